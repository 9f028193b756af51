"""Causal attention over whole rows on CPUs, forward and backward: attention_native.c behind XLA's foreign function
interface.

What XLA makes of attention.py passes over scores in memory several times and between layouts, and works on blocks that
nobody sees. The part in C keeps a block's scores in the cache, stops at the diagonal and begins at the segment.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rstar2_jax.model import native, ops

_FORWARD, _BACKWARD = "rstar2_attention_forward", "rstar2_attention_backward"


def available() -> bool:
    """Whether arrays of this process lie on CPUs and the part in C is there."""
    loss = "attention in training runs without its part in C, at about half the speed"
    return native.available("attention_native.c", (_FORWARD, _BACKWARD), loss)


@jax.custom_vjp
def causal(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """attention.causal in float32; of padding, each run is a segment of its own."""
    return _fwd(q, k, v, segment_ids)[0]


def _fwd(q: Any, k: Any, v: Any, segments: Any) -> Any:
    b, t, h, _ = q.shape
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, h, t, 2), jnp.float32)
    made = jax.ffi.ffi_call(_FORWARD, results)(q, k, v, segments)
    out, statistics = (checkpoint_name(x, ops.KEPT) for x in made)
    return out, (q, k, v, segments, statistics)


def _bwd(residuals: Any, dout: Any) -> Any:
    q, k, v, *_ = residuals
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    return *jax.ffi.ffi_call(_BACKWARD, results)(*residuals, dout), None


causal.defvjp(_fwd, _bwd)
