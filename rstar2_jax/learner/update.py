"""The update: gradients summed over micro-batches, one guarded optimizer step, everything jitted and sharded.

The normaliser belongs to the whole batch and is computed once on the host, so the result does not depend on how rows
were packed, cut into micro-batches or spread over devices. A step with a number that is not finite leaves parameters
and moments as they were and is counted.

Deliberately not here: which rows are trained on (batch.py) and what the objective is (objective.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rstar2_jax import settings
from rstar2_jax.algo import correction
from rstar2_jax.algo import optimizer as optimizers
from rstar2_jax.learner import logprobs, state
from rstar2_jax.learner import objective as objectives
from rstar2_jax.model import decoder, sharding
from rstar2_jax.types import TrainBatch, TrainState


class Learner:
    """Jitted functions of one training run; holds no state of its own.

    Args:
        model: sizes of the decoder.
        learner: micro-batching, mesh and optimizer.
        objective: what is minimised (objective.grpo or objective.supervised).
        total_steps: optimizer steps of the run, for the schedule.
        temperature: sampling temperature that the log-probabilities are taken at.
    """

    def __init__(
        self,
        model: settings.Model,
        learner: settings.Learner,
        objective: objectives.Objective,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        self._model = model
        self.mesh = sharding.make_mesh(learner.mesh)
        self._rows = sharding.batch_sharding(self.mesh)
        self._settings = learner
        self._total_steps = total_steps
        self._optimizer = optimizers.make_optimizer(learner.optimizer, total_steps)
        self._layout = state.layout(decoder.abstract_params(model), self._optimizer, self.mesh)
        module = decoder.Decoder(settings=model, remat=learner.remat)
        score = functools.partial(logprobs.token_logprobs, module, temperature=temperature)
        loss = functools.partial(_loss, score, objective)
        self._statistics = lambda *values: loss(*values)[1]
        # Pinned output layouts keep every later call on the program of the first one.
        sums = (self._layout.params, self._layout.step)
        self._score = jax.jit(score)
        self._zeros = jax.jit(lambda values: jax.tree.map(jnp.zeros_like, values), out_shardings=self._layout.params)
        self._accumulate = jax.jit(functools.partial(_accumulate, loss), donate_argnums=(1, 2), out_shardings=sums)
        apply = functools.partial(_apply, self._optimizer)
        self._apply = jax.jit(apply, donate_argnums=(0,), out_shardings=(self._layout, self._layout.step))

    def create(self, params: Any) -> TrainState:
        """State of step 0 on the run's mesh (see state.create)."""
        return state.create(params, self._optimizer, self._layout)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without an array: what a checkpoint is restored onto."""
        return state.abstract(self._model, self._optimizer, self._layout)

    def place(self, params: Any) -> Any:
        """Parameters laid out as the state's are."""
        return jax.device_put(params, self._layout.params)

    def score(self, params: Any, microbatches: Sequence[TrainBatch]) -> list[tuple[jax.Array, jax.Array]]:
        """(log-probabilities, entropies), both f32[B, T], of every micro-batch under `params`."""
        return [self._score(params, self._place(batch)) for batch in microbatches]

    def compilations(self) -> int:
        """Programs compiled so far: stays the same once every shape of the run was seen."""
        programs: list[Any] = [self._score, self._accumulate, self._apply]
        return sum(program._cache_size() for program in programs)

    def update(
        self,
        before: TrainState,
        microbatches: Sequence[TrainBatch],
        normaliser: float,
        anchors: Sequence[objectives.Anchors] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step over all micro-batches; `before` is donated and must not be used again.

        Args:
            before: the state.
            microbatches: rows [microbatch_rows, T] each, all of one shape.
            normaliser: trained tokens (or sequences) of the whole batch, above 0.
            anchors: constants of each micro-batch; None makes every ratio 1.

        Returns:
            The next state and summed statistics, with `loss`, `grad_norm`, `lr` and `skipped` (0 or 1) added.

        Raises:
            ValueError: the normaliser is not above 0, or there is no micro-batch.
        """
        gradients, totals = self.gradients(before.params, microbatches, normaliser, anchors)
        lr = optimizers.learning_rate(
            optimizers.schedule_step(before.opt_state), self._settings.optimizer, self._total_steps
        )
        after, told = self._apply(before, gradients, totals)
        return after, {**{name: float(value) for name, value in told.items()}, "lr": float(lr)}

    def gradients(
        self,
        params: Any,
        microbatches: Sequence[TrainBatch],
        normaliser: float,
        anchors: Sequence[objectives.Anchors] | None = None,
    ) -> tuple[Any, objectives.Statistics]:
        """Gradients of the global loss and summed statistics, over all micro-batches (arguments as in `update`)."""
        if normaliser <= 0 or not microbatches:
            raise ValueError(f"nothing to train on: normaliser = {normaliser}, {len(microbatches)} micro-batches")
        scale = jax.device_put(np.float32(normaliser), self._layout.step)
        gradients, totals = self._zeros(params), None
        for index, batch in enumerate(microbatches):
            placed, fixed = self._place(batch), objectives.Anchors() if anchors is None else anchors[index]
            if totals is None:
                totals = self._no_statistics(params, placed, fixed, scale)
            gradients, totals = self._accumulate(params, gradients, totals, placed, fixed, scale)
        assert totals is not None
        return gradients, totals

    def _place(self, batch: TrainBatch) -> TrainBatch:
        return jax.device_put(batch, self._rows)

    def _no_statistics(self, *values: Any) -> objectives.Statistics:
        shapes = jax.eval_shape(self._statistics, *values)
        zeros = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        return jax.device_put(zeros, self._layout.step)


def _loss(
    score: Callable[..., tuple[jax.Array, jax.Array]],
    objective: objectives.Objective,
    params: Any,
    batch: TrainBatch,
    anchors: objectives.Anchors,
    normaliser: jax.Array,
) -> tuple[jax.Array, objectives.Statistics]:
    policy, entropies = score(params, batch)
    value, statistics = objective(policy, entropies, batch, anchors, normaliser)
    return value, {**statistics, "loss": value}


def _accumulate(
    loss: Callable[..., tuple[jax.Array, objectives.Statistics]],
    params: Any,
    gradients: Any,
    totals: objectives.Statistics,
    batch: TrainBatch,
    anchors: objectives.Anchors,
    normaliser: jax.Array,
) -> tuple[Any, objectives.Statistics]:
    (_, fresh), more = jax.value_and_grad(loss, has_aux=True)(params, batch, anchors, normaliser)
    return jax.tree.map(jnp.add, gradients, more), correction.combine(totals, fresh)


def _apply(
    optimizer: optax.GradientTransformation, before: TrainState, gradients: Any, totals: objectives.Statistics
) -> tuple[TrainState, objectives.Statistics]:
    grad_norm = optax.tree.norm(gradients)
    sound = jnp.isfinite(grad_norm) & jnp.isfinite(totals["loss"])
    clean = jax.tree.map(lambda g: jnp.where(sound, g, 0), gradients)
    updates, opt_state = optimizer.update(clean, before.opt_state, before.params)
    params = optax.apply_updates(before.params, updates)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(sound, new, old)

    after = TrainState(
        step=before.step + 1,
        params=jax.tree.map(choose, params, before.params),
        opt_state=jax.tree.map(choose, opt_state, before.opt_state),
    )
    return after, {**totals, "grad_norm": grad_norm, "skipped": 1.0 - sound.astype(jnp.float32)}
