"""Which engine takes which rollout, by free KV tokens: the scheduler's decisions as plain state without clock or I/O.

An engine is given a rollout when its memory covers what its rollouts and this one are expected to hold at any time:

    peak(engine)   = max over g of mean H(g) + z sqrt(variance H(g)), and never more than the sum of prompt + budget
    free(engine)   = capacity - peak(engine)

with H(g), what they hold after g more steps, expected by lengths.py, and z that of the normal distribution at
`quantile`: many rollouts together stray less from their mean than each does, so that large engines are filled well and
small ones are not over-filled. Of the variance one half is taken to be the prompt's, which its samples share: with m of
each prompt on an engine it is (1 + m) / 2 times as large. How long a rollout is by now is known from the others of its
engine: all of its rows sample in step, so that each turn that ends says how far those have come that still run.

Waiting rollouts form one first-come-first-served queue: where the head fits nowhere, nobody passes it. With
`longest_first` the head is instead one whose prompt's finished samples were longest on average; a prompt that nothing
is known of comes before all others until two of its samples run (a step ends with its longest rollout, and one that
starts late ends late). Rollouts that were taken off an engine go first in either order. A head that only an engine out
of service could hold is set aside until one is back: nobody who passes it takes its room.

Of the engines with room a rollout takes its home (where it ran before), else one that holds a few of its prompt's
siblings (they share the prefix), else the one with most free tokens; ties go to the one with fewer rollouts, then to
the lower index. Affinity ends where an engine is full or down, and where nobody waits and one engine has clearly more
left to do than another: then rollouts move between two of their turns, a few, since that costs a prefill. Engines are
taken to be equally fast, whatever they hold.

Every change is an explicit call and every answer a plain value, so that the asyncio driver (pool.py) and the event
simulation (benchmarks/scheduler_sim.py) run the same decisions.

Source: rStar2-Agent paper, load-balanced rollout scheduler by KV capacity. Deviations: expected lengths in place of the
longest ones, which the paper leaves open (and which are what holds until enough rollouts have ended), and moves.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from rstar2_jax import hosts
from rstar2_jax.rollout import lengths
from rstar2_jax.rollout.queues import FirstCome, LongestFirst, Rollout

_MOST_SIBLINGS = 4  # that prefer one engine: all of a long prompt's samples in one place would end late together
_MARGIN_TOKENS = 64  # what a rollout that outgrew its expectation is expected to append still
_UNEVEN = 0.2  # of the mean work that engines have left: less of a difference is none


@dataclasses.dataclass(kw_only=True, slots=True)
class _Engine:
    capacity_tokens: int
    longest_tokens: int = 0
    progress: int = 0  # tokens that a row would have which sampled from the start without a pause
    is_up: bool = True
    rollouts: dict[str, Rollout] = dataclasses.field(default_factory=dict)
    families: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def take(self, rollout: Rollout) -> None:
        self.rollouts[rollout.name] = rollout
        self.families[rollout.family] += 1
        self.longest_tokens += rollout.longest_tokens
        rollout.began_at = None

    def drop(self, rollout: Rollout) -> None:
        del self.rollouts[rollout.name]
        self.families[rollout.family] -= 1
        if not self.families[rollout.family]:
            del self.families[rollout.family]  # each request of an endpoint is a family of its own
        self.longest_tokens -= rollout.longest_tokens

    def used_by(self, rollout: Rollout) -> int:
        """Tokens that a rollout has appended by now: all rows of an engine sample one each in a step."""
        more = 0 if rollout.began_at is None else self.progress - rollout.began_at
        return min(rollout.budget_tokens, rollout.used_tokens + more)


class Balancer:
    """The queue and the engines' books.

    Args:
        capacities: KV tokens of each engine.
        quantile: how surely an engine's rollouts stay within its memory, in [0.5, 1); None reserves every rollout's
            whole budget.
        longest_first: order the queue by expected length instead of by arrival.
        move_share: most tokens that moves between turns may have computed again, as a share of the sampled ones.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        quantile: float | None = None,
        longest_first: bool = False,
        move_share: float = 0.0,
    ) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"capacities = {list(capacities)}: needs at least one engine, each with KV tokens")
        self._engines = [_Engine(capacity_tokens=tokens) for tokens in capacities]
        if quantile is not None and not 0.5 <= quantile < 1:
            raise ValueError(f"quantile = {quantile}: must be in [0.5, 1); None reserves every rollout's whole budget")
        self._z = statistics.NormalDist().inv_cdf(quantile) if quantile is not None else 0.0
        self._lengths = lengths.Lengths() if quantile is not None else None
        self._queue = LongestFirst() if longest_first else FirstCome()
        self._aside: dict[str, Rollout] = {}
        self._budget_tokens = 0  # the largest so far: a small one must not cut the others' lengths
        self._most_under_way = self._longest_tokens = 0
        self._move_share, self._may_move = move_share, 0.0
        # Of what each engine is expected to hold from now on; those of stale ones must be made anew.
        self._mean, self._variance = np.zeros((2, len(capacities), lengths.BUCKETS))
        self._stale = set(range(len(capacities)))

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
        return it.capacity_tokens - int(self._peaks([engine], None)[0])

    def need(self, rollout: Rollout) -> int:
        """KV tokens that a rollout is expected to reach."""
        used, budget = rollout.used_tokens, rollout.budget_tokens
        mean = self._lengths.expected(used, budget) if self._lengths else budget
        return rollout.prompt_tokens + min(budget, max(math.ceil(mean), used + _MARGIN_TOKENS))

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
        self._longest_tokens = max(self._longest_tokens, longest)
        if rollout.budget_tokens > self._budget_tokens:
            self._budget_tokens = rollout.budget_tokens
            if self._lengths is not None and self._lengths.are_known:
                self._fit()
        self._queue.put(rollout, first=first)
        under_way = self.waiting + sum(len(engine.rollouts) for engine in self._engines)
        self._most_under_way = max(self._most_under_way, under_way)

    def place(self, most_rollouts: int | None = None) -> list[tuple[Rollout, int]]:
        """(rollout, engine) for every rollout that leaves the queue now, or the first of them, in its order."""
        placed = []
        most = max((self._engines[index].capacity_tokens for index in self.up), default=0)
        if not most:
            return placed
        for rollout in reversed(self.stranded):
            if self.need(rollout) <= most:
                del self._aside[rollout.name]
                self._queue.put(rollout, first=True)
        while (rollout := self._queue.head()) is not None and len(placed) != most_rollouts:
            engine = self._choose(rollout)
            if engine is None:
                if self.need(rollout) <= most:
                    break
                self._queue.remove(rollout)
                self._aside[rollout.name] = rollout
                continue
            self._queue.remove(rollout)
            self._take(rollout, engine)
            placed.append((rollout, engine))
        return placed

    def begin(self, rollout: Rollout) -> int | None:
        """A turn begins of a rollout that has an engine. Returns the engine where it is sampled: the one that it was
        at, or another, where that evens out the work that is left; None, and nothing done, where it has none."""
        if rollout.engine is not None:
            self._even_out(rollout)
            rollout.began_at = self._engines[rollout.engine].progress
        return rollout.engine

    def grow(self, rollout: Rollout, used_tokens: int, sampled_tokens: int = 0) -> None:
        """A turn has ended: the rollout has now appended so many tokens, of which so many were sampled in this turn."""
        rollout.used_tokens = used_tokens
        # Kept for later is what moves the longest rollout, or that share of all memory where it is more.
        most = max(self._longest_tokens, self._move_share * sum(engine.capacity_tokens for engine in self._engines))
        self._may_move = min(self._may_move + self._move_share * sampled_tokens, most)
        if rollout.engine is not None:
            engine = self._engines[rollout.engine]
            if rollout.began_at is not None:
                engine.progress = max(engine.progress, rollout.began_at + sampled_tokens)
            rollout.began_at = None
            self._stale.add(rollout.engine)

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
            self._stale.add(rollout.engine)
        rollout.engine = rollout.began_at = None
        if ended:
            self._queue.learn(rollout)
            if self._lengths:
                cut = rollout.used_tokens >= rollout.budget_tokens
                self._lengths.add(rollout.used_tokens, self._most_under_way, cut=cut)
                if self._lengths.is_due:
                    self._fit()

    def take_down(self, engine: int) -> list[Rollout]:
        """Give an engine nothing more; its rollouts, taken off it, in the order of their arrival there."""
        it = self._engines[engine]
        it.is_up = False
        moved = list(it.rollouts.values())
        for rollout in moved:
            it.drop(rollout)
            rollout.engine = rollout.home = rollout.began_at = None
        self._stale.add(engine)
        return moved

    def bring_up(self, engine: int) -> None:
        """An engine takes rollouts again."""
        self._engines[engine].is_up = True

    @property
    def up(self) -> list[int]:
        """Indices of the engines that take rollouts."""
        return [index for index, engine in enumerate(self._engines) if engine.is_up]

    @property
    def _knows(self) -> bool:
        return self._lengths is not None and self._lengths.are_known

    def _fit(self) -> None:
        assert self._lengths is not None
        running = (it.used_by(one) for it in self._engines for one in it.rollouts.values())
        self._lengths.fit(running, self._budget_tokens)
        self._stale.update(range(len(self._engines)))

    def _even_out(self, rollout: Rollout) -> None:
        """Move a rollout between two turns, where its engine has much more left to do than another with room for it.

        Not while rollouts wait, which even that out by themselves, and only as far as `move_share` allows: the new
        engine computes all that the rollout has.
        """
        index = rollout.engine
        again = (
            rollout.prompt_tokens + rollout.used_tokens if rollout.used_tokens else 0
        )  # nothing before the first turn
        if self.waiting or index is None or again > self._may_move or not self._move_share or not self._knows:
            return
        self._refresh()
        up = self.up
        work = self._mean[up].sum(axis=1)
        to, own = up[int(np.argmin(work))], self._outlook(rollout)[0].sum()
        if self._mean[index].sum() - work.min() < max(2 * own, _UNEVEN * work.mean()):
            return
        if self._engines[to].capacity_tokens < self._peaks([to], rollout)[0]:
            return
        self._engines[index].drop(rollout)
        self._stale.add(index)
        self._take(rollout, to)
        self._may_move -= again

    def _take(self, rollout: Rollout, engine: int) -> None:
        rollout.engine = rollout.home = engine
        self._engines[engine].take(rollout)
        if self._knows and engine not in self._stale:
            mean, variance = self._outlook(rollout)
            self._mean[engine] += mean
            self._variance[engine] += variance

    def _outlook(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        assert self._lengths is not None
        return self._lengths.held([rollout.prompt_tokens], [rollout.used_tokens])

    def _refresh(self) -> None:
        """Bring the outlook of every engine up to what is known of its rollouts by now."""
        assert self._lengths is not None
        for index in self._stale:
            it = self._engines[index]
            rollouts = it.rollouts.values()
            prompts, used = [one.prompt_tokens for one in rollouts], [it.used_by(one) for one in rollouts]
            self._mean[index], self._variance[index] = self._lengths.held(prompts, used)
        self._stale.clear()

    def _peaks(self, indices: Sequence[int], rollout: Rollout | None) -> np.ndarray:
        """KV tokens that engines are expected to hold at most at one time, with one more rollout if there is one."""
        longest = np.array([self._engines[index].longest_tokens for index in indices])
        longest += rollout.longest_tokens if rollout else 0
        if not self._knows:
            return longest
        self._refresh()
        mean, variance = self._outlook(rollout) if rollout else (0.0, 0.0)
        held = [self._engines[index] for index in indices]
        siblings = np.array([len(it.rollouts) / max(1, len(it.families)) for it in held])
        unsure = (self._variance[indices] + variance) * (0.5 + 0.5 * np.maximum(1.0, siblings))[:, None]
        spread = np.sqrt(np.maximum(0.0, unsure))
        return np.minimum(longest, np.ceil((self._mean[indices] + mean + self._z * spread).max(axis=1)))

    def _choose(self, rollout: Rollout) -> int | None:
        need, up = self.need(rollout), self.up
        open_to = {}
        for index, peak in zip(up, self._peaks(up, rollout).tolist(), strict=True):
            it = self._engines[index]
            # An empty engine takes whatever is expected to fit: waiting would not make it larger.
            if peak <= it.capacity_tokens or (not it.rollouts and need <= it.capacity_tokens):
                open_to[index] = it.capacity_tokens - peak
        if rollout.home in open_to:
            return rollout.home

        def rank(index: int) -> tuple[bool, int, int, int]:
            engine = self._engines[index]
            joins = 0 < engine.families[rollout.family] < _MOST_SIBLINGS
            return not joins, -open_to[index], len(engine.rollouts), index

        return min(open_to, key=rank, default=None)


def of(capacities: Sequence[int], policy: hosts.Fleet) -> Balancer:
    """The scheduler of engines of these capacities as the settings have it."""
    return Balancer(
        capacities,
        quantile=policy.expected_quantile or None,
        longest_first=policy.longest_first,
        move_share=policy.move_share,
    )
