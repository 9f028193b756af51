"""Does an engine live, and does it get on? Two questions: a busy engine answers late, a wedged one answers at once.

Deliberately not here: what follows from the answers (pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from rstar2_jax.rollout.engine import EngineError, LimitError, RolloutEngine

_T = TypeVar("_T")


class Progress:
    """Notices when the signs of work stay the same although there is work.

    Args:
        limit_s: seconds without a change that are still well; they start when work starts.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._sign: Hashable = None
        self._since: float | None = None

    def see(self, sign: Hashable, now_s: float, *, idle: bool) -> float | None:
        """Seconds without progress once they are above the limit, else None.

        Args:
            sign: anything that changes when work gets done.
            now_s: any clock that does not go back.
            idle: there is nothing to do, so that nothing need change.
        """
        if idle or self._since is None or sign != self._sign:
            self._sign, self._since = sign, None if idle else now_s
            return None
        waited = now_s - self._since
        return waited if waited > self._limit_s else None


async def unless(event: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """What the work gives, or None as soon as the event is set before: the work is cancelled then, and not awaited.

    An engine that stands still may take long to let go; its late answer is nobody's.
    """
    task, cut_short = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, cut_short}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, cut_short):
            if not one.done():
                one.cancel()
                one.add_done_callback(lambda done: done.cancelled() or done.exception())


async def meanwhile(work: Awaitable[None], limit_s: float, every_s: float, act: Callable[[], None]) -> None:
    """Wait for the work; where it takes longer than the limit, `act` then and every so many seconds until it ends."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        while not done:
            act()
            done, _ = await asyncio.wait({task}, timeout=every_s)
        task.result()
    finally:
        task.cancel()


async def answers(engine: RolloutEngine, limit_s: float) -> bool:
    """Whether the engine says within the limit that it lives; it is taken to where this process could not ask."""
    try:
        async with asyncio.timeout(limit_s):
            return await engine.alive()
    except TimeoutError:
        return False
    except LimitError:
        return True


async def kv_tokens_used(engine: RolloutEngine, limit_s: float) -> int | None:
    """Tokens in the engine's cache, a sign of its work; None where it does not say within the limit.

    Raises:
        LimitError: this process could not ask.
    """
    try:
        async with asyncio.timeout(limit_s):
            return (await engine.load()).kv_tokens_used
    except LimitError:
        raise
    except (TimeoutError, EngineError):
        return None
