"""A wait with a limit, and the error that names what did not come.

Deliberately not here: the limits themselves (settings.Rollout), and what follows from the error (agent.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

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
