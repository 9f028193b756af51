"""Mismatch between the policy that sampled (engine) and the policy that trains (learner): weights and statistics.

Two names are kept apart: behavior_logprobs came with the ids from the engine, old_logprobs are the learner's own for
the weights that sampled. Every result is detached: a correction is a constant to the gradient.

Statistics are sums, so that micro-batches and devices add up; a name that ends in `_max` combines by maximum.

Deliberately not here: deciding that a gap is an alarm, and what to do then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: a ratio of 4.9e8 is still finite when it is squared and summed."""


def log_ratio(logprobs: Float[Any, "B T"], reference: Float[Any, "B T"], mask: Bool[Any, "B T"]) -> Float[Array, "B T"]:
    """logprobs - reference, clamped to +-LOG_RATIO_LIMIT; exactly 0 where the mask is False, whatever stands there.

    Masked values are replaced before the subtraction: not even NaN or infinity there reaches a value or a gradient.
    """
    zero = jnp.zeros((), jnp.asarray(logprobs).dtype)
    gap = jnp.where(mask, logprobs, zero) - jnp.where(mask, reference, zero)
    return jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sums(values: Float[Any, "B T"], segment_ids: Int[Any, "B T"]) -> Float[Array, "B T"]:
    """Sum of the values over each token's own sequence: equal segment id in the same row. Padding (id 0) gets 0.

    Segment ids lie in [0, T].

    >>> sequence_sums(jnp.array([[1.0, 2.0, 3.0, 9.0]]), jnp.array([[1, 1, 2, 0]]))
    Array([[3., 3., 3., 0.]], dtype=float32)
    """
    values, ids = jnp.asarray(values), jnp.asarray(segment_ids)

    def one_row(row: jax.Array, row_ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, row_ids, num_segments=row.shape[0] + 1)[row_ids]

    return jnp.where(ids != 0, jax.vmap(one_row)(values, ids), 0.0)


def token_weights(
    old_logprobs: Float[Any, "B T"], behavior_logprobs: Float[Any, "B T"], mask: Bool[Any, "B T"], cap: float
) -> Float[Array, "B T"]:
    """Truncated importance weights min(exp(old - behavior), cap) of each trained token; 0 elsewhere.

    Args:
        old_logprobs: the learner's log-probabilities under the weights that sampled.
        behavior_logprobs: the engine's, recorded while sampling.
        mask: True at trained tokens.
        cap: 1 or more.

    Source: not in the paper, which assumes that both agree; token-level truncated importance sampling.
    """
    ratio = jnp.exp(log_ratio(old_logprobs, behavior_logprobs, mask))
    return jax.lax.stop_gradient(jnp.where(mask, jnp.minimum(ratio, cap), 0.0))


def band_weights(
    old_logprobs: Float[Any, "B T"], behavior_logprobs: Float[Any, "B T"], mask: Bool[Any, "B T"], cap: float
) -> Float[Array, "B T"]:
    """Importance weights r = exp(old - behavior) of the trained tokens with 1 / cap <= r <= cap; 0 elsewhere.

    Where `token_weights` bounds what it does not trust, this leaves it out: a token on which both programs differ by
    more than the cap tells of the difference, not of the policy.

    Args:
        old_logprobs, behavior_logprobs, mask, cap: as in `token_weights`.

    Source: not in the paper; masking as in IcePop, with one bound for both sides.
    """
    gap = log_ratio(old_logprobs, behavior_logprobs, mask)
    inside = jnp.asarray(mask) & (jnp.abs(gap) <= jnp.log(cap))
    return jax.lax.stop_gradient(jnp.where(inside, jnp.exp(gap), 0.0))


def sequence_mask(
    old_logprobs: Float[Any, "B T"],
    behavior_logprobs: Float[Any, "B T"],
    mask: Bool[Any, "B T"],
    segment_ids: Int[Any, "B T"],
    cap: float,
) -> Float[Array, "B T"]:
    """1 at the trained tokens of sequences whose ratio lies in [1 / cap, cap], 0 elsewhere.

    The ratio of a sequence is the geometric mean over its trained tokens, exp(mean(old - behavior)). A product would
    grow with the length (12,000 tokens with a gap of 0.001 each make 1.6e5) and reject long answers for being long. A
    cap that rejects more than gross faults is close to 1, such as 1.02.

    Args:
        segment_ids: one id for each sequence of a row, 0 for padding; a sequence never spans two rows.

    Source: not in the paper; sequence-level masking with a length-normalised ratio.
    """
    trained = jnp.asarray(mask).astype(jnp.float32)
    gap = sequence_sums(log_ratio(old_logprobs, behavior_logprobs, mask), segment_ids)
    mean = gap / jnp.maximum(sequence_sums(trained, segment_ids), 1.0)
    return jax.lax.stop_gradient(trained * (jnp.abs(mean) <= jnp.log(cap)))


def mismatch(
    policy_logprobs: Float[Any, "B T"],
    behavior_logprobs: Float[Any, "B T"],
    mask: Bool[Any, "B T"],
    cap: float = 2.0,
) -> dict[str, Float[Array, ""]]:
    """Summed ingredients of the gap between engine and learner; `summarise` makes means of them.

    With d = policy - behavior over the trained tokens and w = exp(d):

    - gap_tokens: their number; gap_sum: sum d; gap_abs_sum, gap_abs_max: sum and maximum of |d|;
    - gap_k3_sum: sum (w - 1 - d), estimates KL(behavior || policy) and is never negative;
    - gap_weight_sum, gap_weight_square_sum: sum w, sum w^2 (effective sample size);
    - gap_mult_error_sum: sum exp |d| (multiplicative probability error, 1 when both agree);
    - gap_capped_sum: tokens with w above cap.

    Args:
        cap: as in `token_weights`.
    """
    trained = jnp.asarray(mask).astype(jnp.float32)
    gap = jax.lax.stop_gradient(log_ratio(policy_logprobs, behavior_logprobs, mask))
    weight = jnp.exp(gap)
    return {
        "gap_tokens": trained.sum(),
        "gap_sum": gap.sum(),
        "gap_abs_sum": jnp.abs(gap).sum(),
        "gap_abs_max": jnp.abs(gap).max(initial=0.0),
        "gap_k3_sum": (trained * (jnp.expm1(gap) - gap)).sum(),
        "gap_weight_sum": (trained * weight).sum(),
        "gap_weight_square_sum": (trained * jnp.square(weight)).sum(),
        "gap_mult_error_sum": (trained * jnp.exp(jnp.abs(gap))).sum(),
        "gap_capped_sum": (trained * (weight > cap)).sum(),
    }


def combine(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of two disjoint sets of tokens together: sums are added, names in `_max` take the larger.

    Raises:
        ValueError: the two do not hold the same names.
    """
    if total.keys() != part.keys():
        raise ValueError(f"statistics differ in {sorted(total.keys() ^ part.keys())}: combine like with like")
    return {
        name: jnp.maximum(value, part[name]) if name.endswith("_max") else value + part[name]
        for name, value in total.items()
    }


def summarise(sums: Mapping[str, Any]) -> dict[str, Array]:
    """Means from the sums of `mismatch` over a whole batch; all neutral when it trained no token.

    Returns:
        logprob_gap_mean, logprob_gap_max: of |d|; logprob_gap_signed: mean d (its negative is the k1 estimate);
        kl_k3: mean; ess_share: (sum w)^2 / (n sum w^2), in (0, 1]; mult_prob_error: 1 when both agree, above 1.05
        wants a look; capped_share: of the tokens.
    """
    count = jnp.maximum(sums["gap_tokens"], 1.0)
    empty = sums["gap_tokens"] == 0
    square = jnp.where(empty, 1.0, count * sums["gap_weight_square_sum"])
    return {
        "logprob_gap_mean": sums["gap_abs_sum"] / count,
        "logprob_gap_max": sums["gap_abs_max"] + 0.0,
        "logprob_gap_signed": sums["gap_sum"] / count,
        "kl_k3": sums["gap_k3_sum"] / count,
        "ess_share": jnp.where(empty, 1.0, jnp.square(sums["gap_weight_sum"]) / square),
        "mult_prob_error": jnp.where(empty, 1.0, sums["gap_mult_error_sum"] / count),
        "capped_share": sums["gap_capped_sum"] / count,
    }
