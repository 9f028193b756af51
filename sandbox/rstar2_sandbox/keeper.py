"""A slot keeper: lives in the slot's jail, forks one child for each call, and proves the slot empty afterwards.

It never runs a program and never sees one: it receives descriptors and limits, hands them to the child, and tells the
parent what the kernel said. The parent keeps the clock and asks for the kill. The loop exists twice, in C (forker.c)
and here, for where that was not compiled; both do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from rstar2_sandbox import forker, jail, jail_child, linux

# The C library's fork without the interpreter's own after-fork work: this process has one thread, and the child seeds
# its random module itself. It saves a third of a small call.
_fork = getattr(ctypes.PyDLL(None), "fork", os.fork)
REQUEST = struct.Struct("<cQQQQQ")
REPLY = struct.Struct("<QiddQdII")
FENCE = struct.Struct("<iiiiQQQ256s")
RUN, GRADE, SQL, OCTAVE, SESSION = b"R", b"G", b"Q", b"O", b"S"
KILL, PAUSE, GO_ON = b"K", b"P", b"C"
_PIECE = 4096
_RUN = RUN[0]


class Keeper:
    """The loop of one keeper.

    Args:
        control: sequenced-packet socket to the parent.
        tier: one of jail.TIERS.
        child_uid: user id that children take, or None to keep the own one.
        folders: writable folders, wiped after each call; the first is the working folder.
        keep: names in the folders that belong to the jail itself.
        library: the compiled loop, or None to use the one below.
    """

    def __init__(
        self,
        control: socket.socket,
        tier: str,
        child_uid: int | None,
        folders: list[str],
        keep: frozenset[str],
        library: forker.Forker | None,
    ) -> None:
        self.control = control
        self.tier = tier
        self.child_uid = child_uid
        self.folders = folders
        self.keep = keep
        self.library = library
        self.baseline = self._usage()
        self.memory_bytes = _address_space_bytes()
        # Held open: landlock closes /proc in the tier that needs it.
        self.children = open(f"/proc/self/task/{os.getpid()}/children") if tier == jail.PLAIN else None
        self._ranges = forker.writable_ranges() if library else []

    def serve(self) -> NoReturn:
        """Run calls until the parent is gone."""
        _open_streams()
        jail_child.prepare()
        jail_child.rehearse()
        gc.enable()
        if self.library is not None:
            self.library.collapse(self._ranges)
            self._serve_in_c(self.library)
        import mmap

        # Written by a child that stands confined, and out of its reach before it runs anything.
        self._confined = mmap.mmap(-1, 1)
        while True:
            message, fds, _, _ = socket.recv_fds(self.control, 256, 4)
            if not message:
                os._exit(0)
            kind, serial, *limits = REQUEST.unpack(message)
            if len(fds) == 4:
                self.control.send(self._call(kind, serial, limits, fds))

    def _serve_in_c(self, library: forker.Forker) -> NoReturn:
        fence = FENCE.pack(
            self.control.fileno(),
            jail.TIERS.index(self.tier),
            -1 if self.child_uid is None else self.child_uid,
            -1 if self.children is None else self.children.fileno(),
            self.memory_bytes,
            *self.baseline,
            self.folders[0].encode(),
        )
        serve, answer = library.prepare(fence, REPLY.size)
        read, close, leave, run, plain = os.pread, os.close, os._exit, jail_child.run, self.tier == jail.PLAIN
        while True:
            state = serve()
            # In a child of the usual kind every name below is a local one: each page that it touches has its price.
            if state & 255 == _RUN and not plain:
                source = read(3, state >> 8, 0)
                close(3)
                code = 1
                try:
                    code = run(source)
                finally:
                    leave(code)
            if state > forker.GONE:
                self._child(state & 255)
            if state == forker.GONE:
                leave(0)
            *fields, _ = REPLY.unpack(answer.raw)
            self.control.send(REPLY.pack(*fields, int(self._clean())))

    def _call(self, kind: bytes, serial: int, limits: list[int], fds: list[int]) -> bytes:
        started = time.monotonic()
        self._confined[0] = 0
        pid = _fork()
        if pid == 0:
            try:
                self._become_child(limits, fds)
            except (OSError, ValueError):
                os._exit(1)
            self._confined[0] = 1
            self._confined.close()
            self._child(kind[0])
        if pid < 0:
            os._exit(1)
        for fd in fds:
            os.close(fd)
        self._watch(pid, serial)
        _, status, usage = os.wait4(pid, 0)
        if not self._confined[0]:
            os._exit(1)
        run_s = time.monotonic() - started
        strays = self._empty_slot()
        clean = self._clean()
        return REPLY.pack(
            serial, status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024, run_s, strays, int(clean)
        )

    def _watch(self, pid: int, serial: int) -> None:
        """Return when the leader has ended; kill everything when the parent says so or is gone."""
        leader = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(leader, select.POLLIN)
        poller.register(self.control, select.POLLIN)
        everything = -1 if self.tier == jail.NAMESPACES else pid
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if leader in ready:
                break
            message = self.control.recv(256)
            if not message:
                os.kill(pid, signal.SIGKILL)
                self._empty_slot()
                os._exit(0)
            kind, number = REQUEST.unpack(message)[:2]
            if number != serial:
                continue
            if kind == KILL:
                os.kill(pid, signal.SIGKILL)
            elif kind == PAUSE:
                os.kill(everything, signal.SIGSTOP)
            elif kind == GO_ON:
                os.kill(everything, signal.SIGCONT)
        os.close(leader)

    def _child(self, kind: int) -> NoReturn:
        """Confined, with source, input and outputs at their places: run what was asked for."""
        code = 1
        try:
            if self.tier == jail.PLAIN:
                abi = linux.landlock_abi()
                if abi >= 6:
                    linux.landlock([], [], abi)
            code = _program(kind)
        finally:
            os._exit(code)

    def _become_child(self, limits: list[int], fds: list[int]) -> None:
        source, stdin, stdout, stderr = fds
        for fd, place in ((stdin, 0), (stdout, 1), (stderr, 2), (source, 3)):
            os.dup2(fd, place)
        os.closerange(4, 65536)
        os.setsid()
        cpu_s, memory_bytes, file_bytes, processes = limits
        # One second between the two: the first limit ends the program by a signal that says why.
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        for name, limit in (
            (resource.RLIMIT_AS, self.memory_bytes + memory_bytes),
            (resource.RLIMIT_FSIZE, file_bytes),
        ):
            resource.setrlimit(name, (limit, limit))
        if self.child_uid is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            os.setresgid(self.child_uid, self.child_uid, self.child_uid)
            os.setresuid(self.child_uid, self.child_uid, self.child_uid)
            linux.prctl(linux.PR_SET_DUMPABLE, 1)
        elif self.tier == jail.NAMESPACES:
            # One id in the namespace: the limit counts there alone, and for the keeper too.
            resource.setrlimit(resource.RLIMIT_NPROC, (processes + 1, processes + 1))
            linux.drop_capabilities()
        if self.tier != jail.NAMESPACES:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(self.folders[0])

    def _empty_slot(self) -> int:
        """Kill and reap until the kernel says that no child is left; return how many strays there were."""
        strays = 0
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    self._kill_strays()
                    pid, _ = os.waitpid(-1, 0)
                strays += 1
            except ChildProcessError:
                return strays

    def _kill_strays(self) -> None:
        if self.tier == jail.NAMESPACES:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        elif self.child_uid is not None:
            pid = os.fork()
            if pid == 0:
                os.setresuid(self.child_uid, self.child_uid, self.child_uid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(pid, 0)
        elif self.children is not None:
            self.children.seek(0)
            for pid in self.children.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _usage(self) -> tuple[int, int]:
        if self.tier == jail.NAMESPACES:
            stat = os.statvfs(self.folders[0])
            return stat.f_bfree, stat.f_ffree
        return 0, sum(len(os.listdir(folder)) for folder in self.folders)

    def _clean(self) -> bool:
        """Wipe the writable folders if anything is in them; True when they are as they were at first."""
        if self._usage() == self.baseline:
            return True
        try:
            for folder in self.folders:
                jail.wipe(folder, self.keep)
        except OSError:
            return False
        return self._usage() == self.baseline


def _program(kind: int) -> int:
    """In the child: what the call asked for, with descriptor 3 as its source; the exit code."""
    if kind == SESSION[0]:
        from rstar2_sandbox import session_child

        return session_child.run(3)
    if kind == OCTAVE[0]:
        os.execv(jail.OCTAVE[0], jail.OCTAVE)
    source = _read_all(3)
    os.close(3)
    if kind == RUN[0]:
        return jail_child.run(source)
    if kind == SQL[0]:
        from rstar2_sandbox import sql_child

        return sql_child.run(source)
    from rstar2_sandbox import grade_child

    return grade_child.run(source)


def _open_streams() -> None:
    """Build the children's standard streams over pipes, as they will find them, then let go of the pipes."""
    outer, inner = os.pipe()
    for fd, end in ((0, outer), (1, inner), (2, inner)):
        os.dup2(end, fd)
    jail_child.open_streams()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for fd in (outer, inner, null):
        os.close(fd)


def _read_all(fd: int) -> bytes:
    found = os.pread(fd, _PIECE, 0)
    while len(found) % _PIECE == 0 and (more := os.pread(fd, _PIECE, len(found))):
        found += more
    return found


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
