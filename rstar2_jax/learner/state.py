"""The learner's state at its birth, laid out over the mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rstar2_jax import settings
from rstar2_jax.model import decoder, sharding
from rstar2_jax.types import TrainState


def bytes_on_device(tree: Any) -> int:
    """Bytes that one device, or its host for it, holds of abstract arrays that know their sharding."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def create(params: Any, optimizer: optax.GradientTransformation, where: TrainState) -> TrainState:
    """State of step 0: the parameters placed by the layout, fresh moments beside them.

    The parameters are copied, since the update donates its state and the caller keeps what it gave.

    Args:
        params: float32 parameters, anywhere.
        optimizer: its `init` gives the moments.
        where: shardings, as `layout` gives them.
    """
    placed = jax.device_put(params, where.params)
    return jax.jit(_birth(optimizer), out_shardings=where)(placed)


def abstract(model: settings.Model, optimizer: optax.GradientTransformation, where: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of the state, without an array."""
    shapes = jax.eval_shape(_birth(optimizer), decoder.abstract_params(model))
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, where)


def layout(
    params: Any, optimizer: optax.GradientTransformation, spread: sharding.Layout, *, offload: str = "none"
) -> TrainState:
    """Sharding of every leaf of the state: moments lie where their parameter lies, counters are replicated.

    Args:
        params: parameters or their shapes.
        spread: mesh and table.
        offload: `moments` has them in the memory of the hosts, beside the devices that have their parameters.

    Raises:
        ValueError: a parameter's size does not divide over the mesh (both numbers are named), or the devices cannot
            reach such memory.
    """
    replicated = jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec())
    placed = sharding.param_shardings(params, spread.mesh, spread.table)
    kept = placed
    if offload == "moments":
        sharding.require_host(spread.mesh, "Learner.offload = 'moments'", "Learner.offload = 'none'")
        kept = jax.tree.map(lambda where: where.with_memory_kind(sharding.HOST), placed)
    structure = jax.tree.structure(params)

    def like_params(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    shapes = jax.eval_shape(_birth(optimizer), params)
    moments = jax.tree.map(
        lambda node: kept if like_params(node) else replicated, shapes.opt_state, is_leaf=like_params
    )
    return TrainState(step=replicated, params=placed, opt_state=moments)  # type: ignore[arg-type]


def _birth(optimizer: optax.GradientTransformation) -> Any:
    def birth(values: Any) -> TrainState:
        copied = jax.tree.map(jnp.copy, values)
        return TrainState(step=jnp.zeros((), jnp.int32), params=copied, opt_state=optimizer.init(values))

    return birth
