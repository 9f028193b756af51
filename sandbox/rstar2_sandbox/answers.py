"""A node's results on their way to Redis: written once under their keys, announced, their entries acknowledged.

Whatever gathers while one write is under way goes with the next.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from rstar2_sandbox import keys
from rstar2_sandbox.connection import LOST

GATHER_S = 0.015
FEW = 16
# Characters of one write: Redis refuses requests and messages of hundreds of megabytes.
WRITE_CHARS = 16 * 2**20

# ARGV: group, number of results, then for each: result key, seconds it is kept, payload, number of channels, channels;
# then pairs of stream and entry id to acknowledge. A channel hears all its results in one message, as a JSON list.
_FINISH = (
    keys.GO_ON
    + """
local at, heard, order = 3, {}, {}
for _ = 1, tonumber(ARGV[2]) do
  local payload, channels = ARGV[at + 2], tonumber(ARGV[at + 3])
  if not redis.call('SET', ARGV[at], payload, 'NX', 'EX', ARGV[at + 1]) then
    payload = redis.call('GET', ARGV[at]) or payload
  end
  for index = at + 4, at + 3 + channels do
    local channel = ARGV[index]
    if not heard[channel] then heard[channel] = {}; order[#order + 1] = channel end
    table.insert(heard[channel], payload)
  end
  at = at + 4 + channels
end
while at < #ARGV do
  redis.pcall('XACK', ARGV[at], ARGV[1], ARGV[at + 1])
  redis.call('XDEL', ARGV[at], ARGV[at + 1])
  at = at + 2
end
for _, channel in ipairs(order) do redis.call('PUBLISH', channel, '[' .. table.concat(heard[channel], ',') .. ']') end
"""
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Entry:
    """A stream entry that this node holds, and how many of its calls are unanswered."""

    stream: str
    id: str
    left: int


class Answers:
    """Who waits for which result, and the writing of results.

    Args:
        server: connection to Redis.
        busy: says whether more results are about to come, so that a short wait gathers them.
    """

    def __init__(self, server: Any, busy: Callable[[], bool]) -> None:
        self._finish = server.register_script(_FINISH)
        self._busy = busy
        self._waiters: dict[str, list[tuple[Entry, str]]] = {}
        self._unwritten: dict[str, str] = {}
        self._results: list[list[str | int]] = []
        self._acks: list[str] = []
        self._held: set[tuple[str, str]] = set()
        self._flush = asyncio.Event()

    def holds(self, stream: str, entry_id: str) -> bool:
        """True for an entry that is being worked on here."""
        return (stream, entry_id) in self._held

    def hold(self, entry: Entry) -> None:
        """Remember an entry until its acknowledgement is written."""
        self._held.add((entry.stream, entry.id))

    def expect(self, name: str, entry: Entry, channel: str) -> bool:
        """A call of an entry waits for a result; True when it is the first that waits for it."""
        waiters = self._waiters.setdefault(name, [])
        waiters.append((entry, channel))
        return len(waiters) == 1

    def unwritten(self, name: str) -> str | None:
        """The result under a key that was given here and that Redis does not have yet."""
        return self._unwritten.get(name)

    def give(self, name: str, payload: str, ttl_s: int) -> None:
        """The result under a key: whoever waits for it is told, and entries without open calls are acknowledged."""
        waiters = self._waiters.pop(name, [])
        channels = {channel for _, channel in waiters}
        self._results.append([name, ttl_s, payload, len(channels), *channels])
        self._unwritten[name] = payload
        for entry, _ in waiters:
            entry.left -= 1
            if entry.left == 0:
                self._acks += [entry.stream, entry.id]
        self._flush.set()

    def pass_over(self, stream: str, entry_id: str) -> None:
        """Acknowledge an entry that holds no call."""
        self._acks += [stream, entry_id]
        self._flush.set()

    async def run(self) -> None:
        """Write, forever."""
        while True:
            await self._flush.wait()
            if len(self._results) < FEW and self._busy():
                await asyncio.sleep(GATHER_S)
            self._flush.clear()
            await self.write()

    async def write(self) -> None:
        """Write what is there now, as often as it takes."""
        results, acks = self._results, self._acks
        self._results, self._acks = [], []
        *before, last = _pieces(results)
        for part in before:
            await self._write(part, [])
        await self._write(last, acks)

    async def _write(self, results: list[list[str | int]], acks: list[str]) -> None:
        delay_s = 0.02
        while results or acks:
            try:
                flat = [part for result in results for part in result]
                await self._finish(args=[keys.GROUP, len(results), *flat, *acks])
                self._held.difference_update(zip(acks[::2], acks[1::2], strict=True))
                for result in results:
                    self._unwritten.pop(str(result[0]), None)
                return
            except LOST as error:
                logger.warning("%d results wait for Redis: %s", len(results), error)
                await asyncio.sleep(delay_s)
                delay_s = min(1.0, 2 * delay_s)


def _pieces(results: list[list[str | int]]) -> list[list[list[str | int]]]:
    """The results in their order, in parts of bounded size; the last one may be empty."""
    parts: list[list[list[str | int]]] = [[]]
    chars = 0
    for result in results:
        parts[-1].append(result)
        chars += len(str(result[2]))
        if chars >= WRITE_CHARS:
            parts.append([])
            chars = 0
    return parts
