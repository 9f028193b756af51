"""How a run ends before its last step: a signal asks for it, or nothing is learned any more; and its exit codes then.

Deliberately not here: what is saved then (train.py, sft.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 75  # EX_TEMPFAIL: start the same command again to go on
COLLAPSED = 76  # stopped by the guards; the best weights so far are in RUN/best
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MOST_SKIPPED = 5


class DivergedError(RuntimeError):
    """Nothing is learned any more: every update of several steps in a row had a loss or gradient that is not finite."""


@dataclasses.dataclass(slots=True)
class Stop:
    """Whether the run was asked to stop."""

    asked: bool = False


@contextlib.contextmanager
def on_signals() -> Iterator[Stop]:
    """A stop that SIGTERM and SIGINT ask for, so that the step that runs can end and be saved; a second one kills.

    Signals go to Python's main thread; JAX, where it joins several processes, would keep SIGTERM to itself.
    """
    found, before = Stop(), {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(number: int, frame: Any) -> None:
        del number, frame
        restore()
        found.asked = True

    for number in _SIGNALS:
        signal.signal(number, stop)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Soundness:
    """Counts steps in a row whose every update was skipped; five of them, or all of a shorter run, are one too many."""

    def __init__(self, steps: int) -> None:
        self._most = min(_MOST_SKIPPED, steps)
        self._in_row = 0

    def add(self, step: int, updates: int, skipped: float) -> None:
        """Take in a step. One without updates says nothing.

        Raises:
            DivergedError: it was one too many.
        """
        if updates:
            self._in_row = self._in_row + 1 if skipped >= updates else 0
        if self._in_row >= self._most:
            raise DivergedError(
                f"every update of the last {self._in_row} steps was skipped, since its loss or gradient was not "
                f"finite: the weights after step {step} are those of before. Lower Optimizer.lr, or go back to weights "
                "that are sound (Run.init_from)"
            )
