"""Group-relative advantages: the table, groups without spread, unscored rewards, numerical bounds."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rstar2_jax.algo import advantages as module

advantages = jax.jit(module.advantages, static_argnames=("ddof", "eps"))


def plain_loop(rewards: np.ndarray, kept: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    result = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        members = [i for i in range(rewards.shape[1]) if kept[row, i] and math.isfinite(rewards[row, i])]
        values = [float(rewards[row, i]) for i in members]
        if len(values) < 2 or max(values) == min(values):
            continue
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof)) + eps
        for i, value in zip(members, values, strict=True):
            result[row, i] = (value - mean) / spread
    return result


@pytest.mark.parametrize(
    ("correct", "sample", "population"),
    [
        (1, (3.749985, -0.249999), (3.872983, -0.258199)),
        (2, (2.561730, -0.365961), (2.645751, -0.377964)),
        (4, (1.677047, -0.559016), (1.732051, -0.577350)),
        (8, (0.968244, -0.968244), (1.0, -1.0)),
        (14, (0.365961, -2.561730), (0.377964, -2.645751)),
    ],
)
def test_advantages_of_sixteen_follow_the_table(correct, sample, population):
    rewards, kept = jnp.array([[1.0] * correct + [0.0] * (16 - correct)]), jnp.ones((1, 16), bool)
    for options, wanted in (({"ddof": 1, "eps": 1e-6}, sample), ({}, population)):
        got = advantages(rewards, kept, **options)
        assert got[0, 0] == pytest.approx(wanted[0], abs=1.5e-6)
        assert got[0, -1] == pytest.approx(wanted[1], abs=1.5e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(
    "rewards",
    [[1] * 4, [0] * 4, [0.1] * 4, [1, np.nan, np.nan, np.nan], [np.nan] * 4, [np.inf, 1, 1, 1]],
)
def test_a_group_without_spread_gets_exactly_zero(rewards, ddof):
    rewards = np.array([rewards], np.float32)
    assert advantages(rewards, np.ones((1, 4), bool), ddof=ddof).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_one_gets_exactly_zero(ddof):
    assert advantages(np.ones((1, 1), np.float32), np.ones((1, 1), bool), ddof=ddof).tolist() == [[0.0]]


def test_unscored_samples_leave_the_group_before_statistics():
    got = advantages(np.array([[1, 0, np.nan, 5, 0]], np.float32), np.array([[True, True, True, False, True]]))
    assert got[0] == pytest.approx([math.sqrt(2), -math.sqrt(0.5), 0, 0, -math.sqrt(0.5)], abs=1e-6)


def test_what_is_not_kept_moves_nothing():
    kept = np.array([[True, True, True, False]])
    calm = advantages(np.array([[1, 0, 0, 0]], np.float32), kept)
    wild = advantages(np.array([[1, 0, 0, 1e30]], np.float32), kept)
    assert calm.tolist() == wild.tolist()


def test_near_equal_rewards_do_not_explode():
    got = np.asarray(advantages(np.array([[0] + [0.95] * 7], np.float32), np.ones((1, 8), bool)))
    assert np.abs(got).max() <= math.sqrt(7) + 1e-5
    close = np.array([[0.1, 0.1 + 1e-7, 0.1, 0.1]], np.float32)
    assert np.abs(np.asarray(advantages(close, np.ones((1, 4), bool)))).max() <= math.sqrt(3) + 1e-5


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2, width=16), st.booleans()), min_size=6, max_size=6),
    st.sampled_from([(0, 0.0), (1, 1e-6)]),
)
def test_advantages_equal_a_plain_loop_and_are_bounded(rows, options):
    rewards, kept = np.array([[r for r, _ in rows]], np.float32), np.array([[k for _, k in rows]])
    got = np.asarray(advantages(rewards, kept, ddof=options[0], eps=options[1]))
    assert got == pytest.approx(plain_loop(rewards, kept, *options), rel=2e-3, abs=1e-4)
    assert np.abs(got).max() <= math.sqrt(5) + 1e-4


def test_eager_and_jit_agree():
    rewards, kept = np.array([[1, 0, 1, 0, 0]], np.float32), np.array([[True, True, True, True, False]])
    assert module.advantages(rewards, kept) == pytest.approx(np.asarray(advantages(rewards, kept)), abs=1e-7)
