"""The Linux calls that the standard library lacks, through ctypes: prctl, namespaces, mounts, landlock, seccomp.

Each function raises OSError with the kernel's errno. Loaded by the warm interpreters, so it stays small.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP, CLONE_NEWTIME = 0x2000000, 0x80
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
AT_RECURSIVE = 0x8000

_MACHINE = platform.machine()
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_MACHINE, -1)
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(_MACHINE, -1)
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, a: int = 0, b: int = 0) -> None:
    """See prctl(2)."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(b), zero, zero), f"prctl({option})")


def unshare(flags: int) -> None:
    """See unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """See mount(2)."""
    args = (source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    _check(_libc.mount(*args), f"mount {kind or 'bind'} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, in this mount namespace."""
    attr = struct.pack("<QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    path = ctypes.c_char_p(target.encode())
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, -100, path, AT_RECURSIVE, attr, len(attr)), f"read-only {target}")


def enter_root(path: str) -> None:
    """Make the mount at path the root and drop the old one."""
    os.chdir(path)
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every capability, for good together with NO_NEW_PRIVS."""
    header, data = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    _check(_libc.syscall(_SYS_CAPSET, header, data), "capset")


def landlock_abi() -> int:
    """Version of landlock that the kernel offers; 0 when there is none."""
    return max(0, int(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def landlock(read: list[str], write: list[str], abi: int) -> None:
    """Confine this process and its children: read and execute below `read`, everything below `write`, no TCP, no
    signals and no abstract sockets out of the domain (as far as the ABI has them). Empty lists restrict no files."""
    files = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    handled = files if read or write else 0
    fields = [handled] + ([3] if abi >= 4 else []) + ([3] if abi >= 6 else [])
    attr = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = _check(
        _libc.syscall(_SYS_LANDLOCK_CREATE, attr, ctypes.c_size_t(len(attr)), ctypes.c_uint(0)), "landlock_create"
    )
    for paths, rights in ((read, 0b1101), (write, files & ~(1 << 6 | 1 << 11))):
        for path in paths:
            _allow(ruleset, path, rights)
    _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0)), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
    rule = struct.pack("<Qi", rights, fd)
    _check(_libc.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint(0)), f"landlock rule for {path}")
    os.close(fd)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter (needs NO_NEW_PRIVS or the capability); children inherit it."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    head = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(head))
