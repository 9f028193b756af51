"""The commands that a cluster runs, on a real SGLang server that computes in bfloat16: two training steps with tool
calls whose weights the server fetches after each, then an evaluation of what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rstar2_jax import begin, gin_strict, launch
from rstar2_jax.io import metrics
from rstar2_jax.model import hf
from tests.rollout import engines

pytestmark = pytest.mark.sglang
FILES = ("model/box.gin", "scale/box.gin")
SIZES = (  # of which a server on the CPU can cut two equal parts
    "Model.d_model=64",
    "Model.d_mlp=128",
    "Model.layers=2",
    "Model.heads=2",
    "Model.kv_heads=2",
    "Model.head_dim=32",
    "Model.compute_dtype='bfloat16'",
)
TAUGHT = ("Demonstrations.tool_share=0.9", "Optimizer.lr=4e-3")
SFT_STEPS, STEPS = 320, 2  # of 320, three quarters of the answers are right


def launched(workdir, stage, *bindings, steps=None):
    files = [f"--gin_file={name}" for name in (stage, *FILES)]
    flags = [*files, *(f"--gin_bindings={text}" for text in (*SIZES, *bindings)), f"--workdir={workdir}"]
    return flags + ([] if steps is None else [f"--steps={steps}"])


def ran(flags):
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "rstar2_jax.launch", *flags]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=engines.START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_and_evaluation_run_on_servers_that_compute_in_bfloat16(tmp_path):
    sft = tmp_path / "sft"
    ran(launched(sft, "sft.gin", *TAUGHT, steps=SFT_STEPS))
    # The server is started on what the launch files name: a folder with the model's sizes; its weights are dummies.
    parsed = launch.parse_flags(["launch", *launched(sft, "sft.gin", *TAUGHT, steps=1)])
    model = gin_strict.build(gin_strict.resolve(parsed.gin_file, launch.shadow_bindings(parsed)))[1]["model"]
    folder = tmp_path / "folder" / "model"
    hf.save_folder(begin.load_params(str(sft), model, 0), model, folder)
    with engines.real_server(folder, ranks=2, dtype=model.compute_dtype, extra=["--load-format=dummy"]) as (url, _, _):
        servers = (f"Fleet.engines=('{url}',)", "Fleet.tensor_parallel=2")
        run, small = tmp_path / "run", ("Rollout.prompts_per_step=4", "Rollout.oversample=8", "Rollout.group_size=4")
        waits = ("Rollout.deadline_s=400.0", "HELD_OUT_EVERY=0", f"Run.init_from='{sft}'")
        ran(launched(run, "stage1.gin", *servers, *small, *waits, steps=STEPS))
        exam = ("Rollout.prompts_per_step=4", f"Run.init_from='{run}'", "Rollout.deadline_s=400.0")
        ran(launched(tmp_path / "eval", "eval.gin", *servers, *exam))
    told = metrics.read_metrics(run)
    assert told["step"].tolist() == list(range(STEPS)) and told["rollout/lost"].sum() == 0
    assert told["rollout/tool_rate"].max() > 0
    gaps = told["mismatch/logprob_gap_mean"]
    assert np.isfinite(gaps).any() and np.nanmax(gaps) < 0.05  # two programs in bfloat16; float32 gives 1e-5
    print("logprob gap, mean and largest:", gaps, told["mismatch/logprob_gap_max"])
    manifests = sorted((run / "weights").glob("*/manifest.json"))
    stored = {entry["dtype"] for path in manifests for entry in json.loads(path.read_text())["tensors"].values()}
    assert manifests and stored == {"bfloat16"}
    assert json.loads((tmp_path / "eval" / "evaluation.json").read_text())
