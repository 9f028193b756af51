"""Causal attention within segments over whole rows: the one function that training calls.

    causal(q, k, v, segment_ids) = softmax(q k / sqrt(d), over keys of the same segment at or before the query) v

Short rows keep their softmax weights for the backward pass, in static blocks of queries that see only the keys before
their end. Long rows go block by block and keep the output and its normaliser, so that memory grows linearly with the
row: weights are computed again in the backward pass, and blocks of keys that lie before the segments of a block of
queries are never visited. On one CPU a part in C (attention_native.py) takes the place of both, in float32.

Source: the online softmax of FlashAttention (arXiv 2205.14135); deviation: whole blocks are skipped by segment.
Deliberately not here: attention over a cache (ops.py).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rstar2_jax.model import attention_native, fused, ops, sharding

DENSE_TOKENS = 1024  # longest row whose softmax weights are kept
QUERY_BLOCK_TOKENS = 128  # of the dense form: half of the square is never computed
MAX_QUERY_BLOCKS = 4  # bounds the size of the compiled program
BLOCK_TOKENS = 512  # of the blockwise form, queries and keys alike


def causal(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    segment_ids: Int[Array, "b t"],
    layout: sharding.Layout | None = None,
) -> Float[Array, "b t h d"]:
    """Attention of each query to the keys of its own segment at or before it.

    A padding query (segment 0) sees padding only, itself at least: no real query sees padding, and every row is finite.

    Args:
        segment_ids: each id is one run of neighbours in its row.
        layout: rows and heads are split by it, and it names the kernel; None for one device.
    """
    heads, rows = ("rows", None, "heads", None), ("rows", None)
    if layout is None or (layout.single and layout.attention == "portable"):
        return _alone(q, k, v, segment_ids)
    local = portable if layout.attention == "portable" else fused.KERNELS[layout.attention]
    return layout.spread(local, [heads, heads, heads, rows], heads)(q, k, v, segment_ids)


def _alone(q: Any, k: Any, v: Any, segment_ids: Any) -> jax.Array:
    if {q.dtype, k.dtype, v.dtype} == {jnp.dtype(jnp.float32)} and attention_native.available():
        return attention_native.causal(q, k, v, segment_ids)
    return portable(q, k, v, segment_ids)


def portable(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """`causal` on one device of any kind, by the form that the length of a row asks for."""
    return (dense if q.shape[1] <= DENSE_TOKENS else blockwise)(q, k, v, segment_ids)


@jax.custom_vjp
def dense(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """The form of short rows: static blocks of queries, softmax weights kept."""
    return _dense_fwd(q, k, v, segment_ids)[0]


def _dense_fwd(q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Weights are kept without their normaliser, which is put to the output instead: it is the smaller array."""
    (b, t, h, d), kv = q.shape, k.shape[2]
    grouped, keys, values = ops.group_queries(q, kv), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outs, kept = [], []
    for lo, hi in _spans(t):
        scores = _pairs(_flat(grouped[:, :, :, lo:hi]), keys[:, :, :hi], 3, 3).reshape(b, kv, h // kv, hi - lo, hi)
        before = jnp.arange(lo, hi)[:, None] >= jnp.arange(hi)[None, :]
        same = segments[:, lo:hi, None] == segments[:, None, :hi]
        scores = jnp.where((before & same)[:, None, None], scores * d**-0.5, ops.MASKED)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        inverse, weights = 1 / weights.sum(axis=-1, keepdims=True), weights.astype(v.dtype)
        out = _pairs(_flat(weights), values[:, :, :hi], 3, 2).reshape(b, kv, h // kv, hi - lo, d)
        outs.append((out * inverse).astype(q.dtype))
        kept.append((weights, inverse))
    out = checkpoint_name(ops.ungroup(_along(outs)), ops.KEPT)
    return out, (grouped, keys, values, kept, out)


def _dense_bwd(residuals: Any, dout: Any) -> Any:
    grouped, keys, values, kept, out = residuals
    (b, kv, g, t, d), dtype = grouped.shape, grouped.dtype
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    pull, delta = ops.group_queries(dout, kv), ops.group_queries(delta, kv)
    dqs = []
    dk = dv = jnp.zeros(keys.shape, jnp.float32)
    for (lo, hi), (weights, inverse) in zip(_spans(t), kept, strict=True):
        own = _flat((pull[:, :, :, lo:hi].astype(jnp.float32) * inverse).astype(dtype))
        dweights = _pairs(own, values[:, :, :hi], 3, 3).reshape(weights.shape)
        dscores = weights * (dweights - delta[:, :, :, lo:hi] * inverse) * d**-0.5
        dscores = _flat(dscores.astype(dtype))
        dqs.append(_pairs(dscores, keys[:, :, :hi], 3, 2).reshape(b, kv, g, hi - lo, d).astype(dtype))
        later = ((0, 0), (0, 0), (0, t - hi), (0, 0))
        dk += jnp.pad(_pairs(dscores, _flat(grouped[:, :, :, lo:hi]), 2, 2), later)
        dv += jnp.pad(_pairs(_flat(weights), own, 2, 2), later)
    dk, dv = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (dk, dv))
    return ops.ungroup(_along(dqs)), dk, dv, None


dense.defvjp(_dense_fwd, _dense_bwd)


def _spans(tokens: int) -> list[tuple[int, int]]:
    """(first, end) of each block of queries, which see the keys before its end."""
    block = max(QUERY_BLOCK_TOKENS, -(-tokens // MAX_QUERY_BLOCKS))
    return [(lo, min(lo + block, tokens)) for lo in range(0, tokens, block)]


def _flat(x: jax.Array) -> jax.Array:
    """The query heads of a group and their queries as one axis: one matmul with more rows."""
    b, kv, g, t, d = x.shape
    return x.reshape(b, kv, g * t, d)


def _along(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)


def _pairs(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """A product for each row and kv head, in float32, summed over the named axes."""
    contract = (((over_a,), (over_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def blockwise(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """The form of long rows: blocks of queries and keys, nothing of size T x T, rows of any length."""
    t = q.shape[1]
    padding = -t % BLOCK_TOKENS
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    out = _blockwise(ops.group_queries(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments)
    return ops.ungroup(out)[:, :t]


@jax.custom_vjp
def _blockwise(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
    return _forward(q, k, v, segments)[0]


def _forward(q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array]:
    """(out [b, k, g, t, d], log of the softmax's denominator f32[b, k, g, t])."""
    b, kv, g, t, d = q.shape
    first = _first_blocks(segments)

    def queries(i):
        qi = _block(q, i, 3)

        def keys(j, carry):
            top, total, out = carry
            scores = _scores(qi, k, segments, i, j)
            higher = jnp.maximum(top, scores.max(axis=-1))
            shrink = jnp.exp(top - higher)
            weights = jnp.exp(scores - higher[..., None])
            more = _over_keys(weights.astype(v.dtype), _block(v, j, 2))
            return higher, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + more

        shape = (b, kv, g, BLOCK_TOKENS)
        start = (jnp.full(shape, ops.MASKED), jnp.zeros(shape), jnp.zeros((*shape, d)))
        top, total, out = jax.lax.fori_loop(first[i], i + 1, keys, start)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    outs, logs = jax.lax.map(queries, jnp.arange(t // BLOCK_TOKENS))
    return _joined(outs), _joined(logs)


def _blockwise_fwd(q: Any, k: Any, v: Any, segments: Any) -> Any:
    out, logs = (checkpoint_name(x, ops.KEPT) for x in _forward(q, k, v, segments))
    return out, (q, k, v, segments, out, logs)


def _blockwise_bwd(residuals: Any, dout: Any) -> Any:
    q, k, v, segments, out, logs = residuals
    scale, first = q.shape[-1] ** -0.5, _first_blocks(segments)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def queries(carry, i):
        qi, doi, logi, di = (_block(x, i, 3) for x in (q, dout, logs, delta))

        def keys(j, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(qi, k, segments, i, j) - logi[..., None])
            dweights = jnp.einsum("bkgtd,bksd->bkgts", doi, _block(v, j, 2), preferred_element_type=jnp.float32)
            dscores = (weights * (dweights - di[..., None]) * scale).astype(q.dtype)
            dv = _add_block(dv, j, _over_queries(weights.astype(doi.dtype), doi))
            dk = _add_block(dk, j, _over_queries(dscores, qi))
            return dq + _over_keys(dscores, _block(k, j, 2)), dk, dv

        dq, dk, dv = jax.lax.fori_loop(first[i], i + 1, keys, (jnp.zeros(qi.shape, jnp.float32), *carry))
        return (dk, dv), dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(queries, (zeros, zeros), jnp.arange(q.shape[3] // BLOCK_TOKENS))
    return _joined(dq), dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def _first_blocks(segments: jax.Array) -> jax.Array:
    """For each block of queries the first block of keys that any of its segments reaches, over all rows."""
    index = jnp.arange(segments.shape[1])
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    starts = jax.lax.associative_scan(jnp.maximum, jnp.where(begins, index, 0), axis=1)
    return starts.reshape(len(segments), -1, BLOCK_TOKENS).min(axis=(0, 2)) // BLOCK_TOKENS


def _scores(qi: jax.Array, k: jax.Array, segments: jax.Array, i: Any, j: Any) -> jax.Array:
    scores = jnp.einsum("bkgtd,bksd->bkgts", qi, _block(k, j, 2), preferred_element_type=jnp.float32)
    offsets = jnp.arange(BLOCK_TOKENS)
    before = (i * BLOCK_TOKENS + offsets)[:, None] >= (j * BLOCK_TOKENS + offsets)[None, :]
    same = _block(segments, i, 1)[:, :, None] == _block(segments, j, 1)[:, None, :]
    return jnp.where((before & same)[:, None, None], scores * qi.shape[-1] ** -0.5, ops.MASKED)


_over_keys = functools.partial(jnp.einsum, "bkgts,bksd->bkgtd", preferred_element_type=jnp.float32)
_over_queries = functools.partial(jnp.einsum, "bkgts,bkgtd->bksd", preferred_element_type=jnp.float32)


def _block(x: jax.Array, index: Any, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * BLOCK_TOKENS, BLOCK_TOKENS, axis)


def _add_block(x: jax.Array, index: Any, more: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, _block(x, index, 2) + more, index * BLOCK_TOKENS, 2)


def _joined(blocks: jax.Array) -> jax.Array:
    """[n, b, k, g, block, ...] -> [b, k, g, n * block, ...]."""
    n, b, kv, g, size, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 3).reshape(b, kv, g, n * size, *rest)
