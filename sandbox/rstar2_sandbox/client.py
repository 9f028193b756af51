"""Asyncio client: many thousands of calls in flight over two connections, each answered once, each with a deadline.

Calls are gathered for a few milliseconds and written as micro-batches into the lane's stream. Results come one by one
on a channel of the client's own; whatever a lost connection swallowed is read back from the result keys, and what has
no result yet is submitted again under the same key.

Deliberately not here: any fallback that runs code in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.exceptions

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.protocol import Call, Execution, Outcome, Status, Verdict, Verification

FLUSH_S = 0.003
SWEEP_S = 2.0
GRACE_S = 15.0
DISAGREE = "grader_disagree"  # statistics: verdicts in which the exact rules and the library decided differently
VERIFY_WALL_S = 10.0
LOST = (redis.exceptions.RedisError, OSError)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Pending:
    """A call without a result: what to send, who waits for it, and whether it was written to the stream."""

    lane: str
    key: str
    body: Mapping[str, Any]
    expires: float
    future: asyncio.Future[Outcome | Verification]
    epoch: int | None
    waiters: int = 0
    sent: bool = False


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


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until each has ended.

    Once is not enough: on Python 3.11 a cancellation that arrives while a time-out of its own ends inside the task can
    be taken for that time-out, and the task goes on.
    """
    alive = set(tasks)
    while alive:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=0.1)


class Client:
    """Sends executions and verifications to the nodes behind one Redis; use one in one event loop, and close it.

    Args:
        redis_url: redis://, rediss:// or unix:// address, password included.
        run: name of the run; idempotency keys live inside it.
        epoch: calls of lower epochs of this run are dropped before they start; None joins the run's current epoch.
        queue_limit_s: seconds that a verification may wait before it starts (executions carry their own limit).
        retries: times a call that ended as INFRA is submitted anew while its deadline allows it.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        run: str = "default",
        epoch: int | None = None,
        queue_limit_s: float = 120.0,
        retries: int = 1,
    ) -> None:
        protocol.check_run(run)
        self.run = run
        self.epoch = epoch
        self._queue_limit_s = queue_limit_s
        self._retries = retries
        self._id = uuid.uuid4().hex
        self._redis = connect(redis_url)
        self._pending: dict[str, _Pending] = {}
        self._unsent: list[_Pending] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._resync = asyncio.Event()
        self._ready: asyncio.Event = asyncio.Event()
        self._clock_offset_s = 0.0
        self._capacity = 1
        self._closed = False
        self._fault = "not connected yet"
        self.statistics: dict[str, int] = {}

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def execute(self, execution: Execution) -> Outcome:
        """Run one program and return what it gave. Never raises for a fault of the service: status INFRA says so."""
        limits = execution.limits
        total_s = execution.deadline_s or limits.queue_s + limits.wall_s + GRACE_S
        body = protocol.execution_body(execution)
        started = time.monotonic()
        result = await self._call(keys.EXECUTE, execution.key, body, limits.queue_s, total_s)
        if not isinstance(result, Outcome):
            return Outcome(status=Status.INFRA, detail=_text_of_infra(result) or "a verification has this key")
        queue_s = max(0.0, time.monotonic() - started - result.run_s)
        return dataclasses.replace(result, queue_s=queue_s)

    async def verify(self, text: str, gold: str, key: str = "") -> Verification:
        """Grade the sampled text of a final assistant turn against the gold answer. Faults give Verdict.INFRA."""
        protocol.check_verification(text, gold, key)
        total_s = self._queue_limit_s + VERIFY_WALL_S + GRACE_S
        key = "verify:" + key if key else ""
        result = await self._call(keys.VERIFY, key, {"text": text, "gold": gold}, self._queue_limit_s, total_s)
        if not isinstance(result, Verification):
            return Verification(verdict=Verdict.INFRA, reason=_text_of_infra(result))
        return result

    async def advance_epoch(self) -> int:
        """Make every call submitted before this one stale: those still queued are dropped. Returns the new epoch."""
        self._start()
        await self._ready.wait()
        self.epoch = int(await self._redis.incr(keys.epoch(self.run)))
        return self.epoch

    async def close(self) -> None:
        """End all tasks and connections; calls in flight end as INFRA."""
        self._end_pending("the client was closed")
        await end_tasks(self._tasks)
        self._tasks.clear()
        await self._redis.aclose()

    async def _call(
        self, lane: str, key: str, body: Mapping[str, Any], queue_s: float, total_s: float
    ) -> Outcome | Verification:
        if self._closed:
            raise RuntimeError(f"this client is closed: open a new one (last fault: {self._fault or 'none'})")
        self._start()
        key = key or uuid.uuid4().hex
        deadline = asyncio.get_running_loop().time() + total_s
        for attempt in range(self._retries + 1):
            name = key if attempt == 0 else f"{key}#{attempt}"
            result = await self._attempt(lane, name, body, queue_s, deadline)
            self._count(result)
            left = deadline - asyncio.get_running_loop().time()
            if not _is_infra(result) or left <= 0 or self._closed:
                break
            queue_s = min(queue_s, left)
        return result

    async def _attempt(
        self, lane: str, key: str, body: Mapping[str, Any], queue_s: float, deadline: float
    ) -> Outcome | Verification:
        loop = asyncio.get_running_loop()
        pending = self._pending.get(key)
        if pending is None:
            pending = _Pending(lane, key, body, time.time() + queue_s, loop.create_future(), self.epoch)
            self._pending[key] = pending
            self._unsent.append(pending)
            self._wake.set()
        pending.waiters += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(pending.future)
        except TimeoutError:
            return Outcome(status=Status.INFRA, detail=self._explain(pending))
        finally:
            pending.waiters -= 1
            if pending.waiters == 0 and self._pending.get(key) is pending:
                del self._pending[key]

    def _explain(self, pending: _Pending) -> str:
        state = "written to" if pending.sent else "not yet written to"
        return (
            f"deadline passed waiting for the result of call {pending.key!r}, {state} stream "
            f"{keys.stream(pending.lane)!r}; {len(self._pending)} calls in flight; last fault: {self._fault or 'none'}"
        )

    def _count(self, result: Outcome | Verification) -> None:
        name = result.status if isinstance(result, Outcome) else result.verdict
        self.statistics[name] = self.statistics.get(name, 0) + 1
        if isinstance(result, Verification) and result.disagree:
            self.statistics[DISAGREE] = self.statistics.get(DISAGREE, 0) + 1

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._receive(), name="sandbox-receive"),
                asyncio.create_task(self._send(), name="sandbox-send"),
                asyncio.create_task(self._sweep(), name="sandbox-sweep"),
            ]
            for task in self._tasks:
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task of ours ended: unless the client was closed that is a defect, which nobody shall wait for."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = f"{task.get_name()} ended: {task.exception()!r}"
            logger.error("the sandbox client cannot go on: %s", self._fault, exc_info=task.exception())
            self._end_pending(self._fault)

    def _end_pending(self, detail: str) -> None:
        self._closed = True
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_result(Outcome(status=Status.INFRA, detail=detail))
        self._pending.clear()

    async def _receive(self) -> None:
        """Listen on the client's channel; after each (re)connection have everything unfinished looked at again."""
        delay_s = 0.02
        while True:
            pubsub = self._redis.pubsub(ignore_subscribe_messages=False)
            try:
                await pubsub.subscribe(keys.replies(self._id))
                async for message in pubsub.listen():
                    if message["type"] == "subscribe":
                        await self._join()
                        delay_s = 0.02
                        self._resync.set()
                    elif message["type"] == "message":
                        self._take(message["data"])
            except LOST as error:
                self._ready.clear()
                self._lose(error)
            finally:
                with contextlib.suppress(*LOST):
                    await pubsub.aclose()
            await asyncio.sleep(delay_s)
            delay_s = min(1.0, delay_s * 2)

    async def _join(self) -> None:
        """Learn the server's clock, the run's epoch and the size of the cluster."""
        seconds, micros = await self._redis.time()
        self._clock_offset_s = seconds + micros / 1e6 - time.time()
        current = int(await self._redis.get(keys.epoch(self.run)) or 0)
        if self.epoch is None:
            self.epoch = current
        elif self.epoch > current:
            await self._redis.set(keys.epoch(self.run), self.epoch)
        self._fault = ""
        self._ready.set()

    def _lose(self, error: BaseException) -> None:
        self._fault = f"{type(error).__name__}: {error}"
        logger.warning("connection to the sandbox's Redis lost, trying again: %s", self._fault)

    def _take(self, payload: bytes) -> None:
        try:
            key, result = protocol.decode_result(payload)
        except protocol.ProtocolError as error:
            logger.error("an unreadable result was dropped: %s", error)
            return
        pending = self._pending.pop(key, None)
        if pending is not None and not pending.future.done():
            pending.future.set_result(result)

    async def _send(self) -> None:
        """Write what was submitted, in micro-batches; what cannot be written now waits for the next connection."""
        while True:
            await self._wake.wait()
            await self._ready.wait()
            if len(self._unsent) < protocol.BATCH_CALLS:
                await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            batch = [pending for pending in self._unsent if not pending.future.done() and pending.waiters]
            self._unsent.clear()
            try:
                await self._write(batch)
            except LOST as error:
                self._lose(error)
                self._unsent[:0] = batch
                self._wake.set()
                await asyncio.sleep(0.05)

    async def _write(self, batch: list[_Pending]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for lane in keys.LANES:
                calls = [self._envelope(pending) for pending in batch if pending.lane == lane]
                size = protocol.BATCH_CALLS if lane == keys.VERIFY else self._entry_calls(len(calls))
                for entry in protocol.batches(calls, size):
                    pipe.xadd(keys.stream(lane), {"calls": entry})
            await pipe.execute()
        for pending in batch:
            pending.sent = True

    def _envelope(self, pending: _Pending) -> Call:
        if pending.epoch is None:
            pending.epoch = self.epoch or 0
        return Call(
            run=self.run,
            key=pending.key,
            epoch=pending.epoch,
            lane=pending.lane,
            reply=keys.replies(self._id),
            expires=pending.expires + self._clock_offset_s,
            body=pending.body,
        )

    def _entry_calls(self, calls: int) -> int:
        """Calls of one entry: few while the cluster has free slots for them, since an entry stays with one node."""
        return max(1, min(protocol.BATCH_CALLS, calls // max(1, self._capacity)))

    async def _sweep(self) -> None:
        """Now and then, and after each reconnection, read back results that were announced while nobody listened."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._resync.wait()
            again = self._resync.is_set()
            self._resync.clear()
            try:
                await self._read_back(again)
                await self._measure_capacity()
            except LOST as error:
                self._lose(error)
                if again:
                    self._resync.set()
                await asyncio.sleep(0.05)

    async def _read_back(self, again: bool) -> None:
        waiting = [pending for pending in self._pending.values() if pending.sent]
        for start in range(0, len(waiting), 512):
            part = waiting[start : start + 512]
            values = await self._redis.mget([keys.result(self.run, pending.key) for pending in part])
            for value in values:
                if value is not None:
                    self._take(value)
        if again:
            for pending in waiting:
                if not pending.future.done():
                    pending.sent = False
                    self._unsent.append(pending)
            if self._unsent:
                self._wake.set()

    async def _measure_capacity(self) -> None:
        now = time.time() + self._clock_offset_s
        alive = await self._redis.zrangebyscore(keys.nodes(), now, "+inf")
        self._capacity = sum(int(member.rpartition(b"/")[2]) for member in alive)


def _is_infra(result: Outcome | Verification) -> bool:
    if isinstance(result, Outcome):
        return result.status is Status.INFRA
    return result.verdict is Verdict.INFRA


def _text_of_infra(result: Outcome | Verification) -> str:
    return result.detail if isinstance(result, Outcome) else result.reason
