"""Group-relative advantages.

Deliberately not here: spreading them over tokens (data/pack.py), value functions, whitening over the batch.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def advantages(
    rewards: Float[Any, "P G"], kept: Bool[Any, "P G"], *, ddof: int = 0, eps: float = 0.0
) -> Float[Array, "P G"]:
    """A_i = (r_i - mean) / (std + eps) over the kept rollouts of a group; one number for all tokens of a rollout.

    Exactly 0 for a group without spread (tested on max == min before anything is divided), for one with fewer than two
    kept rollouts and at positions that are not kept. A reward that is not finite counts as not kept. Rewards are taken
    relative to the lowest and the variance takes two passes, so that near-equal rewards do not cancel: |A| stays within
    sqrt(n - 1).

    Args:
        rewards: 0 or 1 (any finite number is taken).
        kept: True where the rollout was selected.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to the standard deviation, 0 or more.

    Source: paper (arXiv 2508.20722), GRPO's advantage; deviation: none with the defaults;
    ddof=1, eps=1e-6 is the authors' code.

    >>> advantages(jnp.array([[1.0, 0.0, 0.0, 1.0]]), jnp.ones((1, 4), bool))
    Array([[ 1., -1., -1.,  1.]], dtype=float32)
    """
    rewards = jnp.asarray(rewards)
    scored = jnp.asarray(kept) & jnp.isfinite(rewards)
    highest = jnp.where(scored, rewards, -jnp.inf).max(axis=-1, keepdims=True, initial=-jnp.inf)
    lowest = jnp.where(scored, rewards, jnp.inf).min(axis=-1, keepdims=True, initial=jnp.inf)
    count = scored.sum(axis=-1, keepdims=True)
    live = (count >= 2) & (highest > lowest)
    above = jnp.where(live & scored, rewards - lowest, 0.0)
    mean = above.sum(axis=-1, keepdims=True) / jnp.maximum(count, 1)
    deviation = jnp.where(live & scored, above - mean, 0.0)
    variance = jnp.square(deviation).sum(axis=-1, keepdims=True) / jnp.maximum(count - ddof, 1)
    return deviation / jnp.where(live, jnp.sqrt(variance) + eps, 1.0)
