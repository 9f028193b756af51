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
BARE, MATH, GRADE = "bare", "math", "grade"
KINDS = (BARE, MATH, GRADE)

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


class KeeperEnd:
    """The parent's end of a keeper: its control socket and a handle that kills it.

    Args:
        control: sequenced-packet socket.
        pid: of the keeper, on this host.
        tier: isolation that it reported.
    """

    def __init__(self, control: socket.socket, pid: int, tier: str) -> None:
        self.control = control
        self.pid = pid
        self.tier = tier
        self.calls = 0
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill the keeper; in a pid namespace nothing outlives it."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and let go of its descriptors."""
        self.kill()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.control.close()


class Image:
    """A warm interpreter process and the lock under which it is asked for keepers.

    Args:
        kind: one of KINDS.
        python: the interpreter to start.
    """

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
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
                [self._python, "-s", "-P", script, str(theirs.fileno()), self.kind],
                env=_ENVIRONMENT,
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
        if status:
            self.close()
            self.missing = status.get("error", "")
            raise SlotError(f"the {self.kind} image cannot start: {self.missing or 'it died at once'}")
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
