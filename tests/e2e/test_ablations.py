"""Every ablation of gin/ablation as a run: two steps on the box from a model that has seen the format."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from rstar2_jax.io import metrics, trajectories

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GIN = pathlib.Path(__file__).resolve().parents[2] / "gin"
MODEL = ("Model.d_model=48", "Model.layers=2", "Model.d_mlp=96", "Model.heads=2", "Model.kv_heads=1")
SMALL = ("PROMPTS=4", "OVERSAMPLE=8", "GROUP_SIZE=4", "Rollout.engine_slots=16", "HELD_OUT_EVERY=0")
TEACHING = ("Demonstrations.tool_share=0.9", "Demonstrations.count=4000", "Optimizer.lr=2e-3")


def launch(file, workdir, steps, *bindings, overlay=()):
    files = [f"--gin_file={name}" for name in (file, "model/box.gin", "scale/box.gin", *overlay)]
    pairs = [f"--gin_bindings={text}" for text in (*MODEL, *bindings)]
    line = [sys.executable, "-m", "rstar2_jax.launch", *files, f"--workdir={workdir}", f"--steps={steps}", *pairs]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations") / "sft"
    launch("sft.gin", folder, 120, *TEACHING)
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in (GIN / "ablation").glob("*.gin")))
def test_a_run_with_it_samples_grades_and_writes_down_what_it_did(taught, tmp_path, name):
    launch("stage1.gin", tmp_path, 2, *SMALL, f"Run.init_from='{taught}'", overlay=(f"ablation/{name}.gin",))
    numbers = metrics.read_metrics(tmp_path)
    assert numbers["step"].tolist() == [0, 1] and np.nansum(numbers["rollout/unscored"]) == 0
    records = [record for step in (0, 1) for record in trajectories.read_step(tmp_path, step)]
    assert len(records) >= 2 * 4 * 4
    called = any(turn.calls for record in records for turn in record.trajectory.turns)
    assert called or name == "no_tool"
