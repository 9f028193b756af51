"""Problems read from files, installed packages or the hub: integer answers only, with a report of what was left out.

A published set may hold every problem a hundred times, or its own evaluation rows: duplicates are dropped and counted,
rows of the evaluation side are taken out of the training side, and equal questions with different answers are refused.

Deliberately not here: the order in which training sees the problems (prompts.py).
"""

from __future__ import annotations

import ast
import dataclasses
import fractions
import hashlib
import importlib
import importlib.util
import json
import operator
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rstar2_jax import settings
from rstar2_jax.types import Prompt

Side = Literal["train", "eval"]

EVAL_SHARE = 8
"""Of a set without a split of its own, one question in this many is kept for evaluation."""

_QUESTION_KEYS = ("question", "problem", "prompt")
_ANSWER_KEYS = ("answer", "expected_answer", "final_answer")
_NUMBER = r"\d+(?:\.\d+)?"
_EVAL_FILES = ("test.jsonl", "eval.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of the rows of one side of a set.

    Args:
        rows: rows read.
        kept: problems that remain.
        not_integer: rows whose answer is not an integer.
        exact_duplicates, normalised_duplicates: rows equal to an earlier one, letter by letter or up to spacing.
        overlap: training rows that are evaluation problems too.
    """

    rows: int
    kept: int
    not_integer: int
    exact_duplicates: int
    normalised_duplicates: int
    overlap: int

    def __str__(self) -> str:
        return (
            f"{self.kept} of {self.rows} rows kept; left out: {self.not_integer} without an integer answer, "
            f"{self.exact_duplicates} exact and {self.normalised_duplicates} normalised duplicates, "
            f"{self.overlap} also in the evaluation set"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """A prompt with code that leads to its answer, where that is known (for demonstrations).

    Args:
        setup: statements that the code needs first.
        expression: Python expression to run; None when only the answer is known.
        value: what the expression prints.
    """

    prompt: Prompt
    setup: str = ""
    expression: str | None = None
    value: str = ""


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


def solved_rows(task: settings.Task, side: Side) -> tuple[list[Solved], Report]:
    """The problems of one side of a finite set, in file order, and what was left out.

    Raises:
        ValueError: no such set or file, a row without question or answer, equal questions with different answers.
    """
    raw, has_split = _read(task, side)
    name = task.source.removeprefix("hub:")
    solved, report = _clean(raw, name)
    if has_split and side == "train":
        evaluation = _read(task, "eval")[0] if _has_evaluation(task) else []
        kept_out = {normalised(row.prompt.question) for row in _clean(evaluation, name)[0]}
        left = [row for row in solved if normalised(row.prompt.question) not in kept_out]
    elif has_split:
        left = solved
    else:
        left = [row for row in solved if is_held_out(row.prompt.question) == (side == "eval")]
    if not left:
        raise ValueError(f"source {task.source!r}, path {task.path!r}: no {side} problem remains; {report}")
    overlap = len(solved) - len(left) if has_split else 0
    return left, dataclasses.replace(report, kept=len(left), overlap=overlap)


def _read(task: settings.Task, side: Side) -> tuple[list[Mapping[str, Any]], bool]:
    """(raw rows, whether the set has an evaluation split of its own)."""
    if task.source.startswith("aime"):
        return _json_lines(_aime_file(task.source)), True
    if task.source.startswith("hub:") or (task.source == "gsm8k" and not task.path):
        hub_name = "openai/gsm8k:main" if task.source == "gsm8k" else task.source.removeprefix("hub:")
        return _hub_rows(hub_name, side)
    path = pathlib.Path(task.path)
    if path.is_dir():
        names = ("train.jsonl",) if side == "train" else _EVAL_FILES
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise ValueError(f"source {task.source!r}: {task.path!r} holds no {' or '.join(names)} for the {side} side")
        return _json_lines(found[0]), True
    if not path.is_file():
        raise ValueError(f"source {task.source!r}: path {task.path!r} is no file or folder; give the problems' .jsonl")
    return _json_lines(path), False


def _has_evaluation(task: settings.Task) -> bool:
    """False for a folder that holds training problems alone, such as the ones that curation kept."""
    path = pathlib.Path(task.path)
    return not (task.path and path.is_dir()) or any((path / name).is_file() for name in _EVAL_FILES)


def _clean(raw: Iterable[Mapping[str, Any]], name: str) -> tuple[list[Solved], Report]:
    kept: dict[str, Solved] = {}
    counts = {"rows": 0, "not_integer": 0, "exact_duplicates": 0, "normalised_duplicates": 0}
    for number, row in enumerate(raw):
        counts["rows"] += 1
        solved = _solved(row, number, name)
        if solved is None:
            counts["not_integer"] += 1
            continue
        key = normalised(solved.prompt.question)
        earlier = kept.setdefault(key, solved)
        if earlier is solved:
            continue
        if earlier.prompt.answer != solved.prompt.answer:
            raise ValueError(
                f"{name}: rows {earlier.prompt.id!r} and {solved.prompt.id!r} pose one question with two answers, "
                f"{earlier.prompt.answer} and {solved.prompt.answer}; remove the wrong one"
            )
        same = earlier.prompt.question == solved.prompt.question
        counts["exact_duplicates" if same else "normalised_duplicates"] += 1
    ids = [row.prompt.id for row in kept.values()]
    if len(set(ids)) != len(ids):
        repeated = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"{name}: two different problems have the id {repeated!r}; ids must be unique")
    return list(kept.values()), Report(**counts, kept=len(kept), overlap=0)


def _solved(row: Mapping[str, Any], number: int, name: str) -> Solved | None:
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
    return with_expression(prompt, working)


def with_expression(prompt: Prompt, working: str) -> Solved:
    """The prompt with the computation in a worked solution that gives its answer, in numbers of the question alone.

    An intermediate result is replaced by its own computation; a solution that needs a number which the question does
    not name gives no expression, for a program that uses it would teach to invent numbers. (100 is free: percentages.)
    Units and currency signs are dropped; what remains must be plain arithmetic.
    """
    bare = re.sub(r"<<[^>]*>>|[$€£]|(?<=[\d)])\s*[A-Za-z]+(?:/[A-Za-z]+)?(?=\s*[-+*/=])", "", working)
    bare = re.sub(r"(?<=\d),(?=\d{3})", "", bare).replace(" x ", " * ").replace("×", "*")
    operand = rf"\(?{_NUMBER}\)?"
    found = re.findall(rf"({operand}(?:\s*[-+*/]\s*{operand})+)\s*=\s*(-?{_NUMBER})", bare)
    given = {"100", *re.findall(_NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", prompt.question))}
    known: dict[str, str] = {}
    for left, right in found:
        expression = re.sub(_NUMBER, lambda m: m[0] if m[0] in given else known.get(m[0], m[0]), left)
        expression = re.sub(r"\s+", "", expression)
        if _arithmetic_value(expression) is not None and given.issuperset(re.findall(_NUMBER, expression)):
            known[right] = f"({expression})"
    for right in (right for _, right in reversed(found) if right in known):
        expression = known[right][1:-1]
        if integer_text(right) == prompt.answer and _arithmetic_value(expression) == int(prompt.answer):
            whole = re.fullmatch(r"[\d+*()-]+", expression) is not None
            code = expression if whole else f"round({expression})"
            return Solved(prompt=prompt, expression=code, value=prompt.answer)
    return Solved(prompt=prompt)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _arithmetic_value(expression: str) -> fractions.Fraction | None:
    """The exact value of a plain arithmetic expression, read from its syntax tree; None when it has none."""

    def value(node: ast.expr) -> fractions.Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return fractions.Fraction(str(node.value))
        raise ValueError(f"not plain arithmetic: {expression!r}")

    try:
        return value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _aime_file(source: str) -> pathlib.Path:
    spec = importlib.util.find_spec("sgl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"source {source!r} comes from the package sgl-eval, not installed here: pip install sgl-eval")
    root = pathlib.Path(next(iter(spec.submodule_search_locations)))
    path = root / "_vendored" / "nemo_skills" / "dataset" / source / "test.txt"
    if not path.is_file():
        raise ValueError(f"source {source!r}: not in the installed sgl-eval; version 0.1.3 has aime24 to aime26")
    return path


def _json_lines(path: pathlib.Path) -> list[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {line.strip()[:40]} is no JSON object with question and answer")
        rows.append(row)
    return rows


def _hub_rows(name: str, side: Side) -> tuple[list[Mapping[str, Any]], bool]:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ValueError(f"hub data set {name!r}: pip install datasets or give a path") from error
    name, _, config = name.partition(":")
    splits = datasets.get_dataset_split_names(name, config or None)
    own = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits and own is None:
        raise ValueError(f"hub data set {name!r}: splits are {splits}, needs train or test")
    split = own if side == "eval" and own else "train"
    if split not in splits:
        raise ValueError(f"hub data set {name!r}: no {split} split among {splits}, so it cannot be trained on")
    return list(datasets.load_dataset(name, config or None, split=split)), own is not None
