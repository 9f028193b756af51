"""`python -m rstar2_jax.report.timeline RUN [--out FILE]`: what a run was doing at the same time, as one PNG.

One panel a kind of work, one x axis of seconds, a thin line where a step was done. Generation beside training shows in
panels that are busy at the same time. A run that was stopped and went on is one picture: each start follows the one
before, at a dashed line. The pause between them is cut, and so is what was done again.

Deliberately not here: the counting (io/timeline.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rstar2_jax.io import timeline

_ORDER = ("generate", "tool", "grade", "learn", "publish")
_LABELS = {"generate": "turns sampled", "tool": "tool calls", "grade": "answers graded"}


def overlap(lines: list[dict]) -> float:
    """Share of the learner's time in which turns were being sampled, in [0, 1]; 0 where it never worked."""
    both = learning = 0.0
    for line in lines:
        learn = np.asarray(line["busy"].get("learn", []), float)
        generate = np.asarray(line["busy"].get("generate", np.zeros(len(learn))), float)
        learning += float(learn.sum() * line["bin_s"])
        both += float((learn * np.minimum(generate, 1.0)).sum() * line["bin_s"])
    return both / learning if learning else 0.0


def plot(workdir: Path, out: Path) -> Path:
    """The PNG of a run's timeline.

    Raises:
        ValueError: the run has no step yet.
        FileNotFoundError: it has no timeline.
    """
    lines, starts = timeline.in_a_row(timeline.read_timeline(workdir))
    if not lines:
        raise ValueError(f"{workdir} has no step in its {timeline.TIMELINE_FILE}")
    present = {kind for line in lines for kind in line["busy"]}
    kinds = [kind for kind in _ORDER if kind in present] + sorted(present - set(_ORDER))
    figure = matplotlib.figure.Figure(figsize=(11, 1.1 * len(kinds) + 0.8), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    for kind, axis in zip(kinds, axes, strict=True):
        for line in lines:
            values = line["busy"].get(kind, [])
            starts = line["start_s"] + line["bin_s"] * np.arange(len(values))
            axis.fill_between(starts, values, step="post", color="#1f6feb", alpha=0.75, linewidth=0)
            axis.axvline(line["start_s"], color="#d8dee4", linewidth=0.7, zorder=0)
        for start_s in starts:
            axis.axvline(start_s, color="#57606a", linewidth=0.9, linestyle="--", zorder=1)
        axis.set_ylabel(_LABELS.get(kind, kind), fontsize=8, rotation=0, ha="right", va="center")
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7, length=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_title(f"{workdir.name}: {overlap(lines):.0%} of training beside generation", fontsize=10, loc="left")
    cut = f", {len(starts)} pauses cut" if len(starts) > 1 else ", one pause cut" if starts else ""
    axes[-1].set_xlabel(f"seconds since the start{cut}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return out


def main(argv: list[str] | None = None) -> int:
    """Draw the timeline of a run. Returns 0."""
    parser = argparse.ArgumentParser(description="What a run was doing at the same time, as one PNG.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="default: timeline.png in that folder")
    args = parser.parse_args(argv)
    print(plot(args.run, args.out or args.run / "timeline.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
