"""Learning rate as a pure function of the stage's step; AdamW against a plain loop."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rstar2_jax import settings
from rstar2_jax.algo import optimizer

PAPER = settings.Optimizer(lr=1e-6)
COSINE = settings.Optimizer(lr=5e-6, warmup_steps=12, schedule="cosine")

learning_rate = jax.jit(optimizer.learning_rate, static_argnums=(1, 2))


@pytest.mark.parametrize("function", [learning_rate, optimizer.learning_rate])
@pytest.mark.parametrize(("step", "wanted"), [(0, 0), (1, 5e-8), (10, 5e-7), (20, 1e-6), (21, 1e-6), (299, 1e-6)])
def test_warm_up_of_twenty_then_constant(function, step, wanted):
    assert function(step, PAPER, 300) == pytest.approx(wanted, rel=1e-6)


def test_cosine_ends_at_the_last_step_and_not_before():
    rates = np.asarray(jax.vmap(lambda step: optimizer.learning_rate(step, COSINE, 300))(jnp.arange(330)))
    for step in range(12):
        assert rates[step] == pytest.approx(5e-6 * step / 12, rel=1e-5)
    for step in range(12, 300):
        wanted = 5e-6 * (1 + math.cos(math.pi * (step - 12) / 288)) / 2
        assert rates[step] == pytest.approx(wanted, rel=1e-4, abs=1e-12)
    assert rates[12] == rates.max()
    assert rates[270] > 1e-7
    assert rates[299] > 0
    assert rates[300:].max() < 1e-12


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rate(0, settings.Optimizer(lr=0.1, warmup_steps=0), 5) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_stage_never_divides_by_zero():
    how = settings.Optimizer(lr=1.0, warmup_steps=20, schedule="cosine")
    assert all(math.isfinite(float(learning_rate(step, how, 10))) for step in range(30))


def plain_adamw(params, grads_by_step, how: settings.Optimizer, total_steps: int):
    """Float64 AdamW with a global-norm clip, one scalar formula after another."""
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, grads in enumerate(grads_by_step):
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        scale = min(1.0, how.max_grad_norm / norm)
        rate = float(optimizer.learning_rate(step, how, total_steps))
        for name in params:
            grad = grads[name] * scale
            first[name] = how.b1 * first[name] + (1 - how.b1) * grad
            second[name] = how.b2 * second[name] + (1 - how.b2) * grad**2
            move = (
                first[name] / (1 - how.b1 ** (step + 1)) / (np.sqrt(second[name] / (1 - how.b2 ** (step + 1))) + 1e-8)
            )
            decay = how.weight_decay * params[name] if params[name].ndim > 1 else 0.0
            params = params | {name: params[name] - rate * (move + decay)}
    return params


def test_updates_equal_a_plain_adamw_with_clip_and_decay_on_matrices_only():
    draw = np.random.default_rng(0)
    how = settings.Optimizer(lr=0.05, warmup_steps=2, weight_decay=0.3, schedule="cosine")
    params = {"kernel": draw.normal(size=(3, 4)), "scale": draw.normal(size=4), "bias": draw.normal(size=2)}
    grads = [{name: draw.normal(size=value.shape) for name, value in params.items()} for _ in range(6)]
    grads[3] = {name: 0.01 * value for name, value in grads[3].items()}
    transform = optimizer.make_optimizer(how, 6)
    narrow = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), params)
    state, step = transform.init(narrow), jax.jit(transform.update)
    for grad in grads:
        updates, state = step(jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), grad), state, narrow)
        narrow = optax.apply_updates(narrow, updates)
    for name, wanted in plain_adamw(params, grads, how, 6).items():
        assert np.asarray(narrow[name]) == pytest.approx(wanted, abs=2e-6)
    assert optimizer.schedule_step(state) == 6


def test_decay_spares_scales_and_biases():
    params = {"layers_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}}
    assert optimizer.decay_mask(params) == {"layers_0": {"kernel": True, "bias": False}, "norm": {"scale": False}}


def test_the_three_ways_between_stages_are_distinct():
    how = settings.Optimizer(lr=1.0, warmup_steps=4)
    transform = optimizer.make_optimizer(how, 10)
    params = {"kernel": jnp.ones((2, 2))}
    state = transform.init(params)
    step = jax.jit(transform.update)
    for _ in range(5):
        _, state = step({"kernel": jnp.full((2, 2), 0.1)}, state, params)
    restarted = optimizer.restart_schedule(state)
    assert optimizer.schedule_step(state) == 5
    assert optimizer.schedule_step(restarted) == 0
    assert optimizer.learning_rate(optimizer.schedule_step(restarted), how, 10) == 0
    moments = [leaf for leaf in jax.tree.leaves(restarted) if leaf.shape == (2, 2)]
    assert len(moments) == 2
    assert all(np.asarray(leaf).any() for leaf in moments)
    assert jax.tree.structure(restarted) == jax.tree.structure(state)
    assert optimizer.schedule_step(transform.init(params)) == 0


def test_a_foreign_optimizer_state_is_refused():
    with pytest.raises(ValueError, match="make_optimizer"):
        optimizer.schedule_step(optax.sgd(0.1).init({"w": jnp.ones(2)}))


def test_a_resumed_state_continues_the_rate():
    how = settings.Optimizer(lr=1.0, warmup_steps=20)
    transform = optimizer.make_optimizer(how, 300)
    params = {"w": jnp.zeros((1, 1))}
    state = transform.init(params)
    count = jnp.full((), 150, jnp.int32)
    state = jax.tree.map(lambda leaf: count if leaf.dtype == jnp.int32 else leaf, state)
    assert optimizer.schedule_step(state) == 150
    updates, _ = transform.update({"w": jnp.ones((1, 1))}, state, params)
    assert float(updates["w"][0, 0]) != 0
    assert optimizer.learning_rate(optimizer.schedule_step(state), how, 300) == 1


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_schedule_of_a_million_steps_never_leaves_its_bounds(schedule):
    how = settings.Optimizer(lr=3e-4, warmup_steps=2000, schedule=schedule)
    rates = np.asarray(jax.vmap(lambda step: optimizer.learning_rate(step, how, 1_000_000))(jnp.arange(1_000_001)))
    assert np.isfinite(rates).all() and rates.min() >= 0 and rates.max() <= np.float32(3e-4)
    assert rates[0] == 0 and rates[2000] == pytest.approx(3e-4) and (np.diff(rates[:2001]) > 0).all()
    assert (np.diff(rates[2000:]) <= 1e-10).all()
    assert rates[-1] == pytest.approx(3e-4 if schedule == "constant" else 0, abs=1e-10)


@pytest.mark.parametrize("given", [{"b1": 1 - 1e-9}, {"b2": 1 - 1e-9}, {"weight_decay": float("inf")}])
def test_values_that_single_precision_does_not_hold_are_refused(given):
    with pytest.raises(ValueError, match=f"Optimizer.{next(iter(given))} = .*must be in"):
        settings.Optimizer(lr=1e-3, **given)
