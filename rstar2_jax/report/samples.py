"""What many samples of each problem say: pass@k, maj@k, intervals over problems, and how well the formats are kept.

    pass@1 = mean over problems of c / n,   pass@k = mean over problems with n >= k of 1 - C(n - c, k) / C(n, k)

with n scored samples of a problem, c of them correct. maj@n: the answer that most samples of a problem gave; where
several share the first place, the share of them that is correct. Samples without a verdict leave their problem first;
a problem without any scored sample counts nowhere. Problems are told apart by id, never by their text.

Pure. Deliberately not here: rates of tools and lengths (evaluation.py).

Source: the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rstar2_jax.data import sources
from rstar2_jax.report import evaluation, intervals
from rstar2_jax.types import CallStatus, Group, Trajectory, Verdict

_NOT_VALID = (CallStatus.PARSE_ERROR, CallStatus.UNKNOWN_TOOL)
_RIGHT = object()  # the vote of every correct answer


def pass_at(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one.

    >>> [round(pass_at(4, 1, k), 3) for k in (1, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"{correct} correct of {n}, k = {k}: needs 0 <= correct <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[tuple[str | None, bool]]) -> float:
    """Whether the most frequent answer is correct; in [0, 1] where several are most frequent.

    Args:
        answers: (answer or None, correct) of each scored sample, at least one. None is never voted for.

    Answers that the grader found correct equal the gold answer, and so each other, however they are written; others are
    told apart by their text (integers by value).

    >>> majority([("3", True), ("3", True), ("4", False)]), majority([("3", True), ("4", False)])
    (1.0, 0.5)
    >>> majority([(r"\\frac{1}{2}", True), ("0.5", True), ("1/2", True), ("2", False), ("2", False)])
    1.0
    """
    given = [(answer, correct) for answer, correct in answers if answer is not None]
    votes = collections.Counter(_RIGHT if correct else _canonical(answer) for answer, correct in given)
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, count in votes.items() if count == most]
    return float(_RIGHT in first) / len(first)


def _canonical(answer: str) -> str:
    return sources.integer_text(answer) or "".join(answer.split())


def describe(groups: Sequence[Group], seed: int = 0) -> dict[str, Any]:
    """The fields that many samples add to an entry of evaluation.json.

    `problems`; `pass_at`, `maj_at` by k as text (powers of two up to the samples of most problems, and maj at all of
    them); `ci95` of accuracy where a problem has several samples, from the bootstrap over problems (Wilson's interval
    over problems where all or none are solved); `format`: calls that name a tool on offer in readable JSON over all
    calls, episodes that end in a closed answer over all, and those with exactly one answer block; `stops` and
    `statuses` by kind; `tokens` sampled, quantiles.

    Args:
        groups: graded samples of each problem, one group a problem id.

    Raises:
        ValueError: two groups of one problem id.
    """
    ids = [group.prompt.id for group in groups]
    if len(set(ids)) != len(ids):
        repeated = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"problem {repeated!r} has two groups: ask each problem once, with all its samples")
    scored = [ts for ts in ([t for t in g.trajectories if t.verdict is not Verdict.UNSCORED] for g in groups) if ts]
    counts = [(len(ts), sum(t.verdict is Verdict.CORRECT for t in ts)) for ts in scored]
    told: dict[str, Any] = {"problems": len(scored), **_passes(counts), "maj_at": _majorities(scored)}
    if any(n > 1 for n, _ in counts):
        told["ci95"] = list(_interval([c / n for n, c in counts], seed))
    everything = [t for ts in scored for t in ts]
    return {**told, "format": _format(groups), **_shape(everything)}


def _interval(shares: Sequence[float], seed: int) -> tuple[float, float]:
    """The bootstrap over problems; Wilson's where all or none are solved: every draw then gives the same number."""
    if set(shares) <= {0.0} or set(shares) <= {1.0}:
        return evaluation.wilson(round(sum(shares)), len(shares))
    return intervals.over_problems(shares, seed)


def _passes(counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    most = max((n for n, _ in counts), default=0)
    ks = [2**i for i in range(most.bit_length()) if 2**i <= most]
    table = {}
    for k in sorted({*ks, most} - {0}):
        found = [pass_at(n, c, k) for n, c in counts if n >= k]
        table[str(k)] = float(np.mean(found))
    return {"pass_at": table}


def _majorities(scored: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    if not scored:
        return {}
    votes = [majority([(t.answer, t.verdict is Verdict.CORRECT) for t in ts]) for ts in scored]
    return {str(max(map(len, scored))): float(np.mean(votes))}


def _format(groups: Sequence[Group]) -> dict[str, float | None]:
    rows = [
        (t, p)
        for group in groups
        for t, p in zip(group.trajectories, group.p_format, strict=True)
        if t.verdict is not Verdict.UNSCORED
    ]
    statuses = [result.status for t, _ in rows for turn in t.turns for result in turn.results]
    made = [status for status in statuses if status.is_counted]
    return {
        "valid_calls": _share(sum(status not in _NOT_VALID for status in made), len(made)),
        "closed_answers": _share(sum(p < 1 for _, p in rows), len(rows)),
        "single_answers": _share(sum(p == 0 for _, p in rows), len(rows)),
    }


def _shape(everything: Sequence[Trajectory]) -> Mapping[str, Any]:
    lengths = [t.num_sampled_tokens for t in everything]
    statuses = collections.Counter(r.status.value for t in everything for turn in t.turns for r in turn.results)
    stops = collections.Counter(t.stop_reason.value for t in everything)
    points = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    tokens = {name: float(np.quantile(lengths, at)) if lengths else None for name, at in points.items()}
    return {"stops": dict(sorted(stops.items())), "statuses": dict(sorted(statuses.items())), "tokens": tokens}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
