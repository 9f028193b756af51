"""What an evaluation counts: accuracy with its interval, tool use, length, and call errors in correct trajectories.

evaluation.json, as evaluate.py writes it into its workdir (each entry of `sets` is what `evaluation_set` returns; other
keys beside `sets` may be added freely):

    {"temperature": 1.0, "samples_per_problem": 1, "init_from": "runs/stage3", "sets": [
      {"set": "gcd", "kind": "trained", "n": 256, "correct": 240, "unscored": 0, "tool_episodes": 250,
       "correct_calls": 260, "correct_bad_calls": 13, "accuracy": 0.9375, "ci95": [0.9009, 0.9612],
       "tool_rate": 0.9766, "call_error_rate_correct": 0.05, "mean_tokens": 21.5, "mean_response_tokens": 34.0}]}

`kind` is `trained` or `held_out`. n counts scored trajectories only; a rate or mean over nothing is null. mean_tokens
are the sampled ids of a trajectory, mean_response_tokens count tool replies and forced ids as well.

Pure, but for reading the file. Deliberately not here: pass@k, maj@k and the interval over problems, which replaces the
one over answers where a problem has several samples (samples.py adds them to each entry).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_jax.types import Trajectory, Verdict

EVALUATION_FILE = "evaluation.json"

_KINDS = ("trained", "held_out")
_SUMS = ("n", "correct", "unscored", "tool_episodes", "correct_calls", "correct_bad_calls")
_MEANS = ("mean_tokens", "mean_response_tokens")


def wilson(correct: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson interval of a share, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = correct / n.

    Args:
        correct, n: 0 <= correct <= n; n = 0 gives (0, 1).
        z: quantile of the normal distribution; the default is that of 95%.

    >>> [round(edge, 4) for edge in wilson(9, 10)]
    [0.5958, 0.9821]
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} correct of {n}: must be 0 <= correct <= n")
    if n == 0:
        return 0.0, 1.0
    share, spread = correct / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (0.0 if correct == 0 else low), (1.0 if correct == n else high)


def evaluation_set(name: str, kind: str, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The entry of evaluation.json for graded trajectories of one set (see the module for the fields).

    A call error is a call that failed through the model's own fault; calls that failed through ours, or that were never
    made, count nowhere. Unscored trajectories are counted and left out of everything else.

    Args:
        name: of the set, such as the problem family.
        kind: `trained` or `held_out`.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind of set {name!r} is {kind!r}: must be 'trained' or 'held_out'")
    scored = [t for t in trajectories if t.verdict in (Verdict.CORRECT, Verdict.WRONG)]
    right = [t for t in scored if t.verdict is Verdict.CORRECT]
    statuses = [r.status for t in right for turn in t.turns for r in turn.results if r.status.is_counted]
    sums = {
        "n": len(scored),
        "correct": len(right),
        "unscored": len(trajectories) - len(scored),
        "tool_episodes": sum(any(turn.calls for turn in t.turns) for t in scored),
        "correct_calls": len(statuses),
        "correct_bad_calls": sum(status.is_bad for status in statuses),
    }
    means = {
        "mean_tokens": _share(sum(t.num_sampled_tokens for t in scored), len(scored)),
        "mean_response_tokens": _share(sum(t.num_response_tokens for t in scored), len(scored)),
    }
    return {"set": name, "kind": kind, **_with_rates(sums), **means}


def pool(sets: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any] | None:
    """All sets of a kind as one (counts added up, means weighted by n), or None when there is none."""
    chosen = [entry for entry in sets if entry["kind"] == kind]
    if not chosen:
        return None
    pooled = _with_rates({name: sum(entry[name] for entry in chosen) for name in _SUMS})
    means = {name: _share(sum((e[name] or 0.0) * e["n"] for e in chosen), pooled["n"]) for name in _MEANS}
    return {**pooled, **means}


def read_evaluation(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of workdir/evaluation.json, with every set checked for its fields.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not what an evaluation writes.
    """
    path = Path(workdir) / EVALUATION_FILE
    try:
        content = json.loads(path.read_text())
        for entry in content["sets"]:
            lacking = [name for name in ("set", "kind", *_SUMS, *_MEANS) if name not in entry]
            if lacking or entry["kind"] not in _KINDS:
                raise ValueError(f"a set lacks {lacking}" if lacking else f"kind {entry['kind']!r} is none of {_KINDS}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an evaluation ({error!r}); evaluate again to write it anew") from error
    return content


def _with_rates(sums: Mapping[str, int]) -> dict[str, Any]:
    return {
        **sums,
        "accuracy": _share(sums["correct"], sums["n"]),
        "ci95": list(wilson(sums["correct"], sums["n"])),
        "tool_rate": _share(sums["tool_episodes"], sums["n"]),
        "call_error_rate_correct": _share(sums["correct_bad_calls"], sums["correct_calls"]),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
