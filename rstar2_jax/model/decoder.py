"""One Flax decoder for Llama, Qwen2 and Qwen3: whole rows for the learner, tokens over pages for the engine.

Parameters are float32 masters in a plain nested dict with unrolled layers; kernels are [in, out]:
    embed/embedding [V, D]; layers_i/{attn_norm, mlp_norm}/scale [D]; layers_i/attn/{q, k, v, o}/kernel (+ bias);
    layers_i/attn/{q_norm, k_norm}/scale [Dh]; layers_i/mlp/{gate, up, down}/kernel; norm/scale [D];
    head/kernel [D, V] where the head is not tied.

Layers are unrolled so that the cache is one buffer a layer and each can be donated: a cache that travels through a
scan is copied at every step.

Deliberately not here: rope scaling, sliding windows, mixtures of experts, dropout. Checkpoints that need them are
refused in hf.py.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from rstar2_jax.model import attention, ops, pages
from rstar2_jax.settings import Model

Params = dict[str, Any]
Cache = tuple[tuple[jax.Array, jax.Array], ...]


class Places(NamedTuple):
    """Where the tokens of a step stand, one a row.

    positions: i32[b], index of each token in its sequence, negative for a row that takes no part: nothing is written
    for it; tables: i32[b, t], pages of its sequence in order, of which those that no position reaches may be any.
    """

    positions: Any
    tables: Any


_ROW = 1 << 16  # numbers drawn at once for a small leaf
_SHAPE_ONLY = nn.initializers.zeros  # the modules declare shapes; init_params draws the values, leaf by leaf


class Linear(nn.Module):
    """Projection to `features` along the last axis, with a bias on demand."""

    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """x @ kernel (+ bias) in the dtype of x."""
        y = ops.linear(x, self.param("kernel", _SHAPE_ONLY, (x.shape[-1], self.features), jnp.float32))
        if self.bias:
            y = y + self.param("bias", _SHAPE_ONLY, (self.features,), jnp.float32).astype(x.dtype)
        return y


class RmsNorm(nn.Module):
    """RMS norm with a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """See ops.rms_norm."""
        return ops.rms_norm(x, self.param("scale", _SHAPE_ONLY, (x.shape[-1],), jnp.float32), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    settings: Model
    layout: Any = None

    def setup(self) -> None:
        """Declare the projections (and the norms of q and k where the family has them)."""
        s = self.settings
        self.q = Linear(s.heads * s.head_dim, bias=s.qkv_bias)
        self.k = Linear(s.kv_heads * s.head_dim, bias=s.qkv_bias)
        self.v = Linear(s.kv_heads * s.head_dim, bias=s.qkv_bias)
        self.o = Linear(s.d_model)
        if s.qk_norm:
            self.q_norm, self.k_norm = RmsNorm(s.rms_eps), RmsNorm(s.rms_eps)

    def _project(self, x, angles):
        s = self.settings
        q = self.q(x).reshape(*x.shape[:2], s.heads, s.head_dim)
        k = self.k(x).reshape(*x.shape[:2], s.kv_heads, s.head_dim)
        v = self.v(x).reshape(*x.shape[:2], s.kv_heads, s.head_dim)
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return ops.rotate(q, *angles), ops.rotate(k, *angles), v

    def __call__(self, x: Float[Array, "b t d"], angles: Any, segment_ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Causal attention within segments."""
        q, k, v = self._project(x, angles)
        return self.o(attention.causal(q, k, v, segment_ids, self.layout).reshape(*x.shape[:2], -1))

    def extend(self, x: Float[Array, "b c d"], angles: Any, positions: Int[Array, "b c"], cache: Any) -> Any:
        """(output, cache) after the chunk's keys and values are written at their positions."""
        q, k, v = self._project(x, angles)
        keys, values = ops.write_cache(cache[0], cache[1], k, v, positions)
        out = ops.cached_attention(q, keys.astype(q.dtype), values.astype(q.dtype), positions)
        return self.o(out.reshape(*x.shape[:2], -1)), (keys, values)

    def step(self, x: Float[Array, "b d"], angles: Any, places: Places, cache: Any) -> Any:
        """(output, cache) of one token a row after its key and value are written."""
        q, k, v = (part[:, 0] for part in self._project(x[:, None], angles))
        out, cache = pages.step(q, (k, v), cache, *places)
        return self.o(out.reshape(x.shape[0], -1)), cache


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    settings: Model
    layout: Any = None

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """The gated feed-forward block."""
        s = self.settings
        gate, up = self._inner(Linear(s.d_mlp, name="gate")(x)), self._inner(Linear(s.d_mlp, name="up")(x))
        return Linear(s.d_model, name="down")(self._inner(ops.silu_mul(gate, up)))

    def _inner(self, x):
        """The compiler would else move tokens between devices and back, to follow the residual stream."""
        return x if self.layout is None else self.layout.constrain(x, "rows", None, "mlp")


class Layer(nn.Module):
    """One pre-norm block.

    Args:
        settings: sizes and family.
        layout: how whole rows lie on a mesh (sharding.Layout); None for one device.
    """

    settings: Model
    layout: Any = None

    def setup(self) -> None:
        """Declare the two halves and their norms."""
        self.attn_norm, self.attn = RmsNorm(self.settings.rms_eps), Attention(self.settings, self.layout)
        self.mlp_norm, self.mlp = RmsNorm(self.settings.rms_eps), Mlp(self.settings, self.layout)

    def __call__(self, x: Float[Array, "b t d"], angles: Any, segment_ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """The block over whole rows."""
        x = self._split(x + self._split(self.attn(self._whole(self.attn_norm(x)), angles, segment_ids)))
        return self._split(x + self._split(self.mlp(self._whole(self.mlp_norm(x)))))

    def _whole(self, x):
        return x if self.layout is None else self.layout.constrain(x, "rows", None, None)

    def _split(self, x):
        return x if self.layout is None else self.layout.constrain(x, "rows", "sequence", None)

    def extend(self, x: Float[Array, "b c d"], angles: Any, positions: Int[Array, "b c"], cache: Any) -> Any:
        """The block over a chunk: (output, cache)."""
        attended, cache = self.attn.extend(self.attn_norm(x), angles, positions, cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache

    def step(self, x: Float[Array, "b d"], angles: Any, places: Places, cache: Any) -> Any:
        """The block over one token a row: (output, cache)."""
        attended, cache = self.attn.step(self.attn_norm(x), angles, places, cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nn.Module):
    """Hidden states and logits of a causal language model."""

    settings: Model

    def setup(self) -> None:
        """Declare embedding, layers, final norm and (untied) head."""
        s = self.settings
        self.embed = nn.Embed(s.vocab_size, s.d_model, embedding_init=_SHAPE_ONLY, param_dtype=jnp.float32)
        self.layers = [Layer(s) for _ in range(s.layers)]
        self.norm = RmsNorm(s.rms_eps)
        if not s.tie_embeddings:
            self.head = _Head(s.vocab_size)

    def __call__(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"], segment_ids: Int[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        """Hidden states after the final norm.

        Args:
            tokens: ids in [0, vocab_size).
            positions: rotary position of each token, counted from 0 within its segment.
            segment_ids: tokens attend causally to tokens with the same id in their row; 0 is padding, and what comes
                out there is finite and without meaning.
        """
        s = self.settings
        x = self.embed(tokens).astype(s.compute_dtype)
        angles = ops.rotary_angles(positions, s.head_dim, s.rope_theta)
        for layer in self.layers:
            x = layer(x, angles, segment_ids)
        return self.norm(x)

    def extend(
        self, tokens: Int[Array, "b c"], positions: Int[Array, "b c"], cache: Cache
    ) -> tuple[Float[Array, "b c d"], Cache]:
        """(hidden states after the final norm, cache) of a chunk that continues what the cache holds.

        Args:
            tokens: ids of the chunk; one column for decoding, more for prefilling.
            positions: index of each token in its sequence, which is also its cache entry; entries 0..position must
                have been written by this or earlier chunks. Negative is a padding column: nothing is written for it
                and its output has no meaning.
            cache: as init_cache makes it; donate it, since the returned one takes its place.
        """
        s = self.settings
        x = self.embed(tokens).astype(s.compute_dtype)
        angles = ops.rotary_angles(jnp.maximum(positions, 0), s.head_dim, s.rope_theta)
        extended = []
        for layer, entry in zip(self.layers, cache, strict=True):
            x, entry = layer.extend(x, angles, positions, entry)
            extended.append(entry)
        return self.norm(x), tuple(extended)

    def step(self, tokens: Int[Array, " b"], places: Places, cache: Cache) -> tuple[Float[Array, "b d"], Cache]:
        """(hidden states after the final norm, cache) of one token a row over a pool of pages.

        All rows write before any of them attends, so that several rows may carry consecutive tokens of one sequence.

        Args:
            tokens: one id a row.
            places: where they stand; what stands before a token must have been written by this or an earlier call.
            cache: as init_cache makes it with a page for a row; donate it, since the returned one takes its place.
        """
        s = self.settings
        x = self.embed(tokens).astype(s.compute_dtype)
        angles = ops.rotary_angles(jnp.maximum(places.positions, 0)[:, None], s.head_dim, s.rope_theta)
        stepped = []
        for layer, entry in zip(self.layers, cache, strict=True):
            x, entry = layer.step(x, angles, places, entry)
            stepped.append(entry)
        return self.norm(x), tuple(stepped)

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """float32 logits of hidden states; a tied head is the embedding transposed."""
        if not self.settings.tie_embeddings:
            return self.head(hidden)
        table = self.embed.embedding.astype(hidden.dtype)
        contract = (((hidden.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(hidden, table, contract, preferred_element_type=jnp.float32)


class _Head(nn.Module):
    """Untied projection to the vocabulary, with float32 output."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", _SHAPE_ONLY, (x.shape[-1], self.features), jnp.float32).astype(x.dtype)
        contract = (((x.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, kernel, contract, preferred_element_type=jnp.float32)


def _declare(settings: Model, key: jax.Array) -> Params:
    one = jnp.zeros((1, 1), jnp.int32)
    variables: Any = Decoder(settings).init(key, one, one, one + 1, method=lambda m, t, p, s: m.logits(m(t, p, s)))
    return variables["params"]


@functools.lru_cache(maxsize=16)
def _abstract(settings: Model) -> Params:
    """Traced once for each model: the weight exchange asks at every step."""
    return jax.eval_shape(lambda key: _declare(settings, key), jax.random.key(0))


def abstract_params(settings: Model) -> Params:
    """The tree of the parameters with shapes and dtypes only."""
    return jax.tree.map(lambda leaf: leaf, _abstract(settings))  # a tree of its own: the cached one stays untouched


def init_params(settings: Model, key: jax.Array) -> Params:
    """Random float32 parameters: kernels normal with variance 1 / fan_in (the two projections back into the residual
    stream 1 / (2 layers) of that), embedding normal with variance 1 / d_model, so that a token outweighs what the first
    layers add to it, norms one, biases zero.

    Each leaf is drawn under its own key, made from its path. A program for each shape would take longer to compile than
    to run: small leaves are cut from one row of numbers, which begins with those that a shorter one has.

    Args:
        key: PRNG key; the same key gives the same parameters.
    """

    def draw(path, leaf):
        names = [entry.key for entry in path]
        if names[-1] == "bias":
            return jnp.array(np.zeros(leaf.shape, leaf.dtype))
        if names[-1] == "scale":
            return jnp.array(np.ones(leaf.shape, leaf.dtype))
        deviation = leaf.shape[-1 if names[-1] == "embedding" else 0] ** -0.5
        if names[-2] in ("o", "down"):
            deviation *= (2 * settings.layers) ** -0.5
        own = jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))
        if leaf.size > _ROW or isinstance(key, Tracer):
            return jax.random.normal(own, leaf.shape, leaf.dtype) * deviation
        row = np.asarray(jax.random.normal(own, (_ROW,), leaf.dtype))
        return jnp.array(row[: leaf.size].reshape(leaf.shape) * row.dtype.type(deviation))

    return jax.tree_util.tree_map_with_path(draw, abstract_params(settings))


def init_cache(settings: Model, batch: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache: for each layer (keys [batch, kv_heads, head_dim, length], values [batch, kv_heads, length,
    head_dim]).

    Both matmuls of attention then read the cache as a plain right-hand side, which is seven times faster for one
    decode step on CPU than a cache with the heads innermost. Callers may rely on rows being the first axis, on
    nothing else.

    Args:
        batch: rows of every later call of extend; pages of a pool for step.
        length: longest sequence in tokens; tokens of a page.
        dtype: dtype that keys and values are kept in.
    """
    heads, dim = settings.kv_heads, settings.head_dim
    return tuple(
        (jnp.zeros((batch, heads, dim, length), dtype), jnp.zeros((batch, heads, length, dim), dtype))
        for _ in range(settings.layers)
    )
