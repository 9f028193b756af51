"""How a run begins: what becomes of the optimizer between stages, and weights read by the devices that need them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rstar2_jax import begin, settings
from rstar2_jax.algo import optimizer as optimizers
from rstar2_jax.io import checkpoint
from rstar2_jax.learner import objective, update
from rstar2_jax.model import decoder, hf
from rstar2_jax.types import TrainBatch

TINY = settings.Model(
    family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, max_positions=64
)


def make_learner(mesh=(1, 1, 1)):
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2, warmup_steps=4), microbatch_rows=4, row_tokens=16, mesh=mesh
    )
    return update.Learner(TINY, learner, objective.supervised(), total_steps=10)


def finished_run(folder, steps=3):
    """A run of a few steps with its last checkpoint; returns its state as host arrays."""
    rng, full = np.random.default_rng(0), np.ones((4, 16), np.int32)
    batch = TrainBatch(
        tokens=rng.integers(0, 64, (4, 16)).astype(np.int32),
        positions=np.arange(16, dtype=np.int32)[None] * full,
        segment_ids=full,
        loss_mask=full * np.arange(16) > 2,
        behavior_logprobs=np.zeros((4, 16), np.float32),
        advantages=np.zeros((4, 16), np.float32),
    )
    learner = make_learner()
    state = learner.create(decoder.init_params(TINY, jax.random.key(0)))
    for _ in range(steps):
        state, _ = learner.update(state, [batch], 52.0)
    store = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
    store.save(steps, state, begin.identity("train", settings.Run(workdir=str(folder), steps=steps), TINY))
    store.close()
    return jax.tree.map(np.array, state)


@pytest.mark.parametrize("choice, count", [("reset", 0), ("restart", 0), ("continue", 3)])
def test_what_becomes_of_the_optimizer_between_stages_is_said_by_name(tmp_path, choice, count):
    before = finished_run(tmp_path / "one")
    run = settings.Run(workdir=str(tmp_path / "two"), steps=5, init_from=str(tmp_path / "one"), optimizer_start=choice)
    learner = make_learner()
    store = checkpoint.Checkpoints(tmp_path / "two" / "checkpoints", keep=1)
    begun = begin.begin("train", run, TINY, learner, store)
    store.close()
    jax.tree.map(np.testing.assert_array_equal, before.params, begun.state.params)
    assert begun.step == 0 and int(begun.state.step) == 0
    assert int(optimizers.schedule_step(begun.state.opt_state)) == count
    moments = [leaf for leaf in jax.tree.leaves(begun.state.opt_state) if leaf.ndim == 2]
    assert any(np.any(leaf) for leaf in moments) == (choice != "reset")


def test_moments_of_another_model_are_refused_by_name(tmp_path):
    finished_run(tmp_path / "one")
    run = settings.Run(
        workdir=str(tmp_path / "two"), steps=5, init_from=str(tmp_path / "one"), optimizer_start="restart"
    )
    other = dataclasses.replace(TINY, rope_theta=5e5)
    store = checkpoint.Checkpoints(tmp_path / "two" / "checkpoints", keep=1)
    with pytest.raises(ValueError, match=r"Model\.rope_theta = 10000\.0, the run asks for 500000\.0"):
        begin.begin("train", run, other, make_learner(), store)
    store.close()


def test_moments_without_a_run_to_take_them_from_are_an_error(tmp_path):
    run = settings.Run(workdir=str(tmp_path / "two"), steps=5, optimizer_start="restart")
    store = checkpoint.Checkpoints(tmp_path / "two" / "checkpoints", keep=1)
    with pytest.raises(ValueError, match="optimizer_start = 'restart' needs a finished run"):
        begin.begin("train", run, TINY, make_learner(), store)
    store.close()


def test_a_run_goes_on_with_the_problems_that_its_cursor_counts(tmp_path):
    run = settings.Run(workdir=str(tmp_path), steps=5)
    learner = make_learner()
    store = checkpoint.Checkpoints(tmp_path / "checkpoints", keep=1)
    state = learner.create(decoder.init_params(TINY, jax.random.key(0)))
    store.save(2, state, {**begin.identity("train", run, TINY), "source": "box"})
    assert begin.begin("train", run, TINY, learner, store, {"source": "box"}).step == 2
    with pytest.raises(ValueError, match="holds a run with source = box, this one has source = gsm8k"):
        begin.begin("train", run, TINY, learner, store, {"source": "gsm8k"})
    store.close()


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_weights_are_read_by_the_devices_that_need_them(tmp_path, kind):
    if kind == "run":
        wanted = finished_run(tmp_path).params
    else:
        wanted = decoder.init_params(TINY, jax.random.key(3))
        hf.save_folder(wanted, TINY, tmp_path, shard_bytes=10_000)
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    where = make_learner((2, 2, 2)).where
    params = begin.load_params(str(tmp_path), TINY, 0, where)
    jax.tree.map(np.testing.assert_array_equal, wanted, params)
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(where), strict=True):
        assert leaf.sharding == place
