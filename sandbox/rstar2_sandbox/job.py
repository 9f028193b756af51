"""One call in one keeper: its descriptors, its clock, and the reading of what the kernel says about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

from rstar2_sandbox import keeper
from rstar2_sandbox.capture import Capture
from rstar2_sandbox.images import KeeperEnd, SlotError
from rstar2_sandbox.jail_child import EXIT_MEMORY
from rstar2_sandbox.protocol import Limits, Outcome, Status

KILL_GRACE_S = 5.0


class KeeperGoneError(SlotError):
    """The keeper was dead before it had the call: nothing ran, so the call may go to a new one."""


class Job:
    """Runs one call; make a new one for each.

    Args:
        owner: the keeper that runs it.
        limits: of the call.
    """

    def __init__(self, owner: KeeperEnd, limits: Limits) -> None:
        self._keeper = owner
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._ended_by: Status | None = None
        self.clean = False

    async def run(self, what: bytes, code: bytes, stdin: bytes) -> Outcome:
        """Send the call, watch it, report it. Raises SlotError when the keeper died."""
        stdout, stderr = (Capture(self._loop, self._limits.output_bytes, self._overflow) for _ in range(2))
        feed = _Feed(self._loop, stdin)
        code_fd = os.memfd_create("code", os.MFD_CLOEXEC)
        try:
            os.write(code_fd, code)
            self._send(what, [code_fd, feed.child_fd, stdout.child_fd, stderr.child_fd])
            for stream in (feed, stdout, stderr):
                stream.start()
            self._timers.append(self._loop.call_later(self._limits.wall_s, self._kill, Status.TIMEOUT_WALL))
            reply = await self._loop.sock_recv(self._keeper.control, 256)
        except ConnectionResetError as error:
            raise KeeperGoneError("the slot's keeper died with the request unread") from error
        except OSError as error:
            raise SlotError(f"the slot's keeper is gone: {error}") from error
        finally:
            os.close(code_fd)
            for timer in self._timers:
                timer.cancel()
            for stream in (feed, stdout, stderr):
                stream.finish()
        if not reply:
            raise SlotError("the slot's keeper died during the call")
        return self._outcome(reply, stdout, stderr)

    def _send(self, what: bytes, fds: list[int]) -> None:
        self._keeper.calls += 1
        limits = self._limits
        numbers = (limits.effective_cpu_s, limits.memory_bytes, limits.file_bytes, limits.processes)
        request = keeper.REQUEST.pack(what, self._keeper.calls, *(int(number) for number in numbers))
        try:
            socket.send_fds(self._keeper.control, [request], fds)
        except OSError as error:
            raise KeeperGoneError(f"the slot's keeper is gone: {error}") from error

    def _overflow(self) -> None:
        self._kill(Status.OUTPUT_LIMIT)

    def _kill(self, why: Status) -> None:
        if self._ended_by is None:
            self._ended_by = why
            with contextlib.suppress(OSError):
                self._keeper.control.send(keeper.REQUEST.pack(keeper.KILL, self._keeper.calls, 0, 0, 0, 0))
            # A keeper that does not answer to this is broken: kill it, and the slot with it.
            self._timers.append(self._loop.call_later(KILL_GRACE_S, self._keeper.kill))

    def _outcome(self, reply: bytes, stdout: Capture, stderr: Capture) -> Outcome:
        _, status, user_s, system_s, _, run_s, _, clean = keeper.REPLY.unpack(reply)
        self.clean = bool(clean)
        cpu_s = user_s + system_s
        kind, exit_code, name = self._judge(status, cpu_s)
        return Outcome(
            status=kind,
            stdout=stdout.text(),
            stderr=stderr.text(),
            exit_code=exit_code,
            signal=name,
            run_s=run_s,
            cpu_s=cpu_s,
            tier=self._keeper.tier,
        )

    def _judge(self, status: int, cpu_s: float) -> tuple[Status, int | None, str]:
        if os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            named = {0: Status.OK, EXIT_MEMORY: Status.OOM}.get(code, Status.ERROR)
            return (Status.OUTPUT_LIMIT if self._ended_by is Status.OUTPUT_LIMIT else named), code, ""
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if self._ended_by is not None and number == signal.SIGKILL:
            return self._ended_by, None, name
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= 0.7 * self._limits.effective_cpu_s):
            return Status.TIMEOUT_CPU, None, name
        return Status.KILLED, None, name


class _Feed:
    """Standard input: a pipe, always; filled at once when it fits, else as the program reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, data: bytes) -> None:
        self.child_fd, self._fd = os.pipe()
        self._loop = loop
        self._data = memoryview(data)
        os.set_blocking(self._fd, False)

    def start(self) -> None:
        """Close the child's end here and begin to write."""
        os.close(self.child_fd)
        self.child_fd = -1
        self._write()
        if self._fd >= 0:
            self._loop.add_writer(self._fd, self._write)

    def _write(self) -> None:
        try:
            while self._data:
                self._data = self._data[os.write(self._fd, self._data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> None:
        """Close what is still open."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1
        self._close()
