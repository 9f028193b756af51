"""The guarded optimizer step: over all parameters at once, or over one after another with moments on the hosts.

With Learner.offload = 'moments' Adam's moments lie in the memory of the devices' hosts, 8 bytes a parameter:

    norm of all gradients  ->  for each parameter: moments to the devices, AdamW, moments back

The devices never hold the moments of more than AHEAD parameters: before it begins another one, the host waits until
those of an earlier one are back. The numbers are those of the step over all at once.

Deliberately not here: what the step is part of (update.py), and activations on the hosts (model/rows.py).
"""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rstar2_jax.learner import state
from rstar2_jax.types import TrainState

AHEAD = 2  # parameters whose moments are on the devices at once: one is worked on while the next one comes


class Verdict(NamedTuple):
    """What the gradients as a whole decide: their norm, and whether it and the loss are finite."""

    grad_norm: Any
    sound: Any


def judge(gradients: Any, loss: jax.Array) -> Verdict:
    """The verdict over the gradients of a step and its loss."""
    grad_norm = optax.tree.norm(gradients)
    return Verdict(grad_norm, jnp.isfinite(grad_norm) & jnp.isfinite(loss))


def advance(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, gradients: Any, opt_state: Any, verdict: Verdict
) -> tuple[Any, Any]:
    """(parameters, optimizer state) after the step, or as they were where the verdict is not sound.

    Args:
        params: all of them, or some: of those the gradients and the parts of the state that belong to them.
        verdict: over all gradients.
    """
    clean = jax.tree.map(lambda g: jnp.where(verdict.sound, g, 0), gradients)
    norm = jnp.where(verdict.sound, verdict.grad_norm, 0)
    updates, after = optimizer.update(clean, opt_state, params, grad_norm=norm)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(verdict.sound, new, old)

    stepped = jax.tree.map(choose, optax.apply_updates(params, updates), params)
    return stepped, jax.tree.map(choose, after, opt_state)


class Stream:
    """Steps over a state whose moments lie on the hosts.

    Args:
        optimizer: as make_optimizer makes it.
        far: shardings of the state, as state.layout gives them for moments on the host.
    """

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, far: TrainState) -> None:
        self._structure = jax.tree.structure(far.params)
        self._where = jax.tree.leaves(far.params)
        self._far = self._split(far.opt_state)
        self._one = jax.jit(functools.partial(_one, optimizer), donate_argnums=(0, 2))

    def apply(self, params: Any, gradients: Any, opt_state: Any, verdict: Verdict) -> tuple[Any, Any]:
        """(parameters, optimizer state) after the step; what is given for them is donated."""
        moments = self._split(opt_state)
        stepped, parts = [], []
        underway: collections.deque[Any] = collections.deque()
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True)
        for index, (param, gradient) in enumerate(pairs):
            if len(underway) == AHEAD:
                _settle(*underway.popleft())
            before = self._part(moments, index)
            near = jax.device_put(before, self._near(index), may_alias=False)  # the counters serve every parameter
            param, near = self._one(param, gradient, near, verdict)
            stepped.append(jax.device_put(param, self._where[index]))
            parts.append(jax.device_put(near, self._part(self._far, index)))
            underway.append((before, parts[-1]))
        return jax.tree.unflatten(self._structure, stepped), self._joined(parts)

    def lower(self, params: Any, opt_state: Any, verdict: Verdict) -> tuple[jax.stages.Lowered, int]:
        """(program of the largest parameter, bytes of moments that are on one device at once), from shapes alone."""
        leaves = jax.tree.leaves(params)
        sizes = [state.bytes_on_device(leaf) for leaf in leaves]
        index = sizes.index(max(sizes))
        part = self._part(self._split(opt_state), index)
        near = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), part, self._near(index)
        )
        return self._one.lower(leaves[index], leaves[index], near, verdict), AHEAD * state.bytes_on_device(near)

    def _near(self, index: int) -> Any:
        """Shardings of a parameter's part of the state while it is worked on."""
        return jax.tree.map(lambda at: jax.sharding.NamedSharding(at.mesh, at.spec), self._part(self._far, index))

    def _split(self, opt_state: Any) -> Any:
        """The optimizer state with a list of leaves in the place of each tree like the parameters'."""

        def like_params(node: Any) -> bool:
            return jax.tree.structure(node) == self._structure

        return jax.tree.map(
            lambda node: jax.tree.leaves(node) if like_params(node) else node, opt_state, is_leaf=like_params
        )

    def _part(self, split: Any, index: int) -> Any:
        """One parameter's share: lists of one leaf, and the counters."""
        return jax.tree.map(lambda node: [node[index]] if _is_list(node) else node, split, is_leaf=_is_list)

    def _joined(self, parts: list[Any]) -> Any:
        """The whole state again; every part has moved the counters alike."""

        def join(*nodes: Any) -> Any:
            whole = [node[0] for node in nodes] if _is_list(nodes[0]) else None
            return nodes[-1] if whole is None else jax.tree.unflatten(self._structure, whole)

        return jax.tree.map(join, *parts, is_leaf=_is_list)


def _one(optimizer: Any, param: Any, gradient: Any, part: Any, verdict: Verdict) -> tuple[Any, Any]:
    (stepped,), after = advance(optimizer, [param], [gradient], part, verdict)
    return stepped, after


def _settle(before: Any, after: Any) -> None:
    """Wait until moments are back on the host, and let those go that they replace."""
    jax.block_until_ready(after)
    for node in jax.tree.leaves(before, is_leaf=_is_list):
        if _is_list(node):
            node[0].delete()


def _is_list(node: Any) -> bool:
    return isinstance(node, list)
