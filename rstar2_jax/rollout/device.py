"""The device side of the embedded engine: prefill, decode and scoring as jitted functions of fixed shapes.

Every call of a run has the same shapes, whatever the occupancy: decode always [slots, 1], prefill always
[prefill_rows, chunk] at chunk borders counted from the start of the sequence. That makes a row's numbers independent of
its slot and its neighbours, bit for bit. A row that takes no part has position -1.

Deliberately not here: who sits in which slot (slots.py), threads and waiting (jax_engine.py).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rstar2_jax.model import decoder
from rstar2_jax.rollout import sampler
from rstar2_jax.settings import Model

MAX_STOP_IDS = 8
MAX_DECODE_STEPS = 32  # columns of what one decode call gives back
_NO_STOP = -2  # never equal to an id, nor to the -1 of a row that is not live


class Rows(NamedTuple):
    """What decoding needs to know of each slot; host arrays, sent with each call.

    token: last id of the row, not yet in the cache; position: its index, -1 for a row that takes no part;
    remaining: ids the row may still sample; seed_words: u32[b, 2]; stop_ids: i32[b, MAX_STOP_IDS].
    """

    token: Any
    position: Any
    remaining: Any
    seed_words: Any
    temperature: Any
    top_k: Any
    top_p: Any
    stop_ids: Any


def empty_rows(slots: int) -> Rows:
    """Rows of which none takes part."""
    return Rows(
        token=np.zeros(slots, np.int32),
        position=np.full(slots, -1, np.int32),
        remaining=np.zeros(slots, np.int32),
        seed_words=np.zeros((slots, 2), np.uint32),
        temperature=np.ones(slots, np.float32),
        top_k=np.full(slots, -1, np.int32),
        top_p=np.ones(slots, np.float32),
        stop_ids=np.full((slots, MAX_STOP_IDS), _NO_STOP, np.int32),
    )


def padded_stop_ids(stop_ids: Sequence[int]) -> np.ndarray:
    """i32[MAX_STOP_IDS]: the stop ids of a row."""
    padded = np.full(MAX_STOP_IDS, _NO_STOP, np.int32)
    padded[: len(stop_ids)] = stop_ids
    return padded


@functools.partial(jax.jit, donate_argnums=(0,))
def copy(cache: decoder.Cache, sources: Int[Array, " r"], targets: Int[Array, " r"]) -> decoder.Cache:
    """The cache with whole rows copied. A target beyond the last slot takes no part."""
    return jax.tree.map(lambda leaf: leaf.at[targets].set(leaf[sources], mode="drop"), cache)


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def prefill(
    model: Model,
    params: Any,
    cache: decoder.Cache,
    slots: Int[Array, " r"],
    tokens: Int[Array, "r c"],
    positions: Int[Array, "r c"],
) -> decoder.Cache:
    """The cache after one chunk of each named slot. A slot number beyond the last is a row that takes no part."""
    taken = jax.tree.map(lambda leaf: leaf[slots], cache)
    _, taken = _apply(model, params, decoder.Decoder.extend, tokens, positions, taken)
    return jax.tree.map(lambda leaf, rows: leaf.at[slots].set(rows, mode="drop"), cache, taken)


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def decode(
    model: Model,
    params: Any,
    cache: decoder.Cache,
    rows: Rows,
    max_steps: Int[Array, ""],
    leave_after: Int[Array, ""],
) -> tuple[decoder.Cache, Int[Array, "b n"], Float[Array, "b n"]]:
    """(cache, ids, log-probabilities) of up to max_steps ids a row; -1 stands where a row sampled nothing.

    Args:
        max_steps: at most MAX_DECODE_STEPS.
        leave_after: return as soon as so many rows have ended (their places are wanted).
    """
    slots = rows.token.shape[0]

    def wanted(state):
        step, _, position, _, ended, *_ = state
        return (step < max_steps) & jnp.any(position >= 0) & (ended < leave_after)

    def advance(state):
        step, token, position, remaining, ended, cache, ids, logprobs = state
        hidden, cache = _apply(model, params, decoder.Decoder.extend, token[:, None], position[:, None], cache)
        logits = _apply(model, params, decoder.Decoder.logits, hidden[:, 0])
        keys = sampler.position_keys(rows.seed_words, position + 1)
        token, logprob = sampler.sample(keys, logits, rows.temperature, rows.top_k, rows.top_p)
        live = position >= 0
        over = live & (jnp.any(token[:, None] == rows.stop_ids, axis=-1) | (remaining <= 1))
        ids = jax.lax.dynamic_update_slice(ids, jnp.where(live, token, -1)[:, None], (0, step))
        logprobs = jax.lax.dynamic_update_slice(logprobs, jnp.where(live, logprob, 0.0)[:, None], (0, step))
        position = jnp.where(live & ~over, position + 1, -1)
        return step + 1, token, position, remaining - 1, ended + jnp.sum(over), cache, ids, logprobs

    ids = jnp.full((slots, MAX_DECODE_STEPS), -1, jnp.int32)
    logprobs = jnp.zeros((slots, MAX_DECODE_STEPS), jnp.float32)
    start = (0, rows.token, rows.position, rows.remaining, 0, cache, ids, logprobs)
    *_, cache, ids, logprobs = jax.lax.while_loop(wanted, advance, start)
    return cache, ids, logprobs


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def score(
    model: Model,
    params: Any,
    cache: decoder.Cache,
    tokens: Int[Array, "1 c"],
    positions: Int[Array, "1 c"],
    targets: Int[Array, "1 c"],
) -> tuple[decoder.Cache, Float[Array, "1 c"]]:
    """(cache, log-probability of each target given everything up to its token) of one chunk of one row."""
    hidden, cache = _apply(model, params, decoder.Decoder.extend, tokens, positions, cache)
    logits = _apply(model, params, decoder.Decoder.logits, hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return cache, chosen - jax.nn.logsumexp(logits, axis=-1)


def resident(params: Any, model: Model) -> Any:
    """The parameters on the device, in the dtype that they are computed with.

    Norm scales stay float32, as the decoder applies them in float32: the logits are those of the float32 masters.
    """

    def place(path, leaf):
        kept = getattr(path[-1], "key", None) == "scale"
        return jax.device_put(jnp.asarray(leaf, jnp.float32 if kept else model.compute_dtype))

    return jax.tree_util.tree_map_with_path(place, params)


def checksums(params: Any) -> list[int]:
    """CRC-32 of the bytes of each leaf."""
    return [zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data) for leaf in jax.tree.leaves(params)]


def _apply(model: Model, params: Any, method: Any, *args: Any) -> Any:
    return decoder.Decoder(model).apply({"params": params}, *args, method=method)
