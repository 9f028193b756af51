"""`python -m rstar2_jax.report.analysis RUN`: where a policy hesitates, and how its trajectories changed over the run.

RUN is a folder of training or evaluation. What is written, into RUN/analysis:

    index.html      table of entropies by kind of token, forking and reflection tokens, curves, coloured trajectories
    analysis.json   the numbers of it
    curves.png      response length, tool errors and reward over the steps, from the trajectories themselves

Entropies are computed again from the weights in RUN/weights: those that sampled the trajectories where the store still
holds them, else its newest, which the page says. The largest difference between recorded and recomputed
log-probabilities is told as well: it is small exactly when the entropies are those of the policy that sampled.

Deliberately not here: several devices; a model that fits one is enough to read 64 trajectories.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rstar2_jax import settings
from rstar2_jax.data import files
from rstar2_jax.io import trajectories
from rstar2_jax.learner import logprobs
from rstar2_jax.report import coloured, evaluation, tokens
from rstar2_jax.types import TrainBatch, Trajectory, Verdict
from rstar2_jax.weights import fetch, manifest

FOLDER = "analysis"
COUNT = 64
_ROWS = 4  # read at once
_ROUND_TOKENS = 64  # lengths are rounded up to this, so that few shapes are compiled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What the record of a run says of it."""

    folder: Path
    model: settings.Model
    task: settings.Task
    temperature: float


def analyse(folder: Path, *, step: int | None = None, count: int = COUNT) -> dict[str, Any]:
    """Write the analysis of a run and return its numbers.

    Args:
        step: whose trajectories are read; None reads the last step of training, every set of an evaluation.
        count: trajectories, spread evenly over those that there are.

    Raises:
        ValueError: the folder holds no run, no trajectories or no weights, or a log-probability is not finite.
    """
    run = _run(folder)
    steps = trajectories.list_steps(folder)
    if not steps or (step is not None and step not in steps):
        raise ValueError(f"{folder} has no trajectories{'' if step is None else f' of step {step}'}: steps {steps}")
    wanted = [step] if step is not None else steps if _is_evaluation(folder) else steps[-1:]
    records = [record for number in wanted for record in trajectories.read_step(folder, number)]
    records = [record for record in records if record.trajectory.num_sampled_tokens]
    if not records or count < 1:
        raise ValueError(f"{folder}, steps {wanted}: {len(records)} trajectories with sampled tokens, {count} wanted")
    places = np.unique(np.linspace(0, len(records) - 1, min(count, len(records))).astype(int))
    chosen = [records[place] for place in places]
    params, note = _weights(run, [record.trajectory for record in chosen])
    entropies, gap = _entropies(run, params, [record.trajectory for record in chosen])
    sampled = [row[tokens.sampled_positions(r.trajectory)] for row, r in zip(entropies, chosen, strict=True)]
    high = tokens.threshold(sampled)
    decode = files.load_tokenizer(run.task).decode
    readings = [tokens.read(r.trajectory, row, high, decode) for r, row in zip(chosen, entropies, strict=True)]
    after = (tokens.Kind.AFTER_REPLY, tokens.Kind.AFTER_ERROR)
    numbers = {
        "run": str(folder),
        "steps": wanted,
        "trajectories": len(chosen),
        "temperature": run.temperature,
        "weights": note,
        "max_logprob_gap": gap,
        "high_entropy_from": high,
        "table": tokens.table(readings),
        "forking": tokens.frequent(readings, (tokens.Kind.THOUGHT,)),
        "reflection": tokens.frequent(readings, after),
        "curves": curve_lines(folder),
    }
    _write(folder, numbers, list(zip((r.prompt for r in chosen), readings, strict=True)))
    return numbers


def curve_lines(folder: Path) -> list[dict[str, Any]]:
    """One line a step, from its trajectories: response length, share of failed calls (of all scored episodes, and of
    correct ones), reward. Unscored episodes are left out; a mean over nothing is None."""
    lines = []
    for step in trajectories.list_steps(folder):
        found = [record.trajectory for record in trajectories.read_step(folder, step)]
        scored = [t for t in found if t.verdict in (Verdict.CORRECT, Verdict.WRONG)]
        right = [t for t in scored if t.verdict is Verdict.CORRECT]
        lines.append(
            {
                "step": step,
                "response_tokens_mean": _mean([t.num_response_tokens for t in scored]),
                "call_error_rate": _error_rate(scored),
                "call_error_rate_correct": _error_rate(right),
                "reward_mean": _mean([t.verdict is Verdict.CORRECT for t in scored]),
            }
        )
    return lines


def _is_evaluation(folder: Path) -> bool:
    return (folder / evaluation.EVALUATION_FILE).exists()


def _run(folder: Path) -> _Run:
    try:
        said = json.loads((folder / "resolved.json").read_text())["arguments"]
        task: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said["task"].items()}
        return _Run(
            folder=folder,
            model=settings.Model(**said["model"]),
            task=settings.Task(**task),
            temperature=said["rollout"]["temperature"],
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        remedy = "name the folder of a run of train or evaluate"
        raise ValueError(f"{folder} is no run with trajectories ({error!r}): {remedy}") from error


def _weights(run: _Run, found: Sequence[Trajectory]) -> tuple[Any, str]:
    """Parameters to read by, and a sentence about them."""
    store = run.folder / "weights"
    used = sorted({int(v) for t in found for turn in t.turns for v in np.unique(turn.weights_versions[turn.mask])})
    newest = fetch.latest_version(store)
    if newest is None:
        raise ValueError(f"{store} holds no weights: entropies need those of the run")
    kept = set(manifest.committed_versions(store))
    version = max((version for version in used if version in kept), default=newest)
    try:
        params = fetch.fetch(store, version, run.model)
    except fetch.FetchError as error:
        raise ValueError(f"the weights of {run.folder} cannot be read: {error}") from error
    if used == [version]:
        return params, f"read by the weights that sampled them (version {version})"
    return params, f"read by weights {version}, while {used} sampled them"


def _entropies(run: _Run, params: Any, found: Sequence[Trajectory]) -> tuple[list[np.ndarray], float]:
    """f32[n] of each whole row, and the largest difference of a sampled id's log-probability from the recorded one."""
    compute = jax.jit(functools.partial(logprobs.token_logprobs, run.model, temperature=run.temperature))
    rows = [np.concatenate([t.prompt_ids, *(turn.token_ids for turn in t.turns)]).astype(np.int32) for t in found]
    results: list[np.ndarray] = [np.zeros(0)] * len(rows)
    gap = 0.0
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), _ROWS):
        part = order[start : start + _ROWS]
        length = -(-max(len(rows[index]) for index in part) // _ROUND_TOKENS) * _ROUND_TOKENS
        batch = _batch([rows[index] for index in part], length)
        logps, entropies = map(np.asarray, compute(params, batch))
        for place, index in enumerate(part):
            count, sampled = len(rows[index]), tokens.sampled_positions(found[index])
            recorded = np.concatenate([turn.behavior_logprobs[turn.mask] for turn in found[index].turns])
            found_gap = float(np.abs(logps[place, :count][sampled] - recorded).max(initial=0.0))
            if not math.isfinite(found_gap):  # max() would pass over it, and the page would tell of agreement
                raise ValueError(
                    f"{run.folder}: a log-probability of {found[index].prompt_id}, sample {found[index].sample_index}, "
                    f"is not finite (largest difference {found_gap}): the weights or the recorded values are damaged; "
                    "analyse another step"
                )
            gap = max(gap, found_gap)
            results[index] = entropies[place, :count]
    return results, gap


def _batch(rows: Sequence[np.ndarray], length: int) -> TrainBatch:
    shape = (_ROWS, length)
    ids, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)], segments[place, : len(row)] = row, 1
    return TrainBatch(
        tokens=ids,
        positions=np.tile(np.arange(length, dtype=np.int32), (_ROWS, 1)),
        segment_ids=segments,
        loss_mask=segments > 0,
        behavior_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )


def _write(folder: Path, numbers: dict[str, Any], readings: list) -> None:
    out = folder / FOLDER
    out.mkdir(exist_ok=True)
    told = evaluation.read_evaluation(folder)["sets"] if _is_evaluation(folder) else []
    sets = [entry["set"] for entry in told]
    drawn = _draw(numbers["curves"], sets)
    (out / "curves.png").write_bytes(drawn)
    (out / "analysis.json").write_text(json.dumps(numbers, indent=1) + "\n")
    asked = ", ".join(sets[step] for step in numbers["steps"]) if sets else ""
    where = f"of {asked}" if asked else f"of steps {numbers['steps']}"
    notes = [
        f"{numbers['trajectories']} trajectories {where}, sampled at temperature "
        f"{numbers['temperature']:g}; {numbers['weights']}. Largest difference from the recorded log-probabilities: "
        f"{numbers['max_logprob_gap']:.2g}.",
        f"High: entropy of {numbers['high_entropy_from']:.3f} nats or more, a fifth of all sampled tokens.",
    ]
    lists = {
        "Forking tokens (high, in thoughts before any reply)": numbers["forking"],
        "Reflection tokens (high, in thoughts after a reply)": numbers["reflection"],
    }
    text = coloured.page(f"Tokens of {folder.name}", notes, numbers["table"], lists, readings, drawn)
    (out / "index.html").write_text(text, encoding="utf-8")


def _draw(lines: Sequence[dict[str, Any]], sets: Sequence[str]) -> bytes:
    """Response length, tool errors and reward side by side: curves over the steps of training, or points for the named
    sets of an evaluation."""
    figure = matplotlib.figure.Figure(figsize=(11, 3.6 if sets else 2.9), dpi=130)
    FigureCanvasAgg(figure)
    panels = (
        ("tokens per response", {"response_tokens_mean": ("#1f6feb", "")}),
        (
            "failed tool calls",
            {"call_error_rate": ("#d1570a", "all"), "call_error_rate_correct": ("#8250df", "in correct ones")},
        ),
        ("reward", {"reward_mean": ("#1a7f37", "")}),
    )
    style = "" if sets else "-"
    for axis, (title, curves) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, (colour, label) in curves.items():
            points = [(line["step"], line[name]) for line in lines if line[name] is not None]
            where = zip(*points, strict=True) if points else ([], [])
            axis.plot(*where, color=colour, marker="o", markersize=4, linestyle=style, label=label)
        if len(curves) > 1:
            axis.legend(fontsize=8, frameon=False)
        if title != "tokens per response":
            axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(0, 1.1 if title == "reward" else max(1.1 * axis.get_ylim()[1], 0.01))
        axis.grid(True, color="#d8dee4", linewidth=0.7)
        axis.tick_params(labelsize=8, length=0)
        if sets:
            axis.set_xticks(range(len(sets)), sets, rotation=45, ha="right")
        else:
            axis.set_xlabel("step", fontsize=9)
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _error_rate(found: Sequence[Trajectory]) -> float | None:
    statuses = [r.status for t in found for turn in t.turns for r in turn.results if r.status.is_counted]
    return _mean([status.is_bad for status in statuses])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def main(argv: list[str] | None = None) -> int:
    """Analyse a run. Returns 0; 2 where there is nothing to analyse."""
    parser = argparse.ArgumentParser(description="Entropies, coloured trajectories and curves of a run.")
    parser.add_argument("run", type=Path, help="folder of a run of train or evaluate")
    parser.add_argument("--step", type=int, help="step to read; default: the last, or all sets of an evaluation")
    parser.add_argument("--count", type=int, default=COUNT, help=f"trajectories to read; default {COUNT}")
    arguments = parser.parse_args(argv)
    try:
        numbers = analyse(arguments.run, step=arguments.step, count=arguments.count)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'kind':<16}{'tokens':>8}{'entropy':>9}{'high':>7}")
    for row in numbers["table"]:
        mean, high = row["entropy_mean"], row["high_share"]
        shown = ("-" if mean is None else f"{mean:.3f}", "-" if high is None else f"{high:.0%}")
        print(f"{row['kind']:<16}{row['tokens']:>8}{shown[0]:>9}{shown[1]:>7}")
    print(arguments.run / FOLDER / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
