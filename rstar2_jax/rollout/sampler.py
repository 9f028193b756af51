"""Drawing ids from logits, row by row, with one uniform number a row.

A row's id depends on its own logits, sampling values and key alone, bit for bit: all rows pass through the same code,
whatever their neighbours ask for. Only the cuts of top-k and top-p are computed on demand: from the most probable 64
ids where those hold the whole nucleus, else by bisection over the bits of a float, exact without a sort of the
vocabulary. Which of the two a row takes is a matter of its own logits.

Deliberately not here: penalties, min-p, grammars.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

_BLOCK = 128  # ids of a block of the two-level draw
_LIKELY = 64  # most probable ids that are looked at before the whole vocabulary is
_INFINITY_BITS = 0x7F800000


def position_keys(seed_words: UInt[Array, "b 2"], positions: Int[Array, " b"]) -> Array:
    """One key a row: fold_in(key of the request's seed, index of the id that is drawn).

    Args:
        seed_words: high and low 32 bits of each row's seed.
    """
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed_words, impl="threefry2x32"), positions)


def sample(
    keys: Array,
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    top_k: Int[Array, " b"],
    top_p: Float[Array, " b"],
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """(ids, log-probabilities): temperature first, then top-k, then top-p of what top-k left.

    An id stays when its probability is at least that of the last id kept, so ties at the edge stay together. The
    log-probability is that of the id under softmax(logits / temperature) over the full vocabulary.

    Args:
        keys: one PRNG key a row, used for nothing else.
        temperature: 0 takes the most probable id (the lowest of equals) and reports its probability at temperature 1.
        top_k: ids kept, -1 for all.
        top_p: the smallest set of most probable ids with at least this share is kept, 1 for all.
    """
    greedy = temperature <= 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    gaps = jnp.max(scaled, axis=-1, keepdims=True) - scaled
    weights = jnp.exp(-gaps)
    cuts = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        _cuts,
        lambda gaps, weights, top_k, top_p: jnp.full(gaps.shape[0], jnp.inf, jnp.float32),
        *(gaps, weights, top_k, top_p),
    )
    # The most probable id is what remains under a cut of 0, and the number 0 draws the first of equals.
    cuts, uniform = jnp.where(greedy, 0.0, cuts), jax.vmap(lambda key: jax.random.uniform(key))(keys)
    ids = _draw(jnp.where(gaps <= cuts[:, None], weights, 0.0), jnp.where(greedy, 0.0, uniform))
    chosen = jnp.take_along_axis(gaps, ids[:, None], axis=-1)[:, 0]
    return ids, -chosen - jnp.log(jnp.sum(weights, axis=-1))


def _cuts(gaps, weights, top_k, top_p):
    """Largest gap to the best logit that stays, infinite for rows that keep everything."""
    near, enough = _cuts_of_likely(gaps, weights, top_k, top_p)
    asked = (top_k > 0) | (top_p < 1)
    far = jax.lax.cond(
        jnp.any(asked & ~enough), _cuts_of_all, lambda *_: jnp.zeros_like(near), *(gaps, weights, top_k, top_p)
    )
    return jnp.where(asked, jnp.where(enough, near, far), jnp.inf)


def _cuts_of_likely(gaps, weights, top_k, top_p):
    """(cuts, whether they are the true ones) from the most probable ids alone."""
    count = min(_LIKELY, gaps.shape[1])
    sorted_gaps = -jax.lax.top_k(-gaps, count)[0]
    sorted_weights = jnp.exp(-sorted_gaps)
    limited = (top_k > 0) & (top_k <= count)
    by_count = jnp.take_along_axis(sorted_gaps, jnp.clip(top_k - 1, 0, count - 1)[:, None], axis=-1)[:, 0]
    by_count = jnp.where(limited, by_count, jnp.inf)
    # Ids that tie with the last of the k count too, and those beyond the ones looked at are not known.
    known = ~limited | (by_count < sorted_gaps[:, -1]) | (count == gaps.shape[1])
    kept = jnp.where(sorted_gaps <= by_count[:, None], sorted_weights, 0.0)
    mass = jnp.where(limited, jnp.sum(kept, axis=-1), jnp.sum(weights, axis=-1))
    reached = jnp.cumsum(kept, axis=-1) >= (top_p * mass)[:, None]
    by_mass = jnp.take_along_axis(sorted_gaps, jnp.argmax(reached, axis=-1)[:, None], axis=-1)[:, 0]
    cut = jnp.where(top_p < 1, jnp.minimum(by_mass, by_count), by_count)
    found = jnp.where(top_p < 1, reached[:, -1], limited)
    return cut, known & found & (limited | (top_k <= 0))


def _cuts_of_all(gaps, weights, top_k, top_p):
    by_count = _smallest_gap(gaps, jnp.ones_like(weights), top_k.astype(jnp.float32))
    by_count = jnp.where(top_k > 0, by_count, jnp.inf)
    left = jnp.where(gaps <= by_count[:, None], weights, 0.0)
    by_mass = _smallest_gap(gaps, left, top_p * jnp.sum(left, axis=-1))
    return jnp.where(top_p < 1, jnp.minimum(by_mass, by_count), by_count)


def _smallest_gap(gaps, measure, needed):
    """Smallest g with sum(measure where gaps <= g) >= needed; infinite when even the whole sum is below."""

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        gap = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(gaps <= gap[:, None], measure, 0.0), axis=-1) >= needed
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    # Floats of one sign are ordered as their bits are, so that bisecting the bits ends at a value of `gaps` itself.
    low = jnp.full(gaps.shape[0], -1, jnp.int32)
    high = jnp.full(gaps.shape[0], _INFINITY_BITS, jnp.int32)
    high = jax.lax.while_loop(lambda b: jnp.any(b[1] - b[0] > 1), halve, (low, high))[1]
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _draw(weights, uniform):
    """Index drawn in proportion to weights by inverting their cumulative sum, first over blocks, then inside one."""
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    tiles = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab))).reshape(rows, blocks, _BLOCK)
    sums = jnp.sum(tiles, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    block = _first_above(sums, ends, target)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
    tile = jnp.take_along_axis(tiles, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _first_above(tile, jnp.cumsum(tile, axis=-1), target - before)


def _first_above(weights, ends, target):
    """Index whose share of the cumulative sum holds the target.

    The sums are rounded and need not rise where a weight is 0: the answer steps back to the nearest id that has one.
    """
    index = jnp.arange(weights.shape[1], dtype=jnp.int32)
    found = jnp.sum(ends <= target[:, None], axis=-1, dtype=jnp.int32)
    has_weight = weights > 0
    nearest = jnp.max(jnp.where(has_weight & (index <= found[:, None]), index, -1), axis=-1)
    return jnp.where(nearest >= 0, nearest, jnp.argmax(has_weight, axis=-1).astype(jnp.int32))
