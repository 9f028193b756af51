"""The clipped policy loss over trained tokens, as one micro-batch's exact share of the global loss.

The caller computes the normaliser once over the global optimizer batch; a micro-batch returns its sum divided by it.
Losses, gradients and statistics of micro-batches therefore add up to the global ones, whatever the split, the packing
or the number of devices. No mean of means, nowhere.

Deliberately not here: log-probabilities (the learner has them), advantages, skipping of non-finite updates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rstar2_jax import settings
from rstar2_jax.algo import correction


class Extras(NamedTuple):
    """What only some settings need. A pytree; None stands for absent; arrays are f32[B, T].

    Attributes:
        entropy: of the policy at each token, in nats; gradients flow through it (for entropy_coef).
        ref_logprobs: of the reference policy (for kl_coef).
        weights: correction weights, detached here (algo/correction.py); they scale the policy term alone.
        inverse_lengths: 1 / |o_i| at the trained tokens (for seq_mean, see `inverse_lengths`).
        entropy_threshold: f32[], from the whole batch (for high_entropy_share < 1, see `entropy_threshold`).
    """

    entropy: Any = None
    ref_logprobs: Any = None
    weights: Any = None
    inverse_lengths: Any = None
    entropy_threshold: Any = None


_NO_EXTRAS = Extras()


def inverse_lengths(mask: Bool[Any, "B T"], segment_ids: Int[Any, "B T"]) -> Float[Array, "B T"]:
    """1 / |o_i| at each trained token, |o_i| = trained tokens of its sequence (row and segment id); 0 elsewhere.

    >>> inverse_lengths(jnp.array([[True, True, False, True]]), jnp.array([[1, 1, 1, 2]]))
    Array([[0.5, 0.5, 0. , 1. ]], dtype=float32)
    """
    trained = jnp.asarray(mask).astype(jnp.float32)
    return trained / jnp.maximum(correction.sequence_sums(trained, segment_ids), 1.0)


def normaliser(
    mask: Bool[Any, "B T"], settings: settings.Loss, inverse_lengths: Float[Any, "B T"] | None = None
) -> Float[Array, ""]:
    """What the global sum is divided by: trained tokens (token_mean) or sequences with a trained token (seq_mean).

    Take it over the global optimizer batch, once; a batch without a trained token gives 1, so that it contributes 0.

    Raises:
        ValueError: seq_mean without inverse_lengths.
    """
    if settings.aggregation == "token_mean":
        return jnp.maximum(jnp.asarray(mask).astype(jnp.int32).sum(), 1).astype(jnp.float32)
    if inverse_lengths is None:
        raise ValueError("aggregation 'seq_mean' needs inverse_lengths: pass loss.inverse_lengths(mask, segment_ids)")
    return jnp.maximum(jnp.round(jnp.where(mask, inverse_lengths, 0.0).sum()), 1.0)


def entropy_threshold(entropy: Float[Any, "B T"], mask: Bool[Any, "B T"], share: float) -> Float[Array, ""]:
    """Entropy of the last token inside the top `share` of the trained tokens (ceil(share * n) of them; ties all pass).

    Exact over the whole batch, which is why it is an argument of the loss and not found inside a micro-batch.
    """
    flat = jnp.where(mask, entropy, -jnp.inf).ravel()
    wanted = jnp.ceil(share * jnp.asarray(mask).sum() - 1e-4).astype(jnp.int32)
    return jnp.sort(flat, descending=True)[jnp.maximum(wanted - 1, 0)]


def token_losses(
    ratio: Float[Any, "B T"], advantages: Float[Any, "B T"], settings: settings.Loss
) -> Float[Array, "B T"]:
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A); with dual_clip c and A < 0 at most c |A|.

    Source: paper (arXiv 2508.20722), GRPO objective with clip-higher; deviation: dual_clip is an option (off).

    >>> token_losses(jnp.array([[1.5, 0.5]]), jnp.ones((1, 2)), settings.Loss())
    Array([[-1.28, -0.5 ]], dtype=float32)
    """
    ratio, advantages = jnp.asarray(ratio), jnp.asarray(advantages)
    clipped = jnp.clip(ratio, 1.0 - settings.eps_low, 1.0 + settings.eps_high)
    losses = -jnp.minimum(ratio * advantages, clipped * advantages)
    if settings.dual_clip:
        losses = jnp.where(advantages < 0, jnp.minimum(losses, -settings.dual_clip * advantages), losses)
    return losses


def _k3(logprobs: jax.Array, reference: Any, mask: jax.Array) -> jax.Array:
    """exp(x) - 1 - x with x = reference - logprobs: estimates KL(policy || reference) on the policy's own samples."""
    gap = correction.log_ratio(reference, logprobs, mask)
    return jnp.expm1(gap) - gap


def _check(settings: settings.Loss, extras: Extras) -> None:
    wanted = {
        "ref_logprobs": ("kl_coef", settings.kl_coef > 0),
        "entropy": ("entropy_coef", settings.entropy_coef != 0),
        "inverse_lengths": ("aggregation", settings.aggregation == "seq_mean"),
        "entropy_threshold": ("high_entropy_share", settings.high_entropy_share < 1),
        "weights": ("correction", settings.correction != "off"),
    }
    for name, (field, needed) in wanted.items():
        if needed and getattr(extras, name) is None:
            raise ValueError(f"Loss.{field} = {getattr(settings, field)!r} needs Extras.{name}: pass it")
    if extras.entropy_threshold is not None and extras.entropy is None:
        raise ValueError("Extras.entropy_threshold needs Extras.entropy: pass it")


def policy_loss(
    policy_logprobs: Float[Any, "B T"],
    old_logprobs: Float[Any, "B T"],
    advantages: Float[Any, "B T"],
    mask: Bool[Any, "B T"],
    normaliser: Float[Any, ""] | float | int,
    settings: settings.Loss,
    extras: Extras = _NO_EXTRAS,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """This micro-batch's share of the loss and its summed statistics.

        loss = 1 / normaliser * sum over trained tokens of
               a_t * (s_t w_t token_loss_t + kl_coef * k3_t - entropy_coef * H_t)

    with ratio_t = exp(policy - old), a_t = 1 (token_mean) or 1 / |o_i| (seq_mean), w_t the correction weight (else 1)
    and s_t = 1 for tokens of entropy >= entropy_threshold (else 0; the normaliser still counts all trained tokens).
    Nothing at a masked position, NaN included, reaches the loss, a gradient or a statistic. Log-ratios are clamped to
    +-20: such a token has a finite loss and no gradient.

    Args:
        policy_logprobs: under the parameters being trained, at the sampling temperature.
        old_logprobs: under the parameters that sampled, same temperature; constants. With one optimizer step a
            rollout batch pass stop_gradient(policy_logprobs): every ratio is 1 and the clip inert.
        advantages: of the token's trajectory.
        mask: True at trained (sampled) tokens.
        normaliser: of the global batch, see `normaliser`.
        settings: static under jit.
        extras: what the settings ask for.

    Returns:
        loss: f32[].
        statistics: sums over trained tokens, see `_statistics`.

    Raises:
        ValueError: the settings ask for an extra that is missing.

    Source: paper (arXiv 2508.20722), objective of GRPO-RoC; deviation: none with the defaults (token mean, clip 0.2 and
    0.28, no KL, no entropy term).
    """
    _check(settings, extras)
    mask = jnp.asarray(mask)
    trained = mask.astype(jnp.float32)
    gap = correction.log_ratio(policy_logprobs, jax.lax.stop_gradient(jnp.asarray(old_logprobs)), mask)
    safe_advantages = jnp.where(mask, advantages, 0.0)
    losses = token_losses(jnp.exp(gap), safe_advantages, settings)
    statistics = _statistics(gap, trained, safe_advantages, losses, settings)
    if extras.weights is not None:
        weights = jnp.where(mask, jax.lax.stop_gradient(jnp.asarray(extras.weights)), 0.0)
        losses = losses * weights
        statistics["weight_sum"] = weights.sum()
    losses, terms = _other_terms(losses, policy_logprobs, mask, settings, extras)
    statistics |= terms
    if settings.aggregation == "seq_mean":
        losses = losses * jnp.where(mask, extras.inverse_lengths, 0.0)
    return losses.sum() / normaliser, jax.lax.stop_gradient(statistics)


def _statistics(
    gap: jax.Array, trained: jax.Array, advantages: jax.Array, losses: jax.Array, settings: settings.Loss
) -> dict[str, jax.Array]:
    """Sums over the trained tokens of a micro-batch, to be added over micro-batches.

    tokens; live_tokens (advantage not 0); policy_loss_sum (token losses before any weight); ratio_sum; clip_low,
    clip_high, clip_dual (tokens whose gradient that bound cut); kl_old_sum (k3 of old against policy). policy_loss
    adds, where their input is given, weight_sum, kl_ref_sum, entropy_sum and high_entropy_tokens.
    """
    ratio = jnp.exp(gap)
    dual = (advantages < 0) & (ratio > settings.dual_clip) if settings.dual_clip else jnp.zeros(gap.shape, bool)
    return {
        "tokens": trained.sum(),
        "live_tokens": (advantages != 0).astype(jnp.float32).sum(),
        "policy_loss_sum": losses.sum(),
        "ratio_sum": (trained * ratio).sum(),
        "clip_low": (trained * ((advantages < 0) & (ratio < 1 - settings.eps_low))).sum(),
        "clip_high": (trained * ((advantages > 0) & (ratio > 1 + settings.eps_high))).sum(),
        "clip_dual": (trained * dual).sum(),
        "kl_old_sum": (jnp.expm1(gap) - gap).sum(),
    }


def _other_terms(
    losses: jax.Array, policy_logprobs: Any, mask: jax.Array, settings: settings.Loss, extras: Extras
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The policy term with the high-entropy selection, KL and entropy terms applied, and their statistics."""
    terms = {}
    if extras.entropy is not None:
        entropy = jnp.where(mask, extras.entropy, 0.0)
        terms["entropy_sum"] = entropy.sum()
        if settings.high_entropy_share < 1:
            high = mask & (entropy >= jax.lax.stop_gradient(jnp.asarray(extras.entropy_threshold)))
            losses = jnp.where(high, losses, 0.0)
            terms["high_entropy_tokens"] = high.astype(jnp.float32).sum()
        if settings.entropy_coef:
            losses = losses - settings.entropy_coef * entropy
    if extras.ref_logprobs is not None:
        divergence = _k3(jnp.asarray(policy_logprobs), jax.lax.stop_gradient(jnp.asarray(extras.ref_logprobs)), mask)
        terms["kl_ref_sum"] = divergence.sum()
        if settings.kl_coef:
            losses = losses + settings.kl_coef * divergence
    return losses, terms
