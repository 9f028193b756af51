"""The device side of the embedded engine: one jitted function of one shape for all that it computes of a sequence.

A step moves `lanes` tokens, whatever they are: the next id of a row that samples, or an id of a prompt that is written
into the cache. So prefilling goes on beside decoding, and every key and value, sampled or given, comes out of the same
arithmetic: a row's numbers are the same bits in every lane, beside any neighbours, and when they are computed again
after their pages were given away. A lane that takes no part has position -1.

Deliberately not here: who sits in which lane (slots.py), which pages are whose (kv_cache.py), threads and waiting
(jax_engine.py).
"""

from __future__ import annotations

import dataclasses
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
MAX_STEPS = 32  # columns of what one call takes and gives back
COPIED_PAGES = 8  # of one call of copy
_NO_STOP = -2  # never equal to an id, nor to the -1 of a row that is not live


class Rows(NamedTuple):
    """What a call needs to know of each lane; host arrays, sent with it.

    token: last id of the row that samples in this lane, not yet in the cache; position: its index, -1 for a lane in
    which nothing is sampled; start: step of the call in which it begins; remaining: ids it may still sample;
    seed_words: u32[b, 2]; stop_ids: i32[b, MAX_STOP_IDS]; table: i32[b, t], pages of the row that sits in the lane.
    """

    token: Any
    position: Any
    start: Any
    remaining: Any
    seed_words: Any
    temperature: Any
    top_k: Any
    top_p: Any
    stop_ids: Any
    table: Any


class Given(NamedTuple):
    """Ids that a call writes into the cache: i32[MAX_STEPS, b] each.

    token, and position in its sequence, of the id that a lane carries in a step, -1 where it carries none; owner: the
    lane whose table holds the sequence.
    """

    token: Any
    position: Any
    owner: Any


def empty_rows(lanes: int, pages: int) -> Rows:
    """Lanes of which none samples, with tables of so many pages."""
    return Rows(
        token=np.zeros(lanes, np.int32),
        position=np.full(lanes, -1, np.int32),
        start=np.zeros(lanes, np.int32),
        remaining=np.zeros(lanes, np.int32),
        seed_words=np.zeros((lanes, 2), np.uint32),
        temperature=np.ones(lanes, np.float32),
        top_k=np.full(lanes, -1, np.int32),
        top_p=np.ones(lanes, np.float32),
        stop_ids=np.full((lanes, MAX_STOP_IDS), _NO_STOP, np.int32),
        table=np.zeros((lanes, pages), np.int32),
    )


def nothing_given(lanes: int) -> Given:
    """No id to write in any step."""
    shape = MAX_STEPS, lanes
    return Given(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32))


def padded_stop_ids(stop_ids: Sequence[int]) -> np.ndarray:
    """i32[MAX_STOP_IDS]: the stop ids of a row."""
    padded = np.full(MAX_STOP_IDS, _NO_STOP, np.int32)
    padded[: len(stop_ids)] = stop_ids
    return padded


@functools.partial(jax.jit, donate_argnums=(0,))
def copy(cache: decoder.Cache, sources: Int[Array, " c"], targets: Int[Array, " c"]) -> decoder.Cache:
    """The cache with whole pages copied, all read before any is written. A target beyond the last takes no part."""
    return jax.tree.map(lambda leaf: leaf.at[targets].set(leaf[sources], mode="drop"), cache)


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def step(
    model: Model,
    params: Any,
    cache: decoder.Cache,
    rows: Rows,
    given: Given,
    steps: Int[Array, ""],
    leave_after: Int[Array, ""],
) -> tuple[decoder.Cache, Int[Array, "b n"], Float[Array, "b n"], Int[Array, ""]]:
    """(cache, ids, log-probabilities, steps done) of up to `steps` steps; -1 stands where a lane sampled nothing.

    Args:
        steps: at most MAX_STEPS.
        leave_after: return as soon as so many rows have ended (their places are wanted).
    """
    lanes = rows.token.shape[0]
    last_given = jnp.max(jnp.where(jnp.any(given.position >= 0, axis=1), jnp.arange(1, MAX_STEPS + 1), 0))

    def wanted(state):
        number, _, position, _, ended, *_ = state
        return (number < steps) & (jnp.any(position >= 0) | (number < last_given)) & (ended < leave_after)

    def advance(state):
        number, token, position, remaining, ended, cache, ids, logprobs = state
        written = Given(*(jax.lax.dynamic_index_in_dim(part, number, keepdims=False) for part in given))
        live, carries = (position >= 0) & (rows.start <= number), written.position >= 0
        tokens, places = jnp.where(carries, written.token, token), jnp.where(live, position, -1)
        places = jnp.where(carries, written.position, places)
        owners = jnp.where(carries, written.owner, jnp.arange(lanes))
        where = decoder.Places(places, rows.table[owners])
        hidden, cache = _apply(model, params, decoder.Decoder.step, tokens, where, cache)
        token, logprob = jax.lax.cond(
            jnp.any(live),
            functools.partial(_sample, model),
            lambda *_: (jnp.zeros(lanes, jnp.int32), jnp.zeros(lanes, jnp.float32)),
            *(params, hidden, position, rows),
        )
        over = live & (jnp.any(token[:, None] == rows.stop_ids, axis=-1) | (remaining <= 1))
        ids = jax.lax.dynamic_update_slice(ids, jnp.where(live, token, -1)[:, None], (0, number))
        logprobs = jax.lax.dynamic_update_slice(logprobs, jnp.where(live, logprob, 0.0)[:, None], (0, number))
        token = jnp.where(live, token, rows.token)
        position = jnp.where(live, jnp.where(over, -1, position + 1), position)
        remaining = remaining - live.astype(jnp.int32)
        return number + 1, token, position, remaining, ended + jnp.sum(over), cache, ids, logprobs

    ids = jnp.full((lanes, MAX_STEPS), -1, jnp.int32)
    logprobs = jnp.zeros((lanes, MAX_STEPS), jnp.float32)
    start = (jnp.int32(0), rows.token, rows.position, rows.remaining, 0, cache, ids, logprobs)
    done, *_, cache, ids, logprobs = jax.lax.while_loop(wanted, advance, start)
    return cache, ids, logprobs, done


def _sample(model, params, hidden, position, rows):
    logits = _apply(model, params, decoder.Decoder.logits, hidden)
    keys = sampler.position_keys(rows.seed_words, position + 1)
    return sampler.sample(keys, logits, rows.temperature, rows.top_k, rows.top_p)


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


def untied(model: Model) -> Model:
    """The same model with a head of its own, which `resident` makes of a tied one's embedding."""
    return dataclasses.replace(model, tie_embeddings=False)


def resident(params: Any, model: Model) -> Any:
    """The parameters of the untied model on the device, in the dtype that they are computed with.

    Norm scales stay float32, as the decoder applies them in float32: the logits are those of the float32 masters. A
    tied head is laid out once as a kernel of its own: the embedding transposed in each step runs at three quarters of
    the rate.
    """

    def place(path, leaf):
        kept = getattr(path[-1], "key", None) == "scale"
        return jax.device_put(jnp.asarray(leaf, jnp.float32 if kept else model.compute_dtype))

    if model.tie_embeddings:
        params = {**params, "head": {"kernel": jnp.transpose(jnp.asarray(params["embed"]["embedding"]))}}
    return jax.tree_util.tree_map_with_path(place, params)


def checksums(params: Any) -> list[int]:
    """CRC-32 of the bytes of each leaf."""
    return [zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data) for leaf in jax.tree.leaves(params)]


def _apply(model: Model, params: Any, method: Any, *args: Any) -> Any:
    return decoder.Decoder(model).apply({"params": params}, *args, method=method)
