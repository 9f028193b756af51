"""Connections to Redis, what losing one looks like, and the ending of the tasks that use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

LOST = (redis.exceptions.RedisError, OSError)


def connect(redis_url: str) -> Any:
    """A redis.asyncio.Redis that reports a lost connection at once: the callers here do their own retrying.

    Typed as Any, since the package's annotations mix its synchronous and asynchronous answers.
    """
    keepalive = {} if redis_url.startswith("unix:") else {"socket_keepalive": True}
    return redis.asyncio.Redis.from_url(
        redis_url,
        **keepalive,
        protocol=2,
        socket_connect_timeout=5,
        socket_timeout=30,
        retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
    )


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until each has ended.

    Once is not enough: on Python 3.11 a cancellation that arrives while a time-out of its own ends inside the task can
    be taken for that time-out, and the task goes on.
    """
    alive = set(tasks)
    while alive:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=0.1)
