"""launch/recipe.sh: every part of the paper's recipe resolves strictly, in its order, for its model on its machines."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


STAGES = ("sft", "stage1", "stage2", "stage3")


def recipe(*words, **env):
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox")])
    given = {**os.environ, "VENV": sys.prefix, "PYTHONPATH": path, **env}
    command = ["bash", str(ROOT / "launch" / "recipe.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=900)


@pytest.mark.long
def test_the_whole_recipe_of_the_paper_says_what_it_would_run(tmp_path):
    runs = tmp_path / "runs"
    done = recipe("qwen3_14b", "mi300x_64", "--dry_run", RUNS=str(runs), REDIS="redis://127.0.0.1:6379")
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.findall(r"^recipe: (.*)", done.stdout, re.MULTILINE)
    every = ("aime24", "aime25")
    assert parts[:6] == [*(f"eval_base_{s}" for s in every), "sft", *(f"eval_sft_{s}" for s in every), "stage1"]
    assert [part for part in parts if not part.startswith("eval")] == [*STAGES[:3], "curate", "stage3", "export"]
    last = [part for part in parts if part.startswith("eval_stage3")]
    assert last == [f"eval_stage3_{name}" for name in (*every, "hmmt25", "math_500")]
    told = dict(zip(parts, re.split(r"^recipe: .*\n", done.stdout, flags=re.MULTILINE)[1:], strict=True))
    for stage, steps in (("sft", 5203), ("stage1", 300), ("stage2", 85), ("stage3", 125)):
        assert f"steps = {steps}" in told[stage]
    assert f"init_from = '{runs}/stage2'" in told["stage3"] and f"path = '{runs}/curate'" in told["stage3"]
    assert (
        "prompts_per_step = 500" in told["eval_stage3_math_500"]
        and "source = 'math_500'" in told["eval_stage3_math_500"]
    )
    assert not runs.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "usage"), (("qwen3_14b",), "usage"), (("qwen3_14b", "moon"), "there is no gin/scale/moon.gin")],
)
def test_a_call_that_is_not_understood_starts_nothing(words, said):
    done = recipe(*words)
    assert done.returncode == 2 and said in done.stderr
