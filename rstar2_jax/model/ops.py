"""The numerical pieces of the decoder: projections, gated activation, RMS norm, rotary positions, attention.

Every function is pure and takes its weights. Those that training goes through carry a hand-written backward pass: that
of a projection, since the transpose rule of a matmul gives a doubly transposed dot, at less than half of the plain
dot's rate on CPU; those of the others, since they keep their inputs alone and compute again what is cheap.

Deliberately not here: parameters (decoder.py) and attention over whole rows (attention.py).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

KEPT = "attention"  # what a rematerialisation policy may keep: the output and the normaliser of attention
MASKED = -1e30  # finite, so that a row whose keys are all masked is uniform and never NaN


@jax.custom_vjp
def linear(x: Float[Array, "... i"], w: Float[Array, "i o"]) -> Float[Array, "... o"]:
    """x @ w in the dtype of x; the gradient of w is accumulated in float32.

    Args:
        x: activations in the compute dtype.
        w: float32 master kernel, [in, out].
    """
    return x @ w.astype(x.dtype)


def _linear_fwd(x, w):
    return linear(x, w), (x, w)


def _linear_bwd(residuals, dy):
    x, w = residuals
    dx = jax.lax.dot_general(dy, w.astype(dy.dtype), (((dy.ndim - 1,), (1,)), ((), ())))
    dw = weight_gradient(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
    return dx.astype(x.dtype), dw.astype(w.dtype)


def weight_gradient(x: Float[Array, "n i"], dy: Float[Array, "n o"]) -> Float[Array, "i o"]:
    """x^T dy, accumulated in float32."""
    if x.shape[1] > dy.shape[1] and jax.default_backend() == "cpu":
        # XLA's products on CPUs are faster with the narrower operand on the left; without the barrier it would be
        # the same product again.
        return jax.lax.optimization_barrier(_over_rows(dy, x)).T
    return _over_rows(x, dy)


def _over_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


linear.defvjp(_linear_fwd, _linear_bwd)


@jax.custom_vjp
def silu_mul(gate: Float[Array, "... f"], up: Float[Array, "... f"]) -> Float[Array, "... f"]:
    """gate * sigmoid(gate) * up, keeping only its two inputs for the backward pass."""
    # One division instead of a reciprocal and a product: a rounding less, which real weights with large activations
    # show (SmolLM2's logits come 1.6 times closer to those of double precision).
    return gate / (1 + jnp.exp(-gate)) * up


def _silu_mul_fwd(gate, up):
    return silu_mul(gate, up), (gate, up)


def _silu_mul_bwd(residuals, dy):
    gate, up = jax.lax.optimization_barrier(residuals)  # else exp(-gate) would be kept from the forward pass
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu


silu_mul.defvjp(_silu_mul_fwd, _silu_mul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32, given back in the dtype of x."""
    x32 = x.astype(jnp.float32)
    return (x32 * _inverse_rms(x32, eps) * scale).astype(x.dtype)


def _inverse_rms(x32, eps):
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def _rms_norm_fwd(x, scale, eps):
    return rms_norm(x, scale, eps), (x, scale)


def _rms_norm_bwd(eps, residuals, dy):
    x, scale = residuals
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = jax.lax.optimization_barrier(_inverse_rms(x32, eps))  # else it would be kept as wide as x is
    pull = dy32 * scale
    along = jnp.mean(pull * x32, axis=-1, keepdims=True) * (inverse * inverse * inverse)
    dscale = jnp.sum(dy32 * x32 * inverse, axis=tuple(range(x.ndim - 1)))
    return (pull * inverse - x32 * along).astype(x.dtype), dscale


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def rotary_angles(
    positions: Int[Array, "b t"], head_dim: int, theta: float
) -> tuple[Float[Array, "b t h"], Float[Array, "b t h"]]:
    """(cos, sin) of position * theta^(-2i / head_dim) for i < head_dim / 2, in float32."""
    # One unit in the last place of a frequency is a visible angle at position 10,000: the power is rounded from double
    # and inverted in single precision, which gives the bits that torch computes.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = (float(theta) ** exponents.astype(np.float64)).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * (np.float32(1) / powers)
    return jnp.cos(angles), jnp.sin(angles)


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float
) -> tuple[Float[Array, "b t h"], Float[Array, "b t h"]]:
    """rotary_angles of positions below t, which index a row of t tokens; NaN for others.

    Looked up in a table of t rows: the compiler would else compute sines again for every head of every layer.
    """
    table = rotary_angles(jnp.arange(positions.shape[1])[None], head_dim, theta)
    cos, sin = (jnp.take(part[0], positions, axis=0, mode="fill", fill_value=jnp.nan) for part in table)
    return cos, sin


@jax.custom_vjp
def rotate(x: Float[Array, "b t n d"], cos: Float[Array, "b t h"], sin: Float[Array, "b t h"]) -> Array:
    """x with its halves (x1, x2) rotated to (x1 cos - x2 sin, x2 cos + x1 sin), the convention of Hugging Face.

    No gradient flows into the angles.
    """
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _rotate_fwd(x, cos, sin):
    return rotate(x, cos, sin), (cos, sin)


def _rotate_bwd(residuals, dy):
    cos, sin = residuals
    return rotate(dy, cos, -sin), None, None


rotate.defvjp(_rotate_fwd, _rotate_bwd)


def attend(
    q: Float[Array, "b k g t d"], k: Float[Array, "b k d s"], v: Float[Array, "b k s d"], allowed: Bool[Array, "b t s"]
) -> Float[Array, "b k g t d"]:
    """softmax(q k / sqrt(d), over allowed keys) v; scores and softmax in float32; g query heads share a kv head."""
    b, kv, g, t, d = q.shape
    # The heads of a group join the query axis: one batched matmul with more rows instead of a broadcast of the keys.
    scores = jnp.einsum("bktd,bkds->bkts", q.reshape(b, kv, g * t, d), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv, g, t, -1) * (d**-0.5)
    weights = jax.nn.softmax(jnp.where(allowed[:, None, None], scores, MASKED), axis=-1)
    weights = weights.astype(v.dtype).reshape(b, kv, g * t, -1)
    return jnp.einsum("bkts,bksd->bktd", weights, v).reshape(b, kv, g, t, d)


def group_queries(q: Float[Array, "b t h d"], kv_heads: int) -> Float[Array, "b k g t d"]:
    """Query heads in the groups that share a kv head."""
    b, t, h, d = q.shape
    return q.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)


def ungroup(out: Float[Array, "b k g t d"]) -> Float[Array, "b t h d"]:
    """The inverse of group_queries."""
    b, kv, g, t, d = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, kv * g, d)


def cached_attention(
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b k d s"],
    values: Float[Array, "b k s d"],
    positions: Int[Array, "b c"],
) -> Float[Array, "b c h d"]:
    """Attention of each query to the cache entries at or before its position; a padding column looks at entry 0."""
    allowed = jnp.arange(keys.shape[-1])[None, None, :] <= jnp.maximum(positions, 0)[:, :, None]
    return ungroup(attend(group_queries(q, keys.shape[1]), keys, values, allowed))


def write_cache(
    keys: Float[Array, "b k d s"],
    values: Float[Array, "b k s d"],
    new_keys: Float[Array, "b c k d"],
    new_values: Float[Array, "b c k d"],
    positions: Int[Array, "b c"],
) -> tuple[Float[Array, "b k d s"], Float[Array, "b k s d"]]:
    """(keys, values) with column c of row b written at entry positions[b, c].

    A negative position, or one beyond the cache, writes nothing.
    """
    # A negative index would wrap around to the end of the cache: padding is sent out of range and dropped there.
    entries = jnp.where(positions < 0, keys.shape[-1], positions)[:, None, :]
    rows = jnp.arange(keys.shape[0])[:, None, None]
    heads = jnp.arange(keys.shape[1])[None, :, None]
    new_keys, new_values = new_keys.transpose(0, 2, 1, 3), new_values.transpose(0, 2, 1, 3)
    keys = keys.at[rows, heads, :, entries].set(new_keys.astype(keys.dtype), mode="drop")
    return keys, values.at[rows, heads, entries].set(new_values.astype(values.dtype), mode="drop")
