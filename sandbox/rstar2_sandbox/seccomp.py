"""The system-call filter of the jailed children, as a BPF program. Pure.

Everything is allowed but what reaches across the jail or widens the kernel's attack surface: other processes' memory,
mounts and namespaces, modules, keyrings and System V objects (both outlive a process), files in memory that no limit on
memory or folders counts, new kernel interfaces, sockets.
"""

from __future__ import annotations

import errno
import struct

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080
_AF_UNIX = 1

# name: (x86_64, aarch64); numbers from 424 on are the same everywhere
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "init_module": (175, 105), "delete_module": (176, 106),
    "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "syslog": (103, 116),
    "quotactl": (179, 60), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "personality": (135, 92), "lookup_dcookie": (212, 18), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "vhangup": (153, 58), "nfsservctl": (180, 42), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "memfd_create": (319, 279),
}  # fmt: skip
# Allowed for the calling process itself only, which they know as number 0: a keeper may have the child's user id.
_OWN_ONLY = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
_DENIED_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156}
_DENIED_NEW = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip

_LOAD, _EQUAL, _SET, _ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def _refuse(code: int) -> int:
    return 0x00050000 | code


def program(machine: str, *, unix_sockets: bool) -> bytes | None:
    """The filter for a machine ("x86_64", "aarch64"), or None for one that it was not written for.

    Args:
        unix_sockets: allow AF_UNIX sockets (safe where the file system and the network are private).
    """
    if machine not in _ARCH:
        return None
    column = 0 if machine == "x86_64" else 1
    denied = [numbers[column] for numbers in _DENIED.values()] + list(_DENIED_NEW.values())
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    lines.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        denied += list(_DENIED_X86.values())
        lines += [(_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _refuse(errno.ENOSYS))]
    for number in denied:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _refuse(errno.EPERM))]
    for numbers in _OWN_ONLY.values():
        lines += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0)]
        lines += [(_RETURN, 0, 0, _refuse(errno.EPERM)), (_RETURN, 0, 0, _ALLOW)]
    # The flags of clone3 lie in memory that a filter cannot read: without it, glibc uses clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _refuse(errno.ENOSYS))]
    lines += [(_EQUAL, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_SET, 0, 1, _NAMESPACE_FLAGS)]
    lines += [(_RETURN, 0, 0, _refuse(errno.EPERM)), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_EQUAL, 0, 4, _SOCKET[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_EQUAL, 0 if unix_sockets else 1, 1, _AF_UNIX), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_RETURN, 0, 0, _refuse(errno.EACCES)), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
