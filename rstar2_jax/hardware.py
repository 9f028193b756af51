"""Frozen settings of the machines below a run: how arrays lie on a mesh, what a device offers, the tool cluster.

Apart from settings.py because they belong to a machine, not to a recipe: files in gin/scale bind them.
"""

from __future__ import annotations

import dataclasses
import math

from rstar2_jax import ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Which axes of the mesh (data, fsdp, tensor) split which logical axis; () leaves it whole.

    Args:
        rows: rows of a micro-batch.
        sequence: tokens of a row in the residual stream between attention and MLP (sequence parallelism).
        embed: the residual width, of parameters alone.
        heads: attention heads.
        mlp: the inner width of the MLP.
        vocab: ids, in embedding and head.
    """

    rows: tuple[str, ...] = ("data", "fsdp")
    sequence: tuple[str, ...] = ()
    embed: tuple[str, ...] = ("fsdp",)
    heads: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            known = all(axis in ("data", "fsdp", "tensor") for axis in getattr(self, field.name))
            ranges.check(known, self, field.name, "axes are data, fsdp and tensor")
        for split in ("heads", "mlp", "vocab"):
            for other in ("embed", "rows"):
                shared = set(getattr(self, split)) & set(getattr(self, other))
                ranges.check(not shared, self, split, f"shares {sorted(shared)} with {other}: no array can have both")
        shared = set(self.rows) & set(self.sequence)
        ranges.check(not shared, self, "sequence", f"shares {sorted(shared)} with rows: no array can have both")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one device offers, for the plan of --dry_run; zeros are unknown and leave the verdict out.

    Args:
        memory_bytes: its own memory.
        flops: peak floating-point operations a second in the compute dtype.
        memory_bytes_per_s: bandwidth of its memory.
        node_devices: devices of a node; they lie in the mesh one after another.
        node_bytes_per_s: what one device sends to the others of its node, over a link to each of them together: among
            fewer devices a part of the links is of use.
        link_bytes_per_s: what one device sends to other nodes: the bandwidth of its own network card.
    """

    memory_bytes: float = 0.0
    flops: float = 0.0
    memory_bytes_per_s: float = 0.0
    node_devices: int = 0
    node_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        values = dataclasses.astuple(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            ranges.check(0 <= value < math.inf, self, field.name, "must be a finite number, 0 or more")
            ranges.check(
                value > 0 or not any(values), self, field.name, "is 0 where other fields are known: give it as well"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """The tool cluster as the trainer sees it.

    Args:
        redis_url: address of the cluster's Redis; empty starts a private one with one worker node on this machine.
        slots: executions at once on the private node.
        session_slots: stateful sessions that live at once on the private node; a trajectory that finds none waits.
        run_limit_s: wall limit of one call, counted from the moment it starts to run.
        queue_limit_s: limit on the wait before it starts.
        memory_bytes: memory limit of one call.
        output_bytes: output kept of one call.
    """

    redis_url: str = ""
    slots: int = 2
    session_slots: int = 2
    run_limit_s: float = 5.0
    queue_limit_s: float = 120.0
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 64 * 2**10

    def __post_init__(self) -> None:
        ranges.positive(self, "slots", "session_slots", "run_limit_s", "queue_limit_s", "memory_bytes", "output_bytes")
