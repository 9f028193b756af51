"""Resample-on-Correct: counts, inclusion probabilities, uniform negatives, unscored rows."""

from __future__ import annotations

import fractions
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rstar2_jax import settings
from rstar2_jax.algo import roc

DRAWS = 60_000
KEPT_OF_32 = {
    0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 7: 4, 8: 4, 15: 8, 16: 8, 17: 8, 27: 14, 29: 14, 30: 14, 31: 15, 32: 16,
}  # fmt: skip

count_positives = jax.jit(roc.num_positives, static_argnums=(2, 3))
resample = jax.jit(roc.resample, static_argnames=("group_size", "settings"))


def reference_count(num_pos: int, num_neg: int, group_size: int, min_class: int) -> int:
    total = num_pos + num_neg
    group = min(group_size, total)
    if total == 0:
        return 0
    floor = min(min_class, group // 2)
    take = round(fractions.Fraction(num_pos * group, total))
    options = [
        k
        for k in range(group + 1)
        if min(floor, num_pos) <= k <= num_pos and min(floor, num_neg) <= group - k <= num_neg
    ]
    return min(options, key=lambda k: abs(k - take))


def successive_inclusion(penalties: list[float], count: int, p_floor: float) -> np.ndarray:
    """Exact chances of one weighted draw after another, by walking every ordered outcome."""
    weight = [1 / (p + p_floor) for p in penalties]
    chances = np.zeros(len(penalties))
    for order in itertools.permutations(range(len(penalties)), count):
        probability, left = 1.0, sum(weight)
        for i in order:
            probability *= weight[i] / left
            left -= weight[i]
        chances[list(order)] += probability
    return chances


@functools.partial(jax.jit, static_argnames=("group_size", "how"))
def draw_many(keys, rewards, penalties, group_size: int, how: settings.Roc):
    def one(key):
        everything = jnp.ones((1, len(rewards)), bool)
        indices, kept = roc.resample(
            key, rewards[None], penalties[None], everything, group_size=group_size, settings=how
        )
        return jnp.zeros(len(rewards)).at[indices[0]].add(kept[0])

    return jax.vmap(one)(keys)


def measured_inclusion(rewards, penalties, group_size: int, how: settings.Roc) -> np.ndarray:
    keys = jax.random.split(jax.random.key(20), DRAWS)
    rewards, penalties = (jnp.array(values, jnp.float32) for values in (rewards, penalties))
    return np.asarray(draw_many(keys, rewards, penalties, group_size, how), np.float64)


def test_kept_positives_follow_the_published_counts():
    got = {k: int(count_positives(k, 32 - k, 16, 2)) for k in KEPT_OF_32}
    assert got == KEPT_OF_32


def test_the_whole_selection_reproduces_the_published_counts():
    positives = list(KEPT_OF_32)
    rewards = jnp.array([[1.0] * k + [0.0] * (32 - k) for k in positives])
    how = settings.Roc(min_class=2)
    indices, kept = resample(
        jax.random.key(1), rewards, jnp.zeros_like(rewards), jnp.ones(rewards.shape, bool), group_size=16, settings=how
    )
    assert bool(kept.all())
    chosen = np.take_along_axis(np.asarray(rewards), np.asarray(indices), axis=1)
    assert chosen.sum(axis=1).tolist() == list(KEPT_OF_32.values())


def test_counts_equal_a_plain_search_for_every_split():
    pairs = [(pos, neg) for pos in range(21) for neg in range(21)]
    choices = list(itertools.product((1, 2, 7, 16), (0, 1, 2, 9)))

    @jax.jit
    def count_all(pos, neg):
        return [roc.num_positives(pos, neg, *choice) for choice in choices]

    got = jax.vmap(count_all)(*(jnp.array(side) for side in zip(*pairs, strict=True)))
    for (group_size, min_class), counts in zip(choices, got, strict=True):
        assert counts.tolist() == [reference_count(p, n, group_size, min_class) for p, n in pairs]


def test_odd_groups_keep_exactly_g():
    ks = jnp.arange(11)
    got = jax.vmap(lambda k: roc.num_positives(k, 10 - k, 5, 1))(ks).tolist()
    assert got == [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5]


@pytest.mark.parametrize("positives", ["inverse", "greedy", "uniform"])
def test_exactly_min_of_g_and_scored_are_kept_for_every_split(positives):
    columns, group_size = 8, 4
    splits = [(p, n) for p in range(columns + 1) for n in range(columns + 1 - p)]
    order = np.random.default_rng(0)
    rewards, valid = np.zeros((len(splits), columns), np.float32), np.zeros((len(splits), columns), bool)
    for row, (pos, neg) in enumerate(splits):
        places = order.permutation(columns)
        rewards[row, places[:pos]] = 1
        valid[row, places[: pos + neg]] = True
    penalties = order.uniform(0, 2, rewards.shape).astype(np.float32)
    how = settings.Roc(positives=positives)
    indices, kept = map(np.asarray, resample(jax.random.key(3), rewards, penalties, valid, group_size=4, settings=how))
    for row, (pos, neg) in enumerate(splits):
        chosen = indices[row, kept[row]]
        assert len(set(chosen.tolist())) == len(chosen) == min(group_size, pos + neg)
        assert valid[row, chosen].all()
        assert rewards[row, chosen].sum() == reference_count(pos, neg, group_size, 1)
        assert kept[row].tolist() == sorted(kept[row].tolist(), reverse=True)
        assert chosen.tolist() == sorted(chosen.tolist())


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 2, width=32)), min_size=8, max_size=8),
    st.integers(0, 2**31 - 1),
)
def test_any_group_keeps_g_distinct_scored_rows(rows, seed):
    rewards, valid, penalties = (np.array(column)[None] for column in zip(*rows, strict=True))
    indices, kept = resample(
        jax.random.key(seed),
        rewards.astype(np.float32),
        penalties.astype(np.float32),
        valid,
        group_size=4,
        settings=settings.Roc(),
    )
    chosen = np.asarray(indices)[np.asarray(kept)]
    assert len(chosen) == len(set(chosen.tolist())) == min(4, int(valid.sum()))
    assert valid[0, chosen].all()
    pos, neg = int((rewards & valid).sum()), int((~rewards & valid).sum())
    assert int(rewards[0, chosen].sum()) == reference_count(pos, neg, 4, 1)


@pytest.mark.parametrize(
    ("penalties", "p_floor", "exact"),
    [
        ([0, 0, 0.5, 1], 0.1, [0.8491, 0.8491, 0.1943, 0.1075]),
        ([0, 0, 0.5, 1], 0.01, [0.9786, 0.9786, 0.0285, 0.0144]),
        ([0, 1 / 3, 0.5, 1.5], 0.1, [0.9325, 0.5292, 0.3889, 0.1494]),
    ],
)
def test_inclusion_probabilities_of_correct_rollouts_are_exact(penalties, p_floor, exact):
    assert successive_inclusion(penalties, 2, p_floor) == pytest.approx(exact, abs=5e-5)
    assert roc.inclusion_probabilities(np.array(penalties), 2, p_floor) == pytest.approx(exact, abs=5e-5)
    measured = measured_inclusion([1] * 4, penalties, 2, settings.Roc(p_floor=p_floor)).mean(axis=0)
    sigma = np.sqrt(np.array(exact) * (1 - np.array(exact)) / DRAWS)
    assert np.all(np.abs(measured - exact) < 4.5 * sigma + 5e-5)


def test_shown_odds_equal_a_walk_over_all_orders_and_sum_to_the_count():
    penalties = [0.0, 0.1, 0.5, 0.5, 1.0, 2.0]
    for count in (1, 3, 5):
        odds = roc.inclusion_probabilities(np.array(penalties), count, 0.1)
        assert odds == pytest.approx(successive_inclusion(penalties, count, 0.1), abs=1e-5)
        assert odds.sum() == pytest.approx(count, abs=1e-5)
    assert roc.inclusion_probabilities(np.array(penalties), 6, 0.1).tolist() == [1.0] * 6
    assert roc.inclusion_probabilities(np.array(penalties), 0, 0.1).tolist() == [0.0] * 6


def test_negatives_are_uniform_whatever_their_penalties():
    rewards, penalties = [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0.1, 0.5, 1, 1.5, 2]
    draws = measured_inclusion(rewards, penalties, 4, settings.Roc())[:, 2:]
    assert np.all(draws.sum(axis=1) == 3)
    sigma = np.sqrt(0.25 / len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - 0.5) < 4.5 * sigma)
    pairs = (draws.T @ draws / len(draws))[np.triu_indices(6, 1)]
    assert np.all(np.abs(pairs - 0.2) < 4.5 * np.sqrt(0.16 / len(draws)))


def test_uniform_positives_ignore_penalties():
    draws = measured_inclusion([1] * 4, [0, 0, 0.5, 1], 2, settings.Roc(positives="uniform"))
    assert np.all(np.abs(draws.mean(axis=0) - 0.5) < 4.5 * np.sqrt(0.25 / len(draws)))


def test_greedy_takes_the_cleanest_and_breaks_ties_at_random():
    draws = measured_inclusion([1] * 5, [1, 0, 0.5, 0.5, 2], 2, settings.Roc(positives="greedy"))
    mean = draws.mean(axis=0)
    assert mean[[0, 1, 4]].tolist() == [0, 1, 0]
    assert mean[2] + mean[3] == 1
    assert abs(mean[2] - 0.5) < 4.5 * np.sqrt(0.25 / len(draws))


def test_weights_are_inverse_penalties():
    assert roc.weights(np.array([0.0, 0.4, 1.9]), 0.1) == pytest.approx([10.0, 2.0, 0.5])


def test_unscored_rows_leave_before_counting_and_never_matter():
    rewards = np.array([[1, 1, 0, 0, 1, 0, 1, 0]], np.float32)
    valid = np.array([[True, True, True, True, True, True, False, False]])
    noise = np.array([[0, 0, 0, 0, 0, 0, np.nan, np.inf]], np.float32)
    penalties = np.array([[0.5, 0.1, 0.3, 0.2, 0.0, 1.0, 0.0, 0.0]], np.float32)
    for seed in range(5):
        key = jax.random.key(seed)
        how = settings.Roc()
        plain = resample(key, rewards, penalties, valid, group_size=4, settings=how)
        dirty = resample(key, rewards + noise, penalties + noise, valid, group_size=4, settings=how)
        short = resample(key, rewards[:, :6], penalties[:, :6], valid[:, :6], group_size=4, settings=how)
        assert plain[0].tolist() == dirty[0].tolist() == short[0].tolist()
        assert rewards[0, np.asarray(plain[0])[0]].sum() == 2


def test_a_reward_that_is_not_finite_is_never_kept():
    rewards = np.array([[1, np.nan, np.nan, 0] + [-np.inf] * 4], np.float32)
    everything = np.ones((1, 8), bool)
    indices, kept = resample(
        jax.random.key(0), rewards, np.zeros_like(rewards), everything, group_size=4, settings=settings.Roc()
    )
    assert np.asarray(indices)[np.asarray(kept)].tolist() == [0, 3]


def test_a_group_no_larger_than_g_is_kept_whole_and_padded():
    rewards = np.array([[1, 0, 1]], np.float32)
    indices, kept = resample(
        jax.random.key(0), rewards, rewards, np.array([[True, False, True]]), group_size=5, settings=settings.Roc()
    )
    assert kept.tolist() == [[True, True, False, False, False]]
    assert indices.shape == (1, 5)
    assert indices[0, :2].tolist() == [0, 2]
    assert int(indices.max()) < 3


def test_a_prompt_is_drawn_the_same_whatever_the_other_prompts():
    generator = np.random.default_rng(1)
    rewards = generator.integers(0, 2, (6, 8)).astype(np.float32)
    penalties = generator.uniform(0, 2, (6, 8)).astype(np.float32)
    valid = np.ones((6, 8), bool)
    key, how = jax.random.key(9), settings.Roc()
    whole, _ = resample(key, rewards, penalties, valid, group_size=4, settings=how)
    part, _ = resample(key, rewards[:1], penalties[:1], valid[:1], group_size=4, settings=how)
    assert whole[:1].tolist() == part.tolist()
    assert len({tuple(row) for row in whole.tolist()}) > 1


def test_eager_and_jit_choose_the_same():
    rewards = np.array([[1, 1, 0, 0, 1, 0, 1, 0]], np.float32)
    penalties = np.linspace(0, 2, 8, dtype=np.float32)[None]
    valid = np.array([[True] * 7 + [False]])
    key, how = jax.random.key(4), settings.Roc()
    eager = roc.resample(key, rewards, penalties, valid, group_size=4, settings=how)
    compiled = resample(key, rewards, penalties, valid, group_size=4, settings=how)
    assert eager[0].tolist() == compiled[0].tolist()
    assert eager[1].tolist() == compiled[1].tolist()


def test_live_groups_are_those_with_both_outcomes_among_the_kept():
    rewards = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1], [1, np.nan, 1], [1, 0, 0]], np.float32)
    kept = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    assert jax.jit(roc.live_groups)(rewards, kept).tolist() == [True, False, False, False, False, False]
