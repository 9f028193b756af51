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
import json
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.connection import LOST, connect, end_tasks
from rstar2_sandbox.outbox import Outbox, Pending
from rstar2_sandbox.protocol import Execution, Outcome, Status, Verdict, Verification

SWEEP_S = 2.0
GRACE_S = 15.0
DISAGREE = "grader_disagree"  # statistics: verdicts in which the exact rules and the library decided differently
VERIFY_WALL_S = 10.0
NODE_MISSING_S = 5.0
NODE_GONE = "the node that kept the session is gone, and what its cells defined with it"

logger = logging.getLogger(__name__)


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
        self._outbox = Outbox(self._redis, run, keys.replies(self._id))
        self._pending: dict[str, Pending] = {}
        self._sessions: dict[str, str] = {}
        self._missing: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._resync = asyncio.Event()
        self._doubtful: list[Pending] = []
        self._ready: asyncio.Event = asyncio.Event()
        self._closed = False
        self._fault = "not connected yet"
        self.statistics: dict[str, int] = {}

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def execute(self, execution: Execution) -> Outcome:
        """Run one program and return what it gave. Never raises for a fault of the service: status INFRA says so.

        A cell of a session waits for the cells before it: await each before the next.
        """
        limits = execution.limits
        total_s = execution.deadline_s or limits.queue_s + limits.wall_s + GRACE_S
        body = protocol.execution_body(execution)
        started = time.monotonic()
        session = execution.session
        lane, node = (keys.SESSION, self._sessions.get(session, "")) if session else (keys.EXECUTE, "")
        result = await self._call(lane, execution.key, body, limits.queue_s, total_s, node)
        if not isinstance(result, Outcome):
            return Outcome(status=Status.INFRA, detail=_text_of_infra(result) or "a verification has this key")
        if session and result.at:
            self._sessions[session] = result.at
        elif session:
            self._sessions.pop(session, None)
        queue_s = max(0.0, time.monotonic() - started - result.run_s)
        return dataclasses.replace(result, queue_s=queue_s)

    async def end_session(self, session: str) -> None:
        """Have a session end now instead of when it has been idle for long; one that does not live is no error."""
        node = self._sessions.pop(session, "")
        if node:
            await self._call(keys.SESSION, "", {"end": session}, GRACE_S, 2 * GRACE_S, node)

    async def verify(self, text: str, gold: str, key: str = "") -> Verification:
        """Grade the sampled text of a final assistant turn against the gold answer. Faults give Verdict.INFRA."""
        protocol.check_verification(text, gold, key)
        total_s = self._queue_limit_s + VERIFY_WALL_S + GRACE_S
        key = "verify:" + key if key else ""
        body = {"text": text, "gold": gold}
        result = await self._call(keys.VERIFY, key, body, self._queue_limit_s, total_s, "")
        if not isinstance(result, Verification):
            return Verification(verdict=Verdict.INFRA, reason=_text_of_infra(result))
        return result

    async def advance_epoch(self) -> int:
        """Make every call of this run submitted before this one stale: those that wait are dropped, those that run are
        killed, whoever submitted them; sessions end. Returns the new epoch. Raises ConnectionError without a Redis."""
        self._start()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._ready.wait()
                self.epoch = int(await self._redis.incr(keys.epoch(self.run)))
                await self._redis.publish(keys.control(), json.dumps(["epoch", self.run, self.epoch]))
        except (TimeoutError, *LOST) as error:
            raise ConnectionError(f"no answer from the sandbox's Redis: {self._fault or error}") from error
        self._outbox.epoch = self.epoch
        return self.epoch

    async def close(self) -> None:
        """End all tasks and connections; calls in flight end as INFRA."""
        self._end_pending("the client was closed")
        await end_tasks(self._tasks)
        self._tasks.clear()
        await self._redis.aclose()

    async def _call(
        self, lane: str, key: str, body: Mapping[str, Any], queue_s: float, total_s: float, node: str
    ) -> Outcome | Verification:
        if self._closed:
            raise RuntimeError(f"this client is closed: open a new one (last fault: {self._fault or 'none'})")
        self._start()
        key = key or uuid.uuid4().hex
        deadline = asyncio.get_running_loop().time() + total_s
        # A cell is not tried again: what it did to its session cannot be undone.
        retries = self._retries if lane != keys.SESSION else 0
        name = key
        for attempt in range(1, retries + 2):
            future = asyncio.get_running_loop().create_future()
            pending = Pending(lane, name, body, time.time() + queue_s, future, self.epoch, node)
            result = await self._attempt(pending, deadline)
            self._count(result)
            left = deadline - asyncio.get_running_loop().time()
            if not self._may_retry(pending, result) or left <= 0 or self._closed:
                break
            # Under a name of this epoch's own: one of an earlier epoch may be tried again too, and be refused again.
            name = f"{key}#{self.epoch or 0}.{attempt}"
            queue_s = min(queue_s, left)
        return result

    def _may_retry(self, pending: Pending, result: Outcome | Verification) -> bool:
        """True after a fault of ours, and for a call that was ended with an earlier epoch's call of the same key."""
        if isinstance(result, Outcome) and result.status is Status.REJECTED and result.detail == protocol.SUPERSEDED:
            return (pending.epoch or 0) >= (self.epoch or 0)
        return _is_infra(result)

    async def _attempt(self, fresh: Pending, deadline: float) -> Outcome | Verification:
        pending = self._pending.get(fresh.key)
        if pending is None:
            pending = self._pending[fresh.key] = fresh
            self._outbox.push(pending)
        pending.waiters += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(pending.future)
        except TimeoutError:
            return Outcome(status=Status.INFRA, detail=self._explain(pending))
        finally:
            pending.waiters -= 1
            if pending.waiters == 0 and self._pending.get(pending.key) is pending:
                del self._pending[pending.key]
                self._outbox.landed(pending)

    def _explain(self, pending: Pending) -> str:
        state = "written to" if pending.sent else "not yet written to"
        stream, count = keys.stream(pending.lane, self.run), len(self._pending)
        return (
            f"deadline passed waiting for the result of call {pending.key!r}, {state} stream {stream!r}; {count} calls "
            f"in flight; last fault: {self._fault or 'none'}"
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
        self._outbox.clock_offset_s = seconds + micros / 1e6 - time.time()
        current = int(await self._redis.get(keys.epoch(self.run)) or 0)
        if self.epoch is None:
            self.epoch = current
        elif self.epoch > current:
            await self._redis.set(keys.epoch(self.run), self.epoch)
        self._outbox.epoch = self.epoch
        self._fault = ""
        # Written over an earlier connection, so perhaps lost with it. What is written from now on is not.
        self._doubtful = [pending for pending in self._pending.values() if pending.sent]
        self._ready.set()

    def _lose(self, error: BaseException) -> None:
        self._fault = f"{type(error).__name__}: {error}"
        logger.warning("connection to the sandbox's Redis lost, trying again: %s", self._fault)

    def _take(self, payload: bytes, many: bool = True) -> None:
        try:
            results = protocol.decode_results(payload) if many else [protocol.decode_result(payload)]
        except protocol.ProtocolError as error:
            logger.error("an unreadable result was dropped: %s", error)
            return
        for key, result in results:
            pending = self._pending.pop(key, None)
            if pending is not None:
                self._outbox.landed(pending)
                if not pending.future.done():
                    pending.future.set_result(result)

    async def _send(self) -> None:
        """Write what was submitted, in micro-batches; what cannot be written now waits for the next connection."""
        while True:
            batch = await self._outbox.next_batch()
            await self._ready.wait()
            try:
                await self._outbox.write(batch)
            except LOST as error:
                self._lose(error)
                self._outbox.put_back(batch)
                await asyncio.sleep(0.05)

    async def _sweep(self) -> None:
        """Now and then, and after each reconnection, read back results that were announced while nobody listened."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._resync.wait()
            self._resync.clear()
            try:
                await self._read_back()
                await self._measure_capacity()
            except LOST as error:
                self._lose(error)
                if self._doubtful:
                    self._resync.set()
                await asyncio.sleep(0.05)

    async def _read_back(self) -> None:
        waiting = [pending for pending in self._pending.values() if pending.sent]
        for start in range(0, len(waiting), 512):
            part = waiting[start : start + 512]
            values = await self._redis.mget([keys.result(self.run, pending.key) for pending in part])
            for value in values:
                if value is not None:
                    self._take(value, many=False)
        doubtful, self._doubtful = self._doubtful, []
        self._outbox.push_again([pending for pending in doubtful if pending.sent and not pending.future.done()])

    async def _measure_capacity(self) -> None:
        """Learn which nodes are alive; end the calls that only a dead one could have answered."""
        now = time.time() + self._outbox.clock_offset_s
        members = [member.decode() for member in await self._redis.zrangebyscore(keys.nodes(), now, "+inf")]
        self._outbox.capacity = sum(int(member.rpartition("/")[2]) for member in members)
        alive = {member.rpartition("/")[0] for member in members}
        asked = {pending.node for pending in self._pending.values() if pending.node} - alive
        self._missing = {node: self._missing.get(node, time.monotonic()) for node in asked}
        for pending in list(self._pending.values()):
            if time.monotonic() - self._missing.get(pending.node, time.monotonic()) > NODE_MISSING_S:
                self._pending.pop(pending.key)
                self._outbox.landed(pending)
                pending.future.set_result(Outcome(status=Status.INFRA, detail=NODE_GONE))


def _is_infra(result: Outcome | Verification) -> bool:
    if isinstance(result, Outcome):
        return result.status is Status.INFRA
    return result.verdict is Verdict.INFRA


def _text_of_infra(result: Outcome | Verification) -> str:
    return result.detail if isinstance(result, Outcome) else result.reason
