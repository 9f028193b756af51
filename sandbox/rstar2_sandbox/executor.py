"""Runs programs in slots: each slot has a keeper in its own jail, forked from a warm interpreter.

The executor holds the descriptors, the clock and the kill; what it reports comes from the kernel (pipes, wait status,
times). It needs no Redis and no network: the node (worker) feeds it, and so can a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent import futures

from rstar2_sandbox import cgroup, jail
from rstar2_sandbox.images import BARE, KINDS, Image, SlotError
from rstar2_sandbox.protocol import Execution, Status
from rstar2_sandbox.slot import Slot

THREADS = 2
MAX_SLOTS = jail.IDS // 2
# Descriptors of a slot: two for each of its keepers, and those of the call that runs.
_FILES_OF_SLOT = 2 * len(KINDS) + 8

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a node isolates.

    Args:
        isolation: "auto" takes the strongest tier that works; a tier's name takes that one or fails.
        min_isolation: weakest tier that "auto" may fall to.
        uid_base: first of two host user ids for each slot, used as root only; nothing else may run under them. 0 takes
            a range that follows from this process's id.
        python: interpreter that programs run on; empty takes the node's own.
        compiled: use the part in C where it was compiled.
    """

    isolation: str = "auto"
    min_isolation: str = jail.PLAIN
    uid_base: int = 0
    python: str = ""
    compiled: bool = True

    def __post_init__(self) -> None:
        for field, choices in (("isolation", ("auto", *jail.TIERS)), ("min_isolation", jail.TIERS)):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be one of {', '.join(choices)}")
        if not 0 <= self.uid_base < 2**31:
            raise ValueError(f"uid_base = {self.uid_base!r}: must be 0 (derived) or an unused range of user ids")

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers to try, strongest first. Root never takes PLAIN (programs would run as root), others never UID."""
        out = jail.PLAIN if os.geteuid() == 0 else jail.UID
        allowed = jail.TIERS[: jail.TIERS.index(self.min_isolation) + 1]
        wanted = allowed if self.isolation == "auto" else (self.isolation,)
        return tuple(tier for tier in wanted if tier != out)


class Executor:
    """All slots of a node.

    Args:
        slots: calls at once.
        settings: see Settings.
    """

    def __init__(self, slots: int, settings: Settings) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots = {slots}: must be between 1 and {MAX_SLOTS}, those of every lane together")
        self._count = slots
        self._settings = settings
        self._uid_base = settings.uid_base or jail.unused_uid_base(2 * slots)
        self._images = {kind: Image(kind, settings.python, settings.compiled) for kind in KINDS}
        self._threads = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="sandbox-cgroup")
        self.slots: list[Slot] = []
        self.tier = ""
        self.library = ""
        self.refused: dict[str, str] = {}

    async def start(self) -> None:
        """Find the strongest tier that works and build the slots. Raises SlotError; ValueError when the user ids are in
        use."""
        self._end_predecessors()
        _raise_file_limit(self._count)
        list(self._threads.map(time.sleep, [0.001] * THREADS))  # all there from the start, whatever is counted then
        cgroup.sweep(f"rstar2-slot-{os.geteuid()}-")
        for tier in self._settings.tiers:
            trial = self._slot(0, tier)
            try:
                self.tier = (await trial.prepare(BARE)).tier
            except SlotError as error:
                self.refused[tier] = str(error)
                continue
            finally:
                trial.close()
            self.slots = [self._slot(index, tier) for index in range(self._count)]
            self.library = await asyncio.to_thread(library_version, self._settings.python or sys.executable)
            return
        reasons = "; ".join(f"{tier}: {reason}" for tier, reason in self.refused.items())
        raise SlotError(f"no permitted isolation works here: {reasons or 'none is permitted for this user'}")

    async def warm(self, kind: str) -> None:
        """Have the interpreter of a kind warm, so that the first call of that kind does not wait. Raises SlotError."""
        await self._images[kind].start()

    @property
    def compiled(self) -> bool:
        """True when the part in C is in use."""
        return self._images[BARE].compiled

    @property
    def missing(self) -> dict[str, str]:
        """Warm interpreters that cannot start, and why."""
        return {kind: image.missing for kind, image in self._images.items() if image.missing}

    def close(self) -> None:
        """Kill all slots and interpreters."""
        for image in self._images.values():
            image.close()
        self._threads.shutdown()
        for slot in self.slots:
            slot.close()

    def _slot(self, index: int, tier: str) -> Slot:
        name = f"rstar2-slot-{os.geteuid()}-{self._uid_base}-{index}"
        return Slot(name, self._uid_base + 2 * index, tier, self._images, self._threads)

    def _end_predecessors(self) -> None:
        """As root: kill what still runs under the slots' own user ids, left by a node that was killed."""
        if os.geteuid() != 0:
            return
        ours = range(self._uid_base, self._uid_base + 2 * self._count)
        with contextlib.suppress(FileNotFoundError), open("/etc/passwd", errors="replace") as file:
            for name, _, uid in (line.split(":")[:3] for line in file if line.count(":") > 2):
                if uid.isdigit() and int(uid) in ours:
                    raise ValueError(f"uid_base = {ours.start}: {name} has the id {uid}; give {len(ours)} unused ids")
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid in ours:
                    os.kill(int(name), signal.SIGKILL)


def _raise_file_limit(slots: int) -> None:
    """Have as many descriptors as this process may: the usual 1024 are few for many slots."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_SLOT * slots + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < needed:
            logger.warning("%d open files are allowed, %d slots may need %d: raise ulimit -n", hard, slots, needed)


def library_version(python: str) -> str:
    """Versions of what gives the second opinion on an answer, as an interpreter has it; "none" without it."""
    script = (
        "import importlib.metadata as m\n"
        "print(*(p + '-' + m.version(p) for p in ('math-verify', 'latex2sympy2_extended', 'sympy')), sep='+')"
    )
    done = subprocess.run([python, "-s", "-P", "-c", script], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or "none"


async def measure_rate(slot: Slot, code: str, calls: int) -> tuple[float, float]:
    """Calls a second, and CPU milliseconds of the children for each call, of one slot running one program.

    Raises:
        SlotError: the program does not run here.
    """
    execution = Execution(code=code)
    first = await slot.run(execution)
    if first.status is not Status.OK:
        raise SlotError(f"not measured: {first.status}, {first.stderr.strip().rpartition(chr(10))[2] or first.signal}")
    started, cpu_s = time.monotonic(), 0.0
    for _ in range(calls):
        cpu_s += (await slot.run(execution)).cpu_s
    return calls / (time.monotonic() - started), 1000 * cpu_s / calls
