"""A value that one thread owes to a coroutine of another."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from rstar2_jax.rollout.engine import EngineError


class Reply:
    """A future of the caller's event loop that the worker thread may settle."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def resolve(self, value: Any) -> None:
        """Give the caller its value."""
        self._settle(functools.partial(self.future.set_result, value))

    def fail(self, error: EngineError) -> None:
        """Raise in the caller."""
        self._settle(functools.partial(self.future.set_exception, error))

    def _settle(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else act())
        except RuntimeError:  # the caller's loop is closed: nobody waits any more
            return
