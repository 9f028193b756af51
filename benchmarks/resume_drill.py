"""Kill a training run again and again, then compare it with one that was left alone: python benchmarks/resume_drill.py

    --kills N      kills before the run is let through (default 30)
    --steps N      optimizer steps of the run (default 12, a checkpoint every 2)
    --workdir DIR  where the runs live (default: a temporary folder)

A tiny model on the box task, with sandbox, engine, weight exchange and checkpoints as in every run. Moments of the kill
(SIGKILL) take turns: while a checkpoint is being written, while weights are being published, at a random moment of a
step, at a random moment of the start. Passed when the same command, started after each kill and cleaned up by nobody,
ends with parameters equal bit for bit, the same trajectories and the same metrics. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE / "sandbox")]

MODEL = ("Model.d_model=48", "Model.layers=2", "Model.d_mlp=96", "Model.heads=2", "Model.kv_heads=1")
RL = ("Rollout.prompts_per_step=4", "Rollout.oversample=8", "Rollout.group_size=4", "Rollout.engine_slots=16",
      "Roc.max_refills=2", "Optimizer.lr=2e-3", "Run.save_every_steps=2")  # fmt: skip
TIMINGS = {"queue_s", "run_s"}


def command(file: str, workdir: pathlib.Path, steps: int, *bindings: str) -> list[str]:
    """One launch of the drill's model."""
    files = [f"--gin_file={name}" for name in (file, "model/box.gin", "scale/box.gin")]
    pairs = [f"--gin_bindings={text}" for text in (*MODEL, *bindings)]
    return [sys.executable, "-m", "rstar2_jax.launch", *files, f"--workdir={workdir}", f"--steps={steps}", *pairs]


def start(line: list[str]) -> subprocess.Popen[bytes]:
    """The command as a process of its own, silent."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "sandbox")]), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(line: list[str]) -> None:
    """Let the command through."""
    code = start(line).wait()
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join(line)}")


def lines_of(workdir: pathlib.Path) -> int:
    """Steps whose metrics are written."""
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def moments(workdir: pathlib.Path, chance: random.Random) -> dict[str, Callable[[], Callable[[], bool]]]:
    """Name -> maker of a condition that says when to kill; each is made when its run starts."""

    def seen(folder: str, part: str) -> Callable[[], bool]:
        place = workdir / folder
        return lambda: place.is_dir() and any(part in entry.name for entry in place.iterdir())

    def after(event: Callable[[], bool], low: float, high: float) -> Callable[[], bool]:
        found: dict[str, float] = {}

        def due() -> bool:
            if "at" not in found and event():
                found["at"] = time.monotonic() + chance.uniform(low, high)
            return "at" in found and time.monotonic() >= found["at"]

        return due

    def in_a_step() -> Callable[[], bool]:
        before = lines_of(workdir)
        return after(lambda: lines_of(workdir) != before, 0.0, 4.0)

    return {
        "save": lambda: seen("checkpoints", "tmp"),
        "publish": lambda: after(seen("weights", "writing"), 0.0, 0.01),
        "step": in_a_step,
        "start": lambda: after(lambda: True, 1.0, 12.0),
    }


def kill_once(line: list[str], due: Callable[[], bool], limit_s: float = 120.0) -> bool:
    """Start, wait for the moment (at most limit_s), kill; False where the run ended first."""
    process = start(line)
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if due() or time.monotonic() > deadline:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.002)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode} after a kill: {' '.join(line)}")
        return False
    finally:
        process.kill()
        process.wait()


def trained_on(workdir: pathlib.Path) -> list[str]:
    """Every trajectory of every step without its timings."""
    from rstar2_jax.io import trajectories

    rows = []
    for step in trajectories.list_steps(workdir):
        for record in trajectories.read_step(workdir, step):
            value = trajectories.record_to_json(record)
            for turn in value["trajectory"]["turns"]:
                for result in turn["results"]:
                    for name in TIMINGS:
                        result.pop(name)
            rows.append(json.dumps(value, sort_keys=True))
    return rows


def differences(left: pathlib.Path, right: pathlib.Path) -> list[str]:
    """What differs between two finished runs; nothing when the drill is passed."""
    import jax
    import numpy as np

    from rstar2_jax.io import checkpoint, metrics

    found = []
    pair = [checkpoint.restore_params(folder)[0] for folder in (left, right)]
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), *pair)
    if not all(jax.tree.leaves(same)):
        found.append("parameters")
    if trained_on(left) != trained_on(right):
        found.append("trajectories")
    first, second = metrics.read_metrics(left), metrics.read_metrics(right)
    for name in first:
        if not name.startswith("time/") and not np.array_equal(first[name], second[name], equal_nan=True):
            found.append(name)
    return found


def main() -> int:
    """Run the drill."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workdir", type=pathlib.Path)
    asked = options.parse_args()
    root = asked.workdir or pathlib.Path(tempfile.mkdtemp(prefix="rstar2-drill-"))
    finish(command("sft.gin", root / "sft", 120, "Demonstrations.tool_share=0.9", "Run.save_every_steps=60"))
    origin = f'Run.init_from="{root / "sft"}"'
    finish(command("stage1.gin", root / "whole", asked.steps, *RL, origin))
    line = command("stage1.gin", root / "killed", asked.steps, *RL, origin)
    ways = moments(root / "killed", random.Random(asked.seed))
    done: dict[str, int] = dict.fromkeys(ways, 0)
    found: list[str] = []
    runs = 1
    while sum(done.values()) < asked.kills:
        name = list(ways)[sum(done.values()) % len(ways)]
        if kill_once(line, ways[name]()):
            done[name] += 1
        else:  # the run is through: it is compared and begins anew, so that there is something to kill
            runs += 1
            found += differences(root / "whole", root / "killed")
            subprocess.run(["rm", "-rf", str(root / "killed")], check=True)
        print(f"{sum(done.values())} kills ({name}), {lines_of(root / 'killed')} steps written", file=sys.stderr)
    finish(line)
    found += differences(root / "whole", root / "killed")
    left = [str(p.relative_to(root)) for p in (root / "killed").rglob("*") if "tmp" in p.name or "writing" in p.name]
    told = {"kills": done, "runs_compared": runs, "steps": asked.steps, "different": found, "left_behind": left}
    print(json.dumps(told))
    return 1 if found or left else 0


if __name__ == "__main__":
    sys.exit(main())
