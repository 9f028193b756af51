"""What the update minimises: the clipped policy loss of RL, or the cross-entropy of demonstrations.

An objective maps one micro-batch's log-probabilities to its exact share of the global loss and to summed statistics;
names that end in `_max` combine by maximum, all others by addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rstar2_jax import settings
from rstar2_jax.algo import correction, loss
from rstar2_jax.types import TrainBatch

Statistics = dict[str, jax.Array]


@flax.struct.dataclass
class Anchors:
    """Constants of one micro-batch that were computed before the update; None stands for absent.

    old_logprobs f32[B, T]: what ratios are taken against (None: the policy's own, so that every ratio is 1);
    ref_logprobs f32[B, T]: of the reference policy; entropy_threshold f32[]: see loss.entropy_threshold.
    """

    old_logprobs: Any = None
    ref_logprobs: Any = None
    entropy_threshold: Any = None


Objective = Callable[[jax.Array, jax.Array, TrainBatch, Anchors, jax.Array], tuple[jax.Array, Statistics]]


def grpo(how: settings.Loss) -> Objective:
    """The RL objective under the settings: policy loss, correction weights, mismatch statistics (see algo/)."""

    def objective(
        policy: jax.Array, entropies: jax.Array, batch: TrainBatch, anchors: Anchors, normaliser: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        detached = jax.lax.stop_gradient(policy)
        old = detached if anchors.old_logprobs is None else anchors.old_logprobs
        extras = loss.Extras(
            entropy=entropies,
            ref_logprobs=anchors.ref_logprobs,
            weights=_weights(how, old, batch),
            inverse_lengths=loss.inverse_lengths(batch.loss_mask, batch.segment_ids),
            entropy_threshold=anchors.entropy_threshold,
        )
        value, statistics = loss.policy_loss(policy, old, batch.advantages, batch.loss_mask, normaliser, how, extras)
        gap = correction.mismatch(old, batch.behavior_logprobs, batch.loss_mask, how.correction_cap)
        return value, {**statistics, **gap}

    return objective


def supervised() -> Objective:
    """Cross-entropy of the masked tokens: -sum of log-probabilities / normaliser."""

    def objective(
        policy: jax.Array, entropies: jax.Array, batch: TrainBatch, anchors: Anchors, normaliser: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        del anchors
        trained = batch.loss_mask.astype(jnp.float32)
        statistics = {
            "tokens": trained.sum(),
            "entropy_sum": jnp.where(batch.loss_mask, entropies, 0.0).sum(),
        }
        return -jnp.where(batch.loss_mask, policy, 0.0).sum() / normaliser, jax.lax.stop_gradient(statistics)

    return objective


def _weights(how: settings.Loss, old: jax.Array, batch: TrainBatch) -> jax.Array | None:
    if how.correction == "token":
        return correction.token_weights(old, batch.behavior_logprobs, batch.loss_mask, how.correction_cap)
    if how.correction == "band":
        return correction.band_weights(old, batch.behavior_logprobs, batch.loss_mask, how.correction_cap)
    if how.correction == "sequence":
        return correction.sequence_mask(
            old, batch.behavior_logprobs, batch.loss_mask, batch.segment_ids, how.correction_cap
        )
    return None
