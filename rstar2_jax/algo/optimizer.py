"""AdamW with warm-up, through Optax.

The learning rate is a pure function of the stage's own step, so a resumed run continues it and nothing is subtracted
twice. What happens between stages is a choice, each with a name: go on (keep the state), `restart_schedule` (keep the
moments, warm up again) or a fresh `init` (the paper's stage 3).

Deliberately not here: the guard against non-finite gradients (learner/update.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from rstar2_jax import settings


def learning_rate(step: Int[Any, ""] | int, settings: settings.Optimizer, total_steps: int) -> Float[Array, ""]:
    """Rate of optimizer step `step` (0 for the first of the stage).

        warm-up:  lr * step / warmup_steps             while step < warmup_steps (so it begins at 0)
        constant: lr                                   after it
        cosine:   lr * (1 + cos(pi * p)) / 2           p = (step - warmup_steps) / (total_steps - warmup_steps)

    Args:
        step: optimizer steps taken in this stage so far.
        settings: lr, warmup_steps, schedule.
        total_steps: optimizer steps of the stage, warm-up included; the cosine reaches 0 there and stays.

    Source: paper (arXiv 2508.20722), training recipe (1e-6 constant after 20 warm-up steps; SFT: 5e-6
    cosine with 4% warm-up).

    >>> from rstar2_jax.settings import Optimizer
    >>> [float(learning_rate(s, Optimizer(lr=1.0), 300)) for s in (0, 1, 20, 299)]
    [0.0, 0.05..., 1.0, 1.0]
    """
    at = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(at / settings.warmup_steps, 1.0) if settings.warmup_steps else jnp.ones(())
    if settings.schedule == "constant":
        return settings.lr * warm
    progress = (at - settings.warmup_steps) / max(total_steps - settings.warmup_steps, 1)
    return settings.lr * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))


def decay_mask(params: Any) -> Any:
    """True at the parameters that weight decay touches: those with two axes or more (kernels, embeddings).

    Norm scales and biases are left alone: pulling a scale towards 0 shrinks a layer's output for no gain.
    """
    return jax.tree.map(lambda leaf: len(leaf.shape) > 1, params)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale down to max_norm what is longer. `update` takes the length as grad_norm, so that parameters can be updated
    one by one; without it the length is that of what is given."""

    def init(params: Any) -> Any:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any) -> Any:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        fits = norm < max_norm
        return jax.tree.map(lambda g: jnp.where(fits, g, g / norm * max_norm), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def make_optimizer(settings: settings.Optimizer, total_steps: int) -> optax.GradientTransformationExtraArgs:
    """Clip by the global norm, then AdamW with decoupled decay at the scheduled rate.

    The schedule counts the updates applied to its state, in optimizer steps: with several minibatches a rollout batch,
    total_steps and warmup_steps count each of them. `update` takes grad_norm, the norm over all parameters, where it is
    given some of them only.

    Args:
        settings: see settings.Optimizer.
        total_steps: optimizer steps of the stage.

    Source: the authors' code (decay 0.01, clip 1.0); deviation: no decay on norm scales and biases.
    """
    return optax.chain(
        _clip(settings.max_grad_norm),
        optax.adamw(
            lambda count: learning_rate(count, settings, total_steps),
            b1=settings.b1,
            b2=settings.b2,
            weight_decay=settings.weight_decay,
            mask=decay_mask,
        ),
    )


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def schedule_step(opt_state: Any) -> Int[Array, ""]:
    """Updates applied in this stage, the argument of `learning_rate` for the next one.

    Raises:
        ValueError: the state is not of `make_optimizer`.
    """
    found = [node.count for node in jax.tree.leaves(opt_state, is_leaf=_is_schedule) if _is_schedule(node)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} schedules in the optimizer state, expected 1: make it with make_optimizer(...)")
    return found[0]


def restart_schedule(opt_state: Any) -> Any:
    """The same state with the schedule at step 0: warm-up runs again, Adam's moments and their count are kept."""
    schedule_step(opt_state)
    return jax.tree.map(
        lambda node: node._replace(count=jnp.zeros_like(node.count)) if _is_schedule(node) else node,
        opt_state,
        is_leaf=_is_schedule,
    )
