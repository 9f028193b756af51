"""The optional part in C (forker.c): found, built, and called through ctypes. Everything works without it, a little
slower.

build.py compiles it. Loaded by the warm interpreters, so it imports little.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

RESERVE_BYTES = 512 * 2**20
VERSION = 2
WIPE, GONE = 1, 2
FOLDER = os.path.dirname(os.path.abspath(__file__))


def find() -> str:
    """Path of the compiled part, or "" when there is none."""
    names = sorted(name for name in os.listdir(FOLDER) if name.startswith("_forker") and name.endswith(".so"))
    return os.path.join(FOLDER, names[0]) if names else ""


class Forker:
    """The loaded library. Raises OSError when it cannot be loaded (compiled for another machine, say), OSError or
    AttributeError when it was compiled from an earlier source."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.PyDLL(path)
        if self._library.rstar2_version() != VERSION:
            raise OSError(f"{path} is of another version: python -m rstar2_sandbox build")
        self._library.rstar2_collapse.argtypes = (ctypes.c_size_t, ctypes.c_size_t)

    def gather_arenas(self) -> None:
        """Have Python's arenas come from one aligned reserve from now on."""
        allocator = (ctypes.c_void_p * 3)()
        if self._library.rstar2_reserve(ctypes.byref(allocator), ctypes.c_size_t(RESERVE_BYTES)):
            ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(allocator))

    def trim(self) -> None:
        """Give back the unused end of the reserve: it would count as address space of every child."""
        self._library.rstar2_trim()

    def collapse(self, ranges: list[tuple[int, int]]) -> int:
        """Make huge pages of the ranges (see writable_ranges), as far as the kernel can; how many there are then."""
        return sum(self._library.rstar2_collapse(start, end) for start, end in ranges)

    def prepare(self, fence: bytes, reply_bytes: int) -> tuple[Callable[[], int], ctypes.Array[ctypes.c_char]]:
        """The loop, ready to be called (see rstar2_serve in forker.c: in a child it returns the call's kind as a
        character's number, and above its 8 bits the size of the source), and where it leaves an answer that its caller
        is to send. Raises MemoryError."""
        self._library.rstar2_prepare.restype = ctypes.c_void_p
        place = self._library.rstar2_prepare(fence)
        if not place:
            raise MemoryError("no page for the keeper")
        return self._library.rstar2_serve, (ctypes.c_char * reply_bytes).from_address(place)


def load() -> Forker | None:
    """The library where it was compiled and fits this machine, else None."""
    path = find()
    try:
        return Forker(path) if path else None
    except (OSError, AttributeError):
        return None


def writable_ranges() -> list[tuple[int, int]]:
    """Private anonymous memory of this process, the stack excepted, as (start, end)."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split()
            if fields[1] == "rw-p" and fields[4] == "0" and (len(fields) == 5 or fields[5] == "[heap]"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                found.append((start, end))
    return found
