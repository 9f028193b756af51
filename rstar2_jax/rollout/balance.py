"""Which engine takes which rollout, by free KV tokens: the scheduler's decisions as plain state without clock or I/O.

An engine is given a rollout when its memory covers what its rollouts and this one are expected to hold in the end:

    need(rollout)  = prompt + min(budget, max(expected length, used + margin))
    peak(engine)   = sum of needs + z sqrt(sum of variances), and never more than the sum of prompt + budget
    free(engine)   = capacity - peak(engine)

with the lengths expected by lengths.py and z that of the normal distribution at `quantile`: many rollouts together
stray less from their mean than each does, so that large engines are filled well and small ones are not over-filled.

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

Source: rStar2-Agent paper, load-balanced rollout scheduler by KV capacity. Deviation: expected lengths in place of the
longest ones, which the paper leaves open (and which are what holds until enough rollouts have ended).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

from rstar2_jax.rollout import lengths

_MOST_SIBLINGS = 8  # that prefer one engine: all of a long prompt's samples in one place would end late together
_MARGIN_TOKENS = 64  # what a rollout that outgrew its expectation is expected to append still
_MOST_FAMILIES = 4096  # prompts whose samples' lengths are remembered: several steps' worth


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Rollout:
    """One rollout as the scheduler sees it.

    Args:
        name: unlike any other's.
        family: rollouts of one prompt share it.
        prompt_tokens, budget_tokens: length of the prompt, most tokens after it.
        used_tokens: appended so far.
        reserved_tokens, variance: KV tokens that its engine expects it to reach, and how unsure that is.
        engine: index of the engine that holds it, None while it waits.
        home: index of the engine that held it last.
    """

    name: str
    family: str
    prompt_tokens: int
    budget_tokens: int
    used_tokens: int = 0
    reserved_tokens: int = 0
    variance: float = 0.0
    engine: int | None = None
    home: int | None = None

    @property
    def longest_tokens(self) -> int:
        """KV tokens that it holds if it uses its whole budget."""
        return self.prompt_tokens + self.budget_tokens


@dataclasses.dataclass(kw_only=True, slots=True)
class _Engine:
    capacity_tokens: int
    reserved_tokens: int = 0
    variance: float = 0.0
    longest_tokens: int = 0
    is_up: bool = True
    rollouts: dict[str, Rollout] = dataclasses.field(default_factory=dict)
    families: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def take(self, rollout: Rollout) -> None:
        self.rollouts[rollout.name] = rollout
        self.families[rollout.family] += 1
        self.longest_tokens += rollout.longest_tokens

    def reserve(self, rollout: Rollout, tokens: int, variance: float) -> None:
        self.reserved_tokens += tokens - rollout.reserved_tokens
        self.variance += variance - rollout.variance
        rollout.reserved_tokens, rollout.variance = tokens, variance

    def drop(self, rollout: Rollout) -> None:
        del self.rollouts[rollout.name]
        self.families[rollout.family] -= 1
        if not self.families[rollout.family]:
            del self.families[rollout.family]  # each request of an endpoint is a family of its own
        self.longest_tokens -= rollout.longest_tokens
        self.reserve(rollout, 0, 0.0)


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
        quantile: how surely an engine's rollouts stay below what they are expected to hold, in [0.5, 1); None reserves
            every rollout's whole budget.
        longest_first: order the queue by expected length instead of by arrival.
    """

    def __init__(
        self, capacities: Sequence[int], *, quantile: float | None = None, longest_first: bool = False
    ) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"capacities = {list(capacities)}: needs at least one engine, each with KV tokens")
        self._engines = [_Engine(capacity_tokens=tokens) for tokens in capacities]
        if quantile is not None and not 0.5 <= quantile < 1:
            raise ValueError(f"quantile = {quantile}: must be in [0.5, 1); None reserves every rollout's whole budget")
        self._z = statistics.NormalDist().inv_cdf(quantile) if quantile is not None else 0.0
        self._lengths = lengths.Lengths() if quantile is not None else None
        self._queue = _LongestFirst() if longest_first else _FirstCome()
        self._aside: dict[str, Rollout] = {}
        self._budget_tokens = 0  # the largest of those that ended: a small one must not cut the others' lengths

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
        return it.capacity_tokens - self._peak(it.reserved_tokens, it.variance, it.longest_tokens)

    def need(self, rollout: Rollout) -> int:
        """KV tokens that a rollout is expected to reach."""
        return self._expect(rollout)[0]

    def _expect(self, rollout: Rollout) -> tuple[int, float]:
        """What a rollout is expected to reach, and the variance of that."""
        used, budget = rollout.used_tokens, rollout.budget_tokens
        mean, variance = self._lengths.expected(used, budget) if self._lengths else (budget, 0.0)
        return rollout.prompt_tokens + min(budget, max(math.ceil(mean), used + _MARGIN_TOKENS)), variance

    def _peak(self, reserved: int, variance: float, longest: int) -> int:
        return min(longest, reserved + math.ceil(self._z * math.sqrt(max(0.0, variance))))

    def able(self, rollout: Rollout) -> list[int]:
        """Indices of the engines, in service or not, that could hold a rollout if they held nothing else."""
        need = self.need(rollout)
        return [index for index, engine in enumerate(self._engines) if engine.capacity_tokens >= need]

    def submit(self, rollout: Rollout, *, first: bool = False) -> None:
        """Put a rollout into the queue; `first` for one that was taken off an engine and must not lose its turn.

        Raises:
            ValueError: it could fit no engine, even alone.
        """
        longest, most = rollout.longest_tokens, max(engine.capacity_tokens for engine in self._engines)
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
            self._engines[engine].take(rollout)
            self._engines[engine].reserve(rollout, *self._expect(rollout))
            placed.append((rollout, engine))
        return placed

    def grow(self, rollout: Rollout, used_tokens: int) -> None:
        """A rollout has now appended so many tokens, and is expected to reach what such rollouts reach."""
        rollout.used_tokens = used_tokens
        if rollout.engine is not None:
            self._engines[rollout.engine].reserve(rollout, *self._expect(rollout))

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
                self._budget_tokens = max(self._budget_tokens, rollout.budget_tokens)
                self._lengths.add(rollout.used_tokens)
                if self._lengths.is_due:
                    held = (one.used_tokens for engine in self._engines for one in engine.rollouts.values())
                    self._lengths.fit(held, self._budget_tokens)

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
        need, variance = self._expect(rollout)
        open_to = {}
        for index in self.up:
            it = self._engines[index]
            longest = it.longest_tokens + rollout.longest_tokens
            free = it.capacity_tokens - self._peak(it.reserved_tokens + need, it.variance + variance, longest)
            # An empty engine takes whatever is expected to fit: waiting would not make it larger.
            if free >= 0 or (not it.rollouts and need <= it.capacity_tokens):
                open_to[index] = free
        if rollout.home in open_to:
            return rollout.home

        def rank(index: int) -> tuple[bool, int, int, int]:
            engine = self._engines[index]
            joins = 0 < engine.families[rollout.family] < _MOST_SIBLINGS
            return not joins, -open_to[index], len(engine.rollouts), index

        return min(open_to, key=rank, default=None)
