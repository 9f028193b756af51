"""Curated sets as one: `python -m rstar2_jax.data.join OUT FOLDER...` writes OUT/train.jsonl, which a task reads.

Each FOLDER is what curate.py left of one set (train.jsonl). A problem that stands in several of them is taken once,
from the first; one that two of them answer differently is taken from neither, as nobody can tell which label is wrong.
Near duplicates go by the rule of curation.py. OUT/joined.json says how many came from where and what was left out;
OUT/train.jsonl is written last: while it is there, the command does nothing.

Deliberately not here: what a single set leaves out (curate.py).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_jax.data import curation, sources, tables

PROMPTS_FILE, REPORT_FILE = "train.jsonl", "joined.json"


def join(sets: Mapping[str, Iterable[tables.Row]]) -> tuple[list[tables.Row], tables.Rejects]:
    """The problems of all sets (name -> rows with id, question and answer), in their order, and the others by reason.

    >>> row = {"id": "a/1", "question": "Two and two?", "answer": "4"}
    >>> kept, left_out = join({"a": [row], "b": [{**row, "id": "b/1"}]})
    >>> [row["id"] for row in kept], left_out.counts
    (['a/1'], {'in another set as well': 1})
    """
    left_out, near = tables.Rejects(), curation.NearDuplicates()
    rows = [row for listed in sets.values() for row in listed]
    answers: dict[str, set[str]] = {}
    for row in rows:
        answers.setdefault(sources.normalised(row["question"]), set()).add(row["answer"])
    kept, seen = [], set()
    for row in rows:
        question = sources.normalised(row["question"])
        if len(answers[question]) > 1:
            left_out.add("answered differently by another set", row["id"])
        elif question in seen:
            left_out.add("in another set as well", row["id"])
        elif other := near.add(row["id"], row["question"], row["answer"]):
            left_out.add("near duplicate", f"{row['id']} = {other}")
        else:
            kept.append(row)
        seen.add(question)
    return kept, left_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the joined set. Returns 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rstar2_jax.data.join", description="Join curated sets.")
    parser.add_argument("out", type=Path, help="folder of the joined set")
    parser.add_argument("folders", type=Path, nargs="+", help="workdirs of curate.py")
    given = parser.parse_args(arguments)
    done = given.out / PROMPTS_FILE
    if done.exists():
        print(f"{done} is there already; delete it to join again")
        return 0
    lacking = [str(folder) for folder in given.folders if not (folder / PROMPTS_FILE).is_file()]
    if lacking:
        print(f"join: {', '.join(lacking)} hold no {PROMPTS_FILE}: let the curation end first", file=sys.stderr)
        return 1
    kept, left_out = join({f.name: tables.from_files([f / PROMPTS_FILE]) for f in given.folders})
    told: dict[str, Any] = {
        "kept": len(kept),
        "sources": dict(collections.Counter(row["source"] for row in kept)),
        "licences": dict(collections.Counter(row.get("licence", "") for row in kept)),
        "left_out": {why: {"count": n, "examples": left_out.examples[why]} for why, n in left_out.counts.items()},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    _replace(given.out / REPORT_FILE, json.dumps(told, indent=1) + "\n")
    _replace(done, "".join(json.dumps(row) + "\n" for row in kept))
    print(f"{done}: {len(kept)} problems, {told['sources']}; left out: {left_out}")
    return 0


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
