"""The sampler against plain numpy: distribution, cuts, log-probabilities, independence of the neighbours."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rstar2_jax import settings
from rstar2_jax.rollout import sampler

sample = jax.jit(sampler.sample)
position_keys = jax.jit(sampler.position_keys)
cuts = jax.jit(sampler._cuts)


def draw(logits, *, temperature=1.0, top_k=-1, top_p=1.0, seed=0):
    """Rows of logits sampled under one setting, a key for each row."""
    rows = len(logits)
    keys = position_keys(np.tile(np.array([[0, seed]], np.uint32), (rows, 1)), np.arange(rows))
    ids, logprobs = sample(
        keys,
        logits.astype(np.float32),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
    )
    return np.asarray(ids), np.asarray(logprobs)


def kept_set(logits, temperature, top_k, top_p):
    """The ids that may be drawn, in a loop over the ids from the most probable down; ties at the edge stay."""
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        edge = probabilities[order[min(top_k, len(order)) - 1]]
        order = [i for i in order if probabilities[i] >= edge]
    mass, kept, edge = sum(probabilities[i] for i in order), 0.0, 0.0
    for i in order:
        if kept < top_p * mass:
            kept, edge = kept + probabilities[i], probabilities[i]
    return {int(i) for i in order if probabilities[i] >= edge}


def truncated_probabilities(logits, temperature, top_k, top_p):
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    kept = kept_set(logits, temperature, top_k, top_p)
    probabilities = np.array([p if i in kept else 0.0 for i, p in enumerate(probabilities)])
    return probabilities / probabilities.sum()


DRAWS = 20_000
SETTINGS = [
    (1.0, -1, 1.0),
    (0.6, -1, 1.0),
    (1.7, -1, 1.0),
    (1.0, 5, 1.0),
    (1.0, -1, 0.8),
    (0.7, 7, 0.9),
    (1.0, 200, 1.0),
]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_draws_follow_the_truncated_softmax(temperature, top_k, top_p):
    vocab = 300
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    ids, _ = draw(np.tile(logits, (DRAWS, 1)), temperature=temperature, top_k=top_k, top_p=top_p, seed=vocab)
    counts = np.bincount(ids, minlength=vocab)
    expected = truncated_probabilities(logits, temperature, top_k, top_p) * DRAWS
    assert not counts[expected == 0].any()
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    if not common.all():
        observed, wanted = np.append(observed, counts[~common].sum()), np.append(wanted, expected[~common].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.integers(-40, 40), min_size=9, max_size=9),
    st.integers(-1, 9).filter(lambda k: k != 0),
    st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 0.99, 1.0]),
)
def test_every_id_of_the_kept_set_can_be_drawn_and_no_other(quarters, top_k, top_p):
    logits = np.array(quarters, np.float32) / 4
    scaled = logits.astype(np.float64)
    shares = np.cumsum(np.sort(np.exp(scaled - scaled.max()))[::-1])
    if top_k > 0:
        shares = shares[: len(kept_set(logits, 1.0, top_k, 1.0))]
    hypothesis.assume(np.min(np.abs(shares / shares[-1] - top_p)) > 1e-5 or top_p == 1.0)  # the edge is not a rounding
    gaps = logits.max() - logits
    weights = np.exp(-gaps)
    cut = cuts(jnp.asarray(gaps)[None], jnp.asarray(weights)[None], jnp.array([top_k]), jnp.array([top_p], jnp.float32))
    assert {int(i) for i in np.flatnonzero(gaps <= np.asarray(cut)[0])} == kept_set(logits, 1.0, top_k, top_p)


def test_a_nucleus_of_thousands_of_ids_is_exact():
    logits = np.random.default_rng(5).normal(size=20_000).astype(np.float32) * 0.5
    for top_k, top_p in [(-1, 0.95), (3000, 1.0), (3000, 0.9)]:
        gaps = jnp.asarray(logits.max() - logits)[None]
        cut = cuts(gaps, jnp.exp(-gaps), jnp.array([top_k]), jnp.array([top_p], jnp.float32))
        found, wanted = int(np.sum(np.asarray(gaps) <= np.asarray(cut))), len(kept_set(logits, 1.0, top_k, top_p))
        # A float32 sum of thousands of terms places the edge of a nucleus to within its rounding: one id in 1e4.
        assert abs(found - wanted) <= (0 if top_p == 1.0 else 1)


def test_ties_at_the_edge_stay_together():
    logits = np.zeros((64, 300), np.float32)
    logits[:, :3] = 2.0, 1.5, 1.5
    ids, _ = draw(logits, top_k=2)
    assert set(ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("top_k, top_p", [(-1, 1.0), (3, 1.0), (-1, 0.5)])
def test_log_probabilities_are_of_the_full_support_after_temperature(top_k, top_p):
    logits = np.random.default_rng(1).normal(size=(64, 300)).astype(np.float32) * 3
    ids, logprobs = draw(logits, temperature=0.7, top_k=top_k, top_p=top_p)
    scaled = logits.astype(np.float64) / 0.7
    wanted = scaled[np.arange(64), ids] - np.log(np.exp(scaled).sum(axis=1))
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_temperature_zero_takes_the_best_id_and_reports_it_at_temperature_one():
    logits = np.random.default_rng(2).normal(size=(64, 300)).astype(np.float32)
    logits[3, [7, 200]] = 9.0
    ids, logprobs = draw(logits, temperature=0.0, top_p=0.3)
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    assert ids[3] == 7
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[np.arange(64), ids], atol=1e-5)


@pytest.mark.parametrize("vocab", [4, 300])
def test_the_least_temperature_still_gives_numbers(vocab):
    logits = np.random.default_rng(4).normal(size=(64, vocab)).astype(np.float32) * 100
    ids, logprobs = draw(logits, temperature=settings.LEAST_TEMPERATURE)
    assert np.isfinite(logprobs).all() and (ids == logits.argmax(axis=1)).all()


def test_ids_without_probability_are_never_drawn():
    logits = np.full((64, 300), -np.inf, np.float32)
    logits[:, [3, 130, 299]] = 0.0
    ids, logprobs = draw(logits)
    assert set(ids.tolist()) == {3, 130, 299}
    np.testing.assert_allclose(logprobs, -np.log(3), atol=1e-6)


def test_a_row_is_the_same_bit_for_bit_whatever_its_neighbours_ask_for():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 300)).astype(np.float32) * 2
    seeds = jnp.asarray(rng.integers(0, 2**32, size=(64, 2)), jnp.uint32)
    keys = position_keys(seeds, jnp.arange(64))
    ones, off = jnp.ones(64, jnp.float32), jnp.full(64, -1)
    mine = np.arange(64) % 2 == 0
    alone = sample(keys, logits, ones, off, ones)
    for top_k, top_p, temperature in [(4, 1.0, 1.0), (-1, 0.6, 1.0), (100, 0.99, 0.3), (-1, 1.0, 0.0)]:
        beside = sample(
            keys,
            jnp.where(mine[:, None], logits, rng.normal(size=logits.shape)),
            jnp.where(mine, 1.0, temperature),
            jnp.where(mine, -1, top_k),
            jnp.where(mine, 1.0, top_p),
        )
        for a, b in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[mine], np.asarray(b)[mine])


def test_a_truncated_row_is_the_same_alone_and_beside_wider_ones():
    logits = np.random.default_rng(4).normal(size=(64, 300)).astype(np.float32)
    keys = position_keys(jnp.zeros((64, 2), jnp.uint32), jnp.arange(64))
    ones = jnp.ones(64, jnp.float32)
    first = np.arange(64) == 0
    alone = sample(keys, logits, ones, jnp.where(first, 9, -1), jnp.where(first, 0.9, 1.0))
    beside = sample(keys, logits, ones, jnp.where(first, 9, 250), jnp.where(first, 0.9, 0.999))
    assert alone[0][0] == beside[0][0] and alone[1][0] == beside[1][0]


def test_keys_are_those_of_the_seed_and_the_position():
    seed = 2**40 + 17
    words = jnp.array([[seed >> 32, seed & 0xFFFFFFFF], [0, 5]], jnp.uint32)
    keys = jax.random.key_data(position_keys(words, jnp.array([3, 9])))
    np.testing.assert_array_equal(keys[1], jax.random.key_data(jax.random.fold_in(jax.random.key(5), 9)))
    assert not np.array_equal(keys[0], jax.random.key_data(jax.random.fold_in(jax.random.key(17), 3)))
