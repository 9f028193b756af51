"""A node's lanes, and the readers that fill them: one connection and one loop for each lane.

Deliberately not here: what becomes of a call (worker).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.answers import Answers, Entry
from rstar2_sandbox.connection import LOST, connect
from rstar2_sandbox.fair import Appetite, FairQueue
from rstar2_sandbox.protocol import Call, Outcome, Verification
from rstar2_sandbox.slot import Slot

BLOCK_MS = 1000
RUNS_S = 1.0
NEWCOMERS_S = 0.02
READ = ">"
_MAKE_GROUP = keys.GO_ON + "return redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')"
_FORGOTTEN = ("NOGROUP", "UNBLOCKED")  # what Redis answers when a run's stream was removed: no fault

logger = logging.getLogger(__name__)


class Lane:
    """Calls of one kind that a node holds, and the slots that take them.

    Args:
        name: of the lane.
        slots: that take its calls.
        run: does one call in a slot.
        stream: the one stream that it is fed from; empty: a stream of each run that uses the lane.
        ahead: calls held beyond those that run; 0 learns it (see Appetite).
        limit: calls that may be started at all, where that is less than the slots say.
    """

    def __init__(
        self,
        name: str,
        slots: list[Slot],
        run: Callable[[Slot, Call], Awaitable[Outcome | Verification]],
        *,
        stream: str = "",
        ahead: int = 0,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.run = run
        self.stream = stream
        self.backlog = FairQueue()
        self.busy = 0
        self.work = asyncio.Event()
        self.room = asyncio.Event()
        self.appetite = Appetite(len(slots), ahead)
        self._limit = limit

    @property
    def wanted(self) -> int:
        """Entries that may be taken now."""
        if self._limit is not None:
            return max(0, self._limit() - len(self.backlog) - self.busy)
        return self.appetite.entries(self.busy + len(self.backlog))

    def newcomers(self, streams: Iterable[str]) -> list[str]:
        """Of the runs' streams, those of runs that nothing waits of here: a full lane takes an entry of each, so that
        the turns between runs (see FairQueue) reach the ones that were not there when it filled up."""
        if self.stream or self._limit is not None:
            return []
        here = {keys.stream(self.name, run) for run in self.backlog.runs()}
        return [stream for stream in streams if stream not in here]

    def signal(self) -> None:
        """Wake or hold runners and reader, as the backlog says."""
        (self.work.set if self.backlog else self.work.clear)()
        (self.room.set if self.wanted > 0 else self.room.clear)()


class _Reader:
    """State of one lane's loop: its connection, its streams, and how far each has been read."""

    def __init__(self, lane: Lane, redis_url: str) -> None:
        self.lane = lane
        self.server = connect(redis_url)
        self.client_id = 0
        self.positions: dict[str, str] = {lane.stream: READ} if lane.stream else {}
        self.stale = True
        self.looked_at = 0.0
        self.news = asyncio.Event()


Admit = Callable[[Lane, list[tuple[Entry, list[Call]]]], Awaitable[None]]


class Readers:
    """The loops that take entries from the streams while there is room for them.

    Args:
        redis_url: address of the queue.
        name: of the node: the consumer in each group.
        lanes: by name.
        answers: knows which entries are held, and acknowledges empty ones.
        admit: takes entries with their calls.
    """

    def __init__(self, redis_url: str, name: str, lanes: dict[str, Lane], answers: Answers, admit: Admit) -> None:
        self._name = name
        self._answers = answers
        self._admit = admit
        self._readers = {lane.name: _Reader(lane, redis_url) for lane in lanes.values()}

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """One endless loop for each lane."""
        return [self._run(reader) for reader in self._readers.values()]

    async def close(self) -> None:
        """Close the connections; the loops must have ended."""
        for reader in self._readers.values():
            await reader.server.aclose()

    async def unblock(self, server: Any, lane: str) -> None:
        """A run has come to a lane: have its reader look at once."""
        reader = self._readers.get(lane)
        if reader is not None:
            reader.stale = True
            reader.news.set()
            reader.lane.room.set()
            if reader.client_id:
                await server.client_unblock(reader.client_id)

    async def _run(self, reader: _Reader) -> None:
        while True:
            await self._wait_for_room(reader)
            try:
                if reader.stale or time.monotonic() - reader.looked_at > RUNS_S:
                    await self._look(reader)
                if reader.positions:
                    await self._read(reader)
                else:
                    await self._wait(reader)
            except LOST as error:
                reader.stale = True
                reader.positions = dict.fromkeys(reader.positions, "0")
                if not any(word in str(error) for word in _FORGOTTEN):
                    reader.client_id = 0
                    logger.warning("the %s lane waits for Redis: %s", reader.lane.name, error)
                    await asyncio.sleep(0.1)

    async def _wait_for_room(self, reader: _Reader) -> None:
        """Until the lane has room; where several runs use it, until it is time to look for newcomers among them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWCOMERS_S if len(reader.positions) > 1 else None):
                await reader.lane.room.wait()

    async def _wait(self, reader: _Reader) -> None:
        reader.news.clear()
        try:
            async with asyncio.timeout(RUNS_S):
                await reader.news.wait()
        except TimeoutError:
            reader.stale = True

    async def _look(self, reader: _Reader) -> None:
        """Learn which runs use the lane; have a group on each of their streams."""
        reader.stale = False
        lane = reader.lane
        if not reader.client_id:
            reader.client_id = await reader.server.client_id()
        if lane.stream:
            names = [lane.stream]
        else:
            found = await reader.server.smembers(keys.runs(lane.name))
            names = [keys.stream(lane.name, run.decode("utf-8", "replace")) for run in found]
        for name in names:
            if reader.positions.get(name) != READ or time.monotonic() - reader.looked_at > 60:
                await self._make_group(reader, name)
        reader.positions = {name: reader.positions.get(name, READ) for name in names}
        reader.looked_at = time.monotonic()

    async def _make_group(self, reader: _Reader, stream: str) -> None:
        try:
            await reader.server.eval(_MAKE_GROUP, 1, stream, keys.GROUP)
        except LOST as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, reader: _Reader) -> None:
        """Take entries: first, after a fault, what was handed to this node and perhaps never reached it."""
        lane = reader.lane
        positions, count, block = dict(reader.positions), lane.wanted // len(reader.positions), BLOCK_MS
        if lane.wanted <= 0:
            lane.signal()
            positions, block = {stream: positions[stream] for stream in lane.newcomers(positions)}, None
            if not positions:
                return
        found = await reader.server.xreadgroup(keys.GROUP, self._name, positions, count=max(1, count), block=block)
        fresh = {stream.decode(): entries for stream, entries in found or []}
        taken = []
        for stream, entries in fresh.items():
            for entry, fields in entries:
                if not self._answers.holds(stream, entry.decode()):
                    taken += self._open(lane, stream, entry.decode(), fields)
        if taken:
            await self._admit(lane, taken)
        for stream, position in positions.items():
            if position != READ:
                entries = fresh.get(stream)
                reader.positions[stream] = entries[-1][0].decode() if entries else READ

    def _open(
        self, lane: Lane, stream: str, entry: str, fields: dict[bytes, bytes] | None
    ) -> list[tuple[Entry, list[Call]]]:
        try:
            calls = protocol.decode_calls((fields or {}).get(b"calls", b""))
        except protocol.ProtocolError as error:
            logger.error("an unreadable entry was dropped: %s", error)
            calls = []
        if not calls:
            self._answers.pass_over(stream, entry)
            return []
        lane.appetite.learn_entry(len(calls))
        return [(Entry(stream, entry, len(calls)), calls)]
