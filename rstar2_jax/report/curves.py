"""Learning curves of a run as one PNG: what was learned, whether the gradient was healthy, whether the engines agreed.

One x axis runs through all stages in their order; bands and names at the top tell them apart. The thin line is the
step, the thick one its running mean inside the stage (a mean never mixes two stages). Steps without a value leave a
gap.

Deliberately not here: the loss of on-policy stages, which is 0 by construction and says nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rstar2_jax.io import metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A measured value with its 95% interval, drawn into the panel of `metric` at the start or the end of the run."""

    metric: str
    at_end: bool
    value: float
    low: float
    high: float
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    metric: str
    title: str
    share: bool = False
    log: bool = False


_ROLLOUT_PANELS = (
    _Panel("rollout/reward_mean", "reward (share of correct rollouts)", share=True),
    _Panel("rollout/live_groups_frac", "live groups (some right, some wrong)", share=True),
    _Panel("rollout/tool_rate", "trajectories with a tool call", share=True),
    _Panel("rollout/call_error_rate_correct", "failed calls in correct trajectories", share=True),
    _Panel("rollout/response_tokens_mean", "tokens per response"),
    _Panel("learner/entropy_mean", "entropy of the policy (nats per token)"),
    _Panel("learner/grad_norm", "gradient norm", log=True),
    _Panel("mismatch/logprob_gap_mean", "|engine - learner| logprob, mean", log=True),
)
_OTHER_PANELS = (
    _Panel("learner/loss", "loss (nats per token)"),
    _Panel("learner/grad_norm", "gradient norm", log=True),
    _Panel("learner/lr", "learning rate"),
)
_INK, _FAINT, _GRID, _BAND = "#24292f", "#656d76", "#d8dee4", "#f3f5f8"
_BLUE, _POINTS = "#1f6feb", ("#d1570a", "#8250df")


def plot_run(stage_dirs: Sequence[tuple[str, Path]], out: Path, *, points: Sequence[Point] = ()) -> Path:
    """The PNG of the stages' metrics.jsonl, in the given order.

    Stages that have rollouts are drawn alone; without any, the panels are loss, gradient norm and learning rate.

    Args:
        stage_dirs: (name, folder with metrics.jsonl) of each stage.
        out: file to write; its folder is made.
        points: evaluations to draw beside the curves.

    Raises:
        ValueError: there is no stage with a step.
        FileNotFoundError: a folder holds no metrics.jsonl.
    """
    stages = [(name, metrics.read_metrics(folder)) for name, folder in stage_dirs]
    stages = [(name, columns) for name, columns in stages if len(columns["step"])]
    if not stages:
        raise ValueError(f"no step to draw in {[str(folder) for _, folder in stage_dirs] or 'an empty list of stages'}")
    rollout = [(name, columns) for name, columns in stages if "rollout/reward_mean" in columns]
    panels, across = (_ROLLOUT_PANELS, 2) if rollout else (_OTHER_PANELS, 3)
    down = math.ceil(len(panels) / across)
    figure, axes = _layout(down, across)
    for panel, axis in zip(panels, axes.flat, strict=True):
        _draw(axis, panel, rollout or stages, [point for point in points if point.metric == panel.metric])
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step", color=_INK, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return out


def _layout(down: int, across: int) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """A figure with panels of one size. All lengths are inches, since labels do not shrink with the panels."""
    wide, high = 11.0, 2.3 * down + 0.5
    figure = matplotlib.figure.Figure(figsize=(wide, high), dpi=130)
    FigureCanvasAgg(figure)
    panel_wide, panel_high = wide / across - 0.75, 1.75
    axes = figure.subplots(down, across, squeeze=False)
    figure.subplots_adjust(
        left=0.6 / wide,
        right=1 - 0.15 / wide,
        bottom=0.55 / high,
        top=1 - 0.4 / high,
        hspace=0.55 / panel_high,
        wspace=0.75 / panel_wide,
    )
    return figure, axes


def _draw(axis: Axes, panel: _Panel, stages: list[tuple[str, dict[str, np.ndarray]]], points: list[Point]) -> None:
    start, drawn = 0, []
    for index, (name, columns) in enumerate(stages):
        steps = columns["step"]
        length = int(steps[-1]) + 1
        if index % 2 == 0:
            axis.axvspan(start, start + length, color=_BAND, linewidth=0, zorder=0)
        if len(stages) > 1:
            middle, place = start + length / 2, axis.get_xaxis_transform()
            axis.text(middle, 0.975, name, transform=place, ha="center", va="top", fontsize=8, color=_FAINT)
        values = columns.get(panel.metric, np.full(len(steps), np.nan))
        if panel.log:
            values = np.where(values > 0, values, np.nan)
        if np.isfinite(values).any():
            lone = "o" if np.isfinite(values).sum() < 3 else None
            axis.plot(start + steps, values, color=_BLUE, linewidth=0.8, alpha=0.35, marker=lone, markersize=3)
            axis.plot(start + steps, _running_mean(values), color=_BLUE, linewidth=2)
            drawn.append(values)
        start += length
    if panel.log and drawn:
        _decades(axis, np.concatenate(drawn))
    _place_points(axis, points, start)
    _dress(axis, panel, start, bool(drawn))


def _decades(axis: Axes, values: np.ndarray) -> None:
    """A log axis over whole decades, so that noise within one does not fill the panel."""
    low, high = (math.log10(edge(values)) for edge in (np.nanmin, np.nanmax))
    bottom = math.floor(low)
    axis.set_yscale("log")
    axis.set_ylim(10.0**bottom, 10.0 ** max(math.ceil(high + 0.1), bottom + 1))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _place_points(axis: Axes, points: list[Point], end: int) -> None:
    labels: dict[str, str] = {}
    for point in points:
        new = point.label not in labels
        color = labels.setdefault(point.label, _POINTS[len(labels) % len(_POINTS)])
        side = list(labels).index(point.label) * 0.009 * max(end, 1) + 0.005 * max(end, 1)
        errors = [[max(0.0, point.value - point.low)], [max(0.0, point.high - point.value)]]
        axis.errorbar(
            [end + side if point.at_end else -side],
            [point.value],
            yerr=errors,
            fmt="o",
            markersize=5,
            capsize=3,
            color=color,
            clip_on=False,
            zorder=5,
            label=point.label if new else None,
        )
    if points:
        axis.legend(
            loc="lower center", ncols=2, fontsize=7.5, frameon=True, framealpha=0.9, edgecolor=_GRID, labelcolor=_INK
        )


def _dress(axis: Axes, panel: _Panel, end: int, has_values: bool) -> None:
    axis.set_title(panel.title, fontsize=10, color=_INK, loc="left", pad=6)
    axis.set_xlim(-0.025 * max(end, 1), 1.025 * max(end, 1))
    if panel.share:
        axis.set_ylim(0, 1.14)  # room for the names of the stages
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    elif has_values and not panel.log:
        low, high = axis.get_ylim()
        axis.set_ylim(min(0.0, low), high + 0.12 * (high - min(0.0, low)))
    if not has_values:
        axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center", color=_FAINT, fontsize=9)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=8))
    axis.grid(True, color=_GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=_INK, labelsize=8, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the values within a window around each step, a sixth of the stage wide; NaN where it holds none."""
    half = len(values) // 12
    filled, counted = np.nan_to_num(values, nan=0.0), np.isfinite(values).astype(float)
    window = np.ones(2 * half + 1)
    sums, counts = (np.convolve(row, window)[half : half + len(values)] for row in (filled, counted))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
