"""Rollout/trainer mismatch: weights, masks and statistics that add up."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.algo import correction

token_weights = jax.jit(correction.token_weights, static_argnums=3)
sequence_mask = jax.jit(correction.sequence_mask, static_argnums=4)
mismatch = jax.jit(correction.mismatch, static_argnames="cap")
combine, summarise = jax.jit(correction.combine), jax.jit(correction.summarise)


def noisy(seed: int = 0, rows: int = 4, tokens: int = 250):
    """Behavior and policy logprobs that differ by 0.5 on one token in a hundred."""
    draw = np.random.default_rng(seed)
    policy = draw.normal(-1, 0.3, (rows, tokens)).astype(np.float32)
    mask = np.ones((rows, tokens), bool)
    behavior = policy.copy()
    places = draw.permutation(rows * tokens)[: rows * tokens // 100]
    behavior.ravel()[places] -= 0.5
    return policy, behavior, mask


def test_token_weights_are_truncated_ratios_and_zero_where_masked():
    old = np.log(np.array([[0.5, 0.5, 0.5, 0.5]], np.float32))
    behavior = np.log(np.array([[0.5, 0.25, 0.1, 0.1]], np.float32))
    mask = np.array([[True, True, True, False]])
    got = token_weights(old, behavior, mask, 2.0)
    assert got[0] == pytest.approx([1, 2, 2, 0], abs=1e-6)
    assert token_weights(behavior, old, mask, 2.0)[0] == pytest.approx([1, 0.5, 0.2, 0], abs=1e-6)


def test_a_band_leaves_out_what_a_cap_would_keep_at_its_bound():
    old = np.log(np.array([[0.5, 0.5, 0.5, 0.1, 0.5]], np.float32))
    behavior = np.log(np.array([[0.5, 0.3, 0.1, 0.5, 0.1]], np.float32))
    mask = np.array([[True, True, True, True, False]])
    got = jax.jit(correction.band_weights, static_argnums=3)(old, behavior, mask, 2.0)
    assert got[0] == pytest.approx([1, 5 / 3, 0, 0, 0], abs=1e-6)


def test_corrections_carry_no_gradient():
    policy, behavior, mask = (jnp.asarray(a) for a in noisy(rows=1, tokens=20))
    ids = mask.astype(jnp.int32)

    def everything(old):
        weights = correction.token_weights(old, behavior, mask, 2.0)
        weights += correction.band_weights(old, behavior, mask, 2.0)
        kept = correction.sequence_mask(old, behavior, mask, ids, 2.0)
        return weights.sum() + kept.sum() + correction.mismatch(old, behavior, mask)["gap_k3_sum"]

    assert not np.asarray(jax.jit(jax.grad(everything))(policy)).any()


def test_a_sequence_is_masked_by_its_geometric_mean_and_not_by_its_length():
    tokens = 1200
    old, behavior = np.zeros((1, tokens), np.float32), np.zeros((1, tokens), np.float32)
    segment_ids = np.repeat(np.array([[1, 2, 3]], np.int32), 400, axis=1)
    behavior[0, :400] = -0.001
    behavior[0, 400:800] = -0.05
    behavior[0, 800:] = 0.05
    mask = np.ones((1, tokens), bool)
    mask[0, :100] = False
    got = np.asarray(sequence_mask(old, behavior, mask, segment_ids, 1.02))
    assert got[0].tolist() == [0] * 100 + [1] * 300 + [0] * 800
    assert np.asarray(sequence_mask(old, behavior, mask, segment_ids, 1.06)).sum() == mask.sum()


def test_sequence_sums_equal_a_plain_loop():
    draw = np.random.default_rng(3)
    values = draw.normal(size=(3, 9)).astype(np.float32)
    ids = np.sort(draw.integers(0, 4, (3, 9)), axis=1).astype(np.int32)[:, ::-1]
    got = correction.sequence_sums(values, ids)
    for row in range(3):
        for column in range(9):
            member = (ids[row] == ids[row, column]) & (ids[row] != 0)
            wanted = values[row, member].sum() if ids[row, column] else 0
            assert got[row, column] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function])
def test_mismatch_equals_plain_float64_sums(wrap):
    draw = np.random.default_rng(1)
    policy, behavior = draw.normal(-1, 0.5, (2, 2, 30)).astype(np.float32)
    mask = draw.uniform(size=(2, 30)) < 0.6
    got = wrap(functools.partial(correction.mismatch, cap=1.5))(policy, behavior, mask)
    gap = (policy.astype(np.float64) - behavior)[mask]
    weight = np.exp(gap)
    wanted = {
        "gap_tokens": mask.sum(),
        "gap_sum": gap.sum(),
        "gap_abs_sum": np.abs(gap).sum(),
        "gap_abs_max": np.abs(gap).max(),
        "gap_k3_sum": (weight - 1 - gap).sum(),
        "gap_weight_sum": weight.sum(),
        "gap_weight_square_sum": (weight**2).sum(),
        "gap_mult_error_sum": np.exp(np.abs(gap)).sum(),
        "gap_capped_sum": (weight > 1.5).sum(),
    }
    assert {name: float(value) for name, value in got.items()} == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    summary = summarise(got)
    assert summary["ess_share"] == pytest.approx(weight.sum() ** 2 / (len(gap) * (weight**2).sum()), rel=1e-5)
    assert summary["kl_k3"] == pytest.approx((weight - 1 - gap).mean(), rel=1e-5)


def test_micro_batches_combine_to_the_whole():
    policy, behavior, mask = noisy()
    whole = mismatch(policy, behavior, mask)
    parts = [mismatch(policy[r], behavior[r], mask[r]) for r in (slice(0, 2), slice(2, 4))]
    combined = functools.reduce(combine, parts)
    assert {k: float(v) for k, v in combined.items()} == pytest.approx(
        {k: float(v) for k, v in whole.items()}, rel=1e-5
    )
    with pytest.raises(ValueError, match="gap_sum"):
        correction.combine(whole, {k: v for k, v in whole.items() if k != "gap_sum"})


def test_noise_on_one_token_in_a_hundred_is_reported_and_clipped():
    policy, behavior, mask = noisy()
    statistics = mismatch(policy, behavior, mask, cap=1.5)
    summary = summarise(statistics)
    assert summary["capped_share"] == pytest.approx(0.01, abs=1e-6)
    assert summary["logprob_gap_mean"] == pytest.approx(0.005, rel=1e-3)
    assert summary["logprob_gap_max"] == pytest.approx(0.5, rel=1e-3)
    assert summary["mult_prob_error"] == pytest.approx(1 + 0.01 * (np.exp(0.5) - 1), rel=1e-4)
    weights = np.asarray(token_weights(policy, behavior, mask, 1.5))
    assert weights.max() == 1.5
    assert (weights == 1.5).sum() == 10


def test_equal_logprobs_have_no_gap():
    policy, _, mask = noisy()
    summary = summarise(mismatch(policy, policy, mask))
    neutral = {"ess_share": 1.0, "mult_prob_error": 1.0}
    assert {name: float(value) for name, value in summary.items()} == {name: neutral.get(name, 0.0) for name in summary}


def test_no_trained_token_gives_neutral_numbers():
    policy, behavior, mask = noisy()
    summary = summarise(mismatch(policy, behavior, np.zeros_like(mask)))
    assert all(np.isfinite(float(value)) for value in summary.values())
    assert summary["ess_share"] == summary["mult_prob_error"] == 1


def test_masked_and_absurd_values_stay_finite():
    policy, behavior, mask = noisy(rows=1, tokens=6)
    mask[0, 4:] = False
    clean = mismatch(policy, behavior, mask)
    policy[0, 4], behavior[0, 5] = np.nan, -np.inf
    assert {k: float(v) for k, v in mismatch(policy, behavior, mask).items()} == {k: float(v) for k, v in clean.items()}
    behavior[0, 0] = -60
    statistics = mismatch(policy, behavior, mask)
    assert all(np.isfinite(float(value)) for value in statistics.values())
    assert statistics["gap_abs_max"] == correction.LOG_RATIO_LIMIT
