"""Where each parameter and each batch lives on a (data, fsdp, tensor) mesh.

One table of rules, read top to bottom: the first pattern that matches the end of a parameter's path decides.
Projections out of the residual stream are split by columns over `tensor`, those back into it by rows, so that a layer
needs one reduction after each half; the other axis of every matrix is split over `fsdp`. `data` replicates parameters.

Deliberately not here: constraints on activations; the compiler derives them from parameters and batch.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"attn/(q|k|v)/kernel", PartitionSpec("fsdp", "tensor")),
    (r"mlp/(gate|up)/kernel", PartitionSpec("fsdp", "tensor")),
    (r"attn/o/kernel", PartitionSpec("tensor", "fsdp")),
    (r"mlp/down/kernel", PartitionSpec("tensor", "fsdp")),
    (r"attn/(q|k|v)/bias", PartitionSpec("tensor")),
    (r"embed/embedding", PartitionSpec("tensor", "fsdp")),
    (r"head/kernel", PartitionSpec("fsdp", "tensor")),
    (r"scale", PartitionSpec()),
)


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices.

    Args:
        shape: devices along (data, fsdp, tensor).

    Raises:
        ValueError: fewer devices are visible than the shape needs.
    """
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh {shape} needs {needed} devices, {len(devices)} are visible: change learner.mesh, or run where the "
            f"devices are"
        )
    return Mesh(np.asarray(devices[:needed]).reshape(shape), AXES)


def spec_of(path: str) -> PartitionSpec:
    """The rule for a parameter path such as `layers_0/attn/q/kernel`. Raises ValueError where no rule matches."""
    for pattern, spec in RULES:
        if re.search(rf"(^|/){pattern}$", path):
            return spec
    raise ValueError(f"no sharding rule matches the parameter {path}: add one to RULES")


def _check_divisible(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{path} {shape}: {size} cannot be split over {mesh.shape[axis]} devices of the {axis} axis; choose a "
                f"mesh whose {axis} axis divides {size}"
            )


def param_shardings(abstract: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each leaf of a parameter tree, in a tree of the same structure.

    Also takes any tree that holds parameter trees inside, such as an optimizer state: a leaf is found by the end of its
    path, and a leaf without axes (a step counter) is replicated.

    Args:
        abstract: tree of arrays or ShapeDtypeStructs.
        mesh: as make_mesh makes it.

    Raises:
        ValueError: an axis is not divisible (both numbers are named), or a path that no rule matches.
    """

    def sharding(entries, leaf):
        if leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        path = "/".join(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in entries)
        spec = spec_of(path)
        _check_divisible(path, leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; every tensor-parallel device sees whole rows."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def check_rows(rows: int, mesh: Mesh) -> None:
    """Raise ValueError, naming both numbers, where `rows` cannot be split over data * fsdp."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % shards:
        raise ValueError(f"{rows} rows cannot be split over {shards} devices (data * fsdp): use a multiple of {shards}")
