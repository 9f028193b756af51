"""The rollouts that the scheduler knows, and the order in which they leave its queue.

First come first served, or those of long prompts before those of short ones; rollouts that come back go before all
others in either order.

Deliberately not here: whether there is room for the head (balance.py).
"""

from __future__ import annotations

import collections
import dataclasses

_MOST_FAMILIES = 4096  # prompts whose samples' lengths are remembered: several steps' worth


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Rollout:
    """One rollout as the scheduler sees it.

    Args:
        name: unlike any other's.
        family: rollouts of one prompt share it.
        prompt_tokens, budget_tokens: length of the prompt, most tokens after it.
        used_tokens: appended so far.
        began_at: tokens that its engine had sampled in a row when its turn began, None between turns.
        engine: index of the engine that holds it, None while it waits.
        home: index of the engine that held it last.
    """

    name: str
    family: str
    prompt_tokens: int
    budget_tokens: int
    used_tokens: int = 0
    began_at: int | None = None
    engine: int | None = None
    home: int | None = None

    @property
    def longest_tokens(self) -> int:
        """KV tokens that it holds if it uses its whole budget."""
        return self.prompt_tokens + self.budget_tokens


class FirstCome:
    """Rollouts in the order of their arrival; those that come back before all others."""

    def __init__(self) -> None:
        self._order: collections.OrderedDict[str, Rollout] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def put(self, rollout: Rollout, *, first: bool) -> None:
        """Take a rollout, before all others or after them."""
        self._order[rollout.name] = rollout
        if first:
            self._order.move_to_end(rollout.name, last=False)

    def head(self) -> Rollout | None:
        """The one that leaves next, None where there is none."""
        return next(iter(self._order.values()), None)

    def remove(self, rollout: Rollout) -> None:
        """Let go of a rollout, wherever it is."""
        self._order.pop(rollout.name, None)

    def learn(self, rollout: Rollout) -> None:
        """A rollout has ended with the length that it has."""
        del rollout


@dataclasses.dataclass(slots=True)
class _Family:
    """Samples of one prompt so far: started from the queue, ended, and what those appended."""

    started: int = 0
    ended: int = 0
    tokens: int = 0


class LongestFirst:
    """Rollouts whose siblings were long before those whose siblings were short."""

    _PROBES = 2  # samples of a prompt that start before anything is known of it

    def __init__(self) -> None:
        self._first = FirstCome()
        self._families: dict[str, FirstCome] = {}
        self._known: collections.OrderedDict[str, _Family] = collections.OrderedDict()  # the one met last comes last
        self._tokens = self._ended = 0  # of all that are known

    def __len__(self) -> int:
        return len(self._first) + sum(len(waiting) for waiting in self._families.values())

    def put(self, rollout: Rollout, *, first: bool) -> None:
        """Take a rollout, before all others or after them."""
        line = self._first if first else self._families.setdefault(rollout.family, FirstCome())
        line.put(rollout, first=first)

    def head(self) -> Rollout | None:
        """The one that leaves next, None where there is none."""
        if len(self._first):
            return self._first.head()
        family = max(self._families, key=self._rank, default=None)  # the earliest of equal ones
        return self._families[family].head() if family is not None else None

    def remove(self, rollout: Rollout) -> None:
        """Let go of a rollout, wherever it is."""
        self._first.remove(rollout)
        waiting = self._families.get(rollout.family)
        if waiting is not None:
            before = len(waiting)
            waiting.remove(rollout)
            self._know(rollout.family).started += before - len(waiting)
            if not len(waiting):
                del self._families[rollout.family]

    def learn(self, rollout: Rollout) -> None:
        """A rollout has ended with the length that it has."""
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
