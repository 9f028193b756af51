"""Does generation ahead of training pay? The box's stage 1 with max_staleness 0 and 1, in turns, from one SFT model.

    python benchmarks/ahead.py --runs /tmp/ahead --seeds 2 --steps 25 --json

For each seed both runs are made one after the other, so that a busy machine is busy for both. Printed: seconds of a
step (median over the steps but the first two, which compile), their ratio, CPU seconds, the reward over the last fifth
of the steps with its 95% interval, and how old the ids were. Finished runs in the folder are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from rstar2_jax.io import clock, metrics
from rstar2_jax.report import evaluation

BOX = ("--gin_file=model/box.gin", "--gin_file=scale/box.gin")


def launch(*flags: str) -> None:
    """One run of this package, its output passed on."""
    subprocess.run([sys.executable, "-m", "rstar2_jax.launch", *flags], check=True, stdout=sys.stderr)


def stage(root: Path, kind: str, seed: int, steps: int) -> Path:
    """Folder of a finished stage 1."""
    workdir = root / f"{kind}-{seed}"
    overlay = ["--gin_file=ablation/async.gin"] if kind == "ahead" else []
    launch(
        "--gin_file=stage1.gin",
        *BOX,
        *overlay,
        f"--workdir={workdir}",
        f"--seed={seed}",
        f"--steps={steps}",
        f"--gin_bindings=Run.init_from='{root / 'sft'}'",
        "--gin_bindings=HELD_OUT_EVERY=0",
    )
    return workdir


def numbers(workdir: Path) -> dict[str, object]:
    """What one run took and gave."""
    columns = metrics.read_metrics(workdir)
    last = slice(-max(1, len(columns["step"]) // 5), None)
    episodes = int(columns["rollout/episodes"][last].sum())
    correct = round(float((columns["rollout/reward_mean"] * columns["rollout/episodes"])[last].sum()))
    totals = clock.read_clock(workdir).values()
    return {
        "step_s": float(np.median(columns["time/step_s"][2:])),
        "cpu_s": sum(seconds.cpu_s for seconds in totals),
        "reward": correct / episodes,
        "ci95": evaluation.wilson(correct, episodes),
        "staleness_mean": float(np.nanmean(columns["rollout/staleness_mean"])),
        "staleness_max": float(np.nanmax(columns["rollout/staleness_max"])),
    }


def main() -> int:
    """Print the comparison. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--sft_steps", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    root = args.runs.resolve()
    sft = ["--gin_file=sft.gin", *BOX, f"--workdir={root / 'sft'}", f"--steps={args.sft_steps}"]
    launch(*sft, "--gin_bindings=Run.init_from=''", "--gin_bindings=Task.difficulty=3")
    found: dict[str, list[dict[str, object]]] = {"synchronous": [], "ahead": []}
    for seed in range(args.seeds):
        for kind in found if seed % 2 == 0 else reversed(found):
            found[kind].append(numbers(stage(root, kind, seed, args.steps)))
    pairs = zip(found["ahead"], found["synchronous"], strict=True)
    ratio = statistics.median(float(str(a["step_s"])) / float(str(s["step_s"])) for a, s in pairs)
    print(json.dumps({**found, "step_s_ratio": ratio}, indent=1 if args.json else None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
