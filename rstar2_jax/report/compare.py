"""`python -m rstar2_jax.report.compare OUT [--baseline ARM]`: runs of a sweep beside each other, figure and table.

OUT holds a folder for each arm, and in it a run, or a run for each seed (`seed0`, `seed1`, ...), as launch/sweep.sh
lays them out. A measure of a run is the mean of a metric over its steps from --from_step on; over seeds it has a 95%
interval by Student's t. Differences from the baseline are taken seed by seed, so that what a seed's start brings with
it falls out. An evaluation of a run is read from `evaluation/` inside its folder.

Writes comparison.png, comparison.md and comparison.json. A run that is not finished shows as it is, with its last step.

Deliberately not here: running anything (launch/sweep.sh, launch/study.sh).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rstar2_jax.io import metrics
from rstar2_jax.report import evaluation, intervals

MEASURES = {
    "call errors in correct trajectories": "rollout/call_error_rate_correct",
    "sampled tokens per trajectory": "rollout/sampled_tokens_mean",
    "accuracy": "rollout/reward_mean",
    "live groups": "rollout/live_groups_frac",
    "cut off by a limit": "rollout/cut_off_frac",
    "calls that repeat one": "rollout/repeat_call_frac",
}
"""What is compared: label to metric. The share that a limit cut off is made of the counts of how episodes ended."""

EVALUATED = {"evaluation: accuracy": "accuracy", "evaluation: call errors": "call_error_rate_correct"}
_EVALUATION = "evaluation"
_CUT_OFF = ("rollout/stop_length", "rollout/stop_budget", "rollout/stop_turns")
_COLORS = ("#1f6feb", "#d1570a", "#8250df", "#1a7f37", "#bf3989", "#6e7781", "#9a6700", "#0550ae")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: its arm, seed, steps done, metrics by name (arrays over steps) and values by measure."""

    arm: str
    seed: int
    steps: int
    columns: Mapping[str, np.ndarray]
    values: Mapping[str, float]


def find(out: Path, from_step: int) -> list[Run]:
    """The runs of a sweep, by arm and seed.

    Raises:
        ValueError: there is none.
    """
    runs = []
    for path in sorted(out.rglob(metrics.METRICS_FILE)):
        folder = path.parent
        match = re.fullmatch(r"seed(\d+)", folder.name)
        arm = (folder.parent if match else folder).relative_to(out).as_posix()
        columns = _with_cut_off(metrics.read_metrics(folder))
        if MEASURES["accuracy"] in columns and len(columns["step"]):
            seed = int(match[1]) if match else 0
            values = _values(folder, columns, from_step)
            runs.append(Run(arm=arm, seed=seed, steps=int(columns["step"][-1]) + 1, columns=columns, values=values))
    if not runs:
        raise ValueError(f"{out} holds no run with rollouts: name the folder that launch/sweep.sh wrote into")
    return runs


def _with_cut_off(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns, and the share of a step's episodes that ended at a limit, where their counts are there."""
    if not {*_CUT_OFF, "rollout/episodes"} <= set(columns):
        return dict(columns)
    ended, episodes = sum(columns[name] for name in _CUT_OFF), columns["rollout/episodes"]
    share = np.divide(ended, episodes, out=np.full(len(episodes), np.nan), where=episodes > 0)
    return {**columns, MEASURES["cut off by a limit"]: share}


def _values(folder: Path, columns: Mapping[str, np.ndarray], from_step: int) -> dict[str, float]:
    late = columns["step"] >= from_step
    values = {label: _mean(columns[name][late]) for label, name in MEASURES.items() if name in columns}
    if (folder / _EVALUATION / evaluation.EVALUATION_FILE).is_file():
        pooled = evaluation.pool(evaluation.read_evaluation(folder / _EVALUATION)["sets"], "trained")
        values |= {label: _number((pooled or {}).get(name)) for label, name in EVALUATED.items()}
    return values


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def summary(runs: Sequence[Run], baseline: str) -> dict[str, dict[str, dict]]:
    """By arm and measure: seeds, mean, low, high and, beside the baseline, the paired difference likewise.

    Raises:
        ValueError: no run of the baseline.
    """
    arms = list(dict.fromkeys(run.arm for run in runs))
    if baseline and baseline not in arms:
        raise ValueError(f"--baseline {baseline!r} is none of the arms {', '.join(arms)}")
    held = {run.seed: run.values for run in runs if run.arm == baseline}
    table: dict[str, dict[str, dict]] = {}
    for arm in arms:
        own = {run.seed: run.values for run in runs if run.arm == arm}
        table[arm] = {}
        for label in (*MEASURES, *EVALUATED):
            found = {seed: values[label] for seed, values in own.items() if math.isfinite(values.get(label, math.nan))}
            if not found:
                continue
            entry = {"seeds": sorted(found), **_interval(list(found.values()))}
            paired = [
                found[s] - held[s][label] for s in found if s in held and math.isfinite(held[s].get(label, math.nan))
            ]
            if baseline and arm != baseline and paired:
                entry["difference"] = {"pairs": len(paired), **_interval(paired)}
            table[arm][label] = entry
    return table


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    mean, low, high = intervals.over_seeds(values)
    return {"mean": mean, "low": None if math.isnan(low) else low, "high": None if math.isnan(high) else high}


def markdown(table: Mapping[str, Mapping[str, Mapping]], runs: Sequence[Run], baseline: str) -> str:
    """The table as Markdown: a row an arm, a column a measure, differences from the baseline below."""
    labels = [label for label in (*MEASURES, *EVALUATED) if any(label in row for row in table.values())]
    lines = ["| arm | seeds | steps | " + " | ".join(labels) + " |", "|" + "---|" * (len(labels) + 3)]
    for arm, row in table.items():
        own = [run for run in runs if run.arm == arm]
        steps = sorted({run.steps for run in own})
        cells = [_cell(row.get(label)) for label in labels]
        lines.append(f"| {arm} | {len(own)} | {'-'.join(map(str, steps))} | " + " | ".join(cells) + " |")
    if baseline:
        lines += ["", f"Difference from {baseline}, seed by seed:", ""]
        lines += ["| arm | " + " | ".join(labels) + " |", "|" + "---|" * (len(labels) + 1)]
        for arm, row in table.items():
            if arm != baseline:
                cells = [_cell((row.get(label) or {}).get("difference")) for label in labels]
                lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(entry: Mapping | None) -> str:
    if entry is None:
        return "-"
    if entry["low"] is None:
        return f"{entry['mean']:.3f}"
    return f"{entry['mean']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


def plot(runs: Sequence[Run], out: Path) -> Path:
    """The PNG: a panel a measure, a line an arm (running mean over steps of the mean over seeds) with its interval."""
    figure = matplotlib.figure.Figure(figsize=(14, 7.5), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    arms = list(dict.fromkeys(run.arm for run in runs))
    for axis, (label, name) in zip(axes.ravel(), MEASURES.items(), strict=True):
        for number, arm in enumerate(arms):
            own = [run for run in runs if run.arm == arm and name in run.columns]
            if own:
                _draw(axis, own, name, arm, _COLORS[number % len(_COLORS)])
        axis.set_title(label, fontsize=10, loc="left")
        axis.set_ylim(bottom=0)
        axis.grid(True, color="#d8dee4", linewidth=0.7)
        axis.tick_params(labelsize=8, length=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("RL step", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    more = axes[0, 1].get_legend_handles_labels()
    every = {**dict(zip(more[1], more[0], strict=True)), **dict(zip(labels, handles, strict=True))}
    figure.legend(every.values(), every.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(out)
    return out


def _draw(axis, runs: Sequence[Run], name: str, arm: str, color: str) -> None:  # noqa: ANN001 (an Axes)
    length = min(len(run.columns["step"]) for run in runs)
    curves = np.stack([_smooth(run.columns[name][:length]) for run in runs])
    known = np.isfinite(curves).all(axis=0)
    if not known.any():
        return
    steps, curves = runs[0].columns["step"][:length][known], curves[:, known]
    axis.plot(steps, curves.mean(axis=0), color=color, linewidth=1.8, label=arm)
    if len(runs) > 1:
        half = intervals.t_quantile(len(runs) - 1) * curves.std(axis=0, ddof=1) / math.sqrt(len(runs))
        axis.fill_between(steps, curves.mean(axis=0) - half, curves.mean(axis=0) + half, color=color, alpha=0.13, lw=0)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over a twelfth of the run to either side; steps without a value are left out of it."""
    window = np.ones(2 * (len(values) // 12) + 1)
    known = np.isfinite(values).astype(float)
    half = len(window) // 2
    sums, counts = (np.convolve(v, window)[half : half + len(values)] for v in (np.nan_to_num(values), known))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the comparison and print its table. Returns 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rstar2_jax.report.compare")
    parser.add_argument("out", type=Path, help="folder of the sweep")
    parser.add_argument("--baseline", default="", help="arm that the others are held against, seed by seed")
    parser.add_argument("--from_step", type=int, default=0, help="first step that counts")
    given = parser.parse_args(arguments)
    try:
        runs = find(given.out, given.from_step)
        table = summary(runs, given.baseline)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    text = markdown(table, runs, given.baseline)
    plot(runs, given.out / "comparison.png")
    (given.out / "comparison.md").write_text(text)
    told = {"from_step": given.from_step, "baseline": given.baseline, "arms": table}
    (given.out / "comparison.json").write_text(json.dumps(told, indent=1) + "\n")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
