"""The embedding of tokens, looked up where the table lies; its gradient is summed there as well.

    x[b, t] = table[tokens[b, t]]

Each device looks tokens up in its share of the vocabulary, and the shares are added: all but one are zero, so the sum
is exact in any dtype. Backward each device sums what its own rows give to its share, in float32, and the sums of all
rows are reduced onto the layout of the table. Left to itself the compiler keeps the gradient of the whole table on
every device and reduces all of it.

Deliberately not here: the head, tied or not (vocabulary.py).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rstar2_jax.model import sharding

_TABLE, _TOKENS = ("vocab", None), ("rows", None)


class _How(NamedTuple):
    """Static: dtype of the states, ids in the whole table, layout of the mesh."""

    dtype: Any
    ids: int
    layout: sharding.Layout

    def places(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(row of each token in this device's share of the table, whether it lies there)."""
        axes, share = self.layout.axes("vocab"), self.share
        here = tokens - jax.lax.axis_index(axes) * share if axes else tokens
        return here, (here >= 0) & (here < share)

    @property
    def share(self) -> int:
        """Ids in the share of one device."""
        return self.ids // self.layout.shards("vocab")


def lookup(
    table: Float[Array, "v d"], tokens: Int[Array, "b t"], dtype: Any, layout: sharding.Layout | None = None
) -> Float[Array, "b t d"]:
    """The first states of the residual stream.

    Args:
        table: float32 master of the embedding.
        tokens: ids in [0, v).
        dtype: of the states.
        layout: where rows and table lie; None for one device.
    """
    if layout is None or layout.single:
        return jnp.take(table, tokens, axis=0).astype(dtype)
    return _spread(table, tokens, _How(jnp.dtype(dtype), len(table), layout))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread(table: Any, tokens: Any, how: _How) -> jax.Array:
    def local(share: Any, tokens: Any) -> jax.Array:
        here, known = how.places(tokens)
        found = jnp.where(known[..., None], jnp.take(share, here, axis=0, mode="clip"), 0)
        return how.layout.reduced(found, over="vocab", onto="sequence", dimension=1)

    states = ("rows", "sequence", None)
    return how.layout.spread(local, [_TABLE, _TOKENS], states)(table.astype(how.dtype), tokens)


def _spread_fwd(table: Any, tokens: Any, how: _How) -> Any:
    return _spread(table, tokens, how), tokens


def _spread_bwd(how: _How, tokens: Any, dstates: Any) -> Any:
    def local(dstates: Any, tokens: Any) -> jax.Array:
        here, known = how.places(tokens)
        rows = jnp.where(known, here, how.share)  # beyond the share: dropped

        def add(summed: Any, row: Any) -> Any:  # row by row, so that one row at a time is float32
            return summed.at[row[0]].add(row[1].astype(jnp.float32), mode="drop"), None

        summed, _ = jax.lax.scan(add, jnp.zeros((how.share, dstates.shape[-1]), jnp.float32), (rows, dstates))
        return how.layout.reduced(summed, over="rows", onto="embed", dimension=1)

    whole = ("rows", None, None)
    return how.layout.spread(local, [whole, _TOKENS], ("vocab", "embed"))(dstates, tokens), None


_spread.defvjp(_spread_fwd, _spread_bwd)
