"""The model that end-to-end tests start from: one short fine-tuning for all files and all processes of the suite."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys

SIZES = (
    "Model.d_model=48",
    "Model.layers=2",
    "Model.d_mlp=96",
    "Model.heads=2",
    "Model.kv_heads=1",
)
TAUGHT = ("Demonstrations.tool_share=0.9", "Demonstrations.count=4000", "Optimizer.lr=2e-3")
FILES = ("sft.gin", "model/box.gin", "scale/box.gin")
STEPS = 120


def fine_tuned(tmp_path_factory) -> pathlib.Path:
    """Work folder of a model with a little of the format, to be read only.

    Each process of pytest-xdist has a folder of its own below the one that they share; the first that asks does the
    work and the others wait for it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    workdir = shared / "fine-tuned"
    with open(shared / "fine-tuned.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workdir / "done").exists():
            line = [sys.executable, "-m", "rstar2_jax.launch", *(f"--gin_file={name}" for name in FILES)]
            line += [f"--gin_bindings={text}" for text in (*SIZES, *TAUGHT)] + [f"--workdir={workdir}"]
            env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
            env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
            line += [f"--steps={STEPS}"]
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (workdir / "done").touch()
    return workdir
