"""Where each parameter, each activation and each batch lies on a (data, fsdp, tensor) mesh.

Two tables. This module names the logical axes of every parameter; hardware.Sharding (one for each file of gin/scale)
says along which axes of the mesh a logical axis is split. Projections out of the residual stream are split by columns
over `tensor`, those back into it by rows, so that a layer needs one reduction after each half; the other axis of every
matrix is split over `fsdp`. With `sequence` the residual stream itself is split over `tensor` between the halves.

Deliberately not here: the collectives; the compiler derives them from these layouts, except where a module asks for
`Layout.spread`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar2_jax import hardware, settings

AXES = ("data", "fsdp", "tensor")
Axes = tuple[str | None, ...]  # logical axes of an array; None is whole
DEFAULT = hardware.Sharding()
HOST = "pinned_host"  # kind of the memory beside a device, in JAX's words

PARAMETERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"attn/(q|k|v)/kernel", ("embed", "heads")),
    (r"mlp/(gate|up)/kernel", ("embed", "mlp")),
    (r"attn/o/kernel", ("heads", "embed")),
    (r"mlp/down/kernel", ("mlp", "embed")),
    (r"attn/(q|k|v)/bias", ("heads",)),
    (r"embed/embedding", ("vocab", "embed")),
    (r"head/kernel", ("embed", "vocab")),
    (r"scale", ()),
)


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices.

    Args:
        shape: devices along (data, fsdp, tensor).

    Raises:
        ValueError: fewer devices are visible than the shape needs, or a process has none of those that it takes.
    """
    needed, devices = math.prod(shape), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh {shape} needs {needed} devices, {len(devices)} are visible: change learner.mesh, or run where the "
            f"devices are"
        )
    idle = set(range(jax.process_count())) - {device.process_index for device in devices[:needed]}
    if idle:
        unused = f"mesh {shape} takes {needed} of {len(devices)} devices: processes {sorted(idle)} have no part of it"
        raise ValueError(f"{unused}; change learner.mesh to hold all devices, or start fewer processes")
    return Mesh(np.asarray(devices[:needed]).reshape(shape), AXES)


def require_host(mesh: Mesh, setting: str, instead: str) -> None:
    """Raise ValueError where the mesh's devices do not reach the memory of their hosts.

    Args:
        setting: what needs it, with its value.
        instead: what to set where it is not there.
    """
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(
            f"{setting} needs devices that reach their host's memory ({HOST}), but {device.device_kind} offers "
            f"{kinds}: set {instead}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and the table that maps logical axes to it: hashable, so that it is a static argument.

    Args:
        mesh: as make_mesh makes it.
        table: mesh axes of each logical axis.
        attention: kernel that each device runs on its part (see fused.py).
    """

    mesh: Mesh
    table: hardware.Sharding = DEFAULT
    attention: str = "portable"

    @property
    def single(self) -> bool:
        """True on one device, where every method here is the identity."""
        return self.mesh.size == 1

    def axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes of a logical axis, without those of one device, which split nothing."""
        return tuple(axis for axis in getattr(self.table, logical) if self.mesh.shape[axis] > 1)

    def shards(self, logical: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(logical))

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes; None is whole."""
        return _spec(self.table, logical)

    def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """x, told to lie like this from here on."""
        if self.single:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*logical)))

    def spread(self, function: Callable[..., Any], ins: Sequence[Axes], outs: Axes | list[Axes]) -> Callable[..., Any]:
        """`function` run by each device on its own part; on one device `function` itself.

        Args:
            ins: logical axes of each argument; what is not named is gathered first.
            outs: logical axes of the result, or a list of them for a tuple of results.
        """
        if self.single:
            return function
        several = isinstance(outs, list)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self.spec(*logical) for logical in ins),
            out_specs=tuple(self.spec(*logical) for logical in outs) if several else self.spec(*outs),
            check_vma=False,
        )

    def reduced(self, x: jax.Array, *, over: str, onto: str, dimension: int) -> jax.Array:
        """x, of which each device holds a partial sum, summed and laid out; inside `spread` only.

        Args:
            over: logical axis whose devices hold the parts of the sum.
            onto: logical axis of `dimension` in the result; a reduction over the same devices is scattered.
        """
        axes = self.axes(over)
        for axis in self.axes(onto):
            if axis in axes:
                x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
            else:  # its devices hold the same sum: each keeps its own part
                size = x.shape[dimension] // jax.lax.axis_size(axis)
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dimension)
        rest = tuple(axis for axis in axes if axis not in self.axes(onto))
        return jax.lax.psum(x, rest) if rest else x

    def check(self, model: settings.Model, row_tokens: int) -> None:
        """Raise ValueError, naming both numbers, where a size of the model or of a row cannot be split.

        Args:
            row_tokens: length of a training row.
        """
        sizes = {
            "vocab": ("Model.vocab_size", model.vocab_size),
            "heads": ("Model.kv_heads", model.kv_heads),
            "mlp": ("Model.d_mlp", model.d_mlp),
            "embed": ("Model.d_model", model.d_model),
            "sequence": ("Learner.row_tokens", row_tokens),
        }
        for logical, (name, size) in sizes.items():
            if size % self.shards(logical):
                raise ValueError(
                    f"{name} = {size} cannot be split over {self.shards(logical)} devices (Sharding.{logical} = "
                    f"{self.axes(logical)} on a mesh {dict(self.mesh.shape)}): choose a mesh that divides it, or "
                    f"another Sharding.{logical}"
                )


def _spec(table: hardware.Sharding, logical: Sequence[str | None]) -> PartitionSpec:
    named = [() if name is None else getattr(table, name) for name in logical]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in named))


def spec_of(path: str, table: hardware.Sharding = DEFAULT) -> PartitionSpec:
    """The layout of a parameter path such as `layers_0/attn/q/kernel`. Raises ValueError for an unknown parameter."""
    for pattern, logical in PARAMETERS:
        if re.search(rf"(^|/){pattern}$", path):
            return _spec(table, logical)
    raise ValueError(f"no sharding rule matches the parameter {path}: add one to PARAMETERS")


def _check_divisible(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(
                f"{path} {shape}: {size} cannot be split over {parts} devices of the {'*'.join(names)} axis; choose a "
                f"mesh whose {'*'.join(names)} axis divides {size}"
            )


def param_shardings(abstract: Any, mesh: Mesh, table: hardware.Sharding = DEFAULT) -> Any:
    """A NamedSharding for each leaf of a parameter tree, in a tree of the same structure.

    Also takes any tree that holds parameter trees inside, such as an optimizer state: a leaf is found by the end of its
    path, and a leaf without axes (a step counter) is replicated.

    Args:
        abstract: tree of arrays or ShapeDtypeStructs.
        mesh: as make_mesh makes it.
        table: mesh axes of each logical axis.

    Raises:
        ValueError: an axis is not divisible (both numbers are named), or a path that no rule matches.
    """

    def sharding(entries, leaf):
        if leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        path = "/".join(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in entries)
        spec = spec_of(path, table)
        _check_divisible(path, leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def batch_sharding(mesh: Mesh, table: hardware.Sharding = DEFAULT) -> NamedSharding:
    """Rows over the mesh axes of `rows`; every tensor-parallel device is given whole rows."""
    return NamedSharding(mesh, _spec(table, ("rows",)))
