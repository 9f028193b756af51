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
    kept rollouts and at positions that are not kept. A reward that is not finite counts as not kept. The variance takes
    two passes (deviations first), so that equal-looking rewards do not cancel; |A| <= sqrt(n - 1) for ddof 0.

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
    safe = jnp.where(scored, rewards, 0.0)
    count = scored.sum(axis=-1, keepdims=True)
    mean = safe.sum(axis=-1, keepdims=True) / jnp.maximum(count, 1)
    deviation = jnp.where(scored, safe - mean, 0.0)
    variance = jnp.square(deviation).sum(axis=-1, keepdims=True) / jnp.maximum(count - ddof, 1)
    highest = jnp.where(scored, safe, -jnp.inf).max(axis=-1, keepdims=True, initial=-jnp.inf)
    lowest = jnp.where(scored, safe, jnp.inf).min(axis=-1, keepdims=True, initial=jnp.inf)
    live = (count >= 2) & (highest > lowest)
    spread = jnp.where(live, jnp.sqrt(variance) + eps, 1.0)
    return jnp.where(live & scored, deviation / spread, 0.0)
