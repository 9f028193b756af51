"""The calls that a node holds and has not started, shared fairly between runs. Pure.

Deliberately not here: which calls a node takes from the queue (worker), and the slots (executor).
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from rstar2_sandbox.protocol import Call

AHEAD_S = 0.05
MAX_AHEAD = 64
_WEIGHT = 0.1


class FairQueue:
    """First in, first out within a run; run after run in turn between them.

    >>> queue = FairQueue()
    >>> len(queue)
    0
    """

    def __init__(self) -> None:
        self._calls: dict[str, collections.deque[Call]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, call: Call) -> None:
        """Add a call behind those of its run."""
        self._calls.setdefault(call.run, collections.deque()).append(call)
        self._count += 1

    def pop(self) -> Call:
        """Take the first call of the run whose turn it is. Raises IndexError when there is none."""
        if not self._count:
            raise IndexError("no call waits")
        run = next(iter(self._calls))
        calls = self._calls.pop(run)
        call = calls.popleft()
        if calls:
            self._calls[run] = calls
        self._count -= 1
        return call

    def drop(self, doomed: Callable[[Call], bool]) -> list[Call]:
        """Take out and return the calls that a rule picks."""
        out = [call for calls in self._calls.values() for call in calls if doomed(call)]
        if out:
            kept = {
                run: collections.deque(call for call in calls if not doomed(call)) for run, calls in self._calls.items()
            }
            self._calls = {run: calls for run, calls in kept.items() if calls}
            self._count -= len(out)
        return out

    def runs(self) -> set[str]:
        """Runs that have a call here."""
        return set(self._calls)


class Appetite:
    """How many calls a node takes ahead of its free slots: what it would do in AHEAD_S, so that quick calls travel
    together and a slow one keeps no neighbour waiting on one node while another is idle.

    Args:
        slots: calls at once.
        constant: calls ahead whatever they take; 0 learns it from the time that calls took.
    """

    def __init__(self, slots: int, constant: int = 0) -> None:
        self._slots = slots
        self._constant = constant
        self._mean_s = AHEAD_S
        self._calls_per_entry = 1.0

    def learn_time(self, seconds: float) -> None:
        """A call took so long."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def learn_entry(self, calls: int) -> None:
        """An entry held so many calls."""
        self._calls_per_entry += _WEIGHT * (calls - self._calls_per_entry)

    @property
    def ahead(self) -> int:
        """Calls to hold beyond those that run."""
        return self._constant or min(MAX_AHEAD, int(self._slots * AHEAD_S / max(self._mean_s, 0.0005)))

    def entries(self, held: int) -> int:
        """Entries to ask for while `held` calls run or wait here; 0 when there are enough of them."""
        room = self._slots + self.ahead - held
        if held and room < max(1, self.ahead // 2):
            return 0
        return max(1, int(room / self._calls_per_entry)) if room > 0 else 0
