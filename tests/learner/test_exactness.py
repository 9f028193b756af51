"""The same loss and the same gradients, whatever the layout: micro-batches, meshes, packing, what layers keep."""

from __future__ import annotations

import functools

import chex
import jax
import numpy as np
import pytest

from rstar2_jax import hardware, settings
from rstar2_jax.data import pack
from rstar2_jax.learner import batch, logprobs, objective, update
from rstar2_jax.model import decoder, sharding

SIZES = settings.Model(
    family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64
)
PARAMS = decoder.init_params(SIZES, jax.random.key(0))
TOKENS = 24


def sequence(seed, low=4, high=TOKENS):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(low, high + 1))
    mask = (np.arange(length) >= 2) & (rng.random(length) < 0.8)
    mask[-1] = True
    return pack.Row(
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -4 + rng.normal(size=length) / 5, 0).astype(np.float32),
        advantage=float(rng.normal()),
    )


SEQUENCES = [sequence(seed) for seed in range(8)]


@functools.cache
def trainer(rows=8, mesh=(1, 1, 1), table=hardware.Sharding(), remat="none", loss=settings.Loss(), offload="none"):  # noqa: B008
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2),
        loss=loss,
        microbatch_rows=rows,
        row_tokens=TOKENS,
        mesh=mesh,
        sharding=table,
        remat=remat,
        offload=offload,
    )
    return update.Learner(SIZES, learner, objective.grpo(loss), total_steps=10)


def alone(sequences):
    """Each sequence in a row of its own."""
    parts = [pack.pack([one], row_tokens=TOKENS, rows_multiple=1) for one in sequences]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def gradients(learner, whole, rows):
    """(loss, gradients) with ratios against the recorded log-probabilities, so that the clip has work to do."""
    parts = batch.cut(whole, rows)
    anchors = [objective.Anchors(old_logprobs=part.behavior_logprobs) for part in parts]
    placed = jax.device_put(PARAMS, learner.where)
    found, told = learner.gradients(placed, parts, float(whole.loss_mask.sum()), anchors)
    return float(told["loss"]), jax.tree.map(np.asarray, found)


def assert_same(left, right, tolerance=1e-6):
    assert left[0] == pytest.approx(right[0], abs=tolerance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=0), left[1], right[1])


@functools.cache
def reference():
    value = gradients(trainer(), alone(SEQUENCES), 8)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(value[1])) > 1e-2
    return value


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_micro_batches_and_accumulation_change_nothing(rows):
    assert_same(reference(), gradients(trainer(rows), alone(SEQUENCES), rows))


@pytest.mark.parametrize("mesh, remat", [((8, 1, 1), "none"), ((1, 8, 1), "offload"), ((2, 2, 2), "none")])
def test_a_mesh_changes_nothing(mesh, remat):
    assert_same(reference(), gradients(trainer(mesh=mesh, remat=remat), alone(SEQUENCES), 8))


def test_sequence_parallelism_changes_nothing():
    table = hardware.Sharding(sequence=("tensor",))
    learner = trainer(mesh=(2, 2, 2), table=table, remat="block")
    assert_same(reference(), gradients(learner, alone(SEQUENCES), 8))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_packed_rows_give_the_loss_and_gradients_of_rows_alone(aggregation):
    loss = settings.Loss(aggregation=aggregation)
    sequences = [sequence(seed, high=11) for seed in range(8)]
    packed = pack.pack(sequences, row_tokens=TOKENS, rows_multiple=2)
    assert packed.tokens.shape[0] < 8 and packed.segment_ids.max() > 1
    ours, theirs = trainer(2, loss=loss), trainer(2, loss=loss)
    assert_same(gradients(theirs, alone(sequences), 2), gradients(ours, packed, 2))


def test_a_row_alone_padded_left_padded_right_or_packed_has_the_same_logprobs():
    one = sequence(5, low=9, high=9)
    score = jax.jit(lambda batch: logprobs.token_logprobs(SIZES, PARAMS, batch)[0])

    def scored(rows, tokens, shift=0):
        made = pack.pack(rows, row_tokens=tokens, rows_multiple=1)
        made = jax.tree.map(lambda leaf: np.roll(leaf, shift, axis=1), made)
        return np.asarray(score(made)), made

    exact, _ = scored([one], 9)
    right, _ = scored([one], TOKENS)
    left, _ = scored([one], TOKENS, TOKENS - 9)
    np.testing.assert_allclose(right[:, :9], exact, atol=1e-5)
    np.testing.assert_allclose(left[:, -9:], exact, atol=1e-5)
    beside, made = scored([sequence(6, low=12, high=12), one], TOKENS)
    place = np.flatnonzero(made.segment_ids[0] == 2)
    np.testing.assert_allclose(beside[:, place], exact, atol=1e-5)
    assert np.abs(exact).max() > 1


def test_lengths_of_any_kind_compile_nothing_new():
    learner = trainer(2)
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(lambda batch: logprobs.token_logprobs(SIZES, PARAMS, batch)[0].sum(), n=1)
    score = jax.jit(counted)
    rng = np.random.default_rng(0)
    compiled = None
    for _ in range(5):
        sequences = [sequence(int(seed)) for seed in rng.integers(0, 1000, int(rng.integers(1, 12)))]
        whole = pack.pack(sequences, row_tokens=TOKENS, rows_multiple=2)
        for part in batch.cut(whole, 2):
            score(part)
        gradients(learner, whole, 2)
        compiled = compiled or learner.compilations()
    assert learner.compilations() == compiled


def test_moments_in_the_host_s_memory_change_nothing():
    mesh, whole = (2, 2, 2), alone(SEQUENCES)
    parts, trained = batch.cut(whole, 4), float(whole.loss_mask.sum())
    anchors = [objective.Anchors(old_logprobs=part.behavior_logprobs) for part in parts]
    broken = [part.replace(advantages=np.where(part.loss_mask, np.nan, 0).astype(np.float32)) for part in parts]
    ends = []
    for learner in (trainer(4, mesh), trainer(4, mesh, offload="moments")):
        state = learner.create(PARAMS)
        for rows in (parts, parts, broken, parts):  # the third is skipped
            state, told = learner.update(state, rows, trained, anchors)
        ends.append((state, told))
    (near, first), (far, second) = ends
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7, rtol=1e-6), near, far)
    assert second == pytest.approx(first, rel=1e-6) and first["grad_norm"] > 1 and int(far.step) == 4
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(far.opt_state) if leaf.ndim} == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(far.params)} == {"device"}
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, far) == jax.tree.map(lambda leaf: leaf.sharding.spec, near)


def test_devices_that_cannot_reach_the_host_s_memory_are_refused(monkeypatch):
    monkeypatch.setattr(sharding, "HOST", "a memory that no device here has")
    with pytest.raises(ValueError, match="set Learner.offload = 'none'"):
        trainer.__wrapped__(offload="moments")
    with pytest.raises(ValueError, match="set Learner.remat = 'full'"):
        trainer.__wrapped__(remat="offload")
