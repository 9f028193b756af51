"""What the short job on real weights proved: result.json and a page for the person, each requirement judged.

    python -m rstar2_jax.report.real runs/box-real

reads what the summary of a box reads (RUNS/sft, RUNS/stage1, RUNS/eval_rl, RUNS/export) and counts the tool calls of
the evaluation as well. The exit status is 1 when a requirement does not hold; one that could not be checked, such as
the comparison with transformers where torch is not installed, is said to be unchecked and does not count as failed.

Deliberately not here: curves and comparisons before and after; three steps move nothing that an evaluation could see.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_jax.io import trajectories
from rstar2_jax.report import summary
from rstar2_jax.types import CallStatus

STAGE, EVALUATION = "stage1", "eval_rl"
MIN_STEPS = 3  # RL steps that must have changed the weights
MAX_LOGPROB_GAP = 1e-3
MAX_DELTA_LOGIT = 1e-4
_NEVER_RUN = (CallStatus.PARSE_ERROR, CallStatus.UNKNOWN_TOOL, CallStatus.NOT_EXECUTED, CallStatus.REJECTED)
_SHOWN = {
    "reward": "rollout/reward_mean",
    "episodes": "rollout/episodes",
    "live_groups": "rollout/live_groups_frac",
    "refills": "rollout/refills",
    "trained_rows": "learner/trained_rows",
    "loss": "learner/loss",
    "grad_norm": "learner/grad_norm",
    "logprob_gap": "mismatch/logprob_gap_max",
    "skipped": "learner/skipped_steps",
}
_LITTLE = (
    "This model learned little: {sft} small SFT steps and {rl} RL steps on {rows:.0f} rollouts hardly move 135\n"
    "million parameters. The job shows that each part of the path works on real weights and real problems, not that\n"
    "the model can do mathematics."
)


def call_statuses(workdir: Path) -> dict[str, int]:
    """Calls in all trajectories of a run by status; every kind is there, kinds that were not met with 0."""
    found = Counter(
        result.status
        for step in trajectories.list_steps(workdir)
        for record in trajectories.read_step(workdir, step)
        for turn in record.trajectory.turns
        for result in turn.results
    )
    return {kind.value: found[kind] for kind in CallStatus}


def result_of(runs: Path) -> dict[str, Any]:
    """The content of result.json: that of a box's summary, the calls by status and the requirements.

    `requirements` maps each to {"holds": true, false or null where it was not checked, "found": in words}.

    Raises:
        ValueError: the folder holds no run, or a file of it is damaged.
    """
    files = summary.read_files(runs)
    result = summary.summarise(files)
    result["missing"] = [name for name in result["missing"] if not name.startswith("eval_sft/")]
    result["call_statuses"] = {name: call_statuses(runs / name) for name in (STAGE, EVALUATION)}
    result["rl_steps"] = _steps(files.stages.get(STAGE, {}))
    result["export"] = dict(files.export or {})
    result["requirements"] = requirements(result, files)
    return result


def requirements(result: Mapping[str, Any], files: summary.Files) -> dict[str, dict[str, Any]]:
    """Each requirement, judged from what the run left."""
    steps = result["rl_steps"]
    trained = [step for step in steps if step["trained_rows"]]
    updates = sum(step["skipped"] == 0 and bool(step["grad_norm"]) for step in trained)
    losses = [*files.sft.get("learner/loss", ()), *(step["loss"] for step in trained)]
    finite = sum(loss is not None and math.isfinite(loss) for loss in losses)
    gap = result["rl"]["logprob_gap_max"]
    ran = {
        name: sum(n for kind, n in counts.items() if kind not in _NEVER_RUN)
        for name, counts in result["call_statuses"].items()
    }
    asked = files.evaluations.get("after_rl", {}).get("sets", [])
    judged = {
        "RL steps that changed the weights": (updates >= MIN_STEPS, f"{updates} of {len(steps)}, wanted {MIN_STEPS}"),
        "losses are finite": (bool(losses) and finite == len(losses), f"{finite} of {len(losses)}"),
        "tool calls were executed": (ran[STAGE] > 0, f"{ran[STAGE]} in training, {ran[EVALUATION]} in evaluation"),
        "engine and learner agree": (
            gap is not None and gap < MAX_LOGPROB_GAP,
            f"max |delta logprob| {_number(gap)}, allowed {MAX_LOGPROB_GAP:.0e}",
        ),
        "evaluation is complete": (bool(asked), ", ".join(_accuracy(entry) for entry in asked) or "none was made"),
        "export reads back": _reload(result["export"]),
        "transformers agrees": _transformers(result["export"]),
    }
    return {name: {"holds": holds, "found": found} for name, (holds, found) in judged.items()}


def table(result: Mapping[str, Any]) -> str:
    """The result as a page of text for a person."""
    steps = result["rl_steps"]
    marks = {True: "yes", False: "NO", None: "not checked"}
    rows = [(name, marks[r["holds"]], r["found"]) for name, r in result["requirements"].items()]
    lines = ["RL on real problems", "", "  step" + "".join(f"{name:>14}" for name in _SHOWN)]
    lines += [
        f"  {place:4d}" + "".join(f"{_number(step[name]):>14}" for name in _SHOWN) for place, step in enumerate(steps)
    ]
    lines += ["", "Tool calls by status", "", f"  {'':<14}{'training':>10}{'evaluation':>12}"]
    training, evaluation = (result["call_statuses"][name] for name in (STAGE, EVALUATION))
    lines += [f"  {kind:<14}{training[kind]:>10}{evaluation[kind]:>12}" for kind in training]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines += ["", "What must hold", ""]
    lines += [f"  {name.ljust(widths[0])}  {mark.ljust(widths[1])}  {found}" for name, mark, found in rows]
    seconds, trained = result["seconds"], sum(step["trained_rows"] or 0 for step in steps)
    lines += ["", _LITTLE.format(sft=result["sft"]["steps"], rl=len(steps), rows=trained)]
    lines += ["", f"{seconds['total']['wall_s']:.0f} s wall, {seconds['total']['cpu_s']:.0f} s CPU"]
    for part, phases in seconds["by_part"].items():
        wall, cpu = (sum(phase[unit] for phase in phases.values()) for unit in ("wall_s", "cpu_s"))
        lines.append(f"  {part:<10} {wall:6.0f} wall, {cpu:6.0f} CPU")
    lines += ["", *(f"  {name:<10} {path}" for name, path in result["paths"].items())]
    if result["missing"]:
        lines += ["", f"Not found, and so not in the result: {', '.join(result['missing'])}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write result.json and print the page. Returns 1 when a requirement does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m rstar2_jax.report.real", description="Sum up the job on real weights: result.json and a page."
    )
    parser.add_argument("runs", type=Path, help=f"folder that holds sft, {STAGE}, {EVALUATION} and export")
    runs: Path = parser.parse_args(arguments).runs
    try:
        result = result_of(runs)
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    result["paths"]["result"] = str(runs / summary.RESULT_FILE)
    part = runs / (summary.RESULT_FILE + ".tmp")
    part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    part.replace(runs / summary.RESULT_FILE)
    print(table(result))
    return int(any(requirement["holds"] is False for requirement in result["requirements"].values()))


def _steps(columns: Mapping[str, np.ndarray]) -> list[dict[str, float | None]]:
    """One entry a step; None where a metric has no value, so that the result stays JSON."""

    def value(name: str, place: int) -> float | None:
        found = float(columns[name][place]) if name in columns else math.nan
        return found if math.isfinite(found) else None

    return [{key: value(name, i) for key, name in _SHOWN.items()} for i in range(len(columns.get("step", ())))]


def _reload(export: Mapping[str, Any]) -> tuple[bool | None, str]:
    delta = export.get("max_delta_logit")
    if delta is None:
        return False, "nothing was exported"
    return delta <= MAX_DELTA_LOGIT, f"{export.get('dtype')}, max |delta logit| {_number(delta)} after reload"


def _transformers(export: Mapping[str, Any]) -> tuple[bool | None, str]:
    delta = export.get("transformers_max_delta_logit")
    if delta is None:
        return None, "torch and transformers are not installed, so nothing was compared"
    equal, prompts, faults = (export.get(f"transformers_{n}") for n in ("equal_texts", "prompts", "faults"))
    holds = delta <= MAX_DELTA_LOGIT and equal == prompts and faults == 0
    return holds, f"max |delta logit| {_number(delta)}, same greedy text on {equal} of {prompts} prompts"


def _accuracy(entry: Mapping[str, Any]) -> str:
    low, high = entry["ci95"]
    return f"{entry['set']}: {entry['correct']} of {entry['n']} correct, 95% interval [{low:.2f}, {high:.2f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
