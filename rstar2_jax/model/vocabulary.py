"""Log-probability and entropy of wanted tokens over the vocabulary, without holding the logits of all tokens.

    logp_t = log softmax(h_t W / temperature)[target_t]        H_t = entropy of that distribution

Positions that are not wanted (prompts, tool replies, padding) never reach the head: wanted ones are moved to the front
and taken in chunks, as many as there are. The backward pass computes the logits of a chunk again (small ones may be
kept, each chunk's in an array of its own: How.keep), forms softmax minus one-hot in place (no scatter), sums the
gradient of W on each device over all chunks and rows, and reduces it once.

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
KEPT_CHUNKS = 4  # at most, since each is a piece of the program: chunks of a small vocabulary are larger


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

    def cut(self, tokens: int, ids: int) -> tuple[int, int]:
        """(tokens of a chunk, chunks that are kept) on a device with so many tokens and ids of the vocabulary."""
        chunk = min(self.chunk_tokens, tokens)
        larger = chunk * -(-tokens // (chunk * KEPT_CHUNKS))
        count = -(-tokens // larger)
        return (larger, count) if self.keep and 4 * larger * count * ids <= KEPT_BYTES else (chunk, 0)

    def parts(self, table: Any, wanted: Any) -> int:
        """Kept chunks of a device, of whole arrays."""
        rows, vocab = (1 if self.layout is None else self.layout.shards(name) for name in ("rows", "vocab"))
        return self.cut(wanted.size // rows, _ids(self, table) // vocab)[1]


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
    local, count = functools.partial(_local_forward, how), how.parts(table, wanted)
    if how.layout is not None:
        ins = [_STATES, how.table_axes, _ROWS, _ROWS]
        local = how.layout.spread(local, ins, [_ROWS, _ROWS, _ROWS, *[_LOGITS] * count])
    logprobs, entropies, logs, *kept = local(hidden, table.astype(hidden.dtype), targets, wanted)
    return (logprobs, entropies), (hidden, table, targets, wanted, entropies, logs, kept)


def _bwd(how: How, residuals: Any, gradients: Any) -> Any:
    hidden, table, *rest, kept = residuals
    local = functools.partial(_local_backward, how)
    if how.layout is not None:
        outs = [("rows", "sequence", None), ("vocab", "embed") if how.tied else ("embed", "vocab")]
        ins = [_STATES, how.table_axes, *[_ROWS] * 6, *[_LOGITS] * len(kept)]
        local = how.layout.spread(local, ins, outs)
    dhidden, dtable = local(hidden, table.astype(hidden.dtype), *rest, *gradients, *kept)
    return dhidden, dtable.astype(table.dtype), None, None


token_statistics.defvjp(_fwd, _bwd)


class _Chunks(NamedTuple):
    """Wanted positions first: order i32[n], back i32[m] (where each position went), how many are wanted."""

    order: jax.Array
    back: jax.Array
    count: jax.Array

    @property
    def known(self) -> jax.Array:
        """bool[n]: wanted ones."""
        return jnp.arange(len(self.order)) < self.count


def _chunks(wanted: jax.Array, chunk: int) -> _Chunks:
    order = jnp.argsort(~wanted, stable=True)
    padded = jnp.pad(order, (0, -len(wanted) % chunk))
    return _Chunks(order=padded, back=jnp.argsort(order), count=wanted.sum())


def _states(plan: _Chunks, hidden: Any) -> jax.Array:
    """In the plan's order. What fills up the last chunk has no gradient; its logits must not be infinite either."""
    return jnp.where(plan.known[:, None], hidden.reshape(-1, hidden.shape[-1])[plan.order], 0)


def _local_forward(how: How, hidden: Any, table: Any, targets: Any, wanted: Any) -> Any:
    """(log-probabilities, entropies, logarithms of the softmax's denominators, kept logits of each chunk ...)."""
    shape, (chunk, parts) = wanted.shape, how.cut(wanted.size, _ids(how, table))
    plan = _chunks(wanted.reshape(-1), chunk)
    states, ids = _states(plan, hidden), _local_ids(how, table, targets)[plan.order]

    def measured(at):
        logits = _logits(how, _rows(states, at, chunk), table)
        top = _across(how, jax.lax.pmax, logits.max(axis=-1))
        logs = top + jnp.log(_across(how, jax.lax.psum, jnp.exp(logits - top[:, None]).sum(axis=-1)))
        gap = logits - logs[:, None]
        picked = _picked(logits, _rows(ids, at, chunk), logs)
        picked, negative = _across(how, jax.lax.psum, (picked, (jnp.exp(gap) * gap).sum(axis=-1)))
        wanted_here = at + jnp.arange(chunk) < plan.count
        values = (jnp.where(wanted_here, value, 0) for value in (picked, -negative, logs))
        return *values, logits

    if parts:  # what a loop fills must be cleared first: the parts are not one array
        nothing = *[jnp.zeros(chunk, jnp.float32)] * 3, jnp.zeros((chunk, _ids(how, table)), jnp.float32)
        every = [
            jax.lax.cond(at < plan.count, functools.partial(measured, at), lambda: nothing)
            for at in range(0, len(plan.order), chunk)
        ]
        *values, kept = zip(*every, strict=True)
        found = [jnp.concatenate(value) for value in values]
    else:

        def body(index, found):
            *values, _ = measured(index * chunk)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(f, v, index * chunk, 0) for f, v in zip(found, values, strict=True)
            )

        zeros, kept = jnp.zeros(len(plan.order), jnp.float32), ()
        found = jax.lax.fori_loop(0, -(-plan.count // chunk), body, (zeros, zeros, zeros))
    return *(value[plan.back].reshape(shape) for value in found), *kept


def _local_backward(how: How, hidden: Any, table: Any, targets: Any, wanted: Any, *others: Any) -> Any:
    """Gradients of states and table; `others`: entropies, logs, gradients of log-probabilities and of entropies, and
    the logits of each chunk where they were kept."""
    (chunk, _), width = how.cut(wanted.size, _ids(how, table)), hidden.shape[-1]
    plan = _chunks(wanted.reshape(-1), chunk)
    known, states = plan.known, _states(plan, hidden)
    ids, kept = _local_ids(how, table, targets)[plan.order], others[4:]
    given = [jnp.where(known, x.reshape(-1)[plan.order], 0).astype(jnp.float32) for x in others[:4]]

    def added(at, logits, carry):
        dstates, dtable = carry
        rows = _rows(states, at, chunk)
        entropy, log, dlogprob, dentropy = (_rows(x, at, chunk)[:, None] for x in given)
        gap = (_logits(how, rows, table) if logits is None else logits) - log
        pull = jnp.exp(gap) * (dlogprob + dentropy * (gap + entropy))
        dlogits = jnp.where(_one_hot(_rows(ids, at, chunk), gap), dlogprob, 0) - pull
        dlogits = (dlogits if how.temperature == 1 else dlogits / how.temperature).astype(hidden.dtype)
        contract = (((1,), (0 if how.tied else 1,)), ((), ()))
        back = jax.lax.dot_general(dlogits, table, contract, preferred_element_type=jnp.float32)
        dstates = jax.lax.dynamic_update_slice_in_dim(dstates, back.astype(dstates.dtype), at, 0)
        return dstates, dtable + ops.weight_gradient(rows, dlogits)

    found = jnp.zeros(states.shape, _partial_dtype(how, hidden)), jnp.zeros((width, _ids(how, table)), jnp.float32)
    if kept:
        for at, logits in zip(range(0, len(plan.order), chunk), kept, strict=True):
            found = jax.lax.cond(at < plan.count, functools.partial(added, at, logits), lambda carry: carry, found)
    else:
        found = jax.lax.fori_loop(0, -(-plan.count // chunk), lambda i, carry: added(i * chunk, None, carry), found)
    dstates, dtable = found
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


def _ids(how: How, table: Any) -> int:
    """Ids that the table holds."""
    return table.shape[0 if how.tied else 1]


def _local_ids(how: How, table: Any, targets: Any) -> jax.Array:
    """Targets counted from the first id of this device's share; those of other shares match none of its columns."""
    if not how.vocab_axes:
        return targets.reshape(-1)
    return targets.reshape(-1) - jax.lax.axis_index(how.vocab_axes) * _ids(how, table)


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
