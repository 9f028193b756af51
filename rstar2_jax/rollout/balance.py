"""Which engine takes which rollout, by free KV tokens: the scheduler's decisions as plain state without clock or I/O.

An engine is given a rollout when its free KV tokens cover the prompt and what the rollout is expected to append:

    need(rollout) = prompt + min(budget, max(used + margin, q-quantile of finished responses))
    free(engine)  = capacity - sum of what its rollouts have reserved: their need when they came, and more as they grow

Waiting rollouts form one first-come-first-served queue: where the head fits nowhere, nobody passes it. With
`longest_first` the head is instead one whose prompt's finished samples were longest on average; a prompt that nothing
is known of comes before all others until two of its samples run (a step ends with its longest rollout, and one that
starts late ends late). Rollouts that were taken off an engine go first in either order. A head that only an engine out
of service could hold is set aside until one is back: nobody who passes it takes its room.

Of the engines with room a rollout takes its home (where it ran before), else one that holds a few of its prompt's
siblings (they share the prefix), else the one with most free tokens; ties go to the one with fewer rollouts, then to
the lower index. Affinity ends where an engine is full or down.

Every change is an explicit call and every answer a plain value, so that the asyncio driver (pool.py) and the event
simulation (benchmarks/scheduler_sim.py) run the same decisions.

Source: rStar2-Agent paper, load-balanced rollout scheduler by KV capacity. Deviation: the expected length in place of
the longest one, which the paper leaves open (and is what holds until enough rollouts have finished).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

_MOST_SIBLINGS = 8  # that prefer one engine: all of a long prompt's samples in one place would end late together
_MARGIN_TOKENS = 64  # what a rollout that outgrew its expectation is expected to append still
_MOST_LENGTHS = 4096  # finished rollouts that the estimate remembers
_MOST_FAMILIES = 4096  # prompts whose samples' lengths are remembered: several steps' worth


class Lengths:
    """A running upper quantile of finished response lengths.

    Args:
        quantile: in (0, 1].
        least: finished rollouts before the estimate is used; the short ones finish first, so few say too little.
    """

    def __init__(self, quantile: float, least: int = 32) -> None:
        if not 0 < quantile <= 1:
            raise ValueError(f"quantile = {quantile}: must be in (0, 1]; 1 reserves the longest length seen")
        self._quantile, self._least = quantile, least
        self._order: collections.deque[int] = collections.deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        """A rollout has ended with so many response tokens."""
        self._order.append(tokens)
        bisect.insort(self._sorted, tokens)
        if len(self._order) > _MOST_LENGTHS:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._order.popleft()))

    def expected(self, budget: int) -> int:
        """Tokens to reserve for a response of at most `budget`; the budget itself until enough have ended."""
        if len(self._sorted) < self._least:
            return budget
        place = min(len(self._sorted) - 1, int(self._quantile * len(self._sorted)))
        return min(budget, self._sorted[place])


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Rollout:
    """One rollout as the scheduler sees it.

    Args:
        name: unlike any other's.
        family: rollouts of one prompt share it.
        prompt_tokens, budget_tokens: length of the prompt, most tokens after it.
        used_tokens: appended so far.
        reserved_tokens: KV tokens set aside for it on its engine.
        engine: index of the engine that holds it, None while it waits.
        home: index of the engine that held it last.
    """

    name: str
    family: str
    prompt_tokens: int
    budget_tokens: int
    used_tokens: int = 0
    reserved_tokens: int = 0
    engine: int | None = None
    home: int | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Engine:
    capacity_tokens: int
    reserved_tokens: int = 0
    is_up: bool = True
    rollouts: dict[str, Rollout] = dataclasses.field(default_factory=dict)
    families: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def take(self, rollout: Rollout, need: int) -> None:
        self.rollouts[rollout.name] = rollout
        self.families[rollout.family] += 1
        self.reserve(rollout, need)

    def reserve(self, rollout: Rollout, tokens: int) -> None:
        self.reserved_tokens += tokens - rollout.reserved_tokens
        rollout.reserved_tokens = tokens

    def drop(self, rollout: Rollout) -> None:
        del self.rollouts[rollout.name]
        self.families[rollout.family] -= 1
        self.reserve(rollout, 0)


class _FirstCome:
    """Rollouts in the order of their arrival; those that come back before all others."""

    def __init__(self) -> None:
        self._order: collections.OrderedDict[str, Rollout] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def put(self, rollout: Rollout, *, first: bool) -> None:
        self._order[rollout.name] = rollout
        if first:
            self._order.move_to_end(rollout.name, last=False)

    def head(self) -> Rollout | None:
        return next(iter(self._order.values()), None)

    def remove(self, rollout: Rollout) -> None:
        self._order.pop(rollout.name, None)

    def learn(self, rollout: Rollout) -> None:
        del rollout


@dataclasses.dataclass(slots=True)
class _Family:
    """Samples of one prompt so far: started from the queue, ended, and what those appended."""

    started: int = 0
    ended: int = 0
    tokens: int = 0


class _LongestFirst:
    """Rollouts whose siblings were long before those whose siblings were short."""

    _PROBES = 2  # samples of a prompt that start before anything is known of it

    def __init__(self) -> None:
        self._first = _FirstCome()
        self._families: dict[str, _FirstCome] = {}
        self._known: collections.OrderedDict[str, _Family] = collections.OrderedDict()  # the one met last comes last
        self._tokens = self._ended = 0  # of all that are known

    def __len__(self) -> int:
        return len(self._first) + sum(len(waiting) for waiting in self._families.values())

    def put(self, rollout: Rollout, *, first: bool) -> None:
        line = self._first if first else self._families.setdefault(rollout.family, _FirstCome())
        line.put(rollout, first=first)

    def head(self) -> Rollout | None:
        if len(self._first):
            return self._first.head()
        family = max(self._families, key=self._rank, default=None)  # the earliest of equal ones
        return self._families[family].head() if family is not None else None

    def remove(self, rollout: Rollout) -> None:
        self._first.remove(rollout)
        waiting = self._families.get(rollout.family)
        if waiting is not None:
            before = len(waiting)
            waiting.remove(rollout)
            self._know(rollout.family).started += before - len(waiting)
            if not len(waiting):
                del self._families[rollout.family]

    def learn(self, rollout: Rollout) -> None:
        known = self._know(rollout.family)
        known.tokens, known.ended = known.tokens + rollout.used_tokens, known.ended + 1
        self._tokens, self._ended = self._tokens + rollout.used_tokens, self._ended + 1

    def _know(self, family: str) -> _Family:
        """What is known of a family, which is remembered longest from now on; the one not met for longest may go."""
        known = self._known.setdefault(family, _Family())
        self._known.move_to_end(family)
        if len(self._known) > _MOST_FAMILIES:
            _, gone = self._known.popitem(last=False)
            self._tokens, self._ended = self._tokens - gone.tokens, self._ended - gone.ended
        return known

    def _rank(self, family: str) -> float:
        known = self._known.get(family)
        if known is not None and known.ended:
            return known.tokens / known.ended
        unknown = self._tokens / self._ended if self._ended else 0.0
        return unknown if known is not None and known.started >= self._PROBES else float("inf")


class Balancer:
    """The queue and the engines' books.

    Args:
        capacities: KV tokens of each engine.
        quantile: of finished lengths that a rollout is expected to reach; None always reserves the whole budget.
        longest_first: order the queue by expected length instead of by arrival.
    """

    def __init__(self, capacities: Sequence[int], *, quantile: float | None = 0.9, longest_first: bool = False) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"capacities = {list(capacities)}: needs at least one engine, each with KV tokens")
        self._engines = [_Engine(capacity_tokens=tokens) for tokens in capacities]
        self._lengths = Lengths(quantile) if quantile is not None else None
        self._queue = _LongestFirst() if longest_first else _FirstCome()
        self._aside: dict[str, Rollout] = {}

    @property
    def waiting(self) -> int:
        """Rollouts in the queue or set aside."""
        return len(self._queue) + len(self._aside)

    @property
    def stranded(self) -> list[Rollout]:
        """Rollouts that are set aside, since only engines out of service could hold them."""
        return list(self._aside.values())

    def held(self, engine: int) -> list[str]:
        """Names of the rollouts on an engine."""
        return list(self._engines[engine].rollouts)

    def free(self, engine: int) -> int:
        """KV tokens of an engine that nothing is expected to use; below 0 where rollouts outgrew their expectation."""
        it = self._engines[engine]
        return it.capacity_tokens - it.reserved_tokens

    def need(self, rollout: Rollout) -> int:
        """KV tokens that a rollout is expected to reach."""
        budget = rollout.budget_tokens
        expected = self._lengths.expected(budget) if self._lengths else budget
        return rollout.prompt_tokens + min(budget, max(expected, rollout.used_tokens + _MARGIN_TOKENS))

    def able(self, rollout: Rollout) -> list[int]:
        """Indices of the engines, in service or not, that could hold a rollout if they held nothing else."""
        need = self.need(rollout)
        return [index for index, engine in enumerate(self._engines) if engine.capacity_tokens >= need]

    def submit(self, rollout: Rollout, *, first: bool = False) -> None:
        """Put a rollout into the queue; `first` for one that was taken off an engine and must not lose its turn.

        Raises:
            ValueError: it could fit no engine, even alone.
        """
        longest = rollout.prompt_tokens + rollout.budget_tokens
        most = max(engine.capacity_tokens for engine in self._engines)
        if longest > most:
            raise ValueError(
                f"rollout {rollout.name} may reach {longest} tokens, the largest engine holds {most}: lower the "
                "budgets or give the engines more KV memory"
            )
        rollout.engine = None
        self._queue.put(rollout, first=first)

    def place(self) -> list[tuple[Rollout, int]]:
        """(rollout, engine) for every rollout that leaves the queue now, in its order."""
        placed = []
        most = max((self._engines[index].capacity_tokens for index in self.up), default=0)
        if not most:
            return placed
        for rollout in reversed(self.stranded):
            if self.need(rollout) <= most:
                del self._aside[rollout.name]
                self._queue.put(rollout, first=True)
        while (rollout := self._queue.head()) is not None:
            engine = self._choose(rollout)
            if engine is None:
                if self.need(rollout) <= most:
                    break
                self._queue.remove(rollout)
                self._aside[rollout.name] = rollout
                continue
            self._queue.remove(rollout)
            rollout.engine = rollout.home = engine
            self._engines[engine].take(rollout, self.need(rollout))
            placed.append((rollout, engine))
        return placed

    def grow(self, rollout: Rollout, used_tokens: int) -> None:
        """A rollout has now appended so many tokens; what is set aside for it grows where it outgrows that."""
        rollout.used_tokens = used_tokens
        if rollout.engine is not None:
            least = rollout.prompt_tokens + min(rollout.budget_tokens, used_tokens + _MARGIN_TOKENS)
            self._engines[rollout.engine].reserve(rollout, max(rollout.reserved_tokens, least))

    def release(self, rollout: Rollout, *, ended: bool) -> None:
        """Take a rollout off its engine, or out of the queue.

        Args:
            ended: it is done, and its length says something about the others'.
        """
        if rollout.engine is None:
            self._queue.remove(rollout)
            self._aside.pop(rollout.name, None)
        else:
            self._engines[rollout.engine].drop(rollout)
        rollout.engine = None
        if ended:
            self._queue.learn(rollout)
            if self._lengths:
                self._lengths.add(rollout.used_tokens)

    def take_down(self, engine: int) -> list[Rollout]:
        """Give an engine nothing more; its rollouts, taken off it, in the order of their arrival there."""
        it = self._engines[engine]
        it.is_up = False
        moved = list(it.rollouts.values())
        for rollout in moved:
            it.drop(rollout)
            rollout.engine = rollout.home = None
        return moved

    def bring_up(self, engine: int) -> None:
        """An engine takes rollouts again."""
        self._engines[engine].is_up = True

    @property
    def up(self) -> list[int]:
        """Indices of the engines that take rollouts."""
        return [index for index, engine in enumerate(self._engines) if engine.is_up]

    def _choose(self, rollout: Rollout) -> int | None:
        need = self.need(rollout)
        open_to = {index: free for index in self.up if (free := self.free(index)) >= need}
        if rollout.home in open_to:
            return rollout.home

        def rank(index: int) -> tuple[bool, int, int, int]:
            engine = self._engines[index]
            joins = 0 < engine.families[rollout.family] < _MOST_SIBLINGS
            return not joins, -open_to[index], len(engine.rollouts), index

        return min(open_to, key=rank, default=None)
