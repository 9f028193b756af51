"""The processes of a run over several hosts: one leads, the others do their share of what it is at.

The leader (process 0) drives rollouts, writes metrics and decides; what all processes must do together (updates,
publishing of shards, checkpoints) begins with the leader saying what is to be done, and ends when each has done it. A
run of one process is its own leader, and saying costs it nothing.

Deliberately not here: joining the processes (launch.py), and what is to be done when (train.py).
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rstar2_jax import settings
from rstar2_jax.io import checkpoint
from rstar2_jax.learner import batch, step, update
from rstar2_jax.types import TrainState
from rstar2_jax.weights import publish

_T = TypeVar("_T")
_PIECE_BYTES = 2**28  # of a message, sent at once


class Crew:
    """The learner's state, and what is done to it by all processes together.

    Args:
        trainer, loss, reference: what updates are made with (see learner/step.py).
        store: of checkpoints.
        model: for the names of what is published.
        weights: root of the weight store.
        state: at the start, the same in every process.
    """

    def __init__(
        self,
        trainer: update.Learner,
        loss: settings.Loss,
        store: checkpoint.Checkpoints,
        model: settings.Model,
        weights: str,
        state: TrainState,
        reference: Any,
    ) -> None:
        self.state = state
        self._together = False
        self._trainer, self._loss, self._store = trainer, loss, store
        self._model, self._weights, self._reference = model, weights, reference

    def learn(
        self, work: Sequence[batch.Minibatch], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> step.Metrics:
        """All optimizer steps of one rollout batch; their metrics."""
        with self._all_at_once():
            return self._learn(share(("learn", work))[1], on_progress)

    def publish(self, version: int, in_use: Collection[int]) -> None:
        """Commit the weights as a version, each process its shards."""
        with self._all_at_once():
            self._publish(*share(("publish", (version, set(in_use))))[1])

    def save(self, number: int, record: Mapping[str, Any]) -> None:
        """A checkpoint of the state and the record."""
        with self._all_at_once():
            self._save(*share(("save", (number, dict(record))))[1])

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
        return share(("dismiss", code))[1]

    def follow(self) -> int:
        """Do what the leader says until it dismisses; returns its exit code. For every process but the leader."""
        while True:
            what, told = share()
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
        return told

    def _publish(self, version: int, in_use: Collection[int]) -> None:
        publish.publish(self.state.params, self._model, self._weights, version, in_use=in_use)

    def _save(self, number: int, record: Mapping[str, Any]) -> None:
        self._store.save(number, self.state, dict(record))


def leads() -> bool:
    """Whether this process is the leader; the only process always is."""
    return jax.process_index() == 0


def share(value: _T | None = None) -> _T:
    """The leader's value, in every process. To be called by all of them, in the same order.

    Args:
        value: what the leader says: plain values and host arrays; of the others' calls it is ignored. It travels
            between the processes of one run only, whose code is one and the same.
    """
    if jax.process_count() == 1:
        assert value is not None
        return value
    return pickle.loads(_broadcast(pickle.dumps(value) if leads() else b""))


def check_alike(text: str) -> None:
    """Return when every process has the same text; to be called by all of them.

    Raises:
        ValueError: in every process; names the processes and the first line in which one differs from process 0.
    """
    if jax.process_count() == 1:
        return
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(own))))
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(own)] = own
    whole = np.asarray(multihost_utils.process_allgather(padded))
    told = [row[:length].tobytes().decode() for row, length in zip(whole, lengths, strict=True)]
    odd = [rank for rank, other in enumerate(told) if other != told[0]]
    if odd:
        pairs = itertools.zip_longest(told[0].splitlines(), told[odd[0]].splitlines(), fillvalue="nothing")
        first, other = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        raise ValueError(
            f"processes {odd} were started otherwise than process 0, which has {first.strip()!r} where process "
            f"{odd[0]} has {other.strip()!r}: start all of them with the same command, files and code"
        )


def _broadcast(data: bytes) -> bytes:
    """The leader's bytes, in every process."""
    # Integers of 64 bits are cut to 32 on the way, so the length goes as two.
    high, low = multihost_utils.broadcast_one_to_all(np.array(divmod(len(data), _PIECE_BYTES), np.int32))
    size = int(high) * _PIECE_BYTES + int(low)
    sent, found = np.frombuffer(data, np.uint8), []
    for at in range(0, size, _PIECE_BYTES):
        left = min(_PIECE_BYTES, size - at)
        # Sizes of two significant binary digits, so that messages of many lengths are compiled few times.
        unit = max(1024, 1 << max(0, left.bit_length() - 2))
        piece = np.zeros(-(-left // unit) * unit, np.uint8)
        piece[: len(sent[at : at + left])] = sent[at : at + left]
        found.append(np.asarray(multihost_utils.broadcast_one_to_all(piece))[:left].tobytes())
    return b"".join(found)
