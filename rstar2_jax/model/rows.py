"""Whole rows through the decoder for training: the layers' schedule, what is kept for the backward pass, the layout.

    none     every activation is kept; layers are unrolled
    block    a layer keeps its input and what attention gave, so that the quadratic part is not done again; scanned
    full     a layer keeps its input alone; scanned
    offload  the same, and the inputs lie in the memory of the devices' hosts until the backward pass has them back

Scanned layers are stacked inside the function: parameters, optimizer state and checkpoints have one array a layer
everywhere, and the program does not grow with the depth.

Deliberately not here: the layers themselves (decoder.py), what is below them (embedding.py) and above (vocabulary.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rstar2_jax import settings
from rstar2_jax.model import decoder, embedding, ops, sharding

_INPUT = "layer_input"
_POLICIES = {
    "block": jax.checkpoint_policies.save_only_these_names(ops.KEPT),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst=sharding.HOST,
    ),
}


def hidden(
    model: settings.Model,
    params: Any,
    batch: tuple[Int[Array, "b t"], Int[Array, "b t"], Int[Array, "b t"]],
    *,
    remat: str = "none",
    layout: sharding.Layout | None = None,
) -> Float[Array, "b t d"]:
    """States after the final norm, the numbers of decoder.Decoder's own __call__.

    Args:
        model: sizes.
        params: the decoder's tree.
        batch: (tokens, positions, segment_ids), see decoder.Decoder.
        remat: none, block, full or offload.
        layout: where rows and activations lie; None for one device.
    """
    tokens, positions, segment_ids = batch
    angles = ops.rotary_tables(positions, model.head_dim, model.rope_theta)
    module = decoder.Layer(model, layout)

    def apply(x, own) -> Any:
        return module.apply({"params": own}, checkpoint_name(x, _INPUT), angles, segment_ids)

    x = embedding.lookup(params["embed"]["embedding"], tokens, model.compute_dtype, layout)
    layers = [params[f"layers_{i}"] for i in range(model.layers)]
    if remat == "none":
        for own in layers:
            x = apply(x, own)
    else:
        again = jax.checkpoint(apply, policy=_POLICIES[remat])
        x, _ = jax.lax.scan(lambda x, own: (again(x, own), None), x, _stacked(layers, layout))
    return ops.rms_norm(x, params["norm"]["scale"], model.rms_eps)


def _stacked(layers: list[Any], layout: sharding.Layout | None) -> Any:
    """One tree whose leaves hold all layers along a new first axis, laid out as the layers are."""

    def stack(path, *leaves):
        stacked = jnp.stack(leaves)
        if layout is None or layout.single:
            return stacked
        name = "/".join(entry.key for entry in path)
        spec = PartitionSpec(None, *sharding.spec_of(name, layout.table))
        return jax.lax.with_sharding_constraint(stacked, jax.sharding.NamedSharding(layout.mesh, spec))

    return jax.tree_util.tree_map_with_path(stack, *layers)
