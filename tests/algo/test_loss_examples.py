"""The policy loss on small examples worked by hand, and what it refuses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.algo import loss

PLAIN = settings.Loss()
DUAL = settings.Loss(dual_clip=3.0)
SEQ = settings.Loss(aggregation="seq_mean")

policy_loss = jax.jit(loss.policy_loss, static_argnames="settings")
count_of = jax.jit(loss.normaliser, static_argnames="settings")
inverse_lengths = jax.jit(loss.inverse_lengths)


def example():
    """Two sequences of 2 and 4 tokens in rows of 5; the padding holds values that must not matter."""
    ratios = np.array([[1.5, 0.5, 9, 9, 9], [1.5, 0.7, 1.0, 4.0, 9]], np.float32)
    mask = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    advantages = np.array([[1] * 5, [-1] * 5], np.float32)
    old = np.full((2, 5), -1.25, np.float32)
    return old + np.log(ratios), old, advantages, mask


@pytest.mark.parametrize(("how", "wanted"), [(PLAIN, 0.92), (DUAL, 0.753333)])
@pytest.mark.parametrize("function", [policy_loss, loss.policy_loss])
def test_the_worked_example_of_the_token_mean(function, how, wanted):
    policy, old, advantages, mask = example()
    value, statistics = function(policy, old, advantages, mask, count_of(mask, how), settings=how)
    assert value == pytest.approx(wanted, abs=1e-6)
    assert statistics["tokens"] == 6
    assert statistics["clip_high"] == 1
    assert statistics["clip_low"] == 1
    assert statistics["clip_dual"] == (1 if how.dual_clip else 0)
    assert statistics["ratio_sum"] == pytest.approx(9.2, abs=1e-5)


def test_the_worked_example_of_the_sequence_mean():
    policy, old, advantages, mask = example()
    inverse = inverse_lengths(mask, mask.astype(np.int32))
    count = count_of(mask, SEQ, inverse)
    value, _ = policy_loss(policy, old, advantages, mask, count, SEQ, loss.Extras(inverse_lengths=inverse))
    assert count == 2
    assert value == pytest.approx(0.4675, abs=1e-6)


def test_token_losses_of_the_worked_example():
    ratios = np.array([[1.5, 0.5, 1.0, 1.0], [1.5, 0.7, 1.0, 4.0]], np.float32)
    got = loss.token_losses(ratios, np.array([[1.0] * 4, [-1.0] * 4], np.float32), PLAIN)
    assert got[0, :2] == pytest.approx([-1.28, -0.5])
    assert got[1] == pytest.approx([1.5, 0.8, 1.0, 4.0])


def test_advantages_at_masked_tokens_do_not_matter():
    mask = np.array([[1, 1, 0, 0]], bool)
    logprobs = np.zeros((1, 4), np.float32)
    calm = policy_loss(logprobs, logprobs, np.array([[1, 1, 0, 0]], np.float32), mask, 2.0, PLAIN)
    wild = policy_loss(logprobs, logprobs, np.array([[1, 1, 10, 10]], np.float32), mask, 2.0, PLAIN)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), calm, wild))


def test_lengths_two_and_eight_give_the_global_mean_for_every_split():
    mask = np.zeros((2, 8), bool)
    mask[0, :2], mask[1, :] = True, True
    advantages = np.repeat(np.array([[1.0], [-1.0]], np.float32), 8, axis=1)
    logprobs = np.zeros((2, 8), np.float32)
    count = count_of(mask, PLAIN)
    one, _ = policy_loss(logprobs, logprobs, advantages, mask, count, PLAIN)
    halves = [policy_loss(logprobs[[i]], logprobs[[i]], advantages[[i]], mask[[i]], count, PLAIN)[0] for i in (0, 1)]
    assert one == pytest.approx(0.6, abs=1e-7)
    assert sum(map(float, halves)) == pytest.approx(0.6, abs=1e-7)


def test_tokens_without_advantage_are_counted_apart():
    mask, logprobs = np.ones((1, 4), bool), np.zeros((1, 4), np.float32)
    _, statistics = policy_loss(logprobs, logprobs, np.array([[1, 0, 0, -1]], np.float32), mask, 4.0, PLAIN)
    assert statistics["tokens"] == 4
    assert statistics["live_tokens"] == 2


@pytest.mark.parametrize(("engine_t", "learner_t", "agrees"), [(0.6, 0.6, True), (0.6, 1.0, False)])
def test_ratios_are_one_only_when_both_sides_use_the_temperature(engine_t, learner_t, agrees):
    draw = np.random.default_rng(0)
    logits, ids = draw.normal(0, 2, (4, 16, 32)).astype(np.float32), draw.integers(0, 32, (4, 16))
    scaled = logits / np.float32(engine_t)
    engine = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    engine = np.take_along_axis(engine, ids[..., None], -1)[..., 0]
    learner = jnp.take_along_axis(jax.nn.log_softmax(logits / learner_t), ids[..., None], -1)[..., 0]
    ratio = np.exp(np.asarray(learner) - engine)
    assert (np.abs(ratio - 1).mean() < 1e-4) == agrees


def test_inverse_lengths_of_packed_rows_count_trained_tokens_only():
    segment_ids = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]], np.int32)
    mask = np.array([[0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]], bool)
    got = inverse_lengths(mask, segment_ids)
    assert got.tolist() == [[0, 0.5, 0.5, 1, 0, 0], [1, 0, 0.25, 0.25, 0.25, 0.25]]
    assert count_of(mask, SEQ, got) == 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"aggregation": "seq_mean"}, "inverse_lengths"),
        ({"high_entropy_share": 0.2}, "entropy_threshold"),
        ({"correction": "token"}, "weights"),
    ],
)
def test_a_missing_extra_is_named(changes, name):
    arrays = example()
    with pytest.raises(ValueError, match=rf"Extras\.{name}"):
        loss.policy_loss(*arrays, 6.0, dataclasses.replace(PLAIN, **changes))


def test_sequence_normaliser_without_lengths_is_refused():
    with pytest.raises(ValueError, match="inverse_lengths"):
        loss.normaliser(np.ones((1, 2), bool), SEQ)
