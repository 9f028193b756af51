"""A memory budget for a whole slot, where this process may make control groups (version 1 or 2).

The address-space limit binds one process; this binds all that a call starts, and what it writes to memory-backed files.
Being counted costs a call a sixth of its time, so that only one that lasts is moved into the group of its slot.
"""

from __future__ import annotations

import contextlib
import os
import time

ROOT = "/sys/fs/cgroup"
SLACK_BYTES = 32 * 2**20


def _own_group() -> tuple[str, str]:
    """Folder of this process's memory group, and the name of the file with its limit. Raises OSError."""
    with open("/proc/self/cgroup") as file:
        rows = [line.strip().split(":", 2) for line in file]
    for _, controllers, path in rows:
        if "memory" in controllers.split(","):
            return f"{ROOT}/memory{path}", "memory.limit_in_bytes"
    path = next((path for number, controllers, path in rows if number == "0" and not controllers), None)
    if path is None:
        raise FileNotFoundError("no memory control group")
    return ROOT + path, "memory.max"


def sweep(prefix: str) -> None:
    """Remove empty groups whose names start so: what nodes that were killed left behind."""
    with contextlib.suppress(OSError):
        parent, _ = _own_group()
        for name in os.listdir(parent):
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(parent, name))


def _descendants(root: int) -> set[int]:
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
            found.update(children)
            todo += children
    return found


class SlotMemory:
    """The group of one slot; every method does nothing where groups cannot be made (`works` is False then).

    Args:
        name: of the group, unique on this host.
    """

    def __init__(self, name: str) -> None:
        self.works = False
        self._wanted = self._limit = 0
        self._kills = 0
        try:
            parent, self._limit_file = _own_group()
            self._folder = os.path.join(parent, name)
            os.makedirs(self._folder, exist_ok=True)
            self.works = os.access(os.path.join(self._folder, self._limit_file), os.W_OK)
        except OSError:
            return

    def _file(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def join_tree(self, root: int) -> None:
        """Move all that descends from a process, and all that it will fork, into the group. Slow: for a thread.

        What was taken before stays where it was counted: so the keeper of quick calls never pays for being counted.
        """
        moved: set[int] = set()
        while self.works and (fresh := _descendants(root) - moved):
            for pid in fresh:
                self._move(pid)
            moved |= fresh

    def _move(self, pid: int) -> None:
        try:
            self._make()
            with open(self._file("cgroup.procs"), "w") as file:
                file.write(str(pid))
        except ProcessLookupError:
            return
        except OSError:
            self.works = False

    def _make(self) -> None:
        """Have the group again where another node of this host, at its start, took it for one that was left behind."""
        try:
            os.mkdir(self._folder)
        except FileExistsError:
            return
        self._kills = self._limit = 0
        self.set_limit(self._wanted)

    def set_limit(self, limit_bytes: int) -> None:
        """Bound the group; written only when it changes."""
        self._wanted = limit_bytes
        if self.works and limit_bytes != self._limit:
            with contextlib.suppress(OSError), open(self._file(self._limit_file), "w") as file:
                file.write(str(limit_bytes + SLACK_BYTES))
                self._limit = limit_bytes

    def was_exceeded(self) -> bool:
        """True when the kernel has killed for this budget since the last time this was asked."""
        if not self.works:
            return False
        name = "memory.events" if self._limit_file == "memory.max" else "memory.oom_control"
        kills = 0
        with contextlib.suppress(OSError), open(self._file(name)) as file:
            kills = sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        before, self._kills = self._kills, kills
        return kills > before

    def remove(self) -> None:
        """Remove the group; its processes must have been killed."""
        deadline = time.monotonic() + 1
        while self.works:
            try:
                os.rmdir(self._folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.005)
