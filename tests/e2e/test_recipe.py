"""The launch scripts with the real program: the recipe's problems out of raw sets, and the recipe itself on a toy."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from rstar2_jax import gin_strict
from rstar2_jax.data import sources
from rstar2_jax.model import decoder, hf
from tests.data import test_catalog

pytestmark = pytest.mark.e2e
ROOT = pathlib.Path(__file__).resolve().parents[2]
GIN = ROOT / "gin"

SMALL = """# An overlay after scale/box.gin: as little as goes through every part.
from __gin__ import dynamic_registration
from rstar2_jax import settings

PROMPTS = 2
GROUP_SIZE = 2
OVERSAMPLE = 4
MAX_PROMPT_TOKENS = 100
HELD_OUT_EVERY = 0
settings.Rollout:
    max_response_tokens = 24
    max_turns = 2
    engine_slots = 8
settings.Learner:
    row_tokens = 128
    microbatch_rows = 2
settings.Demonstrations:
    count = 64
    batch_size = 4
settings.Run.save_every_steps = 1
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the toy's random weights as a published base model, and the overlay."""
    root = tmp_path_factory.mktemp("base")
    toy = gin_strict.build(gin_strict.resolve([str(GIN / "eval.gin"), str(GIN / "model" / "toy.gin")], []))[1]["model"]
    hf.save_folder(decoder.init_params(toy, jax.random.key(0)), toy, root / "model")
    (root / "scale").mkdir()
    (root / "scale" / "small.gin").write_text(SMALL)
    return root


def environment(root, **more):
    shown = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox")])
    return (
        shown
        | {"VENV": sys.prefix, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "MODEL_FOLDER": str(root / "model")}
        | more
    )


def command(root, script, *flags):
    return ["bash", str(ROOT / "launch" / script), "toy", "box", f"--gin_file={root / 'scale' / 'small.gin'}", *flags]


def parts(done, script, word=""):
    return re.findall(rf"^{script}: (\S+){word}$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_stages_problems_come_out_of_raw_sets_and_go_on_where_they_were_stopped(base, tmp_path):
    raw, evaluation = tmp_path / "raw", tmp_path / "evaluation"
    gram = "one two three four five six seven eight of an evaluation"
    rows = {
        "openmath_reasoning/cot": [
            *(test_catalog.openmath(f"What is {n} and {n}?", str(2 * n)) for n in range(6)),
            test_catalog.openmath("Half of one?", "1/2"),
            test_catalog.openmath(gram, "8"),
        ],
        "dapo_17k/train": [test_catalog.dapo("a", "What is 1 and 1?", "2"), test_catalog.dapo("b", "And now?", "12")],
        "project_euler/train": [test_catalog.euler(2, "9"), test_catalog.euler(3, "9" * 30)],
    }
    for name, listed in rows.items():
        if not name.startswith("project_euler"):
            (raw / name).parent.mkdir(parents=True)
            test_catalog.write_jsonl(raw / f"{name}.jsonl", listed)
    evaluation.mkdir()
    test_catalog.write_jsonl(evaluation / "test.jsonl", [{"id": "e", "question": gram, "answer": "8"}])
    given = environment(base, RAW=str(raw), RUNS=str(tmp_path / "runs"), OUT=str(tmp_path / "out"))
    flags = [f"--gin_bindings=Curation.against=(('jsonl', '{evaluation}'),)", "--gin_bindings=Curation.min_solved=0"]
    flags.append("--gin_bindings=PROMPTS=1000000")  # as the rules' own files say; the overlay here comes after them

    def run():
        line = command(base, "data.sh", *flags)
        return subprocess.run(line, env=given, capture_output=True, text=True, timeout=500, check=False)

    first = run()  # the last of the raw sets is not there yet
    assert first.returncode == 1 and "project_euler FAILED with exit code 1" in first.stderr, first.stderr
    assert not (tmp_path / "out").exists()
    (raw / "project_euler").mkdir()
    test_catalog.write_jsonl(raw / "project_euler" / "train.jsonl", rows["project_euler/train"])
    second = run()
    assert second.returncode == 0, second.stdout + second.stderr
    assert parts(second, "data", " is finished") == ["openmath_reasoning", "dapo_17k"]
    kept = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    wanted = [f"What is {n} and {n}?" for n in range(6)]
    assert {row["question"] for row in kept} == {*wanted, "And now?", "Sum of the first 2 cubes?"}
    assert {row["licence"] for row in kept} == {"apache-2.0", "cc-by-4.0", "cc-by-nc-sa-4.0"}
    told = json.loads((tmp_path / "out" / "joined.json").read_text())
    assert told["left_out"]["in another set as well"]["count"] == 1
    asked = json.loads((tmp_path / "runs" / "openmath_reasoning" / "curation.json").read_text())
    assert (asked["asked"], asked["settings"]["samples"]) == (6, 16)
    assert "8-gram overlap with evaluation" in asked["left_out"]
    huge = json.loads((tmp_path / "runs" / "project_euler" / "curation.json").read_text())
    assert list(huge["left_out"]) == ["answer above 18 digits"] and huge["settings"]["samples"] == 0
    assert not (tmp_path / "runs" / "project_euler" / "judged.jsonl").exists()
    read = sources.solved_rows(gin_task(tmp_path / "out"), "train")[0]
    assert len(read) == len(kept)


def gin_task(path):
    """The task of stage 1, with its problems in another folder."""
    flags = [(f"Task.path='{path}'", ""), ("Task.tokenizer='box'", "")]
    return gin_strict.build(gin_strict.resolve([str(GIN / "stage1.gin")], flags))[1]["task"]


ORDER = (
    "eval_base_aime24 sft eval_sft_aime24 stage1 eval_stage1_aime24 stage2 eval_stage2_aime24 curate stage3 "
    "eval_stage3_aime24 export"
).split()


@pytest.mark.long
def test_a_toy_goes_through_the_whole_recipe_in_spite_of_a_stop_and_a_kill(base, tmp_path):
    runs = tmp_path / "runs"
    given = environment(base, RUNS=str(runs), SETS="aime24", LAST_SETS="")
    line = command(base, "recipe.sh", "--steps=3")

    def interrupted(part, how):
        """The recipe, given a signal once the part has made a step; all of its processes where it is SIGKILL."""
        running = subprocess.Popen(line, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seen = runs / part / "metrics.jsonl"
        for _ in range(6000):
            if running.poll() is not None or (seen.exists() and seen.read_text().count("\n")):
                break
            time.sleep(0.1)
        if how is signal.SIGKILL:
            below = pathlib.Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            for pid in below:
                os.killpg(int(pid), how)  # each part has a process group of its own
        running.send_signal(how)
        out, _ = running.communicate(timeout=500)
        return subprocess.CompletedProcess(line, running.returncode, out, "")

    stopped = interrupted("stage1", signal.SIGTERM)
    assert stopped.returncode == 75 and "stage1 was stopped" in stopped.stdout, stopped.stdout
    killed = interrupted("stage2", signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert parts(killed, "recipe", " is finished") == ORDER[: ORDER.index("stage1")]
    last = subprocess.run(line, env=given, capture_output=True, text=True, timeout=1200, check=False)
    assert last.returncode == 0, last.stdout + last.stderr
    assert parts(last, "recipe", " is finished") == ORDER[: ORDER.index("stage2")]
    assert parts(last, "recipe") == ORDER[ORDER.index("stage2") :]
    for stage in ("sft", "stage1", "stage2", "stage3"):
        steps = [json.loads(text)["step"] for text in (runs / stage / "metrics.jsonl").read_text().splitlines()]
        assert steps == [0, 1, 2]
    table = json.loads((runs / "recipe.json").read_text())
    assert table["missing"] == [] and {row["model"] for row in table["rows"]} == {
        "base",
        "sft",
        "stage1",
        "stage2",
        "stage3",
    }
    assert (runs / "recipe.md").read_text() in last.stdout
    assert (runs / "export" / "config.json").is_file() and (runs / "export" / "tokenizer.json").is_file()
    again = subprocess.run(line, env=given, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0 and parts(again, "recipe", " is finished") == ORDER
