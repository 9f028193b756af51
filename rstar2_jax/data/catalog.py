"""The published sets of problems that a task may name: where each lives, its columns, its licence, what a row says.

A set is read from the hub by its name, or from a local file or folder in the same schema (Task.path). Sets for
evaluation are never trained on. The texts belong to their owners: none of them is part of this package.

Pure. Deliberately not here: reading (tables.py), and duplicates, overlap and integer answers (sources.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Literal

from rstar2_jax.data import tables


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Raw:
    """A problem as its row states it: the answer is text that is not yet judged; working is a solution, if any."""

    id: str
    question: str
    answer: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published set of problems.

    Args:
        hub: its name on the hub, `owner/name` or `owner/name:config`.
        licence: of the set, as its owners state it.
        use: what it may be used for; `both` has a train and a test split.
        train_split, eval_split: names of the splits that are read.
        columns: those that are read, with the types that a value may have.
        convert: a row, known to fit the columns, as a problem; raises tables.BadRowError.
        integers_only: problems with another answer are left out.
        package: an installed package that carries the set (`sgl_eval`), read where no path is given.
    """

    hub: str
    licence: str
    use: Literal["train", "eval", "both"]
    train_split: str = "train"
    eval_split: str = "test"
    columns: tables.Columns
    convert: Callable[[tables.Row, int], Raw]
    integers_only: bool = True
    package: str = ""


def _text(row: tables.Row, question: str, answer: str, name: str) -> Raw:
    if not row[question].strip():
        raise tables.BadRowError(f"{question} is empty")
    return Raw(id=name, question=row[question].strip(), answer=str(row[answer]).strip())


def _dapo(row: tables.Row, number: int) -> Raw:
    """The question stands in the user's message, between two paragraphs on how to state the answer."""
    said = [m for m in row["prompt"] if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
    truth = row["reward_model"].get("ground_truth")
    if len(said) != 1 or said[0].get("role") != "user":
        raise tables.BadRowError("prompt is not one user message")
    if truth is None:
        raise tables.BadRowError("reward_model has no ground_truth")
    paragraphs = re.split(r"\n\s*\n", said[0]["content"].strip())
    if len(paragraphs) > 1 and "Answer: $Answer" in paragraphs[0]:
        paragraphs = paragraphs[1:]
    if len(paragraphs) > 1 and '"Answer:"' in paragraphs[-1]:
        paragraphs = paragraphs[:-1]
    question = "\n\n".join(paragraphs).strip()
    if not question:
        raise tables.BadRowError("prompt is empty")
    return Raw(id=f"dapo_17k/{row['extra_info'].get('index') or number}", question=question, answer=str(truth).strip())


def _openmath(row: tables.Row, number: int) -> Raw:
    if not row["problem_source"].startswith("aops"):
        raise tables.BadRowError(f"problem_source is {row['problem_source']}, not AoPS")
    if row["problem_type"] != "has_answer_extracted":
        raise tables.BadRowError(f"problem_type is {row['problem_type']}")
    return _text(row, "problem", "expected_answer", f"openmath_reasoning/{number}")


def _euler(row: tables.Row, number: int) -> Raw:
    answer = row["numerical_answer"]
    if isinstance(answer, float):
        if not answer.is_integer() or abs(answer) >= 2**53:
            raise tables.BadRowError("numerical_answer is a float that is no exact integer")
        answer = int(answer)
    return _text({**row, "numerical_answer": answer}, "problem", "numerical_answer", f"project_euler/{row['id']}")


def _arena(name: str) -> Callable[[tables.Row, int], Raw]:
    return lambda row, number: _text(row, "problem", "answer", f"{name}/{row['problem_idx']}")


_NUMBER_OR_TEXT = (str, int)
_ARENA = {"problem_idx": (int,), "problem": (str,), "answer": _NUMBER_OR_TEXT}
_MAA = "texts: (c) Mathematical Association of America; "

PUBLISHED: dict[str, Published] = {
    "dapo_17k": Published(
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        licence="apache-2.0",
        use="train",
        columns={"prompt": (list,), "reward_model": (dict,), "extra_info": (dict,)},
        convert=_dapo,
    ),
    "openmath_reasoning": Published(
        hub="nvidia/OpenMathReasoning",
        licence="cc-by-4.0",
        use="train",
        train_split="cot",
        columns={"problem": (str,), "expected_answer": (str,), "problem_type": (str,), "problem_source": (str,)},
        convert=_openmath,
    ),
    "project_euler": Published(
        hub="alexandonian/project-euler",
        licence="cc-by-nc-sa-4.0",
        use="train",
        columns={"id": (int,), "problem": (str,), "numerical_answer": (str, int, float)},
        convert=_euler,
    ),
    "gsm8k": Published(
        hub="openai/gsm8k:main",
        licence="mit",
        use="both",
        columns={"question": (str,), "answer": (str,)},
        convert=lambda row, number: _text(row, "question", "answer", f"gsm8k/{number}"),
    ),
    "math_500": Published(
        hub="HuggingFaceH4/MATH-500",
        licence="mit",
        use="eval",
        columns={"problem": (str,), "answer": (str,), "unique_id": (str,)},
        convert=lambda row, number: _text(row, "problem", "answer", f"math_500/{row['unique_id']}"),
        integers_only=False,
    ),
    "aime24": Published(
        hub="HuggingFaceH4/aime_2024",
        licence=_MAA + "set: no licence stated",
        use="eval",
        eval_split="train",
        columns={"id": _NUMBER_OR_TEXT, "problem": (str,), "answer": _NUMBER_OR_TEXT},
        convert=lambda row, number: _text(row, "problem", "answer", f"aime24/{row['id']}"),
        package="sgl_eval",
    ),
    "aime25": Published(
        hub="MathArena/aime_2025",
        licence=_MAA + "set: cc-by-nc-sa-4.0",
        use="eval",
        eval_split="train",
        columns=_ARENA,
        convert=_arena("aime25"),
        package="sgl_eval",
    ),
    "aime26": Published(
        hub="MathArena/aime_2026",
        licence=_MAA + "set: cc-by-nc-sa-4.0",
        use="eval",
        eval_split="train",
        columns=_ARENA,
        convert=_arena("aime26"),
        package="sgl_eval",
    ),
    "hmmt25": Published(
        hub="MathArena/hmmt_feb_2025",
        licence="cc-by-nc-sa-4.0",
        use="eval",
        eval_split="train",
        columns=_ARENA,
        convert=_arena("hmmt25"),
        integers_only=False,
    ),
}
"""Sets by the name that Task.source takes."""

EVALUATION_ONLY = tuple(name for name, found in PUBLISHED.items() if found.use == "eval")
TRAINING_ONLY = tuple(name for name, found in PUBLISHED.items() if found.use == "train")
