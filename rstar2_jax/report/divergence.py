"""Does training gain what held-out problems lose? The sign of a training set that is narrow or can be gamed.

With evaluations a_i of n_i scored answers at some steps, the latest one k is held against the best earlier one b:

    z = (a_b - a_k) / sqrt(p (1 - p) (1 / n_b + 1 / n_k)),    p = (a_b n_b + a_k n_k) / (n_b + n_k)

The alarm goes off when z >= 3 and the training reward of a source rose by more than 0.05 over the same steps. (3, not
2: the best of several evaluations is too good by chance. Answers to one problem are counted as independent.)

Pure. Deliberately not here: the evaluations themselves (train.py), and any reaction but the alarm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

ACCURACY, SCORED = "eval/accuracy", "eval/scored"
_REWARD = re.compile(r"reward/(.+)_mean")
_MIN_Z = 3.0
_MIN_RISE = 0.05
_MOST_STEPS = 5  # steps of a training reward that are averaged


def alarm(columns: Mapping[str, np.ndarray]) -> str | None:
    """One sentence that names both sides, or None while nothing diverges.

    Args:
        columns: `step`, `eval/accuracy`, `eval/scored` and `reward/<source>_mean` of all steps so far, NaN where a step
            has no value; as io.metrics.read_metrics gives them. Evaluations take place before the step's update.
    """
    if ACCURACY not in columns or SCORED not in columns:
        return None
    accuracy, scored, steps = columns[ACCURACY], columns[SCORED], columns["step"]
    measured = np.flatnonzero(np.isfinite(accuracy) & (np.nan_to_num(scored) > 0))
    if len(measured) < 2:
        return None
    last = measured[-1]
    best = measured[:-1][np.argmax(accuracy[measured[:-1]])]
    if _z(*(float(column[i]) for i in (best, last) for column in (accuracy, scored))) < _MIN_Z:
        return None
    risen = {name: found for name, found in _rises(columns, best, last).items() if found[1] - found[0] > _MIN_RISE}
    if not risen:
        return None
    told = ", ".join(f"{name} {before:.2f} -> {now:.2f}" for name, (before, now) in sorted(risen.items()))
    return (
        f"training and held-out problems diverge: held-out accuracy fell from {accuracy[best]:.2f} (step "
        f"{steps[best]:.0f}) to {accuracy[last]:.2f} (step {steps[last]:.0f}) while training reward rose ({told}): "
        "look at what these sources reward"
    )


def _z(best: float, n_best: float, last: float, n_last: float) -> float:
    share = (best * n_best + last * n_last) / (n_best + n_last)
    spread = share * (1 - share) * (1 / n_best + 1 / n_last)
    return (best - last) / math.sqrt(spread) if spread > 0 else 0.0


def _rises(columns: Mapping[str, np.ndarray], best: int, last: int) -> dict[str, tuple[float, float]]:
    """Mean reward of each source over a few steps from `best` on, and over as many up to `last`."""
    few = max(1, min(_MOST_STEPS, (last - best) // 2))
    found = {}
    for name, values in columns.items():
        match = _REWARD.fullmatch(name)
        before, now = values[best : best + few], values[last - few + 1 : last + 1]
        if match and np.isfinite(before).any() and np.isfinite(now).any():
            found[match[1]] = float(np.nanmean(before)), float(np.nanmean(now))
    return found
