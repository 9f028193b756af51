"""Runs programs in slots: each slot has a keeper in its own jail, forked from a warm interpreter.

The executor holds the descriptors, the clock and the kill; what it reports comes from the kernel (pipes, wait status,
times). It needs no Redis and no network: the node (worker) feeds it, and so can a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import tempfile
import time

from rstar2_sandbox import cgroup, jail, keeper
from rstar2_sandbox.images import BARE, GRADE, KINDS, MATH, Image, KeeperEnd, SlotError
from rstar2_sandbox.job import Job, KeeperGoneError
from rstar2_sandbox.protocol import Execution, Limits, Outcome, Status

CALLS_PER_KEEPER = 20_000
TMP_BYTES, TMP_INODES = 64 * 2**20, 4096
GRADE_LIMITS = Limits(wall_s=3.0, memory_bytes=1024 * 2**20, output_bytes=1024, processes=1)
# A module that no image has imported: it proves that a child can read the interpreter's library.
_SELF_TEST = Execution(code="import colorsys\nprint('ready')", limits=Limits(wall_s=20.0))

_MATH_IMPORT = re.compile(rb"^[^\S\n]*(?:from|import)[^\n#]*\b(?:numpy|sympy|mpmath)\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a node isolates.

    Args:
        isolation: "auto" takes the strongest tier that works; a tier's name takes that one or fails.
        min_isolation: weakest tier that "auto" may fall to.
        uid_base: first of two host user ids for each slot, used as root only; nothing else may run under them. 0 takes
            a range that follows from this process's id.
        python: interpreter that programs run on; empty takes the node's own.
    """

    isolation: str = "auto"
    min_isolation: str = jail.PLAIN
    uid_base: int = 0
    python: str = ""

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


class Slot:
    """One place to run: at most one call at a time, in a jail that no other slot shares.

    Args:
        name: of the slot on this host; its folder and its control group are called so.
        first_uid: the first of its two host user ids.
        tier: one of jail.TIERS.
        images: warm interpreters by kind.
    """

    def __init__(self, name: str, first_uid: int, tier: str, images: dict[str, Image]) -> None:
        self._folder = os.path.join(tempfile.gettempdir(), name)
        self._uid = first_uid
        self._tier = tier
        self._images = images
        self._keepers: dict[str, KeeperEnd] = {}
        self._memory = cgroup.SlotMemory(name)

    async def run(self, execution: Execution) -> Outcome:
        """Run one program. Raises SlotError when the fault is ours."""
        code = execution.code.encode("utf-8", "surrogatepass")
        kind = MATH if _MATH_IMPORT.search(code) and not self._images[MATH].missing else BARE
        stdin = execution.stdin.encode("utf-8", "surrogatepass")
        return await self._run(kind, keeper.RUN, code, stdin, execution.limits)

    async def grade(self, gold: str, answer: str) -> Outcome:
        """Ask the library whether two expressions are equal; stdout is a JSON boolean. Raises SlotError."""
        request = json.dumps({"gold": gold, "answer": answer}).encode()
        return await self._run(GRADE, keeper.GRADE, request, b"", GRADE_LIMITS)

    async def prepare(self, kind: str) -> KeeperEnd:
        """The keeper of a kind, built and tested when there is none. Raises SlotError."""
        found = self._keepers.get(kind)
        if found is not None and found.calls < CALLS_PER_KEEPER:
            return found
        self.discard(kind)
        try:
            found = await self._images[kind].fork_keeper(self._request(kind))
        except SlotError:
            if kind == BARE or not self._images[kind].missing:
                raise
            return await self.prepare(BARE)
        self._keepers[kind] = found
        self._memory.join(found.pid)
        test = await self._in(found, kind, keeper.RUN, _SELF_TEST.code.encode(), b"", _SELF_TEST.limits)
        if test.status is not Status.OK or test.stdout != "ready\n":
            self.discard(kind)
            raise SlotError(f"self-test in the {self._tier} jail: {test.status}, {test.signal} {test.stderr.strip()!r}")
        return found

    def _request(self, kind: str) -> dict[str, object]:
        folder = f"{self._folder}-{kind}"
        if self._tier != jail.NAMESPACES:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            jail.wipe(folder)
            if self._tier == jail.UID:
                os.chown(folder, self._uid + 1, self._uid + 1)
        return {
            "tier": self._tier,
            "keeper_uid": self._uid,
            "child_uid": self._uid + 1,
            "own_uid": os.geteuid() == 0,
            "folder": folder,
            "tmp_bytes": TMP_BYTES,
            "tmp_inodes": TMP_INODES,
        }

    async def _run(self, kind: str, what: bytes, code: bytes, stdin: bytes, limits: Limits) -> Outcome:
        try:
            return await self._in(await self.prepare(kind), kind, what, code, stdin, limits)
        except KeeperGoneError:
            return await self._in(await self.prepare(kind), kind, what, code, stdin, limits)

    async def _in(self, owner: KeeperEnd, kind: str, what: bytes, code: bytes, stdin: bytes, limits: Limits) -> Outcome:
        self._memory.set_limit(limits.memory_bytes)
        job = Job(owner, limits)
        try:
            outcome = await job.run(what, code, stdin)
        except BaseException:
            self.discard(kind)
            raise
        if not job.clean:
            self.discard(kind)
        if outcome.status is Status.KILLED and outcome.signal == "SIGKILL" and self._memory.was_exceeded():
            return dataclasses.replace(outcome, status=Status.OOM)
        return outcome

    def discard(self, kind: str) -> None:
        """Kill the keeper of a kind and with it all that lives in its jail."""
        old = self._keepers.pop(kind, None)
        if old is not None:
            old.close()

    def close(self) -> None:
        """Kill every keeper; remove folders and groups."""
        for kind in KINDS:
            self.discard(kind)
            shutil.rmtree(f"{self._folder}-{kind}", ignore_errors=True)
        self._memory.remove()


class Executor:
    """All slots of a node.

    Args:
        slots: calls at once.
        settings: see Settings.
    """

    def __init__(self, slots: int, settings: Settings) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots}: must be 1 or more")
        self._count = slots
        self._settings = settings
        self._uid_base = settings.uid_base or jail.unused_uid_base(2 * slots)
        self._images = {kind: Image(kind, settings.python) for kind in KINDS}
        self.slots: list[Slot] = []
        self.tier = ""
        self.refused: dict[str, str] = {}

    async def start(self) -> None:
        """Find the strongest tier that works and build the slots. Raises SlotError."""
        self._end_predecessors()
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
            return
        reasons = "; ".join(f"{tier}: {reason}" for tier, reason in self.refused.items())
        raise SlotError(f"no permitted isolation works here: {reasons or 'none is permitted for this user'}")

    async def warm(self, kind: str) -> None:
        """Have the interpreter of a kind warm, so that the first call of that kind does not wait. Raises SlotError."""
        await self._images[kind].start()

    @property
    def missing(self) -> dict[str, str]:
        """Warm interpreters that cannot start, and why."""
        return {kind: image.missing for kind, image in self._images.items() if image.missing}

    def close(self) -> None:
        """Kill all slots and interpreters."""
        for image in self._images.values():
            image.close()
        for slot in self.slots:
            slot.close()

    def _slot(self, index: int, tier: str) -> Slot:
        name = f"rstar2-slot-{os.geteuid()}-{self._uid_base}-{index}"
        return Slot(name, self._uid_base + 2 * index, tier, self._images)

    def _end_predecessors(self) -> None:
        """As root: kill what still runs under the slots' own user ids, left by a node that was killed."""
        if os.geteuid() != 0:
            return
        ours = range(self._uid_base, self._uid_base + 2 * self._count)
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid in ours:
                    os.kill(int(name), signal.SIGKILL)


async def measure_rate(slot: Slot, code: str, calls: int) -> tuple[float, float]:
    """Calls a second, and CPU milliseconds of the children for each call, of one slot running one program."""
    execution = Execution(code=code)
    await slot.run(execution)
    started, cpu_s = time.monotonic(), 0.0
    for _ in range(calls):
        cpu_s += (await slot.run(execution)).cpu_s
    return calls / (time.monotonic() - started), 1000 * cpu_s / calls
