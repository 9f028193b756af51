"""Collects what a program writes: the head and the tail are kept, the rest is counted, memory stays bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

CHUNK = 65536
HARD_BYTES = 16 * 2**20


class Capture:
    """One pipe and what came through it.

    Args:
        loop: the event loop that reads.
        keep_bytes: bytes kept, half of them from the head and half from the tail.
        overflow: called once when more than HARD_BYTES (or 16 times keep_bytes) have come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, keep_bytes: int, overflow: Callable[[], None]) -> None:
        self._fd, self.child_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop = loop
        self._half = max(1, keep_bytes // 2)
        self._hard = max(HARD_BYTES, 16 * keep_bytes)
        self._overflow = overflow
        self._head = bytearray()
        self._tail = bytearray()
        self._watched = False
        self.total = 0

    def release(self) -> None:
        """Close the child's end here: the child has its own."""
        os.close(self.child_fd)
        self.child_fd = -1

    def start(self) -> None:
        """Read along from now on; what came before waits in the pipe."""
        if self._fd >= 0 and not self._watched:
            self._watched = True
            self._loop.add_reader(self._fd, self._read)

    def _read(self) -> bool:
        """Read once; True when there may be more."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._add(data)
        elif self._watched:
            self._loop.remove_reader(self._fd)
            self._watched = False
        return len(data) == CHUNK

    def _add(self, data: bytes) -> None:
        before, self.total = self.total, self.total + len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half + CHUNK:
            del self._tail[: -self._half]
        if before <= self._hard < self.total:
            self._overflow()

    def finish(self) -> None:
        """Take what is left in the pipe, without waiting for its writers, and close it."""
        if self.child_fd >= 0:
            self.release()
        if self._fd >= 0:
            while self.total <= self._hard and self._read():
                pass
            if self._watched:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def take(self) -> str:
        """Take what is in the pipe now, return the text of all since the last time, and begin anew."""
        while self._fd >= 0 and self.total <= self._hard and self._read():
            pass
        text = self.text()
        self._head, self._tail, self.total = bytearray(), bytearray(), 0
        return text

    def text(self) -> str:
        """What was kept, with a line that says how many bytes were left out; cut between characters."""
        left_out = self.total - len(self._head) - min(len(self._tail), self._half)
        if left_out <= 0:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = _trim_end(self._head), _trim_start(self._tail[-self._half :])
        left_out = self.total - len(head) - len(tail)
        marker = f"\n... [{left_out} bytes left out] ...\n"
        return head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")


def _trim_end(data: bytearray) -> bytearray:
    """Without a character that was cut at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < needed else data
        if byte < 0x80:
            break
    return data


def _trim_start(data: bytearray) -> bytearray:
    """Without the rest of a character that was cut at the start."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
