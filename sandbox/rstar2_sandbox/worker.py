"""A node: takes calls from the queue as its slots become free, and answers each one as it finishes.

Each run has a stream in each lane; the streams' consumer groups give each entry to one node, and the node's heartbeat
is its lease on it. A call is answered once: the first result under its key stands, and whoever submitted it again hears
that one.

Deliberately not here: how a program is confined (executor, keeper, jail), how an answer is judged (verify), and how
results get to Redis (answers).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable

from rstar2_sandbox import executor, keys, protocol, session, verify
from rstar2_sandbox.answers import Answers, Entry
from rstar2_sandbox.connection import LOST, connect, end_tasks
from rstar2_sandbox.images import GRADE, MATH, SlotError
from rstar2_sandbox.lanes import Lane, Readers
from rstar2_sandbox.master import Reaper, infra_result
from rstar2_sandbox.metrics import Tally
from rstar2_sandbox.protocol import Call, Outcome, Status, Verification

BEAT_S, LEASE_S = 1.0, 5.0
VERIFY_AHEAD = 256
_BEAT = keys.GO_ON + "redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2]); redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])"

logger = logging.getLogger(__name__)


class Node:
    """One worker node.

    Args:
        redis_url: address of the queue; the jailed children never learn it.
        slots: executions at once; verification and sessions have slots of their own.
        settings: isolation.
        name: unique name of the node; a restarted node with the same name frees what its predecessor held. Empty: a
            fresh one.
        verify_slots: verifications at once that need a process.
        session_slots: stateful sessions that live at once.

    Raises:
        ValueError: a count is too small or too large.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        slots: int,
        settings: executor.Settings,
        name: str = "",
        verify_slots: int = 1,
        session_slots: int = 0,
    ) -> None:
        counts = {"slots": (slots, 1), "verify_slots": (verify_slots, 1), "session_slots": (session_slots, 0)}
        for what, (count, least) in counts.items():
            if count < least:
                raise ValueError(f"{what} = {count}: must be {least} or more")
        self._url = redis_url
        self._redis = connect(redis_url)
        self._slots = slots
        self._exclusive = bool(name)
        self._base = name or os.uname().nodename
        self.name = f"{self._base}:{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._counts = slots, verify_slots, session_slots
        self._executor = executor.Executor(sum(self._counts), settings)
        self._lanes: dict[str, Lane] = {}
        self._answers = Answers(self._redis, self._busy)
        self._clock_offset_s = 0.0
        self._epochs: dict[str, int] = {}
        self._running: dict[tuple[str, executor.Slot], Call] = {}
        self._joined: asyncio.Future[None]
        self.tally = Tally()

    async def run(self, ready: Callable[[str], None] = lambda tier: None) -> None:
        """Serve until SIGTERM or cancellation; `ready` is called with the isolation tier once calls are taken."""
        await self._executor.start()
        self._open_lanes()
        self._joined = asyncio.get_running_loop().create_future()
        readers = Readers(self._url, self.name, self._lanes, self._answers, self._admit)
        jobs = [self._beat(), self._answers.run(), Reaper(self._redis, self.name).run(), self._warm()]
        jobs += [self._sessions.watch(), self._watch_epochs(), self._listen(readers), *readers.jobs()]
        for lane in self._lanes.values():
            lane.signal()
            jobs += [self._runner(lane, slot) for slot in lane.slots]
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
            await end_tasks(tasks)
            await readers.close()
            await self._leave()

    def _open_lanes(self) -> None:
        slots = list(self._executor.slots)
        plain, verify_slots, session_slots = ([slots.pop(0) for _ in range(count)] for count in self._counts)
        self._sessions = session.Sessions(session_slots, lambda: self._lanes[keys.SESSION].signal())
        self._lanes = {
            keys.EXECUTE: Lane(keys.EXECUTE, plain, self._execute),
            keys.VERIFY: Lane(keys.VERIFY, verify_slots, self._verify, ahead=VERIFY_AHEAD),
        }
        if session_slots:
            self._lanes[keys.SESSION] = Lane(keys.SESSION, session_slots, self._cell, limit=lambda: self._sessions.free)
            own = keys.at_node(self.name)
            self._lanes[own] = Lane(own, session_slots, self._cell, stream=own, ahead=VERIFY_AHEAD)

    async def _leave(self) -> None:
        self._executor.close()
        try:
            await self._redis.zrem(keys.nodes(), self._member)
            await self._redis.delete(keys.at_node(self.name))
            await self._redis.hdel(keys.statistics(), self.name)
        except LOST as error:
            logger.warning("the heartbeat was not withdrawn: %s", error)
        await self._redis.aclose()

    @property
    def _member(self) -> str:
        return f"{self.name}/{self._slots}"

    def _now(self) -> float:
        return time.time() + self._clock_offset_s

    def _busy(self) -> bool:
        return any(lane.backlog for lane in self._lanes.values())

    async def _warm(self) -> None:
        """Warm the larger interpreters while the node already serves; a missing one is reported once."""
        for kind in (MATH, GRADE):
            try:
                await self._executor.warm(kind)
            except SlotError as error:
                logger.warning("%s", error)
        await asyncio.Event().wait()

    async def _beat(self) -> None:
        first, beat = True, self._redis.register_script(_BEAT)
        while True:
            try:
                seconds, micros = await self._redis.time()
                self._clock_offset_s = seconds + micros / 1e6 - time.time()
                if first and self._exclusive:
                    await self._free_predecessors()
                first = False
                until, report = self._now() + LEASE_S, json.dumps(self._report())
                await beat([keys.nodes(), keys.statistics()], [until, self._member, self.name, report])
                if not self._joined.done():
                    self._joined.set_result(None)
            except LOST as error:
                logger.warning("the heartbeat waits for Redis: %s", error)
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(BEAT_S)

    async def _watch_epochs(self) -> None:
        """Look at the epochs once a second. Apart from the heartbeat, since ending a session may take its time."""
        while True:
            with contextlib.suppress(*LOST):
                await self._learn_epochs()
            await asyncio.sleep(BEAT_S)

    def _report(self) -> dict[str, object]:
        lanes = {lane.name: [lane.busy, len(lane.backlog)] for lane in self._lanes.values() if not lane.stream}
        sizes = {"slots": self._counts[0], "verify_slots": self._counts[1], "session_slots": self._counts[2]}
        sizes["sessions"] = self._counts[2] - self._sessions.free
        return {"at": self._now(), "tier": self._executor.tier, "lanes": lanes} | sizes | self.tally.report()

    async def _learn_epochs(self) -> None:
        """Look again at the epochs of the runs whose calls wait or run here."""
        names = sorted(self._runs())
        values = await self._redis.mget([keys.epoch(run) for run in names]) if names else []
        for run, value in zip(names, values, strict=True):
            await self._supersede(run, int(value or 0))
        runs = self._runs()  # some came meanwhile, with their epochs (see _known)
        self._epochs = {run: epoch for run, epoch in self._epochs.items() if run in runs}

    def _runs(self) -> set[str]:
        running = {call.run for call in self._running.values()}
        return running.union(self._sessions.runs, *(lane.backlog.runs() for lane in self._lanes.values()))

    async def _supersede(self, run: str, epoch: int) -> None:
        """End the calls of a run's earlier epochs: those that wait, and those that run."""
        self._epochs[run] = epoch
        if epoch == 0:
            return
        for lane in self._lanes.values():
            for call in lane.backlog.drop(lambda call: call.run == run and call.epoch < epoch):
                self._finish(call, rejected(call, protocol.SUPERSEDED))
            lane.signal()
        for (_, slot), call in self._running.items():
            if call.run == run and call.epoch < epoch:
                slot.cancel()
        await self._sessions.end_before(run, epoch)

    async def _listen(self, readers: Readers) -> None:
        """Hear of new runs and new epochs as they come."""
        while True:
            pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(keys.control())
                async for message in pubsub.listen():
                    kind, *news = protocol.decode_news(message["data"])
                    if kind == "run":
                        await readers.unblock(self._redis, *news)
                    elif kind == "epoch":
                        await self._supersede(*news)
            except (*LOST, protocol.ProtocolError) as error:
                logger.warning("news wait for Redis: %s", error)
                await asyncio.sleep(0.1)
            finally:
                with contextlib.suppress(*LOST):
                    await pubsub.aclose()

    async def _free_predecessors(self) -> None:
        for member in await self._redis.zrange(keys.nodes(), 0, -1):
            if member.decode().rpartition(":")[0] == self._base and member.decode() != self._member:
                await self._redis.zrem(keys.nodes(), member)

    async def _admit(self, lane: Lane, entries: list[tuple[Entry, list[Call]]]) -> None:
        """Queue the calls of entries that still need doing; answer the others at once.

        They are expected before Redis is asked, so that a result which is given meanwhile, or not written yet, is not
        missed, and no call that came twice is done twice.
        """
        fresh = []
        for entry, part in entries:
            self._answers.hold(entry)
            for call in part:
                name = keys.result(call.run, call.key)
                first = self._answers.expect(name, entry, call.reply)
                payload = self._answers.unwritten(name)
                if payload is not None:
                    self._answers.give(name, payload, protocol.result_ttl_s(payload))
                elif first:
                    fresh.append(call)
        for call, payload in zip(fresh, await self._known(fresh), strict=True):
            if payload is not None:
                self._answers.give(keys.result(call.run, call.key), payload.decode(), protocol.RESULT_TTL_S)
            elif not self._settle(call):
                lane.backlog.push(call)
        lane.signal()

    async def _known(self, calls: list[Call]) -> list[bytes | None]:
        """Results that calls had before, and on the way their runs' epochs; asked until Redis answers."""
        runs = sorted({call.run for call in calls})
        names = [keys.result(call.run, call.key) for call in calls] + [keys.epoch(run) for run in runs]
        while names:
            try:
                values = await self._redis.mget(names)
            except LOST as error:
                logger.warning("%d calls wait for Redis: %s", len(calls), error)
                await asyncio.sleep(0.1)
                continue
            self._epochs |= {run: int(epoch or 0) for run, epoch in zip(runs, values[len(calls) :], strict=True)}
            return values[: len(calls)]
        return []

    def _settle(self, call: Call) -> bool:
        """Answer a verification that needs no process, so that it waits behind none that does."""
        if call.lane != keys.VERIFY:
            return False
        started = time.monotonic()
        examined = _examine(call)
        if examined.ask:
            return False
        self._finish(call, verify.conclude(examined, None, run_s=time.monotonic() - started, rules=self._rules))
        return True

    @property
    def _rules(self) -> str:
        """What verdicts of this node rest on: a node whose library cannot start says so."""
        library = "none" if self._executor.missing.get(GRADE) else self._executor.library
        return f"{verify.RULES}+{library}"

    async def _runner(self, lane: Lane, slot: executor.Slot) -> None:
        """Do the lane's calls in one slot, one after another, forever."""
        while True:
            await lane.work.wait()
            if not lane.backlog:
                continue
            call = lane.backlog.pop()
            lane.busy += 1
            self._running[lane.name, slot] = call
            lane.signal()
            started = time.monotonic()
            try:
                if call.deliveries:
                    await self._note_start(call)
                result = self._refusal(call) or await lane.run(slot, call)
            except (SlotError, protocol.ProtocolError) as error:
                result = infra_result(call, str(error))
            except Exception as error:  # one of the three places of fault tolerance: typed and counted
                logger.exception("call %s failed inside the node", call.key)
                result = infra_result(call, f"{type(error).__name__}: {error}")
            lane.appetite.learn_time(time.monotonic() - started)
            lane.busy -= 1
            self._running.pop((lane.name, slot), None)
            self._finish(call, result)
            lane.signal()

    async def _note_start(self, call: Call) -> None:
        """A call that lost a node is started again: if this one dies too, it was not only held here, but at work."""
        with contextlib.suppress(*LOST):
            name = keys.started(call.run, call.key)
            await self._redis.set(name, call.deliveries, ex=protocol.RESULT_TTL_S)

    def _refusal(self, call: Call) -> Outcome | Verification | None:
        """Why a call shall not start any more, or None."""
        if call.expires < self._now():
            return rejected(call, "it waited in the queue for longer than its limit")
        if call.epoch < self._epochs.get(call.run, 0):
            return rejected(call, protocol.SUPERSEDED)
        return None

    async def _execute(self, slot: executor.Slot, call: Call) -> Outcome:
        execution = protocol.execution_from_body(call.body, call.key)
        self.tally.waited(self._now() - call.expires + execution.limits.queue_s)
        return await slot.run(execution)

    async def _cell(self, slot: executor.Slot, call: Call) -> Outcome:
        """A cell of a session, wherever its slot is; or the end of one."""
        if call.body.get("end"):
            await self._sessions.end(call.run, str(call.body["end"]))
            return Outcome(status=Status.OK)
        return await self._sessions.run(call, protocol.execution_from_body(call.body, call.key), self.name)

    async def _verify(self, slot: executor.Slot, call: Call) -> Verification:
        started = time.monotonic()
        examined = _examine(call)
        library, note = None, ""
        if examined.ask and not self._executor.missing.get(GRADE):
            outcome = await slot.grade(*examined.ask)
            if outcome.status is Status.REJECTED:  # killed with its epoch: silence of ours, and no verdict
                return Verification(verdict=protocol.Verdict.INFRA, reason=protocol.SUPERSEDED)
            note = outcome.status.value if outcome.status is not Status.OK else ""
            library = outcome.stdout == "true" if not note else None
        return verify.conclude(examined, library, note, time.monotonic() - started, self._rules)

    def _finish(self, call: Call, result: Outcome | Verification) -> None:
        kind = result.status if isinstance(result, Outcome) else result.verdict
        self.tally.finished(call.lane, str(kind), result.run_s)
        payload = protocol.encode_result(call.key, result)
        lasting = kind not in (Status.INFRA, Status.REJECTED, "infra")
        ttl = protocol.result_ttl_s(payload) if lasting else protocol.INFRA_TTL_S
        self._answers.give(keys.result(call.run, call.key), payload, ttl)


def _examine(call: Call) -> verify.Examined:
    return verify.examine(str(call.body.get("text")), str(call.body.get("gold")))


def rejected(call: Call, detail: str) -> Outcome | Verification:
    """The typed answer to a call that was not run, or not to its end."""
    if call.lane == keys.VERIFY:
        return infra_result(call, detail)
    return Outcome(status=Status.REJECTED, detail=detail)
