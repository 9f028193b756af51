"""Log-probability and entropy of wanted tokens over the vocabulary, without holding the logits of all tokens.

    logp_t = log softmax(h_t W / temperature)[target_t]        H_t = entropy of that distribution

Positions that are not wanted (prompts, tool replies, padding) never reach the head: wanted ones are moved to the front
and taken in chunks, as many as there are. The backward pass computes the logits of a chunk again (small ones may be
kept: How.keep), forms softmax minus one-hot in place (no scatter), sums the gradient of W on each device over all
chunks and rows, and reduces it once.

Deliberately not here: which tokens are wanted (learner/logprobs.py).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rstar2_jax.model import ops, sharding

CHUNK_TOKENS = 512  # of a whole vocabulary; a share of it takes as many more
KEPT_BYTES = 1 << 27  # on a device, of all positions: logits of more than that are never kept


class How(NamedTuple):
    """Static: temperature; tied (the table is the embedding [V, D], else the head [D, V]); layout of the mesh; keep
    (logits that take up to KEPT_BYTES stay for the backward pass: memory for one product in four)."""

    temperature: float
    tied: bool
    layout: sharding.Layout | None = None
    keep: bool = False

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes that the vocabulary is split over."""
        return () if self.layout is None or self.layout.single else self.layout.axes("vocab")

    @property
    def table_axes(self) -> tuple[str | None, str | None]:
        """Logical axes of the table once its other axis is gathered."""
        return ("vocab", None) if self.tied else (None, "vocab")

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, so that its logits take the same room on a device however the vocabulary is split."""
        return CHUNK_TOKENS * (1 if self.layout is None or self.layout.single else self.layout.shards("vocab"))

    def kept(self, tokens: int, ids: int) -> bool:
        """Whether a device with so many tokens and ids of the vocabulary keeps their logits."""
        return self.keep and 4 * tokens * ids <= KEPT_BYTES


_ROWS, _STATES, _LOGITS = ("rows", None), ("rows", None, None), ("rows", "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def token_statistics(
    hidden: Float[Array, "b t d"],
    table: Float[Array, "..."],
    targets: Int[Array, "b t"],
    wanted: Bool[Array, "b t"],
    how: How,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """(log-probability, entropy) of the target at each wanted position, 0 elsewhere.

    Args:
        hidden: states after the final norm, in the compute dtype.
        table: float32 master of the embedding [V, D] where the head is tied, else of the head [D, V].
        targets: ids in [0, V).
        wanted: positions that are computed.
        how: static.
    """
    return _fwd(hidden, table, targets, wanted, how._replace(keep=False))[0]


def _fwd(hidden: Any, table: Any, targets: Any, wanted: Any, how: How) -> Any:
    local = functools.partial(_local_forward, how)
    if how.layout is not None:
        ins = [_STATES, how.table_axes, _ROWS, _ROWS]
        local = how.layout.spread(local, ins, [_ROWS, _ROWS, _ROWS, _LOGITS])
    logprobs, entropies, logs, kept = local(hidden, table.astype(hidden.dtype), targets, wanted)
    return (logprobs, entropies), (hidden, table, kept, targets, wanted, entropies, logs)


def _bwd(how: How, residuals: Any, gradients: Any) -> Any:
    hidden, table, *rest = residuals
    local = functools.partial(_local_backward, how)
    if how.layout is not None:
        outs = [("rows", "sequence", None), ("vocab", "embed") if how.tied else ("embed", "vocab")]
        local = how.layout.spread(local, [_STATES, how.table_axes, _LOGITS, *[_ROWS] * 6], outs)
    dhidden, dtable = local(hidden, table.astype(hidden.dtype), *rest, *gradients)
    return dhidden, dtable.astype(table.dtype), None, None


token_statistics.defvjp(_fwd, _bwd)


class _Chunks(NamedTuple):
    """Wanted positions first: order i32[n], back i32[m] (where each position went), how many are wanted."""

    order: jax.Array
    back: jax.Array
    count: jax.Array


def _chunks(wanted: jax.Array, chunk: int) -> _Chunks:
    order = jnp.argsort(~wanted, stable=True)
    padded = jnp.pad(order, (0, -len(wanted) % chunk))
    return _Chunks(order=padded, back=jnp.argsort(order), count=wanted.sum())


def _local_forward(how: How, hidden: Any, table: Any, targets: Any, wanted: Any) -> Any:
    shape, chunk = wanted.shape, min(how.chunk_tokens, wanted.size)
    plan, vocab = _chunks(wanted.reshape(-1), chunk), table.shape[0 if how.tied else 1]
    states, ids = hidden.reshape(-1, hidden.shape[-1])[plan.order], _local_ids(how, table, targets)[plan.order]
    keeping = how.kept(len(plan.order), vocab)

    def body(index, found):
        at = index * chunk
        *found, kept = found
        logits = _logits(how, _rows(states, at, chunk), table)
        kept = jax.lax.dynamic_update_slice_in_dim(kept, logits, at, 0) if keeping else kept
        top = _across(how, jax.lax.pmax, logits.max(axis=-1))
        logs = top + jnp.log(_across(how, jax.lax.psum, jnp.exp(logits - top[:, None]).sum(axis=-1)))
        gap = logits - logs[:, None]
        picked = _picked(logits, _rows(ids, at, chunk), logs)
        picked, negative = _across(how, jax.lax.psum, (picked, (jnp.exp(gap) * gap).sum(axis=-1)))
        wanted_here = at + jnp.arange(chunk) < plan.count
        values = (jnp.where(wanted_here, value, 0) for value in (picked, -negative, logs))
        more = (jax.lax.dynamic_update_slice_in_dim(f, v, at, 0) for f, v in zip(found, values, strict=True))
        return *more, kept

    zeros = jnp.zeros(len(plan.order), jnp.float32)
    empty = jnp.zeros((len(plan.order) if keeping else 0, vocab), jnp.float32)
    *found, kept = jax.lax.fori_loop(0, -(-plan.count // chunk), body, (zeros, zeros, zeros, empty))
    return *(value[plan.back].reshape(shape) for value in found), kept


def _local_backward(how: How, hidden: Any, table: Any, kept: Any, targets: Any, wanted: Any, *others: Any) -> Any:
    """Gradients of states and table; `others`: entropies, logs, gradients of log-probabilities and of entropies."""
    width, chunk = hidden.shape[-1], min(how.chunk_tokens, wanted.size)
    plan = _chunks(wanted.reshape(-1), chunk)
    known = jnp.arange(len(plan.order)) < plan.count
    # What fills up the last chunk has no gradient; it must not be infinite either.
    states = jnp.where(known[:, None], hidden.reshape(-1, width)[plan.order], 0)
    ids = _local_ids(how, table, targets)[plan.order]
    given = [jnp.where(known, x.reshape(-1)[plan.order], 0).astype(jnp.float32) for x in others]

    def body(index, carry):
        dstates, dtable = carry
        at = index * chunk
        rows = _rows(states, at, chunk)
        entropy, log, dlogprob, dentropy = (_rows(x, at, chunk)[:, None] for x in given)
        gap = (_rows(kept, at, chunk) if len(kept) else _logits(how, rows, table)) - log
        pull = jnp.exp(gap) * (dlogprob + dentropy * (gap + entropy))
        dlogits = jnp.where(_one_hot(_rows(ids, at, chunk), gap), dlogprob, 0) - pull
        dlogits = (dlogits if how.temperature == 1 else dlogits / how.temperature).astype(hidden.dtype)
        contract = (((1,), (0 if how.tied else 1,)), ((), ()))
        back = jax.lax.dot_general(dlogits, table, contract, preferred_element_type=jnp.float32)
        dstates = jax.lax.dynamic_update_slice_in_dim(dstates, back.astype(dstates.dtype), at, 0)
        return dstates, dtable + ops.weight_gradient(rows, dlogits)

    vocab = table.shape[0 if how.tied else 1]
    start = (jnp.zeros(states.shape, _partial_dtype(how, hidden)), jnp.zeros((width, vocab), jnp.float32))
    dstates, dtable = jax.lax.fori_loop(0, -(-plan.count // chunk), body, start)
    return _reduced(how, dstates[plan.back].reshape(hidden.shape), dtable, hidden.dtype)


def _partial_dtype(how: How, hidden: Any) -> Any:
    """Sums over shares of the vocabulary are still to come: they are made in float32."""
    return jnp.float32 if how.vocab_axes else hidden.dtype


def _reduced(how: How, dhidden: Any, dtable: Any, dtype: Any) -> Any:
    """The gradients in their layouts: states summed over the vocabulary's shares, the table over everybody's rows."""
    if how.layout is None or how.layout.single:
        return dhidden.astype(dtype), dtable.T if how.tied else dtable
    dhidden = how.layout.reduced(dhidden, over="vocab", onto="sequence", dimension=1)
    dtable = how.layout.reduced(dtable, over="rows", onto="embed", dimension=0)
    return dhidden.astype(dtype), dtable.T if how.tied else dtable


def _logits(how: How, rows: Any, table: Any) -> jax.Array:
    contract = (((1,), (1 if how.tied else 0,)), ((), ()))
    logits = jax.lax.dot_general(rows, table, contract, preferred_element_type=jnp.float32)
    return logits if how.temperature == 1 else logits / how.temperature


def _local_ids(how: How, table: Any, targets: Any) -> jax.Array:
    """Targets counted from the first id of this device's share; those of other shares match none of its columns."""
    if not how.vocab_axes:
        return targets.reshape(-1)
    return targets.reshape(-1) - jax.lax.axis_index(how.vocab_axes) * table.shape[0 if how.tied else 1]


def _picked(logits: Any, ids: Any, logs: Any) -> jax.Array:
    """Log-probability of each row's id, 0 where another share of the vocabulary has it."""
    own = (ids >= 0) & (ids < logits.shape[1])
    found = jnp.take_along_axis(logits, jnp.where(own, ids, 0)[:, None], axis=1)[:, 0]
    return jnp.where(own, found - logs, 0)


def _one_hot(ids: Any, logits: Any) -> jax.Array:
    return jax.lax.broadcasted_iota(ids.dtype, logits.shape, 1) == ids[:, None]


def _across(how: How, reduce: Any, value: Any) -> Any:
    return reduce(value, how.vocab_axes) if how.vocab_axes else value


def _rows(x: Any, at: Any, chunk: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, chunk, 0)
