"""All optimizer steps of a rollout batch: anchors, options, and metrics that add up."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.data import pack
from rstar2_jax.learner import batch, objective, step, update
from rstar2_jax.model import decoder

pytestmark = pytest.mark.slow

TINY = settings.Model(
    family="llama", vocab_size=64, d_model=16, d_mlp=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=32
)
PARAMS = decoder.init_params(TINY, jax.random.key(0))
ROWS = [
    pack.Row(
        token_ids=np.random.default_rng(n).integers(0, 64, 6 + n).astype(np.int32),
        mask=np.arange(6 + n) >= 3,
        behavior_logprobs=np.where(np.arange(6 + n) >= 3, -4.0, 0).astype(np.float32),
        advantage=(-1.0) ** n,
    )
    for n in range(6)
]
TOKENS = sum(float(row.mask.sum()) for row in ROWS)


def learned(loss=settings.Loss(), minibatches=1, reference=None, rows=ROWS):  # noqa: B008 (frozen settings)
    how = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2, warmup_steps=0),
        loss=loss,
        microbatch_rows=2,
        row_tokens=16,
        minibatches=minibatches,
    )
    trainer = update.Learner(TINY, how, objective.grpo(loss), total_steps=10)
    seen = []
    placed = None if reference is None else trainer.place(reference)
    state, told = step.learn(
        trainer,
        trainer.create(PARAMS),
        batch.minibatches(rows, how),
        loss,
        reference=placed,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    return state, told, seen


def test_one_step_is_on_policy_and_counts_every_trained_token():
    state, told, seen = learned()
    assert told["learner/ratio_mean"] == pytest.approx(1.0) and told["learner/tokens"] == TOKENS
    assert told["learner/clip_low_frac"] == told["learner/clip_high_frac"] == 0
    assert told["learner/grad_norm"] > 0 and told["learner/skipped_steps"] == 0 and int(state.step) == 1
    assert seen == [(seen[0][1], seen[0][1])]


def test_several_steps_on_one_batch_leave_the_policy_that_sampled():
    state, told, _ = learned(minibatches=3)
    assert int(state.step) == 3 and told["learner/tokens"] == TOKENS
    assert abs(told["learner/ratio_mean"] - 1) > 1e-4 and told["learner/kl_old"] > 0


def test_no_work_leaves_the_state_and_says_so():
    state, told, seen = learned(rows=[])
    assert int(state.step) == 0 and told["learner/loss"] is None and told["learner/skipped_steps"] == 0 and not seen


def test_the_kl_term_pulls_towards_the_reference_and_is_zero_at_it():
    plain = learned()[0].params
    held = learned(dataclasses.replace(settings.Loss(), kl_coef=5.0), reference=PARAMS)[0].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, held)
    other = decoder.init_params(TINY, jax.random.key(9))
    pulled = learned(dataclasses.replace(settings.Loss(), kl_coef=5.0), reference=other)[0].params
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(pulled), strict=True))


def test_only_the_chosen_share_of_high_entropy_tokens_is_trained_on():
    whole = learned()[1]
    part = learned(dataclasses.replace(settings.Loss(), high_entropy_share=0.3))[1]
    assert part["learner/tokens"] == whole["learner/tokens"]
    assert 0 < part["learner/grad_norm"] != pytest.approx(whole["learner/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("correction", ["token", "band", "sequence"])
def test_a_correction_weighs_what_was_sampled_under_another_policy(correction):
    how = dataclasses.replace(settings.Loss(), correction=correction, correction_cap=1.0001)
    plain, weighed = learned()[1], learned(how)[1]
    assert weighed["learner/grad_norm"] != pytest.approx(plain["learner/grad_norm"], rel=1e-3)
    assert weighed["mismatch/logprob_gap_max"] == pytest.approx(plain["mismatch/logprob_gap_max"])
