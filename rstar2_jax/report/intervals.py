"""95% intervals of means: over seeds by Student's t, over problems by the bootstrap. Pure.

Deliberately not here: Wilson's interval of a share of independent answers (evaluation.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom; beyond, the expansion in 1/df is exact to 1e-3.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL975 = 1.959963984540054
_DRAWS = 10_000


def t_quantile(df: int) -> float:
    """Quantile 0.975 of Student's t.

    >>> [round(t_quantile(n), 2) for n in (1, 4, 10, 30, 1000)]
    [12.71, 2.78, 2.23, 2.04, 1.96]
    """
    if df < 1:
        raise ValueError(f"df = {df}: an interval needs two values or more")
    if df <= len(_T975):
        return _T975[df - 1]
    z = _NORMAL975
    terms = (z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z)
    return z + sum(term / (scale * df**n) for n, (term, scale) in enumerate(zip(terms, (4, 96, 384), strict=True), 1))


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of a few independent runs: mean -+ t s / sqrt(n); one value has no interval (NaN).

    >>> [round(x, 4) for x in over_seeds([1.0, 2.0, 3.0])]
    [2.0, -0.4845, 4.4845]
    """
    found = np.asarray(values, np.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return mean, math.nan, math.nan
    half = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return mean, mean - half, mean + half


def over_problems(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap of the mean over problems, each with the mean of its own samples as value.

    Samples of one problem stand and fall together, so problems are drawn, not samples.

    Args:
        values: one number a problem, at least one.
        seed: of the draws; the same values and seed give the same interval.
    """
    found = np.asarray(values, np.float64)
    if found.size == 0:
        raise ValueError("no problem: an interval needs one value or more")
    draws = np.random.default_rng([seed, found.size]).integers(0, found.size, (_DRAWS, found.size))
    low, high = np.quantile(found[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
