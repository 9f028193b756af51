"""The small process behind local.start_local: keeps a private Redis and one node alive, and ends both with its parent.

It lives as long as its parent holds the other end of its standard input and is its parent; so nothing is left running
when the parent is killed. Its children die with it by their death signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from rstar2_sandbox import jail, linux, master

BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0
STATE = "state.json"
TRIES = 3


def _die_with_parent() -> None:
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Starts, watches and restarts the two children; writes what it knows to state.json in its folder.

    Args:
        folder: private folder (mode 700) for socket, state and log.
        options: command-line options of the node (`worker` of __main__).
    """

    def __init__(self, folder: str, options: list[str]) -> None:
        self._folder = folder
        self._options = options
        # The same over restarts, so that a new node frees and cleans what its predecessor left.
        self._fixed = ["--name", f"local-{os.getpid()}", "--uid_base", str(jail.unused_uid_base(jail.IDS))]
        self._password = secrets.token_urlsafe(24)
        self._parent = os.getppid()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, list[float]] = {"redis": [], "worker": []}
        self._state: dict[str, Any] = {"redis_url": f"unix://:{self._password}@{folder}/redis.sock"}

    def run(self) -> int:
        """Serve until the parent is gone or says so; return the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            master.find_redis_server()
        except FileNotFoundError as error:
            self._write(error=str(error))
            return 1
        try:
            while os.getppid() == self._parent:
                self._restart_dead()
                if self._parent_left():
                    break
            return 0
        finally:
            for name, child in sorted(self._children.items(), reverse=True):
                child.terminate() if name == "worker" else child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(3)
                child.kill()
                child.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _restart_dead(self) -> None:
        for name in ("redis", "worker"):
            child = self._children.get(name)
            if child is not None and child.poll() is None:
                continue
            recent = [at for at in self._starts[name] if time.monotonic() - at < 10]
            if recent:
                time.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** len(recent)))
            self._starts[name] = [*recent, time.monotonic()]
            if len(recent) >= TRIES and "tier" not in self._state:
                self._write(error=f"{name} ended {len(recent)} times before it was ready; see its messages above")
            self._children[name] = self._start_redis() if name == "redis" else self._start_worker()
            self._write(**{f"{name}_pid": self._children[name].pid})

    def _start_redis(self) -> subprocess.Popen[bytes]:
        config = master.redis_config(self._folder, self._password)
        return master.start_redis(config, preexec_fn=_die_with_parent, start_new_session=True)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"RSTAR2_SANDBOX_REDIS_URL": self._state["redis_url"]}
        return subprocess.Popen(
            [sys.executable, "-m", "rstar2_sandbox", "worker", *self._fixed, *self._options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )

    def _parent_left(self) -> bool:
        """Wait for news: a child's end, the node's first line, or the end of standard input (True)."""
        poller = select.poll()
        pidfds = [os.pidfd_open(child.pid) for child in self._children.values() if child.poll() is None]
        for fd in pidfds:
            poller.register(fd, select.POLLIN)
        poller.register(0, select.POLLIN)
        output = self._children["worker"].stdout
        if output is not None and not output.closed:
            poller.register(output, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000)}
        for fd in pidfds:
            os.close(fd)
        if output is not None and not output.closed and output.fileno() in ready:
            line = output.readline()
            if line:
                self._write(**json.loads(line))
            else:
                output.close()
        return 0 in ready and not os.read(0, 1)

    def _write(self, **news: object) -> None:
        self._state |= news
        path = os.path.join(self._folder, STATE)
        with open(path + ".new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(self._state, file)
        os.replace(path + ".new", path)
