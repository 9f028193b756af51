"""How clean a trajectory is: the penalties that Resample-on-Correct weighs correct rollouts by.

Tool errors come from the typed status of each call, never from what a reply says. Answers are counted in the text of
the sampled ids, outside tool-call arguments.

Pure. Deliberately not here: whether the answer is right (outcome.py) and decoding of ids (the caller's tokenizer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rstar2_jax.types import Trajectory

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_NO_CALL_PENALTY = 0.5
_GRAM = 4

_QUOTE_OR_END = re.compile(r'"|\\.|</tool_call>', re.DOTALL)
_MAX_QUOTE_SCANS = 16  # each may read the text to its end; the bound keeps hostile text linear

# strict=False: a raw newline in a string is the parser's business; here it must only not hide where the object ends.
_DECODER = json.JSONDecoder(strict=False, parse_int=float)


class Penalties(NamedTuple):
    """p_err and p_format, each in [0, 1]."""

    p_err: float
    p_format: float

    @property
    def total(self) -> float:
        """p_total = p_err + p_format, in [0, 2]."""
        return self.p_err + self.p_format


class Answers(NamedTuple):
    """Closed answer blocks in all turns, and whether the final turn holds one."""

    num_answers: int
    has_answer: bool


def penalties(trajectory: Trajectory, num_answers: int, has_answer: bool) -> Penalties:
    """Penalties of one trajectory, from its record.

        p_err    = 0.5 when no call counts, else bad calls / counted calls
        p_format = 1 when the final turn has no closed answer block, else min(1, (num_answers - 1) / num_turns)

    Bad is the model's own fault (CallStatus.is_bad); faults of the infrastructure and calls that were not executed
    count in neither number. num_turns are the assistant turns of the record, the first included.

    Args:
        trajectory: its turns, calls and results.
        num_answers: closed answer blocks over all turns (see `find_answers`).
        has_answer: whether the final turn has one.

    Raises:
        ValueError: has_answer with num_answers below 1, or a negative count.

    Source: paper (arXiv 2508.20722), GRPO-RoC; deviation: statuses in place of words in the reply; the bound of 1.
    """
    if num_answers < int(has_answer):
        raise ValueError(f"num_answers = {num_answers} with has_answer = {has_answer}: take both from find_answers")
    statuses = [result.status for turn in trajectory.turns for result in turn.results]
    counted = sum(status.is_counted for status in statuses)
    bad = sum(status.is_bad for status in statuses)
    p_err = bad / counted if counted else _NO_CALL_PENALTY
    if not has_answer or not trajectory.turns:
        return Penalties(p_err, 1.0)
    return Penalties(p_err, min(1.0, (num_answers - 1) / len(trajectory.turns)))


def assess(trajectory: Trajectory, turn_texts: Sequence[str]) -> Penalties:
    """Penalties of a trajectory whose turns read as `turn_texts` (decoded sampled ids, one text a turn).

    Raises:
        ValueError: not one text a turn.
    """
    if len(turn_texts) != len(trajectory.turns):
        raise ValueError(f"{len(turn_texts)} texts for {len(trajectory.turns)} turns: pass one decoded text a turn")
    return penalties(trajectory, *find_answers(turn_texts))


def repetition(trajectory: Trajectory) -> float:
    """Share of n-grams of sampled ids that occurred before in the same trajectory, in [0, 1]: 1 - distinct / all.

    n = 4, inside single turns; 0 where no turn is that long. Source: paper, the n-gram repetition that was tried in the
    RoC score and made training worse; off by default.
    """
    seen: set[tuple[int, ...]] = set()
    total = 0
    for turn in trajectory.turns:
        ids = turn.sampled_ids.tolist()
        grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
        seen.update(grams)
        total += len(grams)
    return 1 - len(seen) / total if total else 0.0


def find_answers(turn_texts: Sequence[str]) -> Answers:
    """Counts closed `<answer>...</answer>` blocks of assistant turns, tool calls left out.

    Args:
        turn_texts: decoded sampled ids, one text a turn, in order. Tool replies are not part of them.

    >>> find_answers(["<answer>1</answer>", "so <answer>2</answer>"])
    Answers(num_answers=2, has_answer=True)
    """
    counts = [_count_blocks(outside_tool_calls(text)) for text in turn_texts]
    return Answers(sum(counts), bool(counts) and counts[-1] > 0)


def outside_tool_calls(text: str) -> str:
    """The text without its tool-call spans, each replaced by one space: what may be searched for answers.

    A span runs from `<tool_call>` over one JSON value to the end tag; the end is found by decoding, since code in the
    arguments may spell the end tag. Broken JSON ends at the first end tag outside its strings, else at the first one at
    all, else at the end of the text. An opening tag that no JSON follows is prose unless an end tag comes next.

    >>> outside_tool_calls('a <tool_call>{"code": "print(\\'</tool_call>\\')"}</tool_call> b')
    'a   b'
    """
    pieces, start = [], 0
    for begin, end in _call_spans(text):
        pieces.append(text[start:begin])
        start = end
    return " ".join([*pieces, text[start:]])


def _count_blocks(text: str) -> int:
    """Closed answer blocks: each end tag closes the opening tags before it, so nesting counts once."""
    count, at = 0, text.find(_ANSWER)
    while at >= 0:
        end = text.find(_ANSWER_END, at)
        if end < 0:
            break
        count += 1
        at = text.find(_ANSWER, end)
    return count


def _call_spans(text: str) -> Iterator[tuple[int, int]]:
    begin, scans = text.find(_CALL), 0
    while begin >= 0:
        body = begin + len(_CALL)
        end = _span_end(text, body, scans < _MAX_QUOTE_SCANS)
        scans += 1
        if end is not None:
            yield begin, end
        begin = text.find(_CALL, body if end is None else end)


def _span_end(text: str, body: int, heed_quotes: bool) -> int | None:
    """Where the call whose content starts at `body` ends; None when the opening tag was prose."""
    at = _skip_space(text, body)
    if text[at : at + 1] not in ("{", "["):
        reopened = text.find(_CALL, body)
        end = text.find(_CALL_END, body, len(text) if reopened < 0 else reopened)
        return None if end < 0 else end + len(_CALL_END)
    try:
        at = _skip_space(text, _DECODER.raw_decode(text, at)[1])
    except (ValueError, RecursionError):
        end = _end_tag_outside_strings(text, at) if heed_quotes else -1
        end = text.find(_CALL_END, at) if end < 0 else end
        return len(text) if end < 0 else end + len(_CALL_END)
    return at + len(_CALL_END) if text.startswith(_CALL_END, at) else at


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _end_tag_outside_strings(text: str, at: int) -> int:
    """Index of the first end tag that no double-quoted string encloses, or -1."""
    in_string = False
    for match in _QUOTE_OR_END.finditer(text, at):
        if match.group() == '"':
            in_string = not in_string
        elif match.group() == _CALL_END and not in_string:
            return match.start()
    return -1
