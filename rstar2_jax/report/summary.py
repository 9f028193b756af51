"""What a run learned and where everything is: result.json, a table for the person, and the curves beside them.

    python -m rstar2_jax.report.summary runs/box

reads RUNS/sft and RUNS/stage1, stage2, ... (metrics.jsonl and clock.json each), RUNS/eval_sft and RUNS/eval_rl
(evaluation.json, clock.json) and RUNS/export/export.json, and writes RUNS/result.json and RUNS/curves.png. What
is missing is named in the result; nothing is made up for it.

evaluation.json is described in report/evaluation.py; export.json holds at least {"max_delta_logit": 3e-5}.

Deliberately not here: anything that judges a run as good or bad beyond the numbers and their intervals.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_jax.io import clock, metrics
from rstar2_jax.report import curves, evaluation

RESULT_FILE = "result.json"
CURVES_FILE = "curves.png"

FIRST_STEPS, LAST_STEPS = 5, 10  # steps whose call errors are averaged at the two ends of RL
_MOMENTS = ("after_sft", "after_rl")
_STATUS = "rollout/status_"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What was found of a run.

    Args:
        evaluations: `after_sft` and `after_rl` -> content of evaluation.json.
        sft: columns of the metrics.jsonl of SFT; empty when there is none.
        stages: name -> columns of metrics.jsonl, RL stages in their order.
        clocks: folder name -> seconds by phase.
        export: content of export.json, or None.
        paths: what -> where, for the person.
        missing: files that were looked for and not found.
    """

    evaluations: Mapping[str, Mapping[str, Any]]
    sft: Mapping[str, np.ndarray]
    stages: Mapping[str, Mapping[str, np.ndarray]]
    clocks: Mapping[str, Mapping[str, clock.Seconds]]
    export: Mapping[str, Any] | None
    paths: Mapping[str, str]
    missing: tuple[str, ...]


def read_files(runs: Path) -> Files:
    """Everything that a run left below `runs`.

    Raises:
        ValueError: the folder holds no stage and no evaluation, or a file is damaged.
    """
    missing: list[str] = []

    def found(path: Path) -> bool:
        """True when the path exists; otherwise it is noted as missing."""
        if not path.exists():
            missing.append(str(path.relative_to(runs)))
        return path.exists()

    folders = {"after_sft": runs / "eval_sft", "after_rl": runs / "eval_rl"}
    evaluations = {
        moment: evaluation.read_evaluation(folder)
        for moment, folder in folders.items()
        if found(folder / evaluation.EVALUATION_FILE)
    }
    numbers = [int(path.name[5:]) for path in runs.glob("stage*") if path.is_dir() and path.name[5:].isdecimal()]
    names = [f"stage{number}" for number in sorted(numbers)] or ["stage1"]
    stages = {n: metrics.read_metrics(runs / n) for n in names if found(runs / n / metrics.METRICS_FILE)}
    if not stages and not evaluations:
        raise ValueError(
            f"{runs} holds neither {names[0]}/{metrics.METRICS_FILE} nor an {evaluation.EVALUATION_FILE}: not a run"
        )
    sft = metrics.read_metrics(runs / "sft") if found(runs / "sft" / metrics.METRICS_FILE) else {}
    export = _read_json(runs / "export" / "export.json") if found(runs / "export" / "export.json") else None
    timed = ["sft", *stages, "curate", *(folder.name for folder in folders.values()), "export"]
    clocks = {name: clock.read_clock(runs / name) for name in timed if (runs / name / clock.CLOCK_FILE).exists()}
    paths = {name: str(runs / name) for name in ["sft", *stages, "eval_sft", "eval_rl"] if (runs / name).exists()}
    paths |= {"model": str(runs / "export")} if export else {}
    return Files(
        evaluations=evaluations,
        sft=sft,
        stages=stages,
        clocks=clocks,
        export=export,
        paths=paths,
        missing=tuple(missing),
    )


def summarise(files: Files) -> dict[str, Any]:
    """The content of result.json: accuracy, tool use and call errors before and after RL, health, seconds and paths.

    Call errors are given twice: `evaluation` compares the two checkpoints on the same fresh problems; `rl_steps` is the
    mean over the first 5 and the last 10 RL steps, whose problems get harder from stage to stage.
    """
    pooled = {
        kind: {
            m: evaluation.pool(files.evaluations[m]["sets"], kind) if m in files.evaluations else None for m in _MOMENTS
        }
        for kind in ("trained", "held_out")
    }
    trained = pooled["trained"]
    steps = _column(files.stages, "rollout/call_error_rate_correct")
    first, last = _mean(steps[:FIRST_STEPS]), _mean(steps[-LAST_STEPS:])
    errors = {m: _get(trained[m], "call_error_rate_correct") for m in _MOMENTS}
    return {
        "accuracy": {kind: {m: _pick(pooled[kind][m]) for m in _MOMENTS} for kind in pooled},
        "by_set": {m: list(content["sets"]) for m, content in files.evaluations.items()},
        "temperature": {m: content.get("temperature") for m, content in files.evaluations.items()},
        "tool_rate": {m: _get(trained[m], "tool_rate") for m in _MOMENTS},
        "mean_tokens": {m: _get(trained[m], "mean_tokens") for m in _MOMENTS},
        "mean_response_tokens": {m: _get(trained[m], "mean_response_tokens") for m in _MOMENTS},
        "call_error_rate_correct": {
            "evaluation": errors | {"ratio": _ratio(errors["after_rl"], errors["after_sft"])},
            "rl_steps": {"first": first, "last": last, "ratio": _ratio(last, first)},
        },
        "sft": _sft(files.sft),
        "rl": _health(files.stages),
        "seconds": _seconds(files.clocks),
        "export": {"max_delta_logit": _get(files.export, "max_delta_logit")},
        "paths": dict(files.paths),
        "missing": list(files.missing),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as a page of text for a person."""
    rows: list[tuple[str, ...]] = [("on fresh problems", "after SFT", "after RL", "")]
    for kind, title in (("trained", "accuracy, trained families"), ("held_out", "accuracy, held-out families")):
        cells = result["accuracy"][kind]
        rows.append((title, *(_accuracy_text(cells[m]) for m in _MOMENTS), _n_text(cells)))
    errors = result["call_error_rate_correct"]
    rows += [
        ("trajectories with a tool call", *(_percent(result["tool_rate"][m]) for m in _MOMENTS), ""),
        ("failed calls in correct trajectories", *(_percent(errors["evaluation"][m]) for m in _MOMENTS),
         _times(errors["evaluation"]["ratio"])),
        ("sampled tokens, mean", *(_number(result["mean_tokens"][m]) for m in _MOMENTS), ""),
        ("", "", "", ""),
        ("while training", f"first {FIRST_STEPS} steps", f"last {LAST_STEPS} steps", ""),
        ("failed calls in correct trajectories", _percent(errors["rl_steps"]["first"]),
         _percent(errors["rl_steps"]["last"]), _times(errors["rl_steps"]["ratio"])),
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["What was learned", ""]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]
        lines.append(("  " + "   ".join(cells)).rstrip())
    lines += ["", "How the run went", "", *_health_lines(result), ""]
    lines += ["Where everything is", ""]
    width = max((len(name) for name in result["paths"]), default=0)
    lines += [f"  {name.ljust(width)}  {path}" for name, path in result["paths"].items()]
    if result["missing"]:
        lines += ["", f"Not found, and so not in the result: {', '.join(result['missing'])}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write result.json and curves.png into the folder of the runs and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m rstar2_jax.report.summary",
        description="Sum up a finished run: result.json, curves.png, a table.",
    )
    parser.add_argument("runs", type=Path, help="folder that holds sft, stage1, ..., eval_sft, eval_rl and export")
    runs: Path = parser.parse_args(arguments).runs
    try:
        files = read_files(runs)
        result = summarise(files)
        if files.stages:
            points = _points(result)
            out = curves.plot_run([(name, runs / name) for name in files.stages], runs / CURVES_FILE, points=points)
            result["paths"]["curves"] = str(out)
        result["paths"]["result"] = str(runs / RESULT_FILE)
        part = runs / (RESULT_FILE + ".tmp")
        part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        part.replace(runs / RESULT_FILE)
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(table(result))
    return 0


def _pick(pooled: Mapping[str, Any] | None) -> dict[str, Any] | None:
    fields = ("n", "correct", "accuracy", "ci95", "unscored")
    return None if pooled is None else {name: pooled[name] for name in fields}


def _sft(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    losses = columns.get("learner/loss", np.zeros(0))
    return {
        "steps": len(losses),
        "loss_first": _mean(losses[:FIRST_STEPS]),
        "loss_last": _mean(losses[-LAST_STEPS:]),
    }


def _health(stages: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Counts over all RL steps and the extremes that tell whether the numbers can be trusted."""
    names = {name for columns in stages.values() for name in columns}
    total = {name: float(np.nansum(_column(stages, name))) for name in names}
    losses = np.concatenate([np.zeros(0), *(_trained_losses(columns) for columns in stages.values())])
    gaps = _column(stages, "mismatch/logprob_gap_max")
    rewards = _column(stages, "rollout/reward_mean")
    return {
        "steps": {name: len(columns["step"]) for name, columns in stages.items()},
        "reward_first": _mean(rewards[:FIRST_STEPS]),
        "reward_last": _mean(rewards[-LAST_STEPS:]),
        "call_statuses": {n.removeprefix(_STATUS): int(total[n]) for n in sorted(names) if n.startswith(_STATUS)},
        "unscored": int(total.get("rollout/unscored", 0)),
        "lost": int(total.get("rollout/lost", 0)),
        "skipped_steps": int(total.get("learner/skipped_steps", 0)),
        "losses_finite": bool(np.isfinite(losses).all()) if len(losses) else None,
        "logprob_gap_max": float(np.nanmax(gaps)) if np.isfinite(gaps).any() else None,
    }


def _seconds(clocks: Mapping[str, Mapping[str, clock.Seconds]]) -> dict[str, Any]:
    parts = {
        part: {phase: {"wall_s": s.wall_s, "cpu_s": s.cpu_s} for phase, s in phases.items()}
        for part, phases in clocks.items()
    }
    phases = sorted({phase for part in parts.values() for phase in part})
    by_phase = {
        phase: {
            unit: sum(part[phase][unit] for part in parts.values() if phase in part) for unit in ("wall_s", "cpu_s")
        }
        for phase in phases
    }
    total = {unit: sum(phase[unit] for phase in by_phase.values()) for unit in ("wall_s", "cpu_s")}
    return {"total": total, "by_phase": by_phase, "by_part": parts}


def _points(result: Mapping[str, Any]) -> list[curves.Point]:
    points = []
    for kind, label in (("trained", "fresh problems, trained families"), ("held_out", "held-out families")):
        for moment in _MOMENTS:
            cell = result["accuracy"][kind][moment]
            if cell is not None and cell["accuracy"] is not None:
                low, high = cell["ci95"]
                at_end = moment == "after_rl"
                points.append(curves.Point("rollout/reward_mean", at_end, cell["accuracy"], low, high, label))
    return points


def _health_lines(result: Mapping[str, Any]) -> list[str]:
    sft, rl, seconds = result["sft"], result["rl"], result["seconds"]
    statuses = ", ".join(f"{name} {count}" for name, count in rl["call_statuses"].items()) or "none"
    steps = ", ".join(f"{name} {count}" for name, count in rl["steps"].items()) or "none"
    times = sorted(seconds["by_phase"].items(), key=lambda item: -item[1]["wall_s"])
    lines = [
        f"SFT steps         {sft['steps']}, loss {_number(sft['loss_first'])} -> {_number(sft['loss_last'])}",
        f"RL steps          {steps}",
        f"tool calls        {statuses}",
        f"left out          {rl['unscored']} unscored, {rl['lost']} lost rollouts, {rl['skipped_steps']} bad updates",
        f"logprob gap, max  {_number(rl['logprob_gap_max'])} between engine and learner",
        f"export            {_number(result['export']['max_delta_logit'])} max |delta logit| after reload",
        f"seconds           {seconds['total']['wall_s']:.0f} wall, {seconds['total']['cpu_s']:.0f} CPU",
    ]
    lines += [f"  {name:<15} {s['wall_s']:6.0f} wall, {s['cpu_s']:6.0f} CPU" for name, s in times]
    return ["  " + line for line in lines]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); run the command that writes it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: must be an object")
    return content


def _trained_losses(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Losses of the steps that had rows to train on: where there were none, no loss is told."""
    losses = columns.get("learner/loss", np.zeros(0))
    rows = columns.get("learner/trained_rows")  # an older run does not tell them
    return losses if rows is None or not len(losses) else losses[np.nan_to_num(rows) > 0]


def _column(stages: Mapping[str, Mapping[str, np.ndarray]], name: str) -> np.ndarray:
    """Values of a metric over all steps of all stages, NaN where there is none."""
    parts = [columns.get(name, np.full(len(columns["step"]), np.nan)) for columns in stages.values()]
    return np.concatenate(parts) if parts else np.zeros(0)


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _get(entry: Mapping[str, Any] | None, name: str) -> Any:
    return None if entry is None else entry.get(name)


def _accuracy_text(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["accuracy"] is None:
        return "-"
    low, high = cell["ci95"]
    return f"{cell['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def _n_text(cells: Mapping[str, Mapping[str, Any] | None]) -> str:
    counts = [str(cell["n"]) for cell in cells.values() if cell is not None]
    return f"95% interval, n = {' / '.join(dict.fromkeys(counts))}" if counts else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"x {ratio:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
