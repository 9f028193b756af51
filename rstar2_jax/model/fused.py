"""Fused attention kernels of a vendor behind the portable function, for devices that have them.

    aiter               AMD's flash attention for sequences of unlike length (gfx942), a private module of ROCm's jaxlib
    transformer_engine  TransformerEngine's for JAX, 2.10 or later, which on ROCm runs AITER's and CK's kernels

A kernel that is asked for and absent is refused before anything runs. Its numbers are held to the portable form by a
test that runs where the kernel does; nothing here has run on a device yet.

Both kernels are told of runs of one id, padding like any other: then no token lies between the segments, and padding
sees its own run only. One run for SHORTEST_MEAN tokens is what they are built for; rows that hold more come out as NaN
throughout, so that a wrong boundary can never pass unseen.

Deliberately not here: the choice of the kernel (attention.py) and kernels for decoding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rstar2_jax.model import ops

SHORTEST_MEAN = 16  # tokens: bounds how many segments the rows of a batch can hold
_AITER = "jax._src.aiter.aiter_mha"
_ENGINE = "transformer_engine.jax.attention"
_PROCESS = contextlib.ExitStack()  # what TransformerEngine is told, never taken back
_SOURCES = {  # module, where it is looked for, how to have it
    "aiter": (_AITER, "jaxlib", "jax-rocm7-plugin and jax-rocm7-pjrt"),
    "transformer_engine": (
        _ENGINE,
        "environment",
        "TransformerEngine 2.10 or later from github.com/ROCm/TransformerEngine, built with NVTE_FRAMEWORK=jax,",
    ),
}


def require(name: str, compute_dtype: str) -> None:
    """Raise ValueError where the kernel cannot be used here: it is not installed, or computes in another dtype."""
    if name == "portable":
        return
    module, place, remedy = _SOURCES[name]
    instead = f"install {remedy} on a ROCm machine, or set Learner.attention = 'portable'"
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:  # a library of its own may not load
        raise ValueError(
            f"Learner.attention = {name!r}, but this {place} has no {module} ({error}): {instead}"
        ) from error
    if name == "transformer_engine" and not hasattr(found, "AttnSoftmaxType"):
        raise ValueError(f"Learner.attention = {name!r}, but the {module} here is older than 2.10: {instead}")
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
    """Causal attention within segments by AITER; NaN where the batch holds more segments than it was built for."""
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
    begins = _begins(segment_ids).reshape(-1)
    most = b * _most(t)
    (starts,) = jnp.nonzero(begins, size=most, fill_value=b * t)
    return jnp.append(starts, b * t).astype(jnp.int32), begins.sum() <= most


def transformer_engine(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], segment_ids: Int[Array, "b t"]
) -> Float[Array, "b t h d"]:
    """Causal attention within segments by TransformerEngine; NaN where a row holds more segments than it was built for.

    Raises:
        ValueError: it has no fused kernel for arrays of these sizes.
    """
    engine = _engine()
    lengths, starts, fitting = runs(segment_ids)
    asked = {
        "attn_bias_type": engine.AttnBiasType.NO_BIAS,
        "attn_mask_type": engine.AttnMaskType.PADDING_CAUSAL_MASK,  # the only causal one that it takes with segments
        "qkv_layout": engine.QKVLayout.THD_THD_THD,  # rows stay [b, t], each of several segments
        "softmax_type": engine.AttnSoftmaxType.VANILLA_SOFTMAX,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": _most(segment_ids.shape[1]),
    }
    _require_kernel(engine.is_fused_attn_kernel_available, q, k, asked)
    out = engine.fused_attn(
        qkv=(q, k, v),
        bias=None,
        sequence_descriptor=engine.SequenceDescriptor.from_seqlens_and_offsets((lengths, lengths), (starts, starts)),
        seed=None,
        scaling_factor=q.shape[-1] ** -0.5,
        context_checkpoint_name=ops.KEPT,
        **asked,
    )
    return jnp.where(fitting, out, jnp.nan).astype(q.dtype)


def runs(segment_ids: Int[Array, "b t"]) -> tuple[Int[Array, "b t"], Int[Array, "b t+1"], jax.Array]:
    """(lengths of each row's runs of one id, where they begin in the row, both followed by -1; whether all runs fit).

    No end follows the last beginning, as one does in TransformerEngine's own example: it joins the rows' numbers by
    dropping -1, and one beginning too many in a row would shift those of the rows after it.
    """
    b, t = segment_ids.shape
    begins = _begins(segment_ids)
    starts = jnp.sort(jnp.where(begins, jnp.arange(t), t), axis=1)
    starts = jnp.concatenate([starts, jnp.full((b, 1), t)], axis=1).astype(jnp.int32)
    lengths = jnp.where(starts[:, :-1] < t, starts[:, 1:] - starts[:, :-1], -1)
    return lengths, jnp.where(starts < t, starts, -1), (begins.sum(axis=1) <= _most(t)).all()


@functools.cache
def _engine() -> Any:
    """TransformerEngine's module, told that no axis of a mesh is its own to split: each call is one device's part.

    It refuses to compute before it is told, and asks again in backward passes and lowering: hence once for the process.
    """
    sharding: Any = importlib.import_module("transformer_engine.jax.sharding")
    _PROCESS.enter_context(sharding.global_shard_guard(sharding.MeshResource()))
    return importlib.import_module(_ENGINE)


def _require_kernel(available: Callable[..., bool], q: jax.Array, k: jax.Array, asked: dict[str, Any]) -> None:
    """Raise ValueError where TransformerEngine would compute this in another way than by a fused kernel."""
    (b, t, heads, d), kv_heads = q.shape, k.shape[2]
    sizes = {"batch_size": b, "q_num_heads": heads, "kv_num_heads": kv_heads, "q_max_seqlen": t, "kv_max_seqlen": t}
    kinds = {"q_dtype": q.dtype, "kv_dtype": k.dtype, "head_dim_qk": d, "head_dim_v": d}
    known = inspect.signature(available).parameters  # 2.20 also asks for the rows and their segments
    if not available(**{name: value for name, value in (asked | sizes | kinds).items() if name in known}):
        raise ValueError(
            f"Learner.attention = 'transformer_engine', but it has no fused kernel for {q.dtype} rows of {t} tokens, "
            f"{heads} heads over {kv_heads} of {d}: unset NVTE_FUSED_ATTN if it is 0 (NVTE_LOG_CK_CONFIG=1 prints the "
            f"reason), or set Learner.attention = 'portable'"
        )


def _begins(segment_ids: Int[Array, "b t"]) -> jax.Array:
    """Where in its row a run of one id begins."""
    first = jnp.ones((len(segment_ids), 1), bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def _most(tokens: int) -> int:
    """The runs that a row is built for."""
    return -(-tokens // SHORTEST_MEAN)


KERNELS = {"aiter": aiter, "transformer_engine": transformer_engine}
