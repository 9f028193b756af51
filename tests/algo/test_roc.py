"""Resample-on-Correct: counts, inclusion probabilities, uniform negatives, unscored rows."""

from __future__ import annotations

import fractions
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

ROWS, CALLS = 512, 60
PAPER = settings.Roc()
KEPT_OF_32 = {
    0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 7: 4, 8: 4, 15: 8, 16: 8, 17: 8, 27: 14, 29: 14, 30: 14, 31: 15, 32: 16,
}  # fmt: skip

count_positives = jax.jit(roc.num_positives, static_argnums=(2, 3))
inclusion_probabilities = jax.jit(roc.inclusion_probabilities, static_argnums=(1, 2))
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


def choose(key, rewards, penalties, valid=None, how: settings.Roc = PAPER) -> tuple[np.ndarray, np.ndarray]:
    """resample at one compiled shape: unscored rows and columns are added and taken away again. G is 4."""
    rewards, penalties = np.asarray(rewards, np.float32), np.asarray(penalties, np.float32)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid)
    spare = ((0, ROWS - rewards.shape[0]), (0, 8 - rewards.shape[1]))
    wide = (np.pad(values, spare) for values in (rewards, penalties, valid))
    indices, kept = resample(key, *wide, group_size=4, settings=how)
    return np.asarray(indices)[: len(rewards)], np.asarray(kept)[: len(rewards)]


def inclusion_of_many(rewards, penalties, how: settings.Roc = PAPER) -> np.ndarray:
    """bool[draws, N]: which columns of one group were kept, over prompts and keys."""
    chosen = np.zeros((CALLS, ROWS, len(rewards)), bool)
    for call in range(CALLS):
        indices, kept = choose(
            jax.random.key(call), np.tile(rewards, (ROWS, 1)), np.tile(penalties, (ROWS, 1)), how=how
        )
        chosen[call, np.arange(ROWS)[:, None], indices] |= kept
    return chosen.reshape(-1, len(rewards)).astype(np.float64)


def within_noise(measured: np.ndarray, exact) -> bool:
    """True when every mean lies within 4.5 standard errors (and the four digits given) of its exact value."""
    exact = np.asarray(exact)
    error = 4.5 * np.sqrt(exact * (1 - exact) / len(measured)) + 5e-5
    return bool(np.all(np.abs(measured.mean(axis=0) - exact) < error))


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
    splits = [(p, n) for p in range(9) for n in range(9 - p)]
    order = np.random.default_rng(0)
    rewards, valid = np.zeros((len(splits), 8), np.float32), np.zeros((len(splits), 8), bool)
    for row, (pos, neg) in enumerate(splits):
        places = order.permutation(8)
        rewards[row, places[:pos]] = 1
        valid[row, places[: pos + neg]] = True
    penalties = order.uniform(0, 2, rewards.shape)
    indices, kept = choose(jax.random.key(3), rewards, penalties, valid, settings.Roc(positives=positives))
    for row, (pos, neg) in enumerate(splits):
        chosen = indices[row, kept[row]]
        assert len(set(chosen.tolist())) == len(chosen) == min(4, pos + neg)
        assert valid[row, chosen].all()
        assert rewards[row, chosen].sum() == reference_count(pos, neg, 4, 1)
        assert kept[row].tolist() == sorted(kept[row].tolist(), reverse=True)
        assert chosen.tolist() == sorted(chosen.tolist())


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 2, width=32)), min_size=1, max_size=8),
    st.integers(0, 2**31 - 1),
)
def test_any_group_keeps_g_distinct_scored_rows(rows, seed):
    rewards, valid, penalties = (np.array(column)[None] for column in zip(*rows, strict=True))
    indices, kept = choose(jax.random.key(seed), rewards, penalties, valid)
    chosen = indices[kept]
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
    assert np.asarray(inclusion_probabilities(np.array(penalties), 2, p_floor)) == pytest.approx(exact, abs=5e-5)
    draws = inclusion_of_many([1] * 4 + [0] * 4, [*penalties, 0, 0, 0, 0], settings.Roc(p_floor=p_floor))
    assert np.all(draws[:, :4].sum(axis=1) == 2)
    assert within_noise(draws, exact + [0.5] * 4)


def test_shown_odds_equal_a_walk_over_all_orders_and_sum_to_the_count():
    penalties = [0.0, 0.1, 0.5, 0.5, 1.0, 2.0]
    for count in (1, 3, 5):
        odds = np.asarray(inclusion_probabilities(np.array(penalties, np.float32), count, 0.1))
        assert odds == pytest.approx(successive_inclusion(penalties, count, 0.1), abs=1e-5)
        assert odds.sum() == pytest.approx(count, abs=1e-5)
    assert roc.inclusion_probabilities(np.array(penalties), 6, 0.1).tolist() == [1.0] * 6
    assert roc.inclusion_probabilities(np.array(penalties), 0, 0.1).tolist() == [0.0] * 6


def test_shown_odds_hold_at_the_recipe_size():
    penalties = np.linspace(0, 2, 28, dtype=np.float32)
    odds = np.asarray(inclusion_probabilities(penalties, 14, 0.1))
    assert odds.sum() == pytest.approx(14, abs=1e-4)
    assert np.all(np.diff(odds) < 0)


def test_negatives_are_uniform_whatever_their_penalties():
    draws = inclusion_of_many([1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0.1, 0.5, 1, 1.5, 2])[:, 2:]
    assert np.all(draws.sum(axis=1) == 3)
    assert within_noise(draws, [0.5] * 6)
    pairs = np.stack([draws[:, i] * draws[:, j] for i, j in itertools.combinations(range(6), 2)], axis=1)
    assert within_noise(pairs, [0.2] * 15)


def test_uniform_positives_ignore_penalties():
    draws = inclusion_of_many([1] * 4 + [0] * 4, [0, 0, 0.5, 1, 0, 0, 0, 0], settings.Roc(positives="uniform"))
    assert within_noise(draws, [0.5] * 8)


def test_greedy_takes_the_cleanest_and_breaks_ties_at_random():
    draws = inclusion_of_many([1] * 5 + [0] * 3, [1, 0, 0.5, 0.5, 2, 0, 0, 0], settings.Roc(positives="greedy"))
    assert draws.mean(axis=0)[[0, 1, 4]].tolist() == [0, 1, 0]
    assert within_noise(draws[:, 2:4], [0.5, 0.5])
    assert np.all(draws[:, 2] + draws[:, 3] == 1)


def test_weights_are_inverse_penalties():
    assert roc.weights(np.array([0.0, 0.4, 1.9]), 0.1) == pytest.approx([10.0, 2.0, 0.5])


def test_unscored_rows_leave_before_counting_and_never_matter():
    rewards = np.array([[1, 1, 0, 0, 1, 0, 1, 0]], np.float32)
    valid = np.array([[True, True, True, True, True, True, False, False]])
    noise = np.array([[0, 0, 0, 0, 0, 0, np.nan, np.inf]], np.float32)
    penalties = np.array([[0.5, 0.1, 0.3, 0.2, 0.0, 1.0, 0.0, 0.0]], np.float32)
    for seed in range(5):
        key = jax.random.key(seed)
        plain, _ = choose(key, rewards, penalties, valid)
        dirty, _ = choose(key, rewards + noise, penalties + noise, valid)
        short, _ = choose(key, rewards[:, :6], penalties[:, :6], valid[:, :6])
        assert plain.tolist() == dirty.tolist() == short.tolist()
        assert rewards[0, plain[0]].sum() == 2


def test_a_reward_that_is_not_finite_is_never_kept():
    indices, kept = choose(jax.random.key(0), [[1, np.nan, np.nan, 0, -np.inf, np.inf]], np.zeros((1, 6)))
    assert indices[kept].tolist() == [0, 3]


def test_a_group_no_larger_than_g_is_kept_whole_and_padded():
    rewards = np.array([[1, 0, 1]], np.float32)
    indices, kept = resample(
        jax.random.key(0), rewards, rewards, np.array([[True, False, True]]), group_size=5, settings=PAPER
    )
    assert kept.tolist() == [[True, True, False, False, False]]
    assert indices.shape == (1, 5)
    assert indices[0, :2].tolist() == [0, 2]
    assert int(indices.max()) < 3


def test_a_prompt_is_drawn_the_same_whatever_the_other_prompts_and_columns_eager_or_jit():
    generator = np.random.default_rng(1)
    rewards = generator.integers(0, 2, (6, 7)).astype(np.float32)
    penalties = generator.uniform(0, 2, (6, 7)).astype(np.float32)
    key = jax.random.key(9)
    many, many_kept = choose(key, rewards, penalties)
    alone, kept = roc.resample(key, rewards[:1], penalties[:1], np.ones((1, 7), bool), group_size=4, settings=PAPER)
    assert many[:1].tolist() == alone.tolist()
    assert many_kept[:1].tolist() == kept.tolist()
    assert len({tuple(row) for row in many.tolist()}) > 1


def test_live_groups_are_those_with_both_outcomes_among_the_kept():
    rewards = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1], [1, np.nan, 1], [1, 0, 0]], np.float32)
    kept = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    assert jax.jit(roc.live_groups)(rewards, kept).tolist() == [True, False, False, False, False, False]


def test_half_at_random_keeps_every_rollout_equally_often_whatever_its_outcome_and_penalty():
    how = settings.Roc(by_class=False, positives="uniform")
    draws = inclusion_of_many([1] * 2 + [0] * 6, [0, 2, 0, 0, 0, 0, 0, 0], how)
    assert within_noise(draws, [0.5] * 8)


def test_half_at_random_keeps_g_scored_rollouts_and_all_of_a_smaller_group():
    how = settings.Roc(by_class=False, positives="uniform")
    for total in range(9):
        valid = np.arange(8)[None, :] < total
        _, kept = choose(jax.random.key(total), [[1, 0] * 4], [[0.0] * 8], valid, how)
        assert kept.sum() == min(4, total)


def test_a_draw_without_classes_refuses_weights():
    for changed in ({"positives": "inverse"}, {"positives": "uniform", "repetition_weight": 1.0}):
        with pytest.raises(ValueError, match="by_class = False: False draws without any weight"):
            settings.Roc(by_class=False, **changed)
