"""A client's calls on their way to the queue: gathered for a few milliseconds, written as micro-batches.

Only so much is written before answers come: the rest waits here, so that no burst fills the memory of Redis.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.protocol import Call, Outcome, Verification

GATHER_S, GATHER_BUSY_S, GATHER_FULL_S = 0.003, 0.012, 0.05
BUSY_CALLS = 32
FULL_CALLS = 8  # unanswered ones for each slot of the cluster: another one would only wait there
WINDOW_CALLS = 8192
WINDOW_BYTES = 128 * 2**20


@dataclasses.dataclass(slots=True, eq=False)
class Pending:
    """A call without a result: what to send, who waits for it, and whether it was written to a stream.

    Args:
        node: that the call is for, when it is for one node only.
    """

    lane: str
    key: str
    body: Mapping[str, Any]
    expires: float
    future: asyncio.Future[Outcome | Verification]
    epoch: int | None
    node: str = ""
    waiters: int = 0
    sent: bool = False

    @property
    def size(self) -> int:
        """Bytes of its texts, about."""
        return sum(len(value) for value in self.body.values() if isinstance(value, str))


class Outbox:
    """What one client has not written yet, and how much of what it wrote is unanswered.

    Args:
        server: connection to Redis.
        run: name of the run.
        channel: that results are announced on.
    """

    def __init__(self, server: Any, run: str, channel: str) -> None:
        self.epoch: int | None = None
        self.clock_offset_s = 0.0
        self.capacity = 1
        self.flying = 0
        self.flying_bytes = 0
        self._redis = server
        self._run = run
        self._channel = channel
        self._unsent: collections.deque[Pending] = collections.deque()
        self._wake = asyncio.Event()

    def push(self, pending: Pending) -> None:
        """Have a call written soon."""
        self._unsent.append(pending)
        self._wake.set()

    def landed(self, pending: Pending) -> None:
        """A call that was written needs no answer any more: there is room for another."""
        if pending.sent:
            pending.sent = False
            self.flying -= 1
            self.flying_bytes -= pending.size
            if self._unsent:
                self._wake.set()

    def push_again(self, waiting: list[Pending]) -> None:
        """Calls that were written and may be lost: write them once more."""
        for pending in waiting:
            self.landed(pending)
            self.push(pending)

    async def next_batch(self) -> list[Pending]:
        """Wait for something to write, gather a little, and return it as far as the window has room."""
        while True:
            await self._wake.wait()
            if len(self._unsent) < protocol.BATCH_CALLS:
                await asyncio.sleep(self._gather_s)
            self._wake.clear()
            batch = []
            calls, size = self.flying, self.flying_bytes
            while self._unsent and (not calls or (calls < WINDOW_CALLS and size < WINDOW_BYTES)):
                pending = self._unsent.popleft()
                if pending.waiters and not pending.future.done() and not pending.sent:
                    batch.append(pending)
                    calls += 1
                    size += pending.size
            if batch:
                return batch

    @property
    def _gather_s(self) -> float:
        if self.flying <= BUSY_CALLS:
            return GATHER_S
        return GATHER_FULL_S if self.flying > FULL_CALLS * self.capacity else GATHER_BUSY_S

    def put_back(self, batch: list[Pending]) -> None:
        """A batch could not be written: it is the next one."""
        self._unsent.extendleft(reversed(batch))
        self._wake.set()

    async def write(self, batch: list[Pending]) -> None:
        """Write a batch. Raises what a lost connection raises."""
        groups: dict[tuple[str, str], list[Pending]] = {}
        for pending in batch:
            groups.setdefault((pending.lane, pending.node), []).append(pending)
        asked: list[str] = []
        async with self._redis.pipeline(transaction=False) as pipe:
            for (lane, node), part in groups.items():
                stream = keys.at_node(node) if node else keys.stream(lane, self._run)
                calls = [self._envelope(pending) for pending in part]
                for entry in protocol.batches(calls, self._entry_calls(lane, len(calls))):
                    pipe.xadd(stream, {"calls": entry})
                    asked.append("")
                if not node:
                    # After the entry: the reaper forgets a run only while its stream is empty.
                    pipe.sadd(keys.runs(lane), self._run)
                    asked.append(lane)
            # Counted before: an answer may be here sooner than the word that its call was written.
            for pending in batch:
                pending.sent = True
                self.flying += 1
                self.flying_bytes += pending.size
            try:
                answers = await pipe.execute()
            except BaseException:
                for pending in batch:
                    self.landed(pending)
                raise
        for lane, added in zip(asked, answers, strict=True):
            if lane and added == 1:
                await self._redis.publish(keys.control(), json.dumps(["run", lane]))

    def _envelope(self, pending: Pending) -> Call:
        if pending.epoch is None:
            pending.epoch = self.epoch or 0
        return Call(
            run=self._run,
            key=pending.key,
            epoch=pending.epoch,
            lane=pending.lane,
            reply=self._channel,
            expires=pending.expires + self.clock_offset_s,
            body=pending.body,
        )

    def _entry_calls(self, lane: str, calls: int) -> int:
        """Calls of one entry: few while the cluster has free slots for them, since an entry stays with one node."""
        if lane == keys.VERIFY:
            return protocol.BATCH_CALLS
        if lane == keys.SESSION:
            return 1
        return max(1, min(protocol.BATCH_CALLS, calls // max(1, self.capacity)))
