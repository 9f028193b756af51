"""A private sandbox on this machine: `with start_local(slots=2) as local: Client(local.redis_url)`.

One supervising child process owns a Redis that listens on a socket file only, and one worker node; it restarts either
when it dies and ends both when this process does, however that happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from rstar2_sandbox import executor, supervise

START_S = 60.0
_MAX_FOLDER_CHARS = 80


class Local:
    """A running private sandbox; close it, or leave its `with` block. Made by start_local."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str) -> None:
        self._process = process
        self._folder = folder

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def redis_url(self) -> str:
        """Address for Client, password included; it stays the same when the server is restarted."""
        return str(self._state()["redis_url"])

    @property
    def redis_pid(self) -> int:
        """Process id of the Redis server that runs now."""
        return int(self._state()["redis_pid"])

    @property
    def worker_pid(self) -> int:
        """Process id of the node that runs now."""
        return int(self._state()["worker_pid"])

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervising child."""
        return self._process.pid

    @property
    def tier(self) -> str:
        """Isolation that the node found."""
        return str(self._state().get("tier", ""))

    def _state(self) -> dict[str, Any]:
        with open(os.path.join(self._folder, supervise.STATE)) as file:
            return json.load(file)

    def wait_until_ready(self, limit_s: float = START_S) -> None:
        """Return when the node takes calls. Raises RuntimeError that says what is missing."""
        deadline = time.monotonic() + limit_s
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                state = self._state()
            if "error" in state:
                raise RuntimeError(f"the private sandbox cannot start: {state['error']}")
            if "tier" in state:
                return
            if self._process.poll() is not None:
                raise RuntimeError(f"the private sandbox ended at once, exit code {self._process.returncode}")
            time.sleep(0.01)
        raise RuntimeError(f"the private sandbox was not ready after {limit_s:.0f} s; it reported {sorted(state)}")

    def close(self) -> None:
        """End the node, Redis and the supervisor; remove their folder."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def start_local(
    *,
    slots: int = 2,
    verify_slots: int = 1,
    session_slots: int = 2,
    isolation: str = "auto",
    min_isolation: str = "plain",
) -> Local:
    """Start a private Redis and a worker node, and return when calls are taken.

    Args:
        slots: executions at once.
        verify_slots: verifications at once that need a process.
        session_slots: stateful sessions that live at once.
        isolation, min_isolation: see executor.Settings.

    Raises:
        ValueError: an isolation of that name does not exist.
        RuntimeError: it could not start; the message says why and what to do.
    """
    executor.Settings(isolation=isolation, min_isolation=min_isolation)
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="rstar2-sandbox-", dir=parent if len(parent) < _MAX_FOLDER_CHARS else "/tmp")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    options = ["--slots", str(slots), "--verify_slots", str(verify_slots)]
    options += ["--session_slots", str(session_slots)]
    options += ["--isolation", isolation, "--min_isolation", min_isolation]
    process = subprocess.Popen(
        [sys.executable, "-m", "rstar2_sandbox", "supervise", folder, *options],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    local = Local(process, folder)
    try:
        local.wait_until_ready()
    except BaseException:
        local.close()
        raise
    return local
