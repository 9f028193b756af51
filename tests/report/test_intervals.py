"""Intervals: known quantiles, coverage, and problems that stand and fall as a whole."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rstar2_jax.report import intervals


@pytest.mark.parametrize(
    ("df", "value"), [(1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (20, 2.086), (120, 1.980)]
)
def test_quantiles_are_those_of_the_tables(df, value):
    assert intervals.t_quantile(df) == pytest.approx(value, abs=1.5e-3)


def test_five_seeds_by_hand():
    # mean 3, s = sqrt(2.5), half = 2.776 * sqrt(2.5) / sqrt(5) = 1.9629
    mean, low, high = intervals.over_seeds([1, 2, 3, 4, 5])
    assert (mean, round(low, 3), round(high, 3)) == (3.0, 1.037, 4.963)


def test_one_seed_has_no_interval_and_no_problem_is_an_error():
    mean, low, high = intervals.over_seeds([0.25])
    assert mean == 0.25 and math.isnan(low) and math.isnan(high)
    with pytest.raises(ValueError, match="df = 0"):
        intervals.t_quantile(0)
    with pytest.raises(ValueError, match="no problem"):
        intervals.over_problems([])


def test_the_interval_over_seeds_covers_the_truth_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(2.0, 3.0, (2000, 5))
    found = [intervals.over_seeds(row) for row in draws]
    assert np.mean([low <= 2.0 <= high for _, low, high in found]) == pytest.approx(0.95, abs=0.015)


def test_the_bootstrap_is_a_function_of_values_and_seed_and_about_the_normal_interval():
    values = np.random.default_rng(1).uniform(0, 1, 400)
    low, high = intervals.over_problems(values)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert (low, high) == intervals.over_problems(values) != intervals.over_problems(values, seed=1)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=4e-3)
    assert intervals.over_problems([1.0, 1.0, 1.0]) == (1.0, 1.0)
