"""Builds the jail that a slot keeper and its children live in: namespaces, mounts, identity, landlock, seccomp.

Three tiers, strongest first. NAMESPACES: user, pid, mount, net, ipc and uts namespaces of the slot's own, a root of
read-only binds with one small tmpfs. UID: an own user id for each slot, files and signals fenced by landlock. PLAIN:
what an ordinary user can do to itself: landlock, seccomp, limits. A step that fails raises OSError and the tier is
refused.

Deliberately not here: who runs in it (keeper) and the time limits (executor).
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys

from rstar2_sandbox import linux, seccomp

NAMESPACES, UID, PLAIN = "namespaces", "uid", "plain"
TIERS = (NAMESPACES, UID, PLAIN)
INNER_UID = 1000
_FLAGS = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
)  # fmt: skip
# /etc/alternatives: through its links, and no other way, the loader finds the system's BLAS and LAPACK.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives"
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PRIVATE = "/.private"
FILES_OPEN = 64
IDS = 4096  # user ids that one node may take
# How a child starts GNU Octave: the program stands behind descriptor 3.
OCTAVE = (
    "/usr/bin/octave-cli", "--quiet", "--norc", "--no-history", "--no-gui", "--no-window-system", "/proc/self/fd/3"
)  # fmt: skip


def unused_uid_base(count: int) -> int:
    """First of `count` user ids for the slots of this process, of those that this user namespace knows."""
    with open("/proc/self/uid_map") as file:
        rows = [[int(number) for number in line.split()] for line in file]
    base = 1_000_000 + os.getpid() % 65536 * IDS
    if any(start <= base and base + count <= start + length for start, _, length in rows):
        return base
    start, _, length = max(rows, key=lambda row: row[2])
    return max(start, start + length - IDS)


def visible_paths() -> list[str]:
    """Absolute paths that a child may read: the system's libraries and this interpreter, none inside another."""
    wanted = [*_SYSTEM, sys.prefix, sys.base_prefix, *sys.path, os.path.dirname(os.path.realpath(sys.executable))]
    wanted += [os.path.realpath(path) for path in wanted if path]
    found = sorted({os.path.normpath(path) for path in wanted if path.startswith("/") and os.path.exists(path)})
    kept: list[str] = []
    for path in found:
        if path != "/" and not any(path.startswith(other + "/") for other in kept if not os.path.islink(other)):
            kept.append(path)
    return kept


def leave_host(sync: socket.socket) -> dict[str, int]:
    """In the builder process: enter new namespaces, hold what will be bound, take the inner root identity.

    The paths are opened while this process still owns them (a home folder may be closed to the inner root).
    """
    linux.unshare(_FLAGS)
    held = {}
    for path in [*visible_paths(), *(f"/dev/{name}" for name in _DEVICES)]:
        if not os.path.islink(path):
            held[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    sync.sendall(b"u")
    if sync.recv(1) != b"m":
        raise OSError("the id maps were not written")
    if os.path.exists("/proc/self/setgroups") and open("/proc/self/setgroups").read().strip() == "allow":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    return held


def write_id_maps(pid: int, keeper_uid: int, child_uid: int) -> None:
    """In the parent of the builder: map inner root and the inner user; without privilege only one's own id maps."""
    if os.geteuid() == 0:
        for name in ("gid_map", "uid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {keeper_uid} 1\n{INNER_UID} {child_uid} 1\n")
        return
    for name, text in (("setgroups", "deny"), ("gid_map", f"0 {os.getegid()} 1"), ("uid_map", f"0 {os.geteuid()} 1")):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def build_root(held: dict[str, int], tmp_bytes: int, tmp_inodes: int) -> None:
    """In the keeper, process 1 of its namespace: mount a root of its own and enter it."""
    root = "/tmp"
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1M,nr_inodes=4096")
    for name in ("proc", "dev", "tmp", "box", _PRIVATE.strip("/"), "etc"):
        os.mkdir(f"{root}/{name}", 0o755)
    size = f"mode=755,size={tmp_bytes},nr_inodes={tmp_inodes}"
    linux.mount("tmpfs", root + _PRIVATE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, size)
    for name in ("tmp", "box"):
        os.mkdir(f"{root}{_PRIVATE}/{name}")
        os.chmod(f"{root}{_PRIVATE}/{name}", 0o1777)
        linux.mount(f"{root}{_PRIVATE}/{name}", f"{root}/{name}", "", linux.MS_BIND)
    for path, fd in held.items():
        _bind(fd, root + path, read_only=not path.startswith("/dev/"))
    for path in visible_paths():
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
    links = {"shm": "/tmp", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")
    linux.mount("proc", f"{root}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "hidepid=2")
    linux.mount("none", root, "", linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    linux.enter_root(root)
    socket.sethostname("sandbox")


def _bind(fd: int, target: str, read_only: bool) -> None:
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(source, target, "", linux.MS_BIND | linux.MS_REC)
    os.close(fd)
    if read_only:
        linux.make_read_only(target)


def lock(tier: str, writable: list[str]) -> list[str]:
    """Give up, in this process and all that it forks, what no program needs; return the names of what holds."""
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    holds = []
    abi = linux.landlock_abi()
    if abi:
        devices = [f"/dev/{name}" for name in _DEVICES]
        read = ["/"] if tier == NAMESPACES else visible_paths()
        linux.landlock(read, writable + devices, abi)
        holds.append(f"landlock{abi}")
    program = seccomp.program(platform.machine(), unix_sockets=tier == NAMESPACES)
    if program is not None:
        linux.install_filter(program)
        holds.append("seccomp")
    if tier != NAMESPACES and not (abi and program):
        holds.append("files-open" if not abi else "syscalls-open")
    for name, limit in ((resource.RLIMIT_NOFILE, FILES_OPEN), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0)):
        resource.setrlimit(name, (limit, limit))
    return holds


def wipe(folder: str, keep: frozenset[str] = frozenset()) -> None:
    """Empty a folder without recursion: deep trees are flattened level by level. No process may live in it."""
    prefix, count = f".{os.urandom(8).hex()}-", 0
    while True:
        entries = [entry for entry in os.scandir(folder) if entry.name not in keep]
        if not entries:
            return
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for child in list(os.scandir(entry.path)):
                os.rename(child.path, f"{folder}/{prefix}{count}")
                count += 1
            os.rmdir(entry.path)
