"""One call in one keeper: its descriptors, its clock, and the reading of what the kernel says about it.

Most calls last a few milliseconds and print a few bytes, which wait in the pipe until the end: only a call that lasts
longer is given readers on its pipes, and a lower place at the processor, so that it holds up nobody's short call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable

from rstar2_sandbox import keeper
from rstar2_sandbox.capture import Capture
from rstar2_sandbox.images import KeeperEnd, KeeperGoneError
from rstar2_sandbox.jail_child import EXIT_MEMORY
from rstar2_sandbox.protocol import SUPERSEDED, Limits, Outcome, Status

KILL_GRACE_S = 10.0  # below client.GRACE_S: its caller hears of it
LASTS_AFTER_S = 0.02
DEMOTE_AFTER_S = 0.08
DEMOTED_NICE = 5
FILES_EVERY_S = 0.2
_FDS = struct.Struct("4i")


class Job:
    """Runs one call; make a new one for each.

    Args:
        owner: the keeper that runs it.
        limits: of the call.
        lasts: called once when the call has lasted for a while.
        overfull: says that the call's files take more than their share, where no file system of its own bounds them.
    """

    def __init__(
        self,
        owner: KeeperEnd,
        limits: Limits,
        lasts: Callable[[], None] | None = None,
        overfull: Callable[[], bool] | None = None,
    ) -> None:
        self._keeper = owner
        self._limits = limits
        self._lasts = lasts
        self._overfull = overfull
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ended_by: Status | None = None
        self._number = 0
        self._streams: tuple[Capture | Feed, ...] = ()
        self.clean = False

    async def run(self, what: bytes, code: bytes, stdin: bytes) -> Outcome:
        """Send the call, watch it, report it. Raises SlotError when the keeper died."""
        stdout, stderr = (Capture(self._loop, self._limits.output_bytes, self._overflow) for _ in range(2))
        feed = Feed(self._loop, stdin)
        code_fd = os.memfd_create("code", os.MFD_CLOEXEC)
        self._streams = feed, stdout, stderr
        try:
            os.write(code_fd, code)
            fds = [code_fd, feed.child_fd, stdout.child_fd, stderr.child_fd]
            self._number = send(self._keeper, what, self._limits, fds)
            answer = self._keeper.answer()
            for stream in self._streams:
                stream.release()
            self._after(min(LASTS_AFTER_S, self._limits.wall_s), self._read_along)
            if feed.waits:
                feed.start()
            reply = await answer
        finally:
            os.close(code_fd)
            if self._timer is not None:
                self._timer.cancel()
            for stream in self._streams:
                stream.finish()
        return self._outcome(reply, stdout, stderr)

    def _after(self, seconds: float, action: object, *args: object) -> None:
        self._timer = self._loop.call_later(seconds, action, *args)  # type: ignore[arg-type]

    def _read_along(self) -> None:
        for stream in self._streams:
            stream.start()
        if self._lasts is not None:
            self._lasts()
        self._then(self._limits.wall_s - LASTS_AFTER_S, DEMOTE_AFTER_S, self._demote)

    def _then(self, left_s: float, wait_s: float, action: Callable[[float], None]) -> None:
        """Do something in a while, unless the limit comes first."""
        if left_s > wait_s:
            self._after(wait_s, action, left_s - wait_s)
        else:
            self._after(left_s, self.kill, Status.TIMEOUT_WALL)

    def _demote(self, left_s: float) -> None:
        demote(self._keeper.pid)
        self._watch_files(left_s)

    def _watch_files(self, left_s: float) -> None:
        if self._overfull is None:
            self._after(left_s, self.kill, Status.TIMEOUT_WALL)
        elif self._overfull():
            self.kill(Status.OUTPUT_LIMIT)
        else:
            self._then(left_s, FILES_EVERY_S, self._watch_files)

    def _overflow(self) -> None:
        self.kill(Status.OUTPUT_LIMIT)

    def kill(self, why: Status) -> None:
        """Have the call killed; its outcome says why unless it ended by itself before."""
        if self._ended_by is None:
            self._ended_by = why
            tell(self._keeper, keeper.KILL, self._number)
            # A keeper that does not answer to this is broken: kill it, and the slot with it.
            if self._timer is not None:
                self._timer.cancel()
            self._after(KILL_GRACE_S, self._keeper.kill)

    def _outcome(self, reply: bytes, stdout: Capture, stderr: Capture) -> Outcome:
        _, status, user_s, system_s, _, run_s, _, clean = keeper.REPLY.unpack(reply)
        self.clean = bool(clean)
        cpu_s = user_s + system_s
        kind, exit_code, name = judge(status, cpu_s, self._ended_by, self._limits)
        return Outcome(
            status=kind,
            stdout=stdout.text(),
            stderr=stderr.text(),
            exit_code=exit_code,
            signal=name,
            run_s=run_s,
            cpu_s=cpu_s,
            tier=self._keeper.tier,
            detail=SUPERSEDED if kind is Status.REJECTED else "",
        )


def judge(status: int, cpu_s: float, ended_by: Status | None, limits: Limits) -> tuple[Status, int | None, str]:
    """Status, exit code and name of the signal that a wait status stands for.

    Args:
        cpu_s: CPU seconds that the program used.
        ended_by: why we had it killed, if we had.
    """
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        named = {0: Status.OK, EXIT_MEMORY: Status.OOM}.get(code, Status.ERROR)
        return (Status.OUTPUT_LIMIT if ended_by is Status.OUTPUT_LIMIT else named), code, ""
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if ended_by is not None and number == signal.SIGKILL:
        # Where cores are scarce, a program that ignores the first signal of its processor limit meets the clock first.
        spent = ended_by is Status.TIMEOUT_WALL and cpu_s >= limits.effective_cpu_s
        return (Status.TIMEOUT_CPU if spent else ended_by), None, name
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= 0.7 * limits.effective_cpu_s):
        return Status.TIMEOUT_CPU, None, name
    return Status.KILLED, None, name


def send(owner: KeeperEnd, what: bytes, limits: Limits, fds: list[int]) -> int:
    """Hand a call to a keeper; its number. Raises KeeperGoneError when the keeper is dead."""
    owner.calls += 1
    numbers = (limits.effective_cpu_s, limits.memory_bytes, limits.file_bytes, limits.processes)
    request = keeper.REQUEST.pack(what, owner.calls, *map(int, numbers))
    try:
        owner.control.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FDS.pack(*fds))])
    except OSError as error:
        raise KeeperGoneError(f"the slot's keeper is gone: {error}") from error
    return owner.calls


def tell(owner: KeeperEnd, what: bytes, number: int) -> None:
    """Tell a keeper something about the call that it runs (KILL, PAUSE, GO_ON)."""
    with contextlib.suppress(OSError):
        owner.control.send(keeper.REQUEST.pack(what, number, 0, 0, 0, 0))


def demote(keeper_pid: int) -> None:
    """Give what a keeper's call runs a lower place at the processor, as far as this process may."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{keeper_pid}/task/{keeper_pid}/children") as file:
            for pid in file.read().split():
                os.setpriority(os.PRIO_PGRP, int(pid), DEMOTED_NICE)


class Feed:
    """Standard input: a pipe, always; filled at once when it fits, else as the program reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, data: bytes) -> None:
        self.child_fd, self._fd = os.pipe()
        self._loop = loop
        self._data = memoryview(data)
        self._watched = False
        if data:
            os.set_blocking(self._fd, False)
            with contextlib.suppress(BlockingIOError):
                self._data = self._data[os.write(self._fd, self._data) :]
        if not self._data:
            os.close(self._fd)
            self._fd = -1

    @property
    def waits(self) -> bool:
        """True while not all of it is in the pipe."""
        return self._fd >= 0

    def release(self) -> None:
        """Close the child's end here: the child has its own."""
        os.close(self.child_fd)
        self.child_fd = -1

    def start(self) -> None:
        """Write on as the program reads."""
        if self._fd >= 0 and not self._watched:
            self._watched = True
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
            if self._watched:
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> None:
        """Close what is still open."""
        if self.child_fd >= 0:
            self.release()
        self._close()
