"""Kill a training run again and again, then compare it with one that was left alone: python benchmarks/resume_drill.py

    --kills N      kills before the run is let through (default 30)
    --steps N      optimizer steps of the run (default 12, a checkpoint every 2)
    --workdir DIR  where the runs live (default: a temporary folder)
    --minutes M    begin no kill after so many minutes and exit with 75: the same command with its --workdir goes on

A tiny model on the box task, with sandbox, engine, weight exchange and checkpoints as in every run. Moments of the kill
(SIGKILL) take turns, and each is random within: in the start; after none to three steps, while a checkpoint is being
written or weights are being published; after one to four, in a rollout or an update (both by the clock: so long after
the last step as the uninterrupted run was in them). Passed when the same command, started after each kill and cleaned
up by nobody, ends with parameters equal bit for bit, the same trajectories and the same metrics. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE / "sandbox")]

MODEL = ("Model.d_model=48", "Model.layers=2", "Model.d_mlp=96", "Model.heads=2", "Model.kv_heads=1")
# A program's limit lies far above what any takes here, so that its result does not depend on the load.
RL = ("Rollout.prompts_per_step=4", "Rollout.oversample=8", "Rollout.group_size=4", "Rollout.engine_slots=16",
      "Roc.max_refills=2", "Optimizer.lr=2e-3", "Run.save_every_steps=2",
      "Sandbox.run_limit_s=20.0")  # fmt: skip
TIMINGS = {"queue_s", "run_s"}
UNFINISHED = 75  # EX_TEMPFAIL: out of minutes
MACHINE = re.compile(r"(time|disk|guard/disk)\b|.*_s$")  # metrics of the machine or in seconds, not of the run


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


def phase_seconds(workdir: pathlib.Path, name: str) -> float:
    """Median seconds that a step of a finished run spent in a phase."""
    with (workdir / "metrics.jsonl").open() as lines:
        return statistics.median(json.loads(line)[f"time/{name}_s"] for line in lines)


def moments(root: pathlib.Path, chance: random.Random) -> dict[str, Callable[[], bool]]:
    """Name -> condition that is true when it is time to kill the run that has just been started."""
    workdir, least, steps = root / "killed", [sys.maxsize], chance.randrange(4)

    def seen(folder: str, part: str) -> Callable[[], bool]:
        """A name that was not there before: what an earlier kill has left is cleaned first."""
        place, was_absent = workdir / folder, [False]

        def now() -> bool:
            there = place.is_dir() and any(part in entry.name for entry in place.iterdir())
            was_absent[0] |= not there
            return there and was_absent[0]

        return now

    def after(event: Callable[[], bool], low: float, high: float) -> Callable[[], bool]:
        found: dict[str, float] = {}

        def due() -> bool:
            if "at" not in found and event():
                found["at"] = time.monotonic() + chance.uniform(low, high)
            return "at" in found and time.monotonic() >= found["at"]

        return due

    def stepped(least_steps: int) -> bool:
        """So many lines more: those of steps that are done again are cut first."""
        least[0] = min(least[0], now := lines_of(workdir))
        return now >= least[0] + least_steps

    def later(event: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: stepped(steps) & event()  # both are asked each time: each remembers what it saw

    def in_a_step(low: float, high: float) -> Callable[[], bool]:
        return after(lambda: stepped(steps + 1), low, high)

    rollout, learn = (phase_seconds(root / "whole", name) for name in ("rollout", "learn"))
    return {
        "save": after(later(seen("checkpoints", "tmp")), 0.0, 0.02),
        "publish": after(later(seen("weights", "writing")), 0.0, 0.01),
        "rollout": in_a_step(0.0, rollout),
        "update": in_a_step(rollout, rollout + learn),
        "start": after(lambda: True, 1.0, 12.0),
    }


def kill_once(line: list[str], due: Callable[[], bool], limit_s: float = 300.0) -> bool:
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
        if not MACHINE.match(name) and not np.array_equal(first[name], second[name], equal_nan=True):
            found.append(name)
    return found


def kept(root: pathlib.Path) -> dict[str, Any]:
    """Where an earlier call of this drill stopped."""
    path = root / "drill.json"
    fresh = {"kills": {}, "runs_compared": 0, "different": []}
    return json.loads(path.read_text()) if path.exists() else fresh


def begin(root: pathlib.Path, steps: int) -> list[str]:
    """Train the start and the run that is left alone, where they are not yet; the command of the run to kill."""
    finish(command("sft.gin", root / "sft", 120, "Demonstrations.tool_share=0.9", "Run.save_every_steps=60"))
    origin = f'Run.init_from="{root / "sft"}"'
    finish(command("stage1.gin", root / "whole", steps, *RL, origin))
    return command("stage1.gin", root / "killed", steps, *RL, origin)


def main() -> int:
    """Run the drill."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workdir", type=pathlib.Path)
    options.add_argument("--minutes", type=float)
    asked = options.parse_args()
    until = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    root = asked.workdir or pathlib.Path(tempfile.mkdtemp(prefix="rstar2-drill-"))
    line = begin(root, asked.steps)
    told = kept(root)
    while (count := sum(told["kills"].values())) < asked.kills:
        if time.monotonic() > until:
            return UNFINISHED
        ways = moments(root, random.Random(f"{asked.seed} {count} {told['runs_compared']}"))
        name = list(ways)[count % len(ways)]
        if kill_once(line, ways[name]):
            told["kills"][name] = told["kills"].get(name, 0) + 1
        else:  # the run is through: it is compared and begins anew, so that there is something to kill
            told["runs_compared"] += 1
            told["different"] += differences(root / "whole", root / "killed")
            shutil.rmtree(root / "killed")
        (root / "drill.json").write_text(json.dumps(told))
        print(f"{told['kills']} ({name}), {lines_of(root / 'killed')} steps written", file=sys.stderr, flush=True)
    finish(line)
    told["different"] += differences(root / "whole", root / "killed")
    told["runs_compared"] += 1
    left = [str(p.relative_to(root)) for p in (root / "killed").rglob("*") if "tmp" in p.name or "writing" in p.name]
    print(json.dumps({**told, "steps": asked.steps, "left_behind": left}))
    return 1 if told["different"] or left else 0


if __name__ == "__main__":
    sys.exit(main())
