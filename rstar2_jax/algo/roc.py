"""Resample-on-Correct: from N oversampled rollouts of a prompt to the G that are trained on.

Correct rollouts compete by how clean their tool calls and format are; wrong ones are kept blindly, so that the variety
of failures survives. The two classes keep about the proportion they had.

Deliberately not here: the penalties themselves (reward/quality.py), refilling a step with further prompts, I/O.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rstar2_jax import settings

_POINTS = 256


def num_positives(
    num_pos: Int[Any, ""] | int, num_neg: Int[Any, ""] | int, group_size: int, min_class: int
) -> Int[Array, ""]:
    """How many correct rollouts a group of G keeps; the rest of min(G, N) are wrong ones.

    round_half_even(num_pos * G / N), then clamped so that a class that is present keeps min(min_class, its size) and no
    class is asked for more than it has. All in integers. A group too small for both minima (2 * min_class > G) lowers
    them to G // 2.

    Args:
        num_pos: scored rollouts with reward 1.
        num_neg: scored rollouts with reward 0.
        group_size: G.
        min_class: rows kept of a class that is present.

    Source: paper (arXiv 2508.20722), GRPO-RoC, which halves both classes; deviation: one rounding of the positives in
    place of two floors, so that exactly G are kept for odd counts too; the minimum is the authors' code.

    >>> [int(num_positives(k, 32 - k, 16, 2)) for k in (0, 1, 2, 3, 7, 16, 31, 32)]
    [0, 1, 2, 2, 4, 8, 15, 16]
    """
    pos, neg = jnp.asarray(num_pos, jnp.int32), jnp.asarray(num_neg, jnp.int32)
    total = pos + neg
    group = jnp.minimum(group_size, total)
    divisor = jnp.maximum(total, 1)
    quotient, remainder = jnp.divmod(pos * group, divisor)
    rounds_up = (2 * remainder > divisor) | ((2 * remainder == divisor) & (quotient % 2 == 1))
    floor = jnp.minimum(min_class, group // 2)
    lowest = jnp.maximum(jnp.minimum(floor, pos), group - neg)
    highest = jnp.minimum(pos, group - jnp.minimum(floor, neg))
    return jnp.clip(quotient + rounds_up, lowest, highest)


def weights(penalties: Float[Any, "*axes"], p_floor: float) -> Float[Array, "*axes"]:
    """Sampling weight of a correct rollout: 1 / (p_total + p_floor).

    Args:
        penalties: p_total = p_err + p_format, 0 or more.
        p_floor: above 0; the smaller, the closer to always taking the cleanest.

    Source: paper, GRPO-RoC; deviation: p_floor also bounds the weight of a flawless rollout.
    """
    return 1.0 / (jnp.asarray(penalties) + p_floor)


def _ranks(first: jax.Array, second: jax.Array, same: jax.Array) -> jax.Array:
    """i32[N]: how many of the columns j with same[i, j] come before i, by first, then second, then place.

    All pairs are compared: N is some dozens, and this compiles and runs faster than a sort.
    """
    place = jnp.arange(first.shape[0])
    by_place = place[None, :] < place[:, None]
    by_second = (second[None, :] < second[:, None]) | ((second[None, :] == second[:, None]) & by_place)
    before = (first[None, :] < first[:, None]) | ((first[None, :] == first[:, None]) & by_second)
    return (same & before).sum(axis=1)


def _resample_group(
    key: jax.Array, rewards: jax.Array, penalties: jax.Array, valid: jax.Array, group_size: int, how: settings.Roc
) -> tuple[jax.Array, jax.Array]:
    """One prompt: (indices i32[G], kept bool[G]).

    The k smallest of -(log weight + Gumbel) are k draws without replacement with these weights (Gumbel top-k). A column
    belongs to one class, so one noise vector serves both.
    """
    scored = valid & jnp.isfinite(rewards)
    positive = scored & (rewards > 0.5)
    penalties = jnp.where(positive, jnp.where(jnp.isnan(penalties), jnp.inf, penalties), 0.0)
    noise = -jax.random.gumbel(key, rewards.shape)
    first = penalties if how.positives == "greedy" else jnp.zeros_like(penalties)
    second = noise - jnp.log(weights(penalties, how.p_floor)) if how.positives == "inverse" else noise
    same = (positive[None, :] == positive[:, None]) if how.by_class else True
    rank = _ranks(first, second, scored[None, :] & same)
    total, num_pos = scored.sum(), positive.sum()
    take_pos = num_positives(num_pos, total - num_pos, group_size, how.min_class)
    take_neg = jnp.minimum(group_size, total) - take_pos
    limit = jnp.where(positive, take_pos, take_neg) if how.by_class else jnp.minimum(group_size, total)
    chosen = scored & (rank < limit)
    slot = jnp.where(chosen, jnp.cumsum(chosen) - 1, group_size)
    columns = jnp.arange(rewards.shape[0], dtype=jnp.int32)
    indices = jnp.zeros(group_size, jnp.int32).at[slot].set(columns, mode="drop")
    return indices, jnp.arange(group_size) < chosen.sum()


def resample(
    key: Any,
    rewards: Float[Any, "P N"],
    penalties: Float[Any, "P N"],
    valid: Bool[Any, "P N"],
    *,
    group_size: int,
    settings: settings.Roc,
) -> tuple[Int[Array, "P G"], Bool[Array, "P G"]]:
    """Which rollouts of each prompt are trained on.

    Unscored rollouts (valid False, or a reward that is not finite) leave their group first; N below is what stays. Of N
    <= G all are kept. Else num_positives(...) correct ones are drawn without replacement, by weight (`inverse`), lowest
    penalty first with random ties (`greedy`) or blindly (`uniform`), and the rest uniformly from the wrong ones.
    Without by_class, G of all are drawn uniformly and the outcomes fall as they will.

    Prompt p draws from fold_in(key, p): its choice depends neither on the other prompts nor on unscored columns after
    it. Pure; group_size and settings are static under jit.

    Args:
        key: PRNG key, used here alone.
        rewards: 1 for correct, 0 for wrong (above one half counts as correct).
        penalties: p_total >= 0; read for correct rollouts only.
        valid: True where the rollout was scored.
        group_size: G.
        settings: positives, min_class, p_floor, by_class.

    Returns:
        indices: columns of the input, ascending where kept; 0, to be ignored, where not.
        kept: min(G, N) True in each row, first.

    Source: paper, GRPO-RoC; deviation: selection by Gumbel top-k, which draws from the same distribution as one
    weighted draw after another.
    """
    rewards, penalties, valid = jnp.asarray(rewards), jnp.asarray(penalties), jnp.asarray(valid)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rewards.shape[0]))
    one = lambda k, r, p, v: _resample_group(k, r, p, v, group_size, settings)  # noqa: E731
    return jax.vmap(one)(keys, rewards, penalties, valid)


def live_groups(rewards: Float[Any, "P N"], kept: Bool[Any, "P N"]) -> Bool[Array, " P"]:
    """True where the kept rewards of a group differ: the others have no advantage and `reject_equal` drops them.

    Looks at the outcome alone, never at a shaped score; an empty group is not live.

    >>> live_groups(jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([[True, True], [True, True]]))
    Array([ True, False], dtype=bool)
    """
    rewards, kept = jnp.asarray(rewards), jnp.asarray(kept)
    scored = kept & jnp.isfinite(rewards)
    highest = jnp.where(scored, rewards, -jnp.inf).max(axis=-1, initial=-jnp.inf)
    lowest = jnp.where(scored, rewards, jnp.inf).min(axis=-1, initial=jnp.inf)
    return highest > lowest


def inclusion_probabilities(penalties: Float[Any, " n"], count: int, p_floor: float) -> Float[Array, " n"]:
    """Chance of each correct rollout to be among `count` kept ones under `inverse`: what a viewer shows as its odds.

    With arrival times E_i / w_i (E_i exponential) the kept ones are the first `count` to arrive, so
    pi_i = integral over t of w_i exp(-w_i t) P(fewer than `count` others arrived before t), by Fejer's first rule in
    u = exp(-t * smallest weight); exact to about 1e-5 in float32.

    Args:
        penalties: p_total of the correct rollouts of one group.
        count: how many of them are kept; static under jit.
        p_floor: as in `weights`.

    >>> [round(float(p), 4) for p in inclusion_probabilities(jnp.array([0.0, 0.0, 0.5, 1.0]), 2, 0.1)]
    [0.8491, 0.8491, 0.1943, 0.1075]
    """
    n = jnp.shape(penalties)[0]
    if count >= n or count <= 0:
        return jnp.full(n, float(count > 0))
    speed = weights(penalties, p_floor)
    speed = speed / speed.min()
    angle = (jnp.arange(_POINTS) + 0.5) * (jnp.pi / _POINTS)
    even = 2.0 * jnp.arange(1, _POINTS // 2 + 1)
    mass = (1.0 - 2.0 * (jnp.cos(angle[:, None] * even) / (even**2 - 1.0)).sum(axis=1)) / _POINTS
    log_u = 2.0 * jnp.log(jnp.sin(angle / 2))
    waiting = jnp.exp(speed[:, None] * log_u)

    def admit(arrived: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
        """arrived[i, c] = chance that exactly c of the others of i so far came before t, for c < count."""
        late = jnp.where(jnp.arange(n)[:, None] == j, 1.0, waiting[j])[:, None, :]
        shifted = jnp.pad(arrived, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return arrived * late + shifted * (1.0 - late), None

    start = jnp.zeros((n, count, _POINTS)).at[:, 0].set(1.0)
    arrived, _ = jax.lax.scan(admit, start, jnp.arange(n))
    density = speed[:, None] * jnp.exp((speed[:, None] - 1.0) * log_u)
    return (density * arrived.sum(axis=1) * mass).sum(axis=1)
