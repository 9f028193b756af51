"""What a learner needs before a device is rented: its two programs compiled ahead of time on virtual devices.

    micro-step      gradients of one micro-batch, added to the sum so far
    optimizer step  AdamW over the state

Sizes of state, gradients and batch are exact: they are those of the arguments' layouts. Temporaries are what the CPU
backend plans; it keeps bfloat16 matmuls in float32, so they are an upper bound. Not counted: buffers of the collective
library, fragmentation, the runtime itself, and an engine on the same devices.

The compilation runs in a process of its own, since the number of virtual devices is fixed when JAX starts:
`python -m rstar2_jax.learner.plan` reads pickled settings from stdin and prints JSON.

Deliberately not here: seconds, verdict and table (forecast.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rstar2_jax import settings
from rstar2_jax.learner import hlo, hlo_groups, objective, state, update
from rstar2_jax.model import native, sharding

CHILD_LIMIT_S = 1800.0
# What is compiled here never runs: machine code of the cheapest kind has the same buffers and the same traffic, in two
# thirds of the time.
_UNOPTIMIZED = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # programs of jaxlib 0.12 that were compiled without them crash
    _UNOPTIMIZED.append("--xla_cpu_use_fusion_emitters=false")


class PlanError(RuntimeError):
    """The programs could not be compiled; carries what the compiling process said."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """All collectives of one kind among the same groups in one call.

    Args:
        kind: of hlo.KINDS.
        groups: places in the mesh, flat, of the devices that exchange with each other.
        count: how many run.
        size: bytes that they give on one device.
        sent: bytes that one device sends for them.
    """

    kind: str
    groups: hlo_groups.Groups
    count: int
    size: int
    sent: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Bytes are those of one device.

    Args:
        parameters: of the model, all devices together.
        devices: of the mesh.
        params, moments, gradients, batch: bytes that live through a step (float32 masters, Adam's moments, sum of
            gradients, one micro-batch).
        offloaded: bytes of moments that lie in the host's memory for it, and not on the device.
        inputs_away: bytes of the layers' inputs that lie in the host's memory until the backward pass has them back.
        micro_step, optimizer_step: bytes of temporaries while the program runs, moments that it fetches included,
            inputs that are away taken off (the CPU backend, where both memories are one, plans them among these).
        traffic: collectives of one micro-step.
        widest: bytes of the largest single array in the micro-step, and its type and shape.
        widest_logits: the same among arrays with an axis over the vocabulary (or a device's share of it) and none over
            the model's width: logits and what is made of them, not the embedding or the head.
    """

    parameters: int
    devices: int
    params: int
    moments: int
    offloaded: int
    inputs_away: int
    gradients: int
    batch: int
    micro_step: int
    optimizer_step: int
    traffic: tuple[Traffic, ...]
    widest: tuple[int, str]
    widest_logits: tuple[int, str]

    @property
    def arguments(self) -> int:
        """Bytes that live through a step."""
        return self.params + self.moments + self.gradients + self.batch

    @property
    def peak(self) -> int:
        """Bytes at the widest moment of a step."""
        return self.arguments + max(self.micro_step, self.optimizer_step)


def measure(model: settings.Model, learner: settings.Learner) -> Plan:
    """Compile both programs for the mesh of `learner`, whose devices this process must see, with portable attention."""
    learner = dataclasses.replace(learner, attention="portable")
    trainer = update.Learner(model, learner, objective.grpo(learner.loss), total_steps=1)
    shapes = trainer.shapes()
    with native.unused():  # the devices that are planned for are no CPUs
        micro = trainer.lower_micro_step().compile()
    step, fetched = trainer.lower_optimizer_step()
    moments, away = state.bytes_on_device(shapes.state.opt_state), learner.offload == "moments"
    inputs = _inputs(model, learner, trainer.layout) if learner.remat == "offload" else 0
    text = micro.as_text() or ""
    return Plan(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes.state.params)),
        devices=math.prod(learner.mesh),
        params=state.bytes_on_device(shapes.state.params),
        moments=0 if away else moments,
        offloaded=moments if away else 0,
        gradients=state.bytes_on_device(shapes.state.params),
        batch=state.bytes_on_device(shapes.batch),
        inputs_away=inputs,
        micro_step=_temporaries(micro) - inputs,
        optimizer_step=_temporaries(step.compile()) + fetched,
        traffic=_traffic(text),
        widest=_widest(text),
        widest_logits=_widest(
            text,
            (model.vocab_size, model.vocab_size // trainer.layout.shards("vocab")),
            (model.d_model, model.d_model // trainer.layout.shards("embed")),
        ),
    )


def in_child(model: settings.Model, learner: settings.Learner, environment: Mapping[str, str]) -> Plan:
    """`measure` in a process that has the mesh's devices, virtually.

    Args:
        environment: of the calling process; the number of devices, the CPU platform and the place of this package are
            set on top of it.

    Raises:
        PlanError: it could not be compiled, or not within half an hour.
    """
    count = f"--xla_force_host_platform_device_count={math.prod(learner.mesh)}"
    changed = {
        "XLA_FLAGS": " ".join(part for part in (environment.get("XLA_FLAGS", ""), count, *_UNOPTIMIZED) if part),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rstar2_jax.learner.plan"],
            input=pickle.dumps((model, learner)),
            capture_output=True,
            env={**environment, **changed},
            timeout=CHILD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise PlanError(f"compiling for {math.prod(learner.mesh)} devices took over {CHILD_LIMIT_S:.0f} s") from late
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise PlanError(f"compiling for {math.prod(learner.mesh)} devices failed: {said[-1]}")
    values = json.loads(done.stdout)
    traffic = tuple(
        Traffic(**{**entry, "groups": tuple(map(tuple, entry["groups"]))}) for entry in values.pop("traffic")
    )
    widest = {name: tuple(values.pop(name)) for name in ("widest", "widest_logits")}
    return Plan(traffic=traffic, **widest, **values)


def _inputs(model: settings.Model, learner: settings.Learner, layout: sharding.Layout) -> int:
    """Bytes of all layers' inputs on one device: layers * rows * tokens * width, in the compute dtype."""
    rows, tokens = learner.microbatch_rows // layout.shards("rows"), learner.row_tokens // layout.shards("sequence")
    return model.layers * rows * tokens * model.d_model * jnp.dtype(model.compute_dtype).itemsize


def _temporaries(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)


def _traffic(text: str) -> tuple[Traffic, ...]:
    found: dict[tuple[str, hlo_groups.Groups], list[hlo.Collective]] = {}
    for one in hlo.collectives(text):
        found.setdefault((one.kind, one.groups), []).append(one)
    return tuple(
        Traffic(
            kind=kind,
            groups=groups,
            count=sum(one.times for one in same),
            size=sum(one.times * one.size for one in same),
            sent=sum(one.times * one.sent for one in same),
        )
        for (kind, groups), same in sorted(found.items(), key=lambda entry: (hlo.KINDS.index(entry[0][0]), entry[0][1]))
    )


def _widest(text: str, axes: tuple[int, ...] = (), without: tuple[int, ...] = ()) -> tuple[int, str]:
    """The largest array, of those with one of these axes if there are any, and with none of the others.

    Where that leaves none (a chunk of as many tokens as a device has of the model's width looks like its share of
    the head), only arrays with the first of the others are left out, and where that leaves none (as many tokens as the
    whole width), nothing is.
    """
    arrays = [(kind, dims) for kind, dims in hlo.array_sizes(text) if not axes or set(axes) & set(dims)]
    for others in (without, without[:1], ()):
        left = [(kind, dims) for kind, dims in arrays if not set(others) & set(dims)]
        if left:
            break
    return max((hlo.byte_size(kind, dims), f"{kind}{list(dims)}") for kind, dims in left)


if __name__ == "__main__":
    asked_model, asked_learner = pickle.load(sys.stdin.buffer)
    print(json.dumps(dataclasses.asdict(measure(asked_model, asked_learner))))
