"""Stateful Python: a forked process kept between the calls of a trajectory, never a replay of what came before.

A session has a slot of its own while it lives. It ends when its caller says so, when a cell runs into a limit (then
what the cells defined is gone, and the outcome says so), or when nobody used it for a while. Between cells it is
stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable

from rstar2_sandbox import job, keeper
from rstar2_sandbox.capture import Capture
from rstar2_sandbox.images import KeeperEnd, KeeperGoneError, SlotError
from rstar2_sandbox.jail_child import EXIT_MEMORY
from rstar2_sandbox.protocol import SUPERSEDED, Call, Execution, Limits, Outcome, Status
from rstar2_sandbox.slot import Slot

IDLE_S = 600.0
CPU_S = 600  # of one session, all cells together
MAX_STRAY = 64  # messages of a program on its control socket that are passed over
ENDED = "the session has ended: the next call starts afresh, and what earlier ones defined is gone\n"


class Session:
    """One session in one slot.

    Args:
        slot: its own while it lives.
        limits: of its first cell: memory, files, processes and output hold for all of them.
    """

    def __init__(self, slot: Slot, limits: Limits) -> None:
        self.slot = slot
        self.used_at = time.monotonic()
        self.lock = asyncio.Lock()
        self.epoch = 0
        self._limits = dataclasses.replace(limits, cpu_s=CPU_S)
        self._owner: KeeperEnd | None = None
        self._kind = ""
        self._number = 0
        self._cells = 0
        self._control: socket.socket | None = None
        self._ended: asyncio.Future[bytes] | None = None
        self._why: Status | None = None
        self._outputs: tuple[Capture, Capture] | None = None

    @property
    def alive(self) -> bool:
        """True while what the cells defined is still there."""
        return self._ended is not None and not self._ended.done()

    async def open(self) -> None:
        """Fork the session's process. Raises SlotError."""
        try:
            await self._open()
        except KeeperGoneError:  # it was killed while nobody used it: nothing ran
            await self._open()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        owner, self._kind = await self.slot.prepare_session()
        self.slot.limit_memory(self._limits.memory_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._outputs = (
            Capture(loop, self._limits.output_bytes, self._overflow),
            Capture(loop, self._limits.output_bytes, self._overflow),
        )
        feed = job.Feed(loop, b"")
        self._owner, self._control = owner, ours
        try:
            with theirs:
                fds = [theirs.fileno(), feed.child_fd, *(output.child_fd for output in self._outputs)]
                self._number = job.send(owner, keeper.SESSION, self._limits, fds)
        except KeeperGoneError:
            self._finish(False)
            raise
        finally:
            feed.finish()
        self._ended = owner.answer()
        loop.call_later(0.02, self.slot.count_memory, owner)
        for output in self._outputs:
            output.release()
            output.start()

    async def run(self, code: str, limits: Limits) -> Outcome:
        """Run one cell. Raises SlotError when the fault is ours."""
        assert self._owner is not None and self._control is not None and self._ended is not None
        loop = asyncio.get_running_loop()
        self._cells += 1
        name = str(self._cells).encode()
        started = time.monotonic()
        job.tell(self._owner, keeper.GO_ON, self._number)
        self._hand_over(name, code.encode("utf-8", "surrogatepass"))
        answer = asyncio.ensure_future(self._answer(loop, name))
        await asyncio.wait({answer, self._ended}, timeout=limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
        run_s = time.monotonic() - started
        self.used_at = time.monotonic()
        exit_code = answer.result() if answer.done() else None
        if exit_code is None:
            silent = answer.done()
            answer.cancel()
            await asyncio.wait({answer})
            self._stop(Status.KILLED if silent else Status.TIMEOUT_WALL)
            return await self._end_of_process(run_s)
        job.tell(self._owner, keeper.PAUSE, self._number)
        status = {0: Status.OK, EXIT_MEMORY: Status.OOM}.get(exit_code, Status.ERROR)
        return self._outcome(status, exit_code, "", run_s, "")

    def _hand_over(self, name: bytes, code: bytes) -> None:
        assert self._control is not None
        fd = os.memfd_create("cell", os.MFD_CLOEXEC)
        try:
            os.write(fd, code)
            with contextlib.suppress(OSError):  # a program that closed its end: its process is ended below
                socket.send_fds(self._control, [name], [fd])
        finally:
            os.close(fd)

    async def _answer(self, loop: asyncio.AbstractEventLoop, name: bytes) -> int | None:
        """Exit code of the cell; None when the process no longer answers, or sends what is no answer without end (this
        loop does not wait while there is something to read, and the node must not wait for it)."""
        assert self._control is not None
        for _ in range(MAX_STRAY):
            try:
                message = await loop.sock_recv(self._control, 256)
            except OSError:
                return None
            if not message:
                return None
            if message[:-1] == name:
                return message[-1]
        return None

    async def _end_of_process(self, run_s: float) -> Outcome:
        """The process has ended, or is being killed: report what the kernel says."""
        _, status, user_s, system_s, _, _, _, clean = keeper.REPLY.unpack(await self._reply())
        kind, exit_code, signal_name = job.judge(status, user_s + system_s, self._why, self._limits)
        outcome = self._outcome(kind, exit_code, signal_name, run_s, ENDED)
        self._finish(bool(clean))
        return outcome

    async def _reply(self) -> bytes:
        assert self._owner is not None and self._ended is not None
        try:
            async with asyncio.timeout(job.KILL_GRACE_S):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            self._finish(False)
            raise SlotError("the session's keeper does not answer") from None
        except SlotError:
            self._finish(False)
            raise

    def _outcome(self, status: Status, exit_code: int | None, signal_name: str, run_s: float, note: str) -> Outcome:
        assert self._outputs is not None and self._owner is not None
        stdout, stderr = (output.take() for output in self._outputs)
        return Outcome(
            status=status,
            stdout=stdout,
            stderr=stderr + note,
            exit_code=exit_code,
            signal=signal_name,
            run_s=run_s,
            tier=self._owner.tier,
            detail=SUPERSEDED if status is Status.REJECTED else "",
        )

    def _overflow(self) -> None:
        self._stop(Status.OUTPUT_LIMIT)

    def _stop(self, why: Status) -> None:
        if self._owner is not None and self._why is None and self.alive:
            self._why = why
            job.tell(self._owner, keeper.GO_ON, self._number)
            job.tell(self._owner, keeper.KILL, self._number)

    def cancel(self) -> None:
        """Kill the cell that runs now, and the session with it: the outcome is REJECTED."""
        self._stop(Status.REJECTED)

    def _finish(self, clean: bool) -> None:
        for output in self._outputs or ():
            output.finish()
        if self._control is not None:
            self._control.close()
        self._control = None
        if not clean:
            self.slot.discard(self._kind)

    async def close(self) -> None:
        """End the session and leave its slot clean."""
        if self._control is None or self._ended is None:
            return
        self._stop(Status.KILLED)
        with contextlib.suppress(SlotError):
            reply = await self._reply()
            self._finish(bool(keeper.REPLY.unpack(reply)[-1]))


class Sessions:
    """The live sessions of a node, by run and name.

    Args:
        slots: at most one session in each.
        freed: called when a slot has become free.
    """

    def __init__(self, slots: list[Slot], freed: Callable[[], None]) -> None:
        self._free = list(slots)
        self._freed = freed
        self._live: dict[tuple[str, str], Session] = {}

    @property
    def free(self) -> int:
        """Sessions that may still be opened."""
        return len(self._free)

    @property
    def runs(self) -> set[str]:
        """Runs that have a session here."""
        return {run for run, _ in self._live}

    async def run(self, call: Call, execution: Execution, node: str) -> Outcome:
        """Run a cell in the session that it names, opened when there is none. Raises SlotError when the fault is ours.

        Args:
            call: that brought it.
            node: name of this node, which the outcome carries while the session lives.
        """
        run, name = call.run, execution.session
        session = self._live.get((run, name))
        if session is not None and not session.alive and not session.lock.locked():
            await self.end(run, name)
            return Outcome(status=Status.ERROR, stderr=ENDED)
        if session is None:
            if not self._free:
                await self._end_idle(0.5 * IDLE_S)
            if not self._free:
                return Outcome(status=Status.REJECTED, detail=f"all {len(self._live)} sessions of this node are in use")
            session = self._live[run, name] = Session(self._free.pop(), execution.limits)
            session.epoch = call.epoch
        async with session.lock:
            if self._live.get((run, name)) is not session:  # it ended while this cell waited for an earlier one
                return Outcome(status=Status.ERROR, stderr=ENDED)
            try:
                if not session.alive:
                    await session.open()
                outcome = await session.run(execution.code, execution.limits)
            except BaseException:
                await self.end(run, name)
                raise
            if not session.alive:
                await self.end(run, name)
                return outcome
            return dataclasses.replace(outcome, at=node)

    async def end(self, run: str, name: str) -> bool:
        """End a session; False when there is none of that name."""
        session = self._live.pop((run, name), None)
        if session is None:
            return False
        try:
            await session.close()
        finally:
            self._free.append(session.slot)
            self._freed()
        return True

    async def end_before(self, run: str, epoch: int) -> None:
        """End a run's sessions of earlier epochs; a cell that runs now is REJECTED."""
        for key, session in list(self._live.items()):
            if key[0] == run and session.epoch < epoch:
                session.cancel()
                if not session.lock.locked():
                    await self.end(*key)

    async def _end_idle(self, idle_s: float = IDLE_S) -> None:
        now = time.monotonic()
        for (run, name), session in list(self._live.items()):
            if not session.lock.locked() and now - session.used_at > idle_s:
                await self.end(run, name)

    async def watch(self) -> None:
        """End idle sessions, forever."""
        while True:
            await asyncio.sleep(min(10.0, IDLE_S / 10))
            await self._end_idle()
