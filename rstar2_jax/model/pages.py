"""Attention over a pool of pages: keys and values of a sequence lie in pages anywhere, in the order of its table.

A query goes over the pages of its table one after another and keeps the running maximum, the sum of weights and the
weighted values (the online softmax of FlashAttention, arXiv 2205.14135). A page that lies beyond a query changes none
of the three by a single bit: its weights are exactly 0 and the maximum stays. So how far the loop runs, which depends
on the longest sequence beside it, changes no number of a row. What stands in an entry beyond a query is whatever the
page held before, NaN of a sequence that diverged as well, and 0 NaN is NaN: such values are taken for 0.

Queries are taken in groups of a few, each with a loop of its own: a group runs no further than its own longest
sequence, and the pages that it has gathered stay in the processor's cache until they are used.

On CPUs a part in C (pages_native.py) does the same at several times the speed, where a compiler is found.

Deliberately not here: who owns which page (rollout/kv_cache.py).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rstar2_jax.model import ops, pages_native

GROUP_BYTES = 2**19  # of keys and values that are gathered at once: a share of a core's own cache
MAX_GROUPS = 8  # bounds the size of the compiled program


def step(
    q: Float[Array, "b h d"],
    new: tuple[Float[Array, "b k d"], Float[Array, "b k d"]],
    pool: tuple[Float[Array, "n k d p"], Float[Array, "n k p d"]],
    positions: Int[Array, " b"],
    tables: Int[Array, "b t"],
) -> tuple[Float[Array, "b h d"], tuple[Float[Array, "n k d p"], Float[Array, "n k p d"]]]:
    """(attention, pool) of one token a row: all rows write their new key and value, then all attend.

    Args:
        q: queries.
        new: keys and values of the tokens.
        pool: keys and values of all pages; donate it, since the returned one takes its place.
        positions: of the tokens; a row with a negative one takes no part: it writes nothing, and what comes out for it
            is finite and without meaning.
        tables: pages of each row's sequence, in order.
    """
    if q.dtype == pool[0].dtype and pages_native.available():
        out, keys, values = pages_native.step(q, *pool, *new, positions, tables)
        return out, (keys, values)
    pool = write(*pool, *new, positions, tables)
    return attention(q, *pool, positions, tables), pool


def write(
    keys: Float[Array, "n k d p"],
    values: Float[Array, "n k p d"],
    new_keys: Float[Array, "b k d"],
    new_values: Float[Array, "b k d"],
    positions: Int[Array, " b"],
    tables: Int[Array, "b t"],
) -> tuple[Float[Array, "n k d p"], Float[Array, "n k p d"]]:
    """(keys, values) with each row's new entry at its position; a negative one writes nothing."""
    page_tokens = values.shape[2]
    places = jnp.maximum(positions, 0)
    pages = jnp.take_along_axis(tables, (places // page_tokens)[:, None], axis=1)[:, 0]
    pages, offsets = jnp.where(positions < 0, keys.shape[0], pages), places % page_tokens
    keys = keys.at[pages, :, :, offsets].set(new_keys.astype(keys.dtype), mode="drop")
    return keys, values.at[pages, :, offsets].set(new_values.astype(values.dtype), mode="drop")


def attention(
    q: Float[Array, "b h d"],
    keys: Float[Array, "n k d p"],
    values: Float[Array, "n k p d"],
    positions: Int[Array, " b"],
    tables: Int[Array, "b t"],
) -> Float[Array, "b h d"]:
    """Attention of each query to the entries of its table at or before its position."""
    b, h, d = q.shape
    q = q.reshape(b, keys.shape[1], h // keys.shape[1], d)
    bytes_of_row = 2 * keys.dtype.itemsize * math.prod(keys.shape[1:])
    groups = min(MAX_GROUPS, -(-b * bytes_of_row // GROUP_BYTES))
    size = -(-b // groups)
    parts = [slice(lo, min(lo + size, b)) for lo in range(0, b, size)]
    outs = [_over_pages(q[part], keys, values, positions[part], tables[part]) for part in parts]
    return jnp.concatenate(outs).reshape(b, h, d)


def _over_pages(q, keys, values, positions, tables):
    page_tokens, scale = values.shape[2], q.shape[-1] ** -0.5

    def visit(number, state):
        best, total, out = state
        pages = jax.lax.dynamic_index_in_dim(tables, number, axis=1, keepdims=False)
        k, v = _gathered(keys, pages).astype(q.dtype), _gathered(values, pages).astype(q.dtype)
        scores = jnp.einsum("bkgd,bkdp->bkgp", q, k, preferred_element_type=jnp.float32) * scale
        seen = number * page_tokens + jnp.arange(page_tokens) <= positions[:, None]
        scores, v = jnp.where(seen[:, None, None], scores, ops.MASKED), jnp.where(seen[:, None, :, None], v, 0)
        new_best = jnp.maximum(best, scores.max(axis=-1))
        shrink, weights = jnp.exp(best - new_best), jnp.exp(scores - new_best[..., None])
        added = jnp.einsum("bkgp,bkpd->bkgd", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return new_best, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + added

    start = (
        jnp.full(q.shape[:3], ops.MASKED, jnp.float32),
        jnp.zeros(q.shape[:3], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    pages = jnp.max(positions) // page_tokens + 1
    _, total, out = jax.lax.fori_loop(0, pages, visit, start)
    return (out / jnp.maximum(total, 1)[..., None]).astype(q.dtype)


def _gathered(pool, pages):
    """Whole pages, as one long run each: the inner loop of the copy is then long enough to be worth its start."""
    flat = pool.reshape(pool.shape[0], -1).at[pages].get(mode="promise_in_bounds")
    return flat.reshape(-1, *pool.shape[1:])
