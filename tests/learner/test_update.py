"""The update: exact whatever the micro-batches and the mesh, guarded against numbers that are not finite."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.learner import objective, update
from rstar2_jax.model import decoder
from rstar2_jax.types import TrainBatch

TINY = settings.Model(
    family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, max_positions=64
)
LOSS = settings.Loss()
PARAMS = decoder.init_params(TINY, jax.random.key(0))


@functools.lru_cache
def make_learner(mesh=(1, 1, 1), rows=8, loss=LOSS, minibatches=1):
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2, warmup_steps=0),
        loss=loss,
        mesh=mesh,
        microbatch_rows=rows,
        row_tokens=24,
        minibatches=minibatches,
    )
    return update.Learner(TINY, learner, objective.grpo(loss), total_steps=10)


def make_batch(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 25, rows)
    inside = np.arange(24)[None] < lengths[:, None]
    mask = inside & (np.arange(24)[None] >= 4)
    return TrainBatch(
        tokens=np.where(inside, rng.integers(0, 64, (rows, 24)), 0).astype(np.int32),
        positions=np.where(inside, np.arange(24)[None], 0).astype(np.int32),
        segment_ids=inside.astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=(rows, 1)), 0).astype(np.float32),
    )


def cut(batch, rows):
    count = batch.tokens.shape[0]
    return [jax.tree.map(lambda leaf, at=at: leaf[at : at + rows], batch) for at in range(0, count, rows)]


def gradients(learner, batch, rows):
    params = learner.create(PARAMS).params
    found, told = learner.gradients(params, cut(batch, rows), normaliser=float(batch.loss_mask.sum()))
    return jax.tree.map(np.asarray, found), told


def assert_close(left, right, tolerance=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=0), left, right)


def test_rows_without_a_trained_token_change_nothing():
    batch = make_batch(4)
    empty = jax.tree.map(np.zeros_like, batch)
    padded = jax.tree.map(lambda a, b: np.concatenate([a, b]), batch, empty)
    alone, _ = gradients(make_learner(), batch, 4)
    beside, _ = gradients(make_learner(), padded, 4)
    assert_close(alone, beside)


def test_a_number_that_is_not_finite_skips_the_step_and_leaves_the_state_untouched():
    batch = make_batch()
    learner = make_learner()
    params, state = PARAMS, learner.create(PARAMS)
    moments = jax.tree.map(np.asarray, state.opt_state)
    broken = batch.replace(advantages=np.where(batch.loss_mask, np.nan, 0).astype(np.float32))
    after, told = learner.update(state, [broken], normaliser=10.0)
    assert told["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, after.params, params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, moments)
    again, told = learner.update(after, [batch], normaliser=float(batch.loss_mask.sum()))
    assert told["skipped"] == 0.0
    assert not np.array_equal(again.params["norm"]["scale"], params["norm"]["scale"])


def test_on_policy_ratios_are_one_and_against_old_logprobs_they_are_not():
    batch = make_batch()
    learner = make_learner(minibatches=2)
    state = learner.create(PARAMS)
    old = [objective.Anchors(old_logprobs=learner.score(state.params, [batch])[0][0])]
    tokens = float(batch.loss_mask.sum())
    state, first = learner.update(state, [batch], tokens, old)
    state, second = learner.update(state, [batch], tokens, old)
    assert first["ratio_sum"] == pytest.approx(tokens, rel=1e-5)
    assert abs(second["ratio_sum"] - tokens) > 1e-3 * tokens


def test_the_gradient_of_the_supervised_objective_is_that_of_cross_entropy():
    batch = make_batch()
    learner = settings.Learner(optimizer=settings.Optimizer(lr=1e-2), row_tokens=24)
    told = update.Learner(TINY, learner, objective.supervised(), total_steps=10)
    params = PARAMS
    module = decoder.Decoder(TINY)

    def cross_entropy(values):
        hidden = module.apply({"params": values}, batch.tokens, batch.positions, batch.segment_ids)
        logits = module.apply({"params": values}, hidden, method=decoder.Decoder.logits)[:, :-1]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[..., 0]
        return -(picked * batch.loss_mask[:, 1:]).sum() / batch.loss_mask.sum()

    value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(params)
    _, said = told.update(told.create(params), [batch], float(batch.loss_mask.sum()))
    assert said["loss"] == pytest.approx(float(value), abs=1e-5)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))))
    assert said["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_update_compiles_once_for_any_number_of_micro_batches():
    learner = make_learner()
    state = learner.create(PARAMS)
    state, _ = learner.update(state, cut(make_batch(4), 2), 10.0)
    compiled = learner.compilations()
    for rows in (2, 6, 8):
        state, _ = learner.update(state, cut(make_batch(rows), 2), 10.0)
    assert learner.compilations() == compiled
    chex.assert_tree_all_finite(state.params)


def test_nothing_to_train_on_is_an_error():
    learner = make_learner()
    state = learner.create(PARAMS)
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.update(state, [make_batch()], 0.0)
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.update(state, [], 1.0)
