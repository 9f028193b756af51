"""The processes of a run over several hosts: one leads, the others do their share of what it is at.

The leader (process 0) drives rollouts, writes metrics and decides; what all processes must do together (updates,
publishing of shards, checkpoints) begins with the leader saying what is to be done, and ends when each has done it. A
run of one process is its own leader, and saying costs it nothing.

Deliberately not here: joining the processes (launch.py), and what is to be done when (train.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rstar2_jax import processes, settings, stops
from rstar2_jax.io import checkpoint
from rstar2_jax.learner import batch, step, update
from rstar2_jax.types import TrainState
from rstar2_jax.weights import publish


class Crew:
    """The learner's state, and what is done to it by all processes together.

    Args:
        trainer, loss, reference: what updates are made with (see learner/step.py).
        store: of checkpoints.
        model: for the names of what is published.
        weights: root of the weight store, and the dtype of what is published there.
        state: at the start, the same in every process.

    `stop` is what this process is asked by signals; one that is asked stops all of them after the step.
    """

    def __init__(
        self,
        trainer: update.Learner,
        loss: settings.Loss,
        store: checkpoint.Checkpoints,
        model: settings.Model,
        weights: tuple[str, str],
        state: TrainState,
        reference: Any,
    ) -> None:
        self.state = state
        self.stop = stops.Stop()
        self._stops = False
        self._together = False
        self._trainer, self._loss, self._store = trainer, loss, store
        self._model, self._reference = model, reference
        self._weights, self._dtype = weights

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop, or any of them before the last update."""
        return self.stop.asked or self._stops

    def learn(
        self, work: Sequence[batch.Minibatch], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> step.Metrics:
        """All optimizer steps of one rollout batch; their metrics."""
        with self._all_at_once():
            return self._learn(processes.share(("learn", work))[1], on_progress)

    def publish(self, version: int, in_use: Collection[int]) -> None:
        """Commit the weights as a version, each process its shards."""
        with self._all_at_once():
            self._publish(*processes.share(("publish", (version, set(in_use))))[1])

    def save(self, number: int, record: Mapping[str, Any]) -> None:
        """A checkpoint of the state and the record."""
        with self._all_at_once():
            self._save(*processes.share(("save", (number, dict(record))))[1])

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Around the leader's own work: an error in it ends the others' as well, which would wait for a word of it.

        In the middle of what all do together they meet the error themselves, or wait for a process that is gone, which
        JAX's own watch over the processes ends.
        """
        try:
            yield
        except BaseException:
            if not self._together:
                self.dismiss(1)
            raise

    @contextlib.contextmanager
    def _all_at_once(self) -> Iterator[None]:
        self._together = True
        yield
        self._together = False  # not after an error: then it is not known where the others are

    def dismiss(self, code: int) -> int:
        """End the others' work with an exit code, which is returned."""
        return processes.share(("dismiss", code))[1]

    def follow(self) -> int:
        """Do what the leader says until it dismisses; returns its exit code. For every process but the leader."""
        with stops.on_signals() as self.stop:
            while True:
                what, told = processes.share()
                if what == "dismiss":
                    return told
                if what == "learn":
                    self._learn(told, lambda done, total: None)
                elif what == "publish":
                    self._publish(*told)
                else:
                    self._save(*told)

    def _learn(self, work: Sequence[batch.Minibatch], on_progress: Callable[[int, int], None]) -> step.Metrics:
        self._store.check()  # a checkpoint that failed in the background ends the run before more is spent
        self.state, told = step.learn(
            self._trainer, self.state, work, self._loss, reference=self._reference, on_progress=on_progress
        )
        self._stops = processes.any_of(self.stop.asked)
        return told

    def _publish(self, version: int, in_use: Collection[int]) -> None:
        publish.publish(self.state.params, self._model, self._weights, version, dtype=self._dtype, in_use=in_use)

    def _save(self, number: int, record: Mapping[str, Any]) -> None:
        self._store.save(number, self.state, dict(record))
