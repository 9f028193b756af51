"""Log-probability and entropy of the trained tokens of a batch.

Deliberately not here: sampling (rollout/), any loss, and the arithmetic over the vocabulary (model/vocabulary.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rstar2_jax import settings
from rstar2_jax.model import rows, sharding, vocabulary
from rstar2_jax.types import TrainBatch


def token_logprobs(
    model: settings.Model,
    params: Any,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    remat: str = "none",
    layout: sharding.Layout | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(token_t | tokens before t in its segment) and the entropy of that distribution, each f32[B, T].

        logp_t = log softmax(logits_{t-1} / temperature)[token_t]

    Both are 0 where the loss mask is False: only the state before a trained token reaches the head.

    Args:
        model: sizes of the decoder.
        params: its parameters.
        batch: rows [B, T].
        temperature: the one used in sampling, above 0: ratios are those of the distribution that was sampled from.
        remat: what layers keep for the backward pass; with `none` the head keeps small logits as well.
        layout: where rows and activations lie; None for one device.
    """
    inputs = (jnp.asarray(batch.tokens), jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids))
    states = rows.hidden(model, params, inputs, remat=remat, layout=layout)
    table = params["embed"]["embedding"] if model.tie_embeddings else params["head"]["kernel"]
    how = vocabulary.How(temperature, model.tie_embeddings, layout, keep=remat == "none")
    wanted = _next(jnp.asarray(batch.loss_mask))
    found: Any = vocabulary.token_statistics(states, table, _next(inputs[0]), wanted, how)
    logprobs, entropies = found
    return _previous(logprobs), _previous(entropies)


def _next(x: jax.Array) -> jax.Array:
    """x[:, t + 1] at t; 0 at the last position."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def _previous(x: jax.Array) -> jax.Array:
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
