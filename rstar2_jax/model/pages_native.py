"""A step of attention over pages on CPUs: pages_native.c behind XLA's foreign function interface.

What XLA makes of pages.py copies every page before it reads it, which takes three times as long as the reading does,
and then sums with a loop of its own for each product. The part in C reads pages where they lie.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from rstar2_jax.model import native

_NAME = "rstar2_pages_step"


def available() -> bool:
    """Whether arrays of this process lie on CPUs and the part in C is there."""
    loss = "attention over pages runs without its part in C, at about half the speed"
    return native.available("pages_native.c", (_NAME,), loss)


def step(
    q: Float[Array, "b h d"],
    keys: Float[Array, "n k d p"],
    values: Float[Array, "n k p d"],
    new_keys: Float[Array, "b k d"],
    new_values: Float[Array, "b k d"],
    positions: Int[Array, " b"],
    tables: Int[Array, "b t"],
) -> tuple[Float[Array, "b h d"], Float[Array, "n k d p"], Float[Array, "n k p d"]]:
    """(attention, keys, values) as pages.write and then pages.attention give them, one dtype throughout.

    A row with a negative position writes nothing and gets zeros. An error of the runtime names a table that points
    outside the pool or a position beyond its table.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values)]
    call = jax.ffi.ffi_call(_NAME, results, input_output_aliases={1: 1, 2: 2})
    out, keys, values = call(q, keys, values, new_keys, new_values, positions, tables)
    return out, keys, values
