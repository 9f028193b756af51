"""The update: gradients summed over micro-batches, one guarded optimizer step, everything jitted and sharded.

The normaliser belongs to the whole batch and is computed once on the host, so the result does not depend on how rows
were packed, cut into micro-batches or spread over devices. A step with a number that is not finite leaves parameters
and moments as they were and is counted.

Deliberately not here: which rows are trained on (batch.py) and what the objective is (objective.py).
"""

from __future__ import annotations

import dataclasses
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
from rstar2_jax.learner import apply, logprobs, state
from rstar2_jax.learner import objective as objectives
from rstar2_jax.model import decoder, fused, sharding
from rstar2_jax.types import TrainBatch, TrainState

# Vectors as wide as AVX-512 has them, where the processor does: exponentials and products in passing gain a twentieth.
_CPU: Any = {"xla_cpu_prefer_vector_width": 512}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Abstract arguments of the two programs: the state, one micro-batch, summed statistics, the normaliser."""

    state: Any
    batch: Any
    totals: Any
    scale: Any


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
        self.layout = spread = sharding.Layout(sharding.make_mesh(learner.mesh), learner.sharding, learner.attention)
        spread.check(model, learner.row_tokens)
        fused.require(learner.attention, model.compute_dtype)
        if learner.remat == "offload":
            sharding.require_host(spread.mesh, "Learner.remat = 'offload'", "Learner.remat = 'full'")
        self._rows = sharding.batch_sharding(spread.mesh, learner.sharding)
        self._settings = learner
        self._optimizer = optimizers.make_optimizer(learner.optimizer, total_steps)
        shapes = decoder.abstract_params(model)
        self._layout = state.layout(shapes, self._optimizer, spread, offload=learner.offload)
        self._stream = apply.Stream(self._optimizer, self._layout) if learner.offload == "moments" else None
        self._everywhere: Any = self._layout.step  # a sharding, in the place of the step's number
        score = functools.partial(
            logprobs.token_logprobs, model, temperature=temperature, remat=learner.remat, layout=spread
        )
        loss = functools.partial(_loss, score, objective)
        self._statistics = lambda *values: loss(*values)[1]
        # Pinned output layouts keep every later call on the program of the first one.
        sums = (self._layout.params, self._layout.step)
        compiled = functools.partial(jax.jit, compiler_options=_CPU if jax.default_backend() == "cpu" else None)
        self._score = compiled(score)
        self._zeros = jax.jit(lambda values: jax.tree.map(jnp.zeros_like, values), out_shardings=self._layout.params)
        self._accumulate = compiled(functools.partial(_accumulate, loss), donate_argnums=(1, 2), out_shardings=sums)
        rate = functools.partial(optimizers.learning_rate, settings=learner.optimizer, total_steps=total_steps)
        self._judge = jax.jit(functools.partial(_judge, rate), out_shardings=self._layout.step)
        everything = functools.partial(_apply, self._optimizer, rate)
        self._apply = compiled(everything, donate_argnums=(0,), out_shardings=(self._layout, self._layout.step))

    @property
    def where(self) -> Any:
        """The sharding of every parameter."""
        return self._layout.params

    def create(self, params: Any) -> TrainState:
        """State of step 0 on the run's mesh (see state.create)."""
        return state.create(params, self._optimizer, self._layout)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without an array: what a checkpoint is restored onto."""
        return state.abstract(self._model, self._optimizer, self._layout)

    def shapes(self) -> Shapes:
        """Shapes, dtypes and shardings of what a step works with, without an array."""
        form = (self._settings.microbatch_rows, self._settings.row_tokens)
        dtypes = {"loss_mask": np.bool_, "behavior_logprobs": np.float32, "advantages": np.float32}
        fields: dict[str, Any] = {
            field.name: jax.ShapeDtypeStruct(form, dtypes.get(field.name, np.int32), sharding=self._rows)
            for field in dataclasses.fields(TrainBatch)
        }
        batch = TrainBatch(**fields)
        before = self.abstract()
        scale = jax.ShapeDtypeStruct((), np.float32, sharding=self._everywhere)
        found = jax.eval_shape(self._statistics, before.params, batch, objectives.Anchors(), scale)
        totals: Any = {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=scale.sharding) for name, one in found.items()
        }
        return Shapes(state=before, batch=batch, totals=totals, scale=scale)

    def lower_micro_step(self) -> jax.stages.Lowered:
        """The program of one micro-batch, from shapes alone."""
        s = self.shapes()
        return self._accumulate.lower(s.state.params, s.state.params, s.totals, s.batch, objectives.Anchors(), s.scale)

    def lower_optimizer_step(self) -> tuple[jax.stages.Lowered, int]:
        """(program of the optimizer step, bytes of moments that it has on one device beside its arguments), from shapes
        alone; with moments on the hosts it is the program of the largest parameter."""
        s = self.shapes()
        if self._stream is None:
            return self._apply.lower(s.state, s.state.params, s.totals), 0
        verdict = jax.eval_shape(self._judge, s.state, s.state.params, s.totals)[0]
        return self._stream.lower(s.state.params, s.state.opt_state, verdict)

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
        after, told = self.start(before, microbatches, normaliser, anchors)
        return after, told()

    def start(
        self,
        before: TrainState,
        microbatches: Sequence[TrainBatch],
        normaliser: float,
        anchors: Sequence[objectives.Anchors] | None = None,
    ) -> tuple[TrainState, Callable[[], dict[str, float]]]:
        """`update` without waiting for it: the next state is on its way, and calling the second value waits for the
        statistics. What the host does in between costs no device time."""
        gradients, totals = self.gradients(before.params, microbatches, normaliser, anchors)
        if self._stream is None:
            after, told = self._apply(before, gradients, totals)
        else:
            verdict, step, told = self._judge(before, gradients, totals)
            params, opt_state = self._stream.apply(before.params, gradients, before.opt_state, verdict)
            after = TrainState(step=step, params=params, opt_state=opt_state)
        return after, lambda: {name: float(value) for name, value in jax.device_get(told).items()}

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
        scale = self._put(np.float32(normaliser), self._everywhere)
        gradients, totals = self._zeros(params), None
        with jax.transfer_guard("disallow"):  # what the step works with is put where it belongs, by name
            for index, batch in enumerate(microbatches):
                placed = self._place(batch)
                fixed = objectives.Anchors() if anchors is None else self._place_anchors(anchors[index])
                if totals is None:
                    totals = self._no_statistics(params, placed, fixed, scale)
                gradients, totals = self._accumulate(params, gradients, totals, placed, fixed, scale)
        assert totals is not None
        return gradients, totals

    def _place(self, batch: TrainBatch) -> TrainBatch:
        return jax.tree.map(lambda leaf: self._put(leaf, self._rows), batch)

    def _place_anchors(self, anchors: objectives.Anchors) -> objectives.Anchors:
        def put(leaf: Any) -> Any:
            return self._put(leaf, self._rows if np.ndim(leaf) else self._everywhere)

        return jax.tree.map(put, anchors)

    def _put(self, value: Any, where: jax.sharding.Sharding) -> jax.Array:
        """The value laid out; of a host array each process reads the part of its own devices only."""
        if isinstance(value, jax.Array) or where.is_fully_addressable:
            return jax.device_put(value, where)
        with jax.transfer_guard("allow"):  # also by name; the guard takes it for a transfer that nobody meant
            return jax.make_array_from_callback(np.shape(value), where, lambda index: np.asarray(value)[index])

    def _no_statistics(self, *values: Any) -> objectives.Statistics:
        shapes = jax.eval_shape(self._statistics, *values)
        zeros = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        return {name: self._put(value, self._everywhere) for name, value in zeros.items()}


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


def _judge(
    rate: Callable[[jax.Array], jax.Array], before: TrainState, gradients: Any, totals: objectives.Statistics
) -> tuple[apply.Verdict, jax.Array, objectives.Statistics]:
    verdict = apply.judge(gradients, totals["loss"])
    lr = rate(optimizers.schedule_step(before.opt_state))
    skipped = 1.0 - verdict.sound.astype(jnp.float32)
    return verdict, before.step + 1, {**totals, "grad_norm": verdict.grad_norm, "lr": lr, "skipped": skipped}


def _apply(
    optimizer: optax.GradientTransformationExtraArgs,
    rate: Callable[[jax.Array], jax.Array],
    before: TrainState,
    gradients: Any,
    totals: objectives.Statistics,
) -> tuple[TrainState, objectives.Statistics]:
    verdict, step, told = _judge(rate, before, gradients, totals)
    params, opt_state = apply.advance(optimizer, before.params, gradients, before.opt_state, verdict)
    return TrainState(step=step, params=params, opt_state=opt_state), told
