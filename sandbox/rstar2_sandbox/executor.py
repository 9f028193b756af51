"""Runs programs in slots: each slot has a keeper in its own jail, forked from a warm interpreter.

The executor holds the descriptors, the clock and the kill; what it reports comes from the kernel (pipes, wait status,
times). It needs no Redis and no network: the node (worker) feeds it, and so can a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from rstar2_sandbox import jail, keeper
from rstar2_sandbox.capture import Capture
from rstar2_sandbox.jail_child import EXIT_MEMORY
from rstar2_sandbox.protocol import Execution, Limits, Outcome, Status

IMAGE_START_S = 120.0
KEEPER_START_S = 20.0
KILL_GRACE_S = 5.0
CALLS_PER_KEEPER = 20_000
TMP_BYTES, TMP_INODES = 64 * 2**20, 4096
GRADE_LIMITS = Limits(wall_s=3.0, memory_bytes=1024 * 2**20, output_bytes=1024, processes=1)

_MATH_IMPORT = re.compile(rb"^[^\S\n]*(?:from|import)[^\n#]*\b(?:numpy|sympy|mpmath)\b", re.MULTILINE)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}


class SlotError(RuntimeError):
    """A slot, keeper or warm interpreter failed: a fault of ours, status INFRA."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a node isolates.

    Args:
        isolation: "auto" takes the strongest tier that works; a tier's name takes that one or fails.
        min_isolation: weakest tier that "auto" may fall to.
        uid_base: first of two host user ids for each slot; used as root only. Nothing else may run under them.
        python: interpreter that programs run on; empty takes the node's own.
    """

    isolation: str = "auto"
    min_isolation: str = jail.PLAIN
    uid_base: int = 1_000_000
    python: str = ""

    def __post_init__(self) -> None:
        for field, choices in (("isolation", ("auto", *jail.TIERS)), ("min_isolation", jail.TIERS)):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be one of {', '.join(choices)}")

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers to try, strongest first."""
        if self.isolation != "auto":
            return (self.isolation,)
        allowed = jail.TIERS[: jail.TIERS.index(self.min_isolation) + 1]
        return tuple(tier for tier in allowed if tier != jail.UID or os.geteuid() == 0)


class Image:
    """A warm interpreter process and the lock under which it is asked for keepers."""

    def __init__(self, kind: str, settings: Settings) -> None:
        self.kind = kind
        self._settings = settings
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.missing = ""

    async def fork_keeper(self, request: dict[str, object]) -> tuple[socket.socket, int, str]:
        """A new keeper: its control socket, its pid and the isolation it reports. Raises SlotError."""
        async with self._lock:
            control = await self._start()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno()])
                theirs.close()
                async with asyncio.timeout(KEEPER_START_S):
                    loop = asyncio.get_running_loop()
                    pid = json.loads(await loop.sock_recv(control, 4096) or b'{"pid": 0}')["pid"]
                    status = json.loads(await loop.sock_recv(ours, 4096) or b'{"error": "it died at once"}')
            except (OSError, TimeoutError) as error:
                ours.close()
                self.close()
                raise SlotError(f"the {self.kind} image gave no keeper: {type(error).__name__}: {error}") from error
        if "error" in status:
            ours.close()
            raise SlotError(f"no {request['tier']} jail: {status['error']}")
        return ours, pid, status["tier"]

    async def start(self) -> None:
        """Have the interpreter warm. Raises SlotError."""
        async with self._lock:
            await self._start()

    async def _start(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "image.py")
        python = self._settings.python or sys.executable
        self._process = subprocess.Popen(
            [python, "-s", "-P", script, str(theirs.fileno()), self.kind],
            env=_ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        try:
            async with asyncio.timeout(IMAGE_START_S):
                message = await asyncio.get_running_loop().sock_recv(ours, 4096)
        except TimeoutError as error:
            raise SlotError(f"the {self.kind} image was not warm after {IMAGE_START_S:.0f} s") from error
        status = json.loads(message or b'{"error": "it died at once"}')
        if "error" in status:
            self.missing = status["error"]
            raise SlotError(f"the {self.kind} image cannot start: {self.missing}")
        return ours

    def close(self) -> None:
        """End the process and with it all its keepers."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Slot:
    """One place to run: at most one call at a time, in a jail that no other slot shares."""

    def __init__(self, index: int, tier: str, images: dict[str, Image], settings: Settings, folder: str) -> None:
        self.index = index
        self._tier = tier
        self._images = images
        self._settings = settings
        self._folder = os.path.join(folder, str(index))
        self._keepers: dict[str, _Keeper] = {}

    async def run(self, execution: Execution) -> Outcome:
        """Run one program. Raises SlotError when the fault is ours."""
        code = execution.code.encode("utf-8", "surrogatepass")
        kind = "math" if _MATH_IMPORT.search(code) and not self._images["math"].missing else "bare"
        stdin = execution.stdin.encode("utf-8", "surrogatepass")
        return await self._run(kind, keeper.RUN, code, stdin, execution.limits)

    async def grade(self, gold: str, answer: str) -> Outcome:
        """Ask the library whether two expressions are equal; stdout is a JSON boolean. Raises SlotError."""
        request = json.dumps({"gold": gold, "answer": answer}).encode()
        return await self._run("grade", keeper.GRADE, request, b"", GRADE_LIMITS)

    async def prepare(self, kind: str) -> str:
        """Build the keeper of a kind; return the isolation that it reports. Raises SlotError."""
        found = self._keepers.get(kind)
        if found is None or found.calls >= CALLS_PER_KEEPER:
            self.discard(kind)
            found = self._keepers[kind] = await self._build(kind)
        return found.tier

    def discard(self, kind: str) -> None:
        """Kill the keeper of a kind and with it all that lives in its jail."""
        old = self._keepers.pop(kind, None)
        if old is not None:
            old.close()

    def close(self) -> None:
        """Kill every keeper."""
        for kind in list(self._keepers):
            self.discard(kind)

    async def _build(self, kind: str) -> _Keeper:
        base = self._settings.uid_base + 2 * self.index
        folder = f"{self._folder}-{kind}"
        own_uid = os.geteuid() == 0
        if self._tier != jail.NAMESPACES:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            jail.wipe(folder)
            if self._tier == jail.UID:
                os.chown(folder, base + 1, base + 1)
        request = {
            "tier": self._tier,
            "keeper_uid": base,
            "child_uid": base + 1,
            "own_uid": own_uid,
            "folder": folder,
            "tmp_bytes": TMP_BYTES,
            "tmp_inodes": TMP_INODES,
        }
        return _Keeper(*await self._images[kind].fork_keeper(request))

    async def _run(self, kind: str, what: bytes, code: bytes, stdin: bytes, limits: Limits) -> Outcome:
        await self.prepare(kind)
        job = _Job(self._keepers[kind], limits)
        try:
            outcome = await job.run(what, code, stdin)
        except BaseException:
            self.discard(kind)
            raise
        if not job.clean:
            self.discard(kind)
        return outcome


class _Keeper:
    """The parent's end of a keeper."""

    def __init__(self, control: socket.socket, pid: int, tier: str) -> None:
        self.control = control
        self.tier = tier
        self.calls = 0
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill the keeper; in its own pid namespace nothing outlives it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and let go of its descriptors."""
        self.kill()
        os.close(self._pidfd)
        self.control.close()


class _Job:
    """One call in one keeper: descriptors, clock, and the reading of what the kernel says."""

    def __init__(self, owner: _Keeper, limits: Limits) -> None:
        self._keeper = owner
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._ended_by: Status | None = None
        self.clean = False

    async def run(self, what: bytes, code: bytes, stdin: bytes) -> Outcome:
        """Send the call, watch it, report it. Raises SlotError when the keeper died."""
        owner, limits = self._keeper, self._limits
        owner.calls += 1
        overflow = lambda: self._kill(Status.OUTPUT_LIMIT)  # noqa: E731
        stdout, stderr = (Capture(self._loop, limits.output_bytes, overflow) for _ in range(2))
        feed = _Feed(self._loop, stdin)
        code_fd = os.memfd_create("code", os.MFD_CLOEXEC)
        try:
            os.write(code_fd, code)
            numbers = (limits.effective_cpu_s, limits.memory_bytes, limits.file_bytes, limits.processes)
            request = keeper.REQUEST.pack(what, owner.calls, *(int(number) for number in numbers))
            fds = [code_fd, feed.child_fd, stdout.child_fd, stderr.child_fd]
            socket.send_fds(owner.control, [request], fds)
            for stream in (feed, stdout, stderr):
                stream.start()
            timer = self._loop.call_later(limits.wall_s, self._kill, Status.TIMEOUT_WALL)
            try:
                reply = await self._loop.sock_recv(owner.control, 256)
            finally:
                timer.cancel()
        except OSError as error:
            raise SlotError(f"the slot's keeper is gone: {error}") from error
        finally:
            os.close(code_fd)
            for stream in (feed, stdout, stderr):
                stream.finish()
        if not reply:
            raise SlotError("the slot's keeper died during the call")
        return self._outcome(reply, stdout, stderr)

    def _kill(self, why: Status) -> None:
        if self._ended_by is None:
            self._ended_by = why
            with contextlib.suppress(OSError):
                self._keeper.control.send(keeper.REQUEST.pack(keeper.KILL, self._keeper.calls, 0, 0, 0, 0))
            self._loop.call_later(KILL_GRACE_S, self._insist, self._keeper.calls)

    def _insist(self, serial: int) -> None:
        if not self.clean and self._keeper.calls == serial:
            with contextlib.suppress(OSError):
                self._keeper.kill()

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
        if number in (signal.SIGXCPU, signal.SIGKILL) and cpu_s >= self._limits.effective_cpu_s - 0.1:
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
        self.finish()

    def finish(self) -> None:
        """Close what is still open."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1


class Executor:
    """All slots of a node.

    Args:
        slots: calls at once.
        settings: see Settings.
    """

    def __init__(self, slots: int, settings: Settings) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots}: must be 1 or more")
        self._count = slots
        self._settings = settings
        self._folder = os.path.join(tempfile.gettempdir(), f"rstar2-slots-{os.getuid()}-{settings.uid_base}")
        self._images = {kind: Image(kind, settings) for kind in ("bare", "math", "grade")}
        self.slots: list[Slot] = []
        self.tier = ""
        self.refused: dict[str, str] = {}

    async def start(self) -> None:
        """Find the strongest tier that works and build the slots. Raises SlotError."""
        for tier in self._settings.tiers:
            if tier != jail.NAMESPACES:
                os.makedirs(self._folder, mode=0o711, exist_ok=True)
            trial = self._slot(0, tier)
            try:
                self.tier = await trial.prepare("bare")
            except SlotError as error:
                self.refused[tier] = str(error)
                continue
            finally:
                trial.close()
            self.slots = [self._slot(index, tier) for index in range(self._count)]
            return
        reasons = "; ".join(f"{tier}: {reason}" for tier, reason in self.refused.items())
        raise SlotError(f"no permitted isolation works here: {reasons}")

    async def warm(self, kind: str) -> None:
        """Have the interpreter of a kind warm, so that the first call of that kind does not wait. Raises SlotError."""
        await self._images[kind].start()

    @property
    def missing(self) -> dict[str, str]:
        """Warm interpreters that cannot start, and why."""
        return {kind: image.missing for kind, image in self._images.items() if image.missing}

    def close(self) -> None:
        """Kill all slots and interpreters and remove the working folders."""
        for slot in self.slots:
            slot.close()
        for image in self._images.values():
            image.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _slot(self, index: int, tier: str) -> Slot:
        return Slot(index, tier, self._images, self._settings, self._folder)


async def measure_rate(slot: Slot, code: str, calls: int) -> tuple[float, float]:
    """Calls a second, and CPU milliseconds of the children for each call, of one slot running one program."""
    execution = Execution(code=code)
    await slot.run(execution)
    started, cpu_s = time.monotonic(), 0.0
    for _ in range(calls):
        cpu_s += (await slot.run(execution)).cpu_s
    return calls / (time.monotonic() - started), 1000 * cpu_s / calls
