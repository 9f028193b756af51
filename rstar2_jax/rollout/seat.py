"""One rollout's place in a pool of engines: its turns run where it sits, and again elsewhere when that engine fails.

Deliberately not here: who sits where (balance.py), and what becomes of engines (pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

from rstar2_jax.rollout import balance, watch
from rstar2_jax.rollout.engine import Caps, EngineError, Generation, LimitError, Request, RolloutEngine, RoomError

_MOST_ATTEMPTS = 4  # of one turn: beyond that it is the request that no engine can serve
_MOST_MOVES = 16  # of one turn: beyond that it is the request that every engine fails of


@dataclasses.dataclass(kw_only=True, slots=True)
class Counts:
    """Since a pool was made: rollouts seated, moved off failed engines, moved to even out work; engines taken down and
    brought back; seconds in the queue."""

    seated: int = 0
    moved: int = 0
    evened: int = 0
    taken_down: int = 0
    brought_back: int = 0
    queue_s: float = 0.0


class Pool(Protocol):
    """What a seat asks of its pool (see pool.py)."""

    @property
    def caps(self) -> Caps: ...

    @property
    def span(self) -> Callable[[], contextlib.AbstractContextManager]: ...

    preempted: int

    @property
    def seated_s(self) -> float: ...

    def engine(self, index: int) -> RolloutEngine: ...

    def in_words(self) -> str: ...

    def queue(self, seat: Seat) -> None: ...

    def turn_begins(self, seat: Seat) -> None: ...

    def turn_done(self, seat: Seat, used_tokens: int, sampled_tokens: int) -> None: ...

    async def turn_failed(self, seat: Seat, index: int, error: EngineError) -> bool: ...


class Seat:
    """A rollout that waits for an engine or has one.

    Args:
        pool: where it belongs.
        rollout: its entry in the balancer's books.

    Attributes:
        lost: to be set where the rollout ended by a fault: its length then says nothing about the others'.
    """

    def __init__(self, pool: Pool, rollout: balance.Rollout) -> None:
        self.rollout = rollout
        self.lost = False
        self.queued_at = 0.0
        self.in_flight = False
        self._pool = pool
        self._index: int | None = None
        self._queued = True
        self._sat = 0  # places so far
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None
        self._rid, self._begun = "", ("", 0)  # the turn, and at which of its places it was begun last
        self._failed = self._moves = 0  # of the turn named so
        self._last: EngineError | None = None

    @property
    def caps(self) -> Caps:
        """Of the engine that it sits at, of the whole pool while it waits."""
        return self._pool.caps if self._index is None else self._pool.engine(self._index).caps

    async def ready(self, limit_s: float = math.inf) -> None:
        """Return when an engine has room for the rollout. A full engine is no fault, one that stays full is:

        Args:
            limit_s: longest time in which no rollout at all is given a place while this one waits.

        Raises:
            RoomError: nobody was given a place for so long.
            EngineError: no engine is left, or none that could hold it.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if self._index is None and not self._queued:
            self._queued, self._failure = True, None  # an earlier one, which nobody waited for
            self._pool.queue(self)
        while self._index is None:
            if self._failure is not None:
                raise self._failure
            left_s = max(began_s, self._pool.seated_s) + limit_s - loop.time()
            if left_s <= 0:
                raise RoomError(
                    f"rollout {self.rollout.name} waited {loop.time() - began_s:.3g} s for room in an engine, and "
                    f"nobody was given a place for {limit_s:g} s: {self._pool.in_words()}"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s < math.inf else None):
                    await self._changed.wait()

    async def generate(self, request: Request) -> Generation | None:
        """Sample one turn where it sits; None when the place was lost meanwhile: be `ready` and ask again, with the
        same request and so the same seed.

        Raises:
            ValueError: it can never be served.
            LimitError: this process could not send it.
            EngineError: several attempts failed.
        """
        if request.rid != self._rid:
            self._rid, self._failed, self._moves = request.rid, 0, 0
        if self._index is not None and self._begun != (request.rid, self._sat):
            self._pool.turn_begins(self)
            self._begun = request.rid, self._sat
        sat = self._sat
        while (index := self._index) is not None and self._sat == sat:
            if self._failed >= _MOST_ATTEMPTS:
                raise EngineError(
                    f"request {request.rid} failed {self._failed} times, at last: {self._last}"
                ) from self._last
            try:
                with self._pool.span():
                    generation = await self._attempt(self._pool.engine(index), request)
            except LimitError:
                raise  # no engine's fault, and no other would be reached either
            except EngineError as error:
                self._last = error
                self._failed += not await self._pool.turn_failed(self, index, error)
                continue
            if generation is not None:
                self._pool.preempted += generation.preempted
                before = len(request.prompt_ids) - self.rollout.prompt_tokens
                sampled = len(generation.token_ids)
                self._pool.turn_done(self, before + sampled, sampled)
                return generation
        self._moves += 1
        if self._moves >= _MOST_MOVES:
            raise EngineError(f"request {request.rid}: {self._moves} engines were taken down under it") from self._last
        return None

    async def turn(self, request: Request) -> Generation:
        """One turn wherever there is room for it, however long that takes; raises what `ready` and `generate` raise."""
        while True:
            await self.ready()
            if (generation := await self.generate(request)) is not None:
                return generation

    async def _attempt(self, engine: RolloutEngine, request: Request) -> Generation | None:
        """What the engine samples; None when the place was lost meanwhile."""
        self._changed.clear()
        self.in_flight = True
        try:
            return await watch.unless(self._changed, engine.generate(request))
        finally:
            self.in_flight = False

    def is_at(self, index: int) -> bool:
        """Whether it sits at this engine."""
        return self._index == index

    def sit(self, index: int) -> None:
        """Take a place."""
        self._index, self._queued, self._failure = index, False, None
        self._sat += 1
        self._changed.set()

    def lose_place(self, *, queued: bool) -> None:
        """Give the place up; a turn in flight is sampled again elsewhere.

        Args:
            queued: the rollout is in the queue again already.
        """
        self._index, self._queued = None, queued
        self._changed.set()

    def hope(self) -> None:
        """An engine is back: what it was told meanwhile, and did not wait for, no longer holds."""
        self._failure = None

    def fail(self, error: EngineError) -> None:
        """End whatever it waits for."""
        self._failure = error
        self._changed.set()
