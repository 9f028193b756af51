"""Fused attention kernels of a vendor behind the portable function, for devices that have them.

    aiter   AMD's flash attention for sequences of unlike length (gfx942), a private module of ROCm's jaxlib

A kernel that is asked for and absent is refused before anything runs. Its numbers are held to the portable form by a
test that runs where the kernel does; nothing here has run on a device yet.

Deliberately not here: the choice of the kernel (attention.py) and kernels for decoding.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SHORTEST_MEAN = 16  # tokens: bounds how many segments the rows of a batch can hold
_AITER = "jax._src.aiter.aiter_mha"


def require(name: str, compute_dtype: str) -> None:
    """Raise ValueError where the kernel cannot be used here: it is not installed, or computes in another dtype."""
    if name == "portable":
        return
    try:
        importlib.import_module(_AITER)
    except ImportError as error:
        raise ValueError(
            f"Learner.attention = {name!r}, but this jaxlib has no {_AITER} ({error}): install jax-rocm7-plugin and "
            f"jax-rocm7-pjrt on a ROCm machine, or set Learner.attention = 'portable'"
        ) from error
    if jax.default_backend() == "cpu":
        raise ValueError(f"Learner.attention = {name!r} needs a ROCm device, this process has CPUs: set 'portable'")
    if compute_dtype != "bfloat16":
        raise ValueError(
            f"Learner.attention = {name!r} computes in bfloat16, but Model.compute_dtype = {compute_dtype!r}: set one "
            f"of them to fit the other"
        )


def aiter(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """Causal attention within segments by AITER; NaN throughout where rows hold more segments than it was built for
    (one for SHORTEST_MEAN tokens), so that a wrong boundary can never pass unseen."""
    kernel: Any = importlib.import_module(_AITER)
    b, t, _, d = q.shape
    bounds, fitting = boundaries(segment_ids)
    flat = [x.reshape(b * t, *x.shape[2:]) for x in (q, k, v)]
    found = kernel.flash_attn_varlen(
        *flat, bounds, bounds, max_seqlen_q=t, max_seqlen_k=t, causal=True, softmax_scale=d**-0.5
    )
    out = found[0] if isinstance(found, tuple) else found
    return jnp.where(fitting, out, jnp.nan).astype(q.dtype).reshape(q.shape)


def boundaries(segment_ids: Int[Array, "b t"]) -> tuple[Int[Array, " n"], jax.Array]:
    """(where each run of one id begins in the flattened rows, then their total for the rest; whether all runs fit)."""
    b, t = segment_ids.shape
    begins = jnp.concatenate([jnp.ones((b, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1).reshape(-1)
    most = b * -(-t // SHORTEST_MEAN)
    (starts,) = jnp.nonzero(begins, size=most, fill_value=b * t)
    return jnp.append(starts, b * t).astype(jnp.int32), begins.sum() <= most
