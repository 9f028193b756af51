"""What the tokens of trajectories are and where the policy hesitates: their kinds, and the share of highest entropy.

    H_t = -sum_v p_t(v) log p_t(v)      entropy of the distribution that id t was sampled from, in nats

The tokens of highest entropy (a fifth of all sampled ones) are where an episode can take another way. Among thoughts
they are called forking tokens; in the turn after a tool's reply, reflection tokens.

Pure. Deliberately not here: entropies themselves (they need the weights: analysis.py), and drawing (coloured.py).

Source: rStar2-Agent paper, analysis of agentic reasoning (high-entropy tokens of 64 trajectories). Deviation: kinds
follow from the record (turns, calls, replies), not from reading the text.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rstar2_jax.types import Trajectory, Turn

HIGH_SHARE = 0.2
_WINDOW = 12  # ids that are decoded together, so that characters and words of several ids come out whole
_CALL_OPEN, _CALL_CLOSE, _ANSWER, _THOUGHT_CLOSE = "<tool_call>", "</tool_call>", "<answer>", "</reason>"


class Kind(enum.StrEnum):
    """What a sampled token belongs to."""

    THOUGHT = "thought"  # before any tool has replied
    AFTER_REPLY = "after a reply"  # thoughts of a turn that follows replies which all went well
    AFTER_ERROR = "after an error"  # thoughts of a turn that follows a failed call
    CODE = "tool call"
    ANSWER = "answer"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One id of a trajectory.

    Args:
        text: what it adds to the text; empty where its character is completed by a later id.
        kind: None for ids that the loop appended.
        entropy, logprob: of the sampled id; NaN for appended ids. high: among those of highest entropy.
    """

    text: str
    kind: Kind | None
    entropy: float = float("nan")
    logprob: float = float("nan")
    high: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A trajectory with its tokens, turn by turn."""

    trajectory: Trajectory
    turns: tuple[tuple[Token, ...], ...]


def sampled_positions(trajectory: Trajectory) -> np.ndarray:
    """bool[n]: where the ids of the whole row (prompt, then turns) were sampled."""
    masks = [np.zeros(len(trajectory.prompt_ids), bool), *(turn.mask for turn in trajectory.turns)]
    return np.concatenate(masks)


def read(
    trajectory: Trajectory, entropies: np.ndarray, threshold: float, decode: Callable[[Sequence[int]], str]
) -> Reading:
    """The tokens of a trajectory.

    Args:
        entropies: f32[n] over the whole row, prompt included.
        threshold: entropies from here on are high.
        decode: ids to text.
    """
    at, turns, after = len(trajectory.prompt_ids), [], Kind.THOUGHT
    for turn in trajectory.turns:
        length = len(turn.token_ids)
        turns.append(_tokens(turn, entropies[at : at + length], threshold, after, decode))
        at += length
        if turn.results:
            failed = any(result.status.is_bad for result in turn.results)
            after = Kind.AFTER_ERROR if failed else Kind.AFTER_REPLY
    return Reading(trajectory=trajectory, turns=tuple(turns))


def threshold(entropies: Sequence[np.ndarray], share: float = HIGH_SHARE) -> float:
    """The entropy that a share of all given values reaches. Raises ValueError when there is none."""
    values = np.concatenate([np.asarray(row, np.float64) for row in entropies]) if entropies else np.zeros(0)
    if not len(values):
        raise ValueError("no sampled token: nothing to analyse")
    return float(np.quantile(values, 1 - share))


def table(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """One row a kind, and one for all: count, share of all sampled tokens, mean and median entropy, share that is high,
    share of all high tokens. Numbers over nothing are None."""
    tokens = [t for reading in readings for turn in reading.turns for t in turn if t.kind is not None]
    highs = sum(token.high for token in tokens)
    rows = []
    for kind in (*Kind, None):
        chosen = [token for token in tokens if kind is None or token.kind is kind]
        values = np.asarray([token.entropy for token in chosen])
        high = sum(token.high for token in chosen)
        rows.append(
            {
                "kind": "all" if kind is None else kind.value,
                "tokens": len(chosen),
                "share": _share(len(chosen), len(tokens)),
                "entropy_mean": float(values.mean()) if len(chosen) else None,
                "entropy_median": float(np.median(values)) if len(chosen) else None,
                "high_share": _share(high, len(chosen)),
                "share_of_high": _share(high, highs),
            }
        )
    return rows


def frequent(readings: Sequence[Reading], kinds: Sequence[Kind], most: int = 25) -> list[dict[str, Any]]:
    """The texts that are of high entropy most often in these kinds: how often, how often they occur, mean entropy."""
    high, everywhere = collections.defaultdict(list), collections.Counter()
    for reading in readings:
        for token in (t for turn in reading.turns for t in turn if t.kind in kinds):
            everywhere[token.text] += 1
            if token.high:
                high[token.text].append(token.entropy)
    order = sorted(high, key=lambda text: (-len(high[text]), text))[:most]
    return [
        {"text": text, "high": len(values), "occurs": everywhere[text], "entropy_mean": float(np.mean(values))}
        for text, values in ((text, high[text]) for text in order)
    ]


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What each id adds to the text. A character of several ids is whole at the last of them."""
    texts, start, shown = [], 0, ""
    for index in range(len(ids)):
        now = decode(ids[start : index + 1])
        if now.endswith("\ufffd") and index + 1 < len(ids) and index + 1 - start < 2 * _WINDOW:
            texts.append("")
            continue
        texts.append(now[len(shown) :])
        shown = now
        if index + 1 - start >= _WINDOW:
            start, shown = index + 1 - _WINDOW // 2, decode(ids[index + 1 - _WINDOW // 2 : index + 1])
    return texts


def _tokens(
    turn: Turn, entropies: np.ndarray, threshold: float, after: Kind, decode: Callable[[Sequence[int]], str]
) -> tuple[Token, ...]:
    sampled = pieces(turn.sampled_ids.tolist(), decode)
    kinds = iter(_kinds(sampled, after))
    made = []
    for index, text in enumerate([*sampled, *pieces(turn.token_ids[~turn.mask].tolist(), decode)]):
        if index >= len(sampled):
            made.append(Token(text=text, kind=None))
            continue
        entropy = float(entropies[index])
        logprob = float(turn.behavior_logprobs[index])
        made.append(Token(text=text, kind=next(kinds), entropy=entropy, logprob=logprob, high=entropy >= threshold > 0))
    return tuple(made)


def _kinds(texts: Sequence[str], after: Kind) -> list[Kind]:
    """The kind of each sampled piece, by the place where it begins."""
    whole = "".join(texts)
    marks = [(0, after)]
    at = whole.find(_CALL_OPEN)
    while at >= 0:
        end = whole.find(_CALL_CLOSE, at)
        end = len(whole) if end < 0 else end + len(_CALL_CLOSE)
        marks += [(at, Kind.CODE), (end, after)]
        at = whole.find(_CALL_OPEN, end)
    last = marks[-1][0]
    closed = whole.rfind(_THOUGHT_CLOSE)
    answer = whole.find(_ANSWER, max(last, closed if closed >= 0 else 0))
    if answer >= 0:
        marks.append((answer, Kind.ANSWER))
    kinds, place, mark = [], 0, 0
    for text in texts:
        while mark + 1 < len(marks) and marks[mark + 1][0] <= place:
            mark += 1
        kinds.append(marks[mark][1])
        place += len(text)
    return kinds


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
