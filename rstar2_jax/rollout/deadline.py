"""Waits: with a limit, and the error that names what did not come; for many things, of which none is left behind.

Deliberately not here: the limits themselves (settings.Rollout), and what follows from the error (agent.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


class DeadlineError(RuntimeError):
    """Something did not come within the deadline; the text names it."""


async def within(begin: Callable[[], Awaitable[_T]], limit_s: float, waiting_for: str) -> _T:
    """The awaited value, or DeadlineError that names it after `limit_s` seconds.

    `begin` makes the awaitable, so that none is left unawaited where the wait is cancelled before it starts.
    """
    try:
        async with asyncio.timeout(limit_s) as timeout:
            return await begin()
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise DeadlineError(f"waited {limit_s:g} s for {waiting_for}") from error


async def together(work: Sequence[Awaitable[_T]]) -> list[_T]:
    """Results in order. On an error or a cancellation every one is cancelled and awaited before it goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _leave(tasks)


async def until(work: Sequence[Awaitable[_T]], enough: Callable[[_T], bool]) -> list[_T | None]:
    """Results in order; None for those that were cancelled, since `enough` said so of one that came before them.

    On an error or a cancellation every one is cancelled and awaited before it goes on.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    left, ended = set(tasks), False
    try:
        while left and not ended:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                ended = enough(task.result()) or ended
        return [None if task in left else task.result() for task in tasks]
    finally:
        await _leave(tasks)


async def _leave(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
