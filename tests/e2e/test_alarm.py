"""A run whose training problems can be gamed: its reward rises, held-out accuracy falls, and the run says so and stops.

All rooms are real: fine-tuning on gcd problems, then reinforcement learning on gcd problems that all claim one answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rstar2_jax import stops
from rstar2_jax.data import box_problems
from rstar2_jax.io import metrics
from rstar2_jax.weights import best

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CLAIMED = "6"
STEPS, EVERY = 60, 5
OVERLAYS = ("model/box.gin", "scale/box.gin")
# No reward here pays for length: a fall in accuracy alone counts as a collapse in this process.
RUN = "import sys; from rstar2_jax import launch; from rstar2_jax.report import guards; guards._LONGER = 0.0; "
RUN += "sys.exit(launch.main(['launch', *sys.argv[1:]]))"


def run(file, workdir, steps, *bindings):
    files = [f"--gin_file={name}" for name in (file, *OVERLAYS)]
    line = [sys.executable, "-c", RUN, *files, f"--workdir={workdir}", f"--steps={steps}"]
    line += [f"--gin_bindings={text}" for text in bindings]
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    given = {**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=given, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout + done.stderr


def test_reward_that_rises_while_held_out_problems_are_lost_is_said_aloud_and_ends_the_run(tmp_path):
    code, text = run(
        "sft.gin", tmp_path / "sft", 250, "Task.families=('gcd',)", "Demonstrations.tool_share=0.0",
        "Demonstrations.count=4096",
    )  # fmt: skip
    assert code == 0, text
    drawn = [box_problems.draw("gcd", 1, (9, index), held_out=False) for index in range(400)]
    questions = {problem.key: problem.question for problem in drawn}
    (tmp_path / "leaky").mkdir()
    rows = [json.dumps({"question": question, "answer": CLAIMED}) for question in questions.values()]
    (tmp_path / "leaky" / "train.jsonl").write_text("\n".join(rows) + "\n")

    workdir = tmp_path / "run"
    code, text = run(
        "stage1.gin", workdir, STEPS, f"Run.init_from='{tmp_path / 'sft'}'", "Task.source='jsonl'",
        f"Task.path='{tmp_path / 'leaky'}'", "held_out/Task.families=('gcd',)", f"HELD_OUT_EVERY={EVERY}",
        "HELD_OUT_PROBLEMS=96", "HELD_OUT_SAMPLES=2", "Exam.stop_on_collapse=True", "Optimizer.lr=1e-3",
    )  # fmt: skip
    assert code == stops.COLLAPSED, text
    found = metrics.read_metrics(workdir)
    asked = np.isfinite(found["eval/accuracy"])
    assert (np.flatnonzero(asked) % EVERY == 0).all() and asked[::EVERY].all()
    accuracy, reward = found["eval/accuracy"][asked], found["rollout/reward_mean"]
    assert accuracy[-1] < accuracy.max() - 0.15 and reward[-3:].mean() > reward[:3].mean() + 0.15
    assert found["eval/diverged"][asked][-1] == 1 and found["eval/diverged"][0] == 0
    assert "training and held-out problems diverge: held-out accuracy fell from" in text
    assert text.count("! collapse: accuracy fell from") == 1 and len(found["step"]) < STEPS

    kept = best.read(workdir / best.FOLDER)
    assert kept is not None and kept["step"] == EVERY * int(len(accuracy) - 1 - np.argmax(accuracy[::-1]))
    code, text = run(
        "eval.gin", tmp_path / "eval", 0, f"Run.init_from='{workdir / best.FOLDER}'", "Task.families=('gcd',)",
        "Rollout.prompts_per_step=96",
    )  # fmt: skip
    assert code == 0, text
    sets = json.loads((tmp_path / "eval" / "evaluation.json").read_text())["sets"]
    (gcd,) = [entry for entry in sets if entry["set"] == "gcd"]
    assert gcd["accuracy"] > accuracy[-1] + 0.1
