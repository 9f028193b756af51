"""A node: takes calls from the queue as its slots become free, and answers each one as it finishes.

The stream's consumer group gives each entry to one node; the node's heartbeat is its lease on it. A call is answered
once: the first result under its key stands, and whoever submitted it again hears that one.

Deliberately not here: how a program is confined (executor, keeper, jail) and how an answer is judged (verify).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable

from rstar2_sandbox import executor, keys, protocol, verify
from rstar2_sandbox.client import LOST, connect, end_tasks
from rstar2_sandbox.images import GRADE, MATH, SlotError
from rstar2_sandbox.master import Reaper, infra_result
from rstar2_sandbox.protocol import Call, Outcome, Status, Verification

BEAT_S, LEASE_S = 1.0, 5.0
BLOCK_MS = 1000

# ARGV: group, number of results, then for each: result key, seconds it is kept, payload, number of channels, channels;
# then pairs of stream and entry id to acknowledge.
_FINISH = """
local at = 3
for _ = 1, tonumber(ARGV[2]) do
  local payload, channels = ARGV[at + 2], tonumber(ARGV[at + 3])
  if not redis.call('SET', ARGV[at], payload, 'NX', 'EX', ARGV[at + 1]) then
    payload = redis.call('GET', ARGV[at]) or payload
  end
  for index = at + 4, at + 3 + channels do redis.call('PUBLISH', ARGV[index], payload) end
  at = at + 4 + channels
end
while at < #ARGV do
  redis.pcall('XACK', ARGV[at], ARGV[1], ARGV[at + 1])
  redis.call('XDEL', ARGV[at], ARGV[at + 1])
  at = at + 2
end
"""
VERIFY_BACKLOG = 256

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Entry:
    """A stream entry that this node holds, and how many of its calls are unanswered."""

    stream: str
    id: str
    left: int


@dataclasses.dataclass(slots=True)
class _Lane:
    """Calls of one kind that this node holds but has not started, and the slots that take them."""

    name: str
    slots: list[executor.Slot]
    run: Callable[[executor.Slot, Call], Awaitable[Outcome | Verification]]
    spare: int = 0
    backlog: collections.deque[Call] = dataclasses.field(default_factory=collections.deque)
    busy: int = 0
    work: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    room: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def free(self) -> int:
        """Calls that may still be taken from the queue."""
        return len(self.slots) + self.spare - self.busy - len(self.backlog)


class Node:
    """One worker node.

    Args:
        redis_url: address of the queue; the jailed children never learn it.
        slots: executions at once; verification has slots of its own.
        settings: isolation.
        name: unique name of the node; a restarted node with the same name frees what its predecessor held. Empty: a
            fresh one.
    """

    def __init__(
        self, redis_url: str, *, slots: int, settings: executor.Settings, name: str = "", verify_slots: int = 1
    ) -> None:
        self._redis = connect(redis_url)
        self._slots = slots
        self._exclusive = bool(name)
        self._base = name or os.uname().nodename
        self.name = f"{self._base}:{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._executor = executor.Executor(slots + verify_slots, settings)
        self._lanes: dict[str, _Lane] = {}
        self._waiters: dict[str, list[tuple[_Entry, str]]] = {}
        self._results: list[list[str | int]] = []
        self._acks: list[str] = []
        self._flush = asyncio.Event()
        self._clock_offset_s = 0.0
        self._epochs: dict[str, int] = {}
        self._held: set[tuple[str, str]] = set()
        self._joined: asyncio.Future[None]
        self.counts: collections.Counter[str] = collections.Counter()

    async def run(self, ready: Callable[[str], None] = lambda tier: None) -> None:
        """Serve until SIGTERM or cancellation; `ready` is called with the isolation tier once calls are taken."""
        await self._executor.start()
        slots = self._executor.slots
        self._lanes = {
            keys.EXECUTE: _Lane(keys.EXECUTE, slots[: self._slots], self._execute),
            keys.VERIFY: _Lane(keys.VERIFY, slots[self._slots :], self._verify, spare=VERIFY_BACKLOG),
        }
        self._joined = asyncio.get_running_loop().create_future()
        jobs = [self._beat(), self._flusher(), Reaper(self._redis, self.name).run(), self._warm()]
        for lane in self._lanes.values():
            lane.room.set()
            jobs += [self._reader(lane), *(self._runner(lane, slot) for slot in lane.slots)]
        tasks = [asyncio.create_task(job) for job in jobs]
        loop = asyncio.get_running_loop()
        stop = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, lambda: stop.done() or stop.set_result(None))
        self._joined.add_done_callback(lambda joined: joined.cancelled() or ready(self._executor.tier))
        try:
            await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
        finally:
            self._joined.cancel()
            await self._stop(tasks)

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        await end_tasks(tasks)
        self._executor.close()
        try:
            await self._redis.zrem(keys.nodes(), self._member)
        except LOST as error:
            logger.warning("the heartbeat was not withdrawn: %s", error)
        await self._redis.aclose()

    @property
    def _member(self) -> str:
        return f"{self.name}/{self._slots}"

    def _now(self) -> float:
        return time.time() + self._clock_offset_s

    async def _warm(self) -> None:
        """Warm the larger interpreters while the node already serves; a missing one is reported once."""
        for kind in (MATH, GRADE):
            try:
                await self._executor.warm(kind)
            except SlotError as error:
                logger.warning("%s", error)
        await asyncio.Event().wait()

    async def _beat(self) -> None:
        first = True
        while True:
            try:
                seconds, micros = await self._redis.time()
                self._clock_offset_s = seconds + micros / 1e6 - time.time()
                if first and self._exclusive:
                    await self._free_predecessors()
                first = False
                await self._learn_epochs()
                await self._redis.zadd(keys.nodes(), {self._member: self._now() + LEASE_S})
                if not self._joined.done():
                    self._joined.set_result(None)
            except LOST as error:
                logger.warning("the heartbeat waits for Redis: %s", error)
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(BEAT_S)

    async def _learn_epochs(self) -> None:
        """Look again at the epochs of the runs whose calls wait here."""
        runs = sorted({call.run for lane in self._lanes.values() for call in lane.backlog})
        values = await self._redis.mget([keys.epoch(run) for run in runs]) if runs else []
        self._epochs = {run: int(value or 0) for run, value in zip(runs, values, strict=True)}

    async def _free_predecessors(self) -> None:
        for member in await self._redis.zrange(keys.nodes(), 0, -1):
            if member.decode().startswith(f"{self._base}:") and member.decode() != self._member:
                await self._redis.zrem(keys.nodes(), member)

    async def _reader(self, lane: _Lane) -> None:
        """Take entries while there is a free slot for them."""
        stream = keys.stream(lane.name)
        # After a fault, first what was handed to this node and perhaps never reached it.
        start = ">"
        while True:
            await lane.room.wait()
            try:
                found = await self._redis.xreadgroup(
                    keys.GROUP, self.name, {stream: start}, count=max(1, lane.free), block=BLOCK_MS
                )
                entries = found[0][1] if found else []
                for entry, fields in entries:
                    if (stream, entry.decode()) not in self._held:
                        await self._admit(lane, entry.decode(), fields)
                start = ">" if start == ">" or not entries else entries[-1][0]
            except LOST as error:
                start = "0"
                if "NOGROUP" in str(error):
                    await self._make_group(stream)
                    continue
                logger.warning("the %s lane waits for Redis: %s", lane.name, error)
                await asyncio.sleep(0.1)

    async def _make_group(self, stream: str) -> None:
        try:
            await self._redis.xgroup_create(stream, keys.GROUP, id="0", mkstream=True)
        except LOST as error:
            if "BUSYGROUP" not in str(error):
                await asyncio.sleep(0.1)

    async def _admit(self, lane: _Lane, entry_id: str, fields: dict[bytes, bytes] | None) -> None:
        """Queue the calls of an entry that still need doing; answer the others at once."""
        try:
            calls = protocol.decode_calls((fields or {}).get(b"calls", b""))
        except protocol.ProtocolError as error:
            logger.error("an unreadable entry was dropped: %s", error)
            calls = []
        entry = _Entry(keys.stream(lane.name), entry_id, len(calls))
        if not calls:
            self._acks += [entry.stream, entry.id]
            self._flush.set()
            return
        names = [keys.result(call.run, call.key) for call in calls]
        epochs = [keys.epoch(call.run) for call in calls]
        values = await self._redis.mget(names + epochs)
        self._held.add((entry.stream, entry_id))
        self._epochs |= {call.run: int(epoch or 0) for call, epoch in zip(calls, values[len(calls) :], strict=True)}
        for call, name, known in zip(calls, names, values[: len(calls)], strict=True):
            waiters = self._waiters.setdefault(name, [])
            waiters.append((entry, call.reply))
            if known is not None:
                self._answer(name, known.decode(), protocol.RESULT_TTL_S)
            elif len(waiters) == 1 and not self._settle(call):
                lane.backlog.append(call)
        self._signal(lane)

    def _settle(self, call: Call) -> bool:
        """Answer a verification that needs no process, so that it waits behind none that does."""
        if call.lane != keys.VERIFY:
            return False
        started = time.monotonic()
        examined = _examine(call)
        if examined.ask:
            return False
        self._finish(call, verify.conclude(examined, None, run_s=time.monotonic() - started))
        return True

    def _signal(self, lane: _Lane) -> None:
        (lane.work.set if lane.backlog else lane.work.clear)()
        (lane.room.set if lane.free > 0 else lane.room.clear)()

    async def _runner(self, lane: _Lane, slot: executor.Slot) -> None:
        """Do the lane's calls in one slot, one after another, forever."""
        while True:
            await lane.work.wait()
            if not lane.backlog:
                continue
            call = lane.backlog.popleft()
            lane.busy += 1
            self._signal(lane)
            try:
                result = self._refusal(call) or await lane.run(slot, call)
            except (SlotError, protocol.ProtocolError) as error:
                result = infra_result(call, str(error))
            except Exception as error:  # one of the three places of fault tolerance: typed and counted
                logger.exception("call %s failed inside the node", call.key)
                result = infra_result(call, f"{type(error).__name__}: {error}")
            lane.busy -= 1
            self._signal(lane)
            self._finish(call, result)

    def _refusal(self, call: Call) -> Outcome | Verification | None:
        """Why a call shall not start any more, or None."""
        if call.expires < self._now():
            return _rejected(call, "it waited in the queue for longer than its limit")
        if call.epoch < self._epochs.get(call.run, 0):
            return _rejected(call, "superseded by a later epoch of its run")
        return None

    async def _execute(self, slot: executor.Slot, call: Call) -> Outcome:
        return await slot.run(protocol.execution_from_body(call.body, call.key))

    async def _verify(self, slot: executor.Slot, call: Call) -> Verification:
        started = time.monotonic()
        examined = _examine(call)
        library, note = None, ""
        if examined.ask and not self._executor.missing.get(GRADE):
            outcome = await slot.grade(*examined.ask)
            note = outcome.status.value if outcome.status is not Status.OK else ""
            library = outcome.stdout == "true" if not note else None
        return verify.conclude(examined, library, note, time.monotonic() - started)

    def _finish(self, call: Call, result: Outcome | Verification) -> None:
        kind = result.status if isinstance(result, Outcome) else result.verdict
        self.counts[str(kind)] += 1
        lasting = kind not in (Status.INFRA, Status.REJECTED, "infra")
        ttl = protocol.RESULT_TTL_S if lasting else protocol.INFRA_TTL_S
        self._answer(keys.result(call.run, call.key), protocol.encode_result(call.key, result), ttl)

    def _answer(self, name: str, payload: str, ttl_s: int) -> None:
        waiters = self._waiters.pop(name, [])
        channels = {reply for _, reply in waiters}
        self._results.append([name, ttl_s, payload, len(channels), *channels])
        for entry, _ in waiters:
            entry.left -= 1
            if entry.left == 0:
                self._acks += [entry.stream, entry.id]
        self._flush.set()

    async def _flusher(self) -> None:
        """Write results and acknowledgements as they come, whatever gathered during one write in the next."""
        while True:
            await self._flush.wait()
            self._flush.clear()
            results, acks = self._results, self._acks
            self._results, self._acks = [], []
            delay_s = 0.02
            while results or acks:
                try:
                    flat = [part for result in results for part in result]
                    await self._redis.eval(_FINISH, 0, keys.GROUP, len(results), *flat, *acks)
                    self._held.difference_update(zip(acks[::2], acks[1::2], strict=True))
                    break
                except LOST as error:
                    logger.warning("%d results wait for Redis: %s", len(results), error)
                    await asyncio.sleep(delay_s)
                    delay_s = min(1.0, 2 * delay_s)


def _examine(call: Call) -> verify.Examined:
    return verify.examine(str(call.body.get("text")), str(call.body.get("gold")))


def _rejected(call: Call, detail: str) -> Outcome | Verification:
    if call.lane == keys.VERIFY:
        return infra_result(call, detail)
    return Outcome(status=Status.REJECTED, detail=detail)
