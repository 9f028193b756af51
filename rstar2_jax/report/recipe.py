"""The recipe's models beside each other: `python -m rstar2_jax.report.recipe RUNS`, table and recipe.json, recipe.md.

RUNS is the folder of launch/recipe.sh. A model of it (base, sft, stage1, ...) has an evaluation of each set that it was
asked, in RUNS/eval_MODEL_SET. A row is one model on one set: pass@1 with its 95% interval over problems, pass@k, maj@k,
episodes with a tool call, failed calls in correct episodes, sampled tokens of an episode (mean and 95% quantile),
episodes without a verdict. Below, the steps of each training part. What is not there yet is named, and nothing is made
up for it.

Deliberately not here: curves (curves.py, summary.py), and comparisons of arms (compare.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_jax.io import metrics
from rstar2_jax.report import evaluation

MODELS = ("base", "sft", "stage1", "stage2", "stage3")
RESULT_FILE, PAGE_FILE = "recipe.json", "recipe.md"
_COLUMNS = ("model", "set", "problems", "pass@1, 95% interval", "pass@k", "maj@k", "tool use", "failed calls", "tokens",
            "tokens, 95%", "unscored")  # fmt: skip


def result_of(runs: Path) -> dict[str, Any]:
    """The content of recipe.json: rows, steps of each training part, and the models without any evaluation.

    Raises:
        ValueError: the folder holds no evaluation of a model, or one is damaged.
    """
    rows = [row for model in MODELS for row in _rows(runs, model)]
    if not rows:
        raise ValueError(f"{runs} holds no eval_MODEL_SET/{evaluation.EVALUATION_FILE}: name the folder of the recipe")
    steps = {
        name: len(metrics.read_metrics(runs / name)["step"])
        for name in MODELS
        if (runs / name / metrics.METRICS_FILE).exists()
    }
    told = {row["model"] for row in rows}
    return {"rows": rows, "steps": steps, "missing": [model for model in MODELS if model not in told]}


def _rows(runs: Path, model: str) -> list[dict[str, Any]]:
    """A row for each set of a model's evaluations, in the order in which they were made."""
    found = [path for path in runs.glob(f"eval_{model}_*/{evaluation.EVALUATION_FILE}")]
    rows = []
    for path in sorted(found, key=lambda path: (path.stat().st_mtime, path)):
        for entry in evaluation.read_evaluation(path.parent)["sets"]:
            rows.append({"model": model, **_row(entry)})
    return rows


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    several = {name: {k: v for k, v in entry.get(name, {}).items() if k != "1"} for name in ("pass_at", "maj_at")}
    most = {name: list(values.items())[-1:] for name, values in several.items()}
    return {
        "set": entry["set"],
        "problems": entry.get("problems"),
        "pass_at_1": entry.get("pass_at", {}).get("1", entry["accuracy"]),
        "ci95": entry["ci95"],
        "pass_at_k": most["pass_at"],
        "maj_at_k": most["maj_at"],
        "tool_rate": entry["tool_rate"],
        "call_error_rate_correct": entry["call_error_rate_correct"],
        "mean_tokens": entry["mean_tokens"],
        "p95_tokens": entry.get("tokens", {}).get("p95"),
        "unscored": entry["unscored"],
    }


def page(result: Mapping[str, Any]) -> str:
    """The table as Markdown, its columns aligned for a terminal."""
    lines = [_COLUMNS, *(_cells(row) for row in result["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    trained = ", ".join(f"{name} {count}" for name, count in result["steps"].items())
    text += ["", f"Steps: {trained or 'none'}."]
    if result["missing"]:
        text += [f"Not evaluated yet: {', '.join(result['missing'])}."]
    return "\n".join(text) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = row["ci95"]
    first = "-" if row["pass_at_1"] is None else f"{100 * row['pass_at_1']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    several = [f"{100 * at[0][1]:.1f} (k {at[0][0]})" if at else "-" for at in (row["pass_at_k"], row["maj_at_k"])]
    return (
        row["model"], row["set"], _plain(row["problems"]), first, *several, _percent(row["tool_rate"]),
        _percent(row["call_error_rate_correct"]), _plain(row["mean_tokens"]), _plain(row["p95_tokens"]),
        str(row["unscored"]),
    )  # fmt: skip


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write recipe.json and recipe.md into the folder and print the table. Returns 0, or 1 with the reason."""
    parser = argparse.ArgumentParser(prog="python -m rstar2_jax.report.recipe", description="The recipe's final table.")
    parser.add_argument("runs", type=Path, help="folder of launch/recipe.sh")
    runs: Path = parser.parse_args(arguments).runs
    try:
        result = result_of(runs)
    except ValueError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 1
    text = page(result)
    for name, content in ((RESULT_FILE, json.dumps(result, indent=1) + "\n"), (PAGE_FILE, text)):
        part = runs / f"{name}.tmp"
        part.write_text(content)
        os.replace(part, runs / name)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
