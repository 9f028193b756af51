"""One place to run: a keeper for each warm interpreter that was needed, in a jail that no other slot shares.

Deliberately not here: which isolation is taken (executor), and one call's descriptors and clock (job).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from concurrent import futures

from rstar2_sandbox import cgroup, jail, keeper
from rstar2_sandbox.images import BARE, GRADE, INSTEAD, KINDS, MATH, SCIENCE, SQL, Image, KeeperEnd, KeeperGoneError
from rstar2_sandbox.images import SlotError as SlotError
from rstar2_sandbox.job import Job
from rstar2_sandbox.protocol import OCTAVE as LANGUAGE_OCTAVE
from rstar2_sandbox.protocol import SQL as LANGUAGE_SQL
from rstar2_sandbox.protocol import Execution, Limits, Outcome, Status

CALLS_PER_KEEPER = 20_000
TMP_BYTES, TMP_INODES, MAX_DEPTH = 64 * 2**20, 4096, 64
GRADE_LIMITS = Limits(wall_s=3.0, memory_bytes=1024 * 2**20, output_bytes=1024, processes=1)
# A module that no image has imported: it proves that a child can read the interpreter's library.
_SELF_TEST = Execution(code="import colorsys\nprint('ready')", limits=Limits(wall_s=20.0))
_IMPORT = re.compile(rb"^[^\S\n]*(?:from|import)[^\n#]*\b(?:numpy|sympy|mpmath|(scipy))\b", re.MULTILINE)
NO_OCTAVE = f"this node has no GNU Octave at {jail.OCTAVE[0]}: install it (Debian: apt-get install octave)"
# What Octave itself maps before it runs a line.
_OCTAVE_BYTES = 2 * 2**30
_OCTAVE_RANDOM = (b"rand", b"randn", b"rande", b"randg", b"randp")


def _seeded(code: bytes) -> bytes:
    """An Octave program whose random numbers follow from its text: Octave would start them from the clock."""
    if b"rand" not in code:
        return code
    seed = int.from_bytes(hashlib.blake2b(code, digest_size=4).digest(), "big")
    # On the first line, so that the numbers of the lines in its messages stay what they are.
    return b"".join(b"%s('twister',%d);" % (name, seed) for name in _OCTAVE_RANDOM) + code


class Slot:
    """One place to run: at most one call at a time, in a jail that no other slot shares.

    Args:
        name: of the slot on this host; its folder and its control group are called so.
        first_uid: the first of its two host user ids.
        tier: one of jail.TIERS.
        images: warm interpreters by kind.
        threads: for calls to the kernel that take long.
    """

    def __init__(
        self, name: str, first_uid: int, tier: str, images: dict[str, Image], threads: futures.Executor
    ) -> None:
        self._threads = threads
        self._folder = os.path.join(tempfile.gettempdir(), name)
        self._uid = first_uid
        self._tier = tier
        self._images = images
        self._keepers: dict[str, KeeperEnd] = {}
        self._memory = cgroup.SlotMemory(name)
        self._job: Job | None = None

    async def run(self, execution: Execution) -> Outcome:
        """Run one program. Raises SlotError when the fault is ours."""
        code = execution.code.encode("utf-8", "surrogatepass")
        stdin = execution.stdin.encode("utf-8", "surrogatepass")
        limits = execution.limits
        if execution.language == LANGUAGE_SQL:
            return await self._run(SQL, keeper.SQL, code, stdin, limits)
        if execution.language == LANGUAGE_OCTAVE:
            if not os.access(jail.OCTAVE[0], os.X_OK):
                return Outcome(status=Status.REJECTED, detail=NO_OCTAVE)
            limits = dataclasses.replace(limits, memory_bytes=limits.memory_bytes + _OCTAVE_BYTES)
            return await self._run(BARE, keeper.OCTAVE, _seeded(code), stdin, limits)
        return await self._run(self._kind(code), keeper.RUN, code, stdin, limits)

    def _kind(self, code: bytes) -> str:
        """The warm interpreter that has what a program imports."""
        found = {match[1] for match in _IMPORT.finditer(code)}
        return self._present(SCIENCE if b"scipy" in found else MATH if found else BARE)

    def _present(self, kind: str) -> str:
        while kind in INSTEAD and self._images[kind].missing:
            kind = INSTEAD[kind]
        return kind

    def cancel(self) -> None:
        """Kill the call that runs here now, if one does: its outcome is REJECTED."""
        if self._job is not None:
            self._job.kill(Status.REJECTED)

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
            if self._present(kind) == kind:
                raise
            return await self.prepare(self._present(kind))
        self._keepers[kind] = found
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
        overfull = None if self._tier == jail.NAMESPACES else lambda: self._overfull(kind)
        job = self._job = Job(owner, limits, lambda: self.count_memory(owner), overfull)
        try:
            outcome = await job.run(what, code, stdin)
        except BaseException:
            self.discard(kind)
            raise
        finally:
            self._job = None
        if not job.clean:
            self.discard(kind)
        if outcome.status is Status.KILLED and outcome.signal == "SIGKILL" and self._memory.was_exceeded():
            return dataclasses.replace(outcome, status=Status.OOM)
        return outcome

    def _overfull(self, kind: str) -> bool:
        """True when the folder of a kind holds more, or deeper, than a look of bounded cost can go through: more than a
        tmpfs of its own would take. A look, not a wall."""
        entries, size, level = 0, 0, [f"{self._folder}-{kind}"]
        for _ in range(MAX_DEPTH):
            below: list[str] = []
            for folder in level:
                with contextlib.suppress(OSError), os.scandir(folder) as found:
                    for entry in found:
                        entries += 1
                        if entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
                        else:
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entries > TMP_INODES or size > TMP_BYTES:
                            return True
            if not below:
                return False
            level = below
        return True

    async def prepare_session(self) -> tuple[KeeperEnd, str]:
        """The keeper that a session is forked from, and its kind. Raises SlotError."""
        kind = self._present(MATH)
        found = await self.prepare(kind)
        return found, self._present(kind)

    def limit_memory(self, limit_bytes: int) -> None:
        """Bound what all processes of a call hold together, where control groups can be made."""
        self._memory.set_limit(limit_bytes)

    def count_memory(self, owner: KeeperEnd) -> None:
        """Have what a keeper's call runs counted from now on. In a thread: the kernel takes its time."""
        if self._memory.works:
            with contextlib.suppress(RuntimeError):  # the node is ending, and the threads have
                self._threads.submit(self._memory.join_tree, owner.pid)

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
