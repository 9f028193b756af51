"""One rollout's place in a pool of engines: its turns run where it sits, and again elsewhere when that engine fails.

Deliberately not here: who sits where (balance.py), and what becomes of engines (pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from rstar2_jax.rollout import balance
from rstar2_jax.rollout.engine import Caps, EngineError, Generation, Request, RolloutEngine

_MOST_ATTEMPTS = 4  # of one turn: beyond that it is the request that no engine can serve


class Pool(Protocol):
    """What a seat asks of its pool (see pool.py)."""

    @property
    def caps(self) -> Caps: ...

    @property
    def span(self) -> Callable[[], contextlib.AbstractContextManager]: ...

    def engine(self, index: int) -> RolloutEngine: ...

    def queue(self, seat: Seat) -> None: ...

    def turn_done(self, seat: Seat, used_tokens: int) -> None: ...

    async def turn_failed(self, index: int, error: EngineError) -> bool: ...


class Seat:
    """A rollout that waits for an engine or has one.

    Args:
        pool: where it belongs.
        rollout: its entry in the balancer's books.
    """

    def __init__(self, pool: Pool, rollout: balance.Rollout) -> None:
        self.rollout = rollout
        self.queued_at = 0.0
        self.in_flight = False
        self._pool = pool
        self._index: int | None = None
        self._queued = True
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None

    @property
    def caps(self) -> Caps:
        """Of the engine that it sits at, of the whole pool while it waits."""
        return self._pool.caps if self._index is None else self._pool.engine(self._index).caps

    async def ready(self) -> None:
        """Return when an engine has room for the rollout. Has no deadline: a full engine is no fault.

        Raises:
            EngineError: no engine is left.
        """
        if self._index is None and not self._queued and self._failure is None:
            self._queued = True
            self._pool.queue(self)
        while self._index is None:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    async def generate(self, request: Request) -> Generation:
        """Sample one turn; sampled again, with the same seed, on another engine when this one fails.

        Raises:
            ValueError: it can never be served.
            EngineError: several attempts failed, or no engine is left.
        """
        last: EngineError | None = None
        failed = 0
        while failed < _MOST_ATTEMPTS:
            await self.ready()
            index = self._index
            assert index is not None
            try:
                with self._pool.span():
                    generation = await self._attempt(self._pool.engine(index), request)
            except EngineError as error:
                last = error
                failed += not await self._pool.turn_failed(index, error)
                continue
            if generation is not None:
                before = len(request.prompt_ids) - self.rollout.prompt_tokens
                self._pool.turn_done(self, before + len(generation.token_ids))
                return generation
        raise EngineError(f"request {request.rid} failed {_MOST_ATTEMPTS} times, at last: {last}") from last

    async def _attempt(self, engine: RolloutEngine, request: Request) -> Generation | None:
        """What the engine samples; None when the place was lost meanwhile."""
        work = asyncio.ensure_future(engine.generate(request))
        self._changed.clear()
        lost = asyncio.ensure_future(self._changed.wait())
        self.in_flight = True
        try:
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            self.in_flight = False
            for task in (work, lost):
                if not task.done():
                    task.cancel()
                    # An engine that stands still may take long to let go; its late answer is nobody's.
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def is_at(self, index: int) -> bool:
        """Whether it sits at this engine."""
        return self._index == index

    def sit(self, index: int) -> None:
        """Take a place."""
        self._index, self._queued, self._failure = index, False, None
        self._changed.set()

    def lose_place(self, *, queued: bool) -> None:
        """Give the place up; a turn in flight is sampled again elsewhere.

        Args:
            queued: the rollout is in the queue again already.
        """
        self._index, self._queued = None, queued
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        """End whatever it waits for."""
        self._failure = error
        self._changed.set()
