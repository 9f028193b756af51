"""The executor's end of the warm interpreters: starts them, asks them for keepers, kills them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

IMAGE_START_S = 120.0
KEEPER_START_S = 20.0
BARE, MATH, SCIENCE, GRADE, SQL = "bare", "math", "science", "grade", "sql"
KINDS = (BARE, MATH, SCIENCE, GRADE, SQL)
# What stands in for a warm interpreter whose modules are not installed.
INSTEAD = {SCIENCE: MATH, MATH: BARE}

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}
# One heap that grows in large steps, instead of a mapping for each large block: each mapping is copied at each fork.
TUNABLES = "glibc.malloc.mmap_threshold=268435456:glibc.malloc.top_pad=2097152"
# Symbols found at the start: what is looked up at its first use, each child would look up anew.
TUNED = {"GLIBC_TUNABLES": TUNABLES, "LD_BIND_NOW": "1"}


class SlotError(RuntimeError):
    """A slot, keeper or warm interpreter failed: a fault of ours, status INFRA."""


class KeeperGoneError(SlotError):
    """The keeper was dead before it had the call: nothing ran, so the call may go to a new one."""


class KeeperEnd:
    """The parent's end of a keeper: its control socket, the answer that is awaited, and a handle that kills it.

    Args:
        control: sequenced-packet socket, non-blocking.
        pid: of the keeper, on this host.
        tier: isolation that it reported.
    """

    def __init__(self, control: socket.socket, pid: int, tier: str) -> None:
        self.control = control
        self.pid = pid
        self.tier = tier
        self.calls = 0
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[bytes] | None = None
        self._gone: SlotError | None = None
        self._loop.add_reader(control, self._read)

    def answer(self) -> asyncio.Future[bytes]:
        """A future for the keeper's next message; it fails with SlotError when the keeper is dead."""
        self._answer = self._loop.create_future()
        if self._gone is not None:
            self._answer.set_exception(self._gone)
        return self._answer

    def _read(self) -> None:
        try:
            message = self.control.recv(256)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._end(KeeperGoneError("the slot's keeper died with the request unread"))
            return
        except OSError as error:
            self._end(SlotError(f"the slot's keeper is gone: {error}"))
            return
        if not message:
            self._end(SlotError("the slot's keeper died during the call"))
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _end(self, error: SlotError) -> None:
        self._loop.remove_reader(self.control)
        # Whoever comes later has not been heard by it.
        self._gone = KeeperGoneError(str(error))
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def kill(self) -> None:
        """Kill the keeper; in a pid namespace nothing outlives it."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and let go of its descriptors."""
        self.kill()
        if self._pidfd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self.control)
            os.close(self._pidfd)
            self._pidfd = -1
        self.control.close()


class Image:
    """A warm interpreter process and the lock under which it is asked for keepers.

    Args:
        kind: one of KINDS.
        python: the interpreter to start.
        compiled: use the part in C where there is one.
    """

    def __init__(self, kind: str, python: str, compiled: bool) -> None:
        self.kind = kind
        self.compiled = compiled
        self._python = python or sys.executable
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.missing = ""

    async def start(self) -> None:
        """Have the interpreter warm. Raises SlotError."""
        async with self._lock:
            await self._start()

    async def fork_keeper(self, request: dict[str, Any]) -> KeeperEnd:
        """A new keeper in the jail that the request describes. Raises SlotError."""
        async with self._lock:
            control = await self._start()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                pid, status = await self._ask(control, request, ours, theirs)
                if "error" in status:
                    raise SlotError(f"no {request['tier']} jail: {status['error']}")
                return KeeperEnd(ours, pid, status["tier"])
            except (OSError, TimeoutError) as error:
                ours.close()
                self.close()
                raise SlotError(f"the {self.kind} image gave no keeper: {type(error).__name__}: {error}") from error
            except BaseException:
                ours.close()
                raise

    async def _ask(
        self, control: socket.socket, request: dict[str, Any], ours: socket.socket, theirs: socket.socket
    ) -> tuple[int, dict[str, str]]:
        loop = asyncio.get_running_loop()
        with theirs:
            socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno()])
        async with asyncio.timeout(KEEPER_START_S):
            answer = await loop.sock_recv(control, 4096)
            if not answer:
                raise ConnectionError("it died")
            status = await loop.sock_recv(ours, 4096)
        return json.loads(answer)["pid"], json.loads(status or b'{"error": "it died at once"}')

    async def _start(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.close()
        if self.missing:
            raise SlotError(f"the {self.kind} image cannot start: {self.missing}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "image.py")
        with theirs:
            self._process = subprocess.Popen(
                [self._python, "-s", "-P", script, str(theirs.fileno()), self.kind, self._variant],
                env=ENVIRONMENT | (TUNED if self.compiled else {}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._control = ours
        try:
            async with asyncio.timeout(IMAGE_START_S):
                message = await asyncio.get_running_loop().sock_recv(ours, 4096)
        except TimeoutError as error:
            self.close()
            raise SlotError(f"the {self.kind} image was not warm after {IMAGE_START_S:.0f} s") from error
        status = json.loads(message or b'{"died": true}')
        if "compiled" not in status:
            self.close()
            self.missing = status.get("error", "")
            raise SlotError(f"the {self.kind} image cannot start: {self.missing or 'it died at once'}")
        self.compiled = status["compiled"]
        return ours

    @property
    def _variant(self) -> str:
        return "compiled" if self.compiled else "plain"

    def close(self) -> None:
        """End the process and with it all its keepers."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
