"""Log-probability and entropy of every token of a batch, without ever holding [B, T, V].

The head runs over chunks of positions inside a scan whose body is recomputed in the backward pass, so the largest
buffer is [chunk, V] and the head's gradient is summed in the scan's carry.

Deliberately not here: sampling (rollout/) and any loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rstar2_jax.model import decoder
from rstar2_jax.types import TrainBatch

CHUNK_TOKENS = 512


def token_logprobs(
    model: decoder.Decoder, params: Any, batch: TrainBatch, temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(token_t | tokens before t in its segment) and the entropy of that distribution, each f32[B, T].

        logp_t = log softmax(logits_{t-1} / temperature)[token_t]

    Position 0 of a row has no context and gets 0 in both; the first token of a later segment gets a number that no
    loss mask selects.

    Args:
        model: the decoder.
        params: its parameters.
        batch: rows [B, T].
        temperature: the one used in sampling, above 0: ratios are those of the distribution that was sampled from.
    """
    hidden: Any = model.apply({"params": params}, batch.tokens, batch.positions, batch.segment_ids)
    rows, length, width = hidden.shape
    contexts = hidden[:, :-1].reshape(rows * (length - 1), width)
    targets = jnp.asarray(batch.tokens)[:, 1:].reshape(rows * (length - 1))
    logprobs, entropies = _chunked(model, params, contexts, targets, temperature)
    pad = jnp.zeros((rows, 1), jnp.float32)
    shape = (rows, length - 1)
    return (
        jnp.concatenate([pad, logprobs.reshape(shape)], axis=1),
        jnp.concatenate([pad, entropies.reshape(shape)], axis=1),
    )


def _chunked(
    model: decoder.Decoder, params: Any, contexts: jax.Array, targets: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    count, width = contexts.shape
    chunk = min(CHUNK_TOKENS, count)
    chunks = -(-count // chunk)
    contexts = jnp.pad(contexts, ((0, chunks * chunk - count), (0, 0))).reshape(chunks, chunk, width)
    targets = jnp.pad(targets, (0, chunks * chunk - count)).reshape(chunks, chunk)

    @jax.checkpoint
    def body(carry: None, chunk_values: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        states, ids = chunk_values
        logits: Any = model.apply({"params": params}, states, method=decoder.Decoder.logits)
        logp = jax.nn.log_softmax(logits / temperature)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        return carry, (jnp.take_along_axis(logp, ids[:, None], axis=-1)[:, 0], entropy)

    _, (logprobs, entropies) = jax.lax.scan(body, None, (contexts, targets))
    return logprobs.reshape(-1)[:count], entropies.reshape(-1)[:count]
