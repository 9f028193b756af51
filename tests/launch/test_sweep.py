"""launch/sweep.sh: every point of a grid is started with its own bindings, in a folder that is named by them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from rstar2_jax import run_record

ROOT = pathlib.Path(__file__).resolve().parents[2]


def sweep(out, *words, **env):
    command = ["bash", str(ROOT / "launch" / "sweep.sh"), str(out), *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox")])
    given = {**os.environ, "VENV": sys.prefix, "PYTHONPATH": path, **env}
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=300)


def logs(out):
    return {str(path.parent.relative_to(out)): path.read_text() for path in out.rglob("sweep.log")}


def test_scripts_for_one_machine_ask_for_memory_alike_and_the_record_of_a_run_shows_it(monkeypatch):
    def asked(name):
        lines = (ROOT / "launch" / name).read_text().splitlines()
        words = [word for line in lines if line.startswith("export ") for word in line.split()[1:]]
        return dict(word.split("=", 1) for word in words if word.startswith(("MALLOC_", "GLIBC_")))

    first, *others = (asked(name) for name in ("box.sh", "box_real.sh", "sweep.sh"))
    assert first["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and all(other == first for other in others)
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    assert first.items() <= run_record.surroundings([])["environment"].items()


BOX = ("--gin_file=stage1.gin", "--gin_file=model/box.gin", "--gin_file=scale/box.gin", "--dry_run")


@pytest.mark.slow
def test_a_grid_becomes_runs_with_their_bindings_seeds_and_starts(tmp_path):
    axes = ("gin_file=-|ablation/greedy.gin", "Roc.p_floor=0.25", "seed=3|4")
    start = "--gin_bindings=Run.init_from='runs/sft/seed{seed}'"
    done = sweep(tmp_path, *axes, "--", *BOX, start, JOBS="2", CORES="1")
    assert done.returncode == 0, done.stderr
    found = logs(tmp_path)
    names = {f"{arm},Roc.p_floor=0.25/seed{seed}" for arm in ("plain", "greedy") for seed in (3, 4)}
    assert set(found) == names
    for name, text in found.items():
        seed = name[-1]
        assert "p_floor = 0.25" in text and f"seed = {seed}" in text and f"runs/sft/seed{seed}" in text
        assert ("positives = 'greedy'" in text) == name.startswith("greedy")
        assert str(tmp_path / name) in text


@pytest.mark.slow
def test_a_point_that_fails_is_named_and_the_others_are_done(tmp_path):
    done = sweep(tmp_path, "Roc.p_floor=-1|0.5", "--", *BOX, JOBS="1", SUB="evaluation")
    assert done.returncode == 2 and "Roc.p_floor=-1/evaluation FAILED" in done.stderr
    assert "Roc.p_floor=0.5/evaluation done" in done.stdout
    assert "must be above 0" in logs(tmp_path)["Roc.p_floor=-1/evaluation"]


@pytest.mark.parametrize(
    ("words", "said"), [((), "usage"), (("steps",), "write NAME=VALUE"), (("seed=1",), "-- and the flags")]
)
def test_a_call_that_is_not_understood_starts_nothing(tmp_path, words, said):
    done = sweep(*((tmp_path, *words) if words else ("",)))
    assert done.returncode == 2 and said in done.stderr and not list(tmp_path.iterdir())
