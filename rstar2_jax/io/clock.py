"""Wall and CPU seconds by phase, kept over restarts.

The clock is a stack: an inner phase stops the outer one, and time outside of every phase goes to `other`, so that the
phases always add up to the whole. CPU seconds are those of this process and of all its descendants, living or ended
(the sandbox's workers among them), so a phase that waits for a tool shows what the tool cost.

One clock belongs to one thread, and phases do not overlap: concurrent waits (queues, single calls) are recorded with
the call that waited, not here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

CLOCK_FILE = "clock.json"
OTHER = "other"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Time spent in one phase: wall seconds, CPU seconds of the process tree, and how often it was entered."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    count: int = 0


class Clock:
    """Charges the time between two changes of phase to the phase that was running.

    Args:
        workdir: folder of the run, where `save` keeps the totals and where those of earlier starts are found; None
            keeps nothing.
        wall, cpu: sources of seconds. Neither may run backwards; a reading below the one before counts as no time.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None = None,
        *,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] | None = None,
    ) -> None:
        self._path = None if workdir is None else Path(workdir) / CLOCK_FILE
        self._wall, self._cpu = wall, cpu or tree_cpu_s
        self._totals = read_clock(self._path.parent) if self._path and self._path.exists() else {}
        self._lap: dict[str, float] = {}
        self._stack: list[str] = []
        self._marks = (self._wall(), self._cpu())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` block to `name` (lower case, digits, underscores).

        Raises:
            ValueError: a name that cannot stand in `time/<phase>_s`.
            RuntimeError: phases were left in another order than they were entered (two tasks share the clock).
        """
        if not _NAME.fullmatch(name) or name == OTHER:
            raise ValueError(f"phase {name!r}: use lower-case letters, digits and underscores, and not {OTHER!r}")
        self._charge()
        self._stack.append(name)
        depth = len(self._stack)
        self._add(name, 0.0, 0.0, 1)
        try:
            yield
        finally:
            self._charge()
            if len(self._stack) != depth or self._stack[-1] != name:
                raise RuntimeError(f"phase {name!r} ended inside {self._stack}: one clock serves one task")
            self._stack.pop()

    def lap(self) -> dict[str, float]:
        """Wall seconds since the last lap as metrics: `time/<phase>_s` for each, and their sum `time/step_s`."""
        self._charge()
        lap, self._lap = self._lap, {}
        return {f"time/{name}_s": seconds for name, seconds in lap.items()} | {"time/step_s": sum(lap.values())}

    def totals(self) -> dict[str, Seconds]:
        """Seconds by phase over all starts of the run, as far as they were saved, and of this one."""
        self._charge()
        return dict(self._totals)

    def save(self) -> None:
        """Write the totals to workdir/clock.json; the old file stays whole until the new one is."""
        if self._path is None:
            return
        phases = {name: dataclasses.asdict(seconds) for name, seconds in self.totals().items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".tmp")
        part.write_text(json.dumps({"phases": phases}, indent=1) + "\n")
        os.replace(part, self._path)

    def _charge(self) -> None:
        wall, cpu = max(self._wall(), self._marks[0]), max(self._cpu(), self._marks[1])
        name = self._stack[-1] if self._stack else OTHER
        self._add(name, wall - self._marks[0], cpu - self._marks[1], 0)
        self._marks = (wall, cpu)

    def _add(self, name: str, wall_s: float, cpu_s: float, count: int) -> None:
        old = self._totals.get(name, Seconds())
        self._totals[name] = Seconds(wall_s=old.wall_s + wall_s, cpu_s=old.cpu_s + cpu_s, count=old.count + count)
        self._lap[name] = self._lap.get(name, 0.0) + wall_s


def read_clock(workdir: str | os.PathLike[str]) -> dict[str, Seconds]:
    """Seconds by phase from workdir/clock.json.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not hold what `Clock.save` writes.
    """
    path = Path(workdir) / CLOCK_FILE
    try:
        phases: Mapping[str, Mapping[str, float]] = json.loads(path.read_text())["phases"]
        return {
            name: Seconds(wall_s=float(s["wall_s"]), cpu_s=float(s["cpu_s"]), count=int(s["count"]))
            for name, s in phases.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a clock file ({error!r}); remove it to start the count anew") from error


def tree_cpu_s() -> float:
    """CPU seconds, user and system, that this process and its descendants have used so far.

    Ended children are counted by the kernel once they are waited for; living ones are read from /proc, parents before
    children so that none is counted twice. Without /proc the living ones are missing.
    """
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    pending = _children(os.getpid())
    while pending:
        pid = pending.pop()
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue  # it ended meanwhile: its parent has its time now
        ticks = stat[stat.rindex(")") + 2 :].split()[11:15]
        total += sum(int(tick) for tick in ticks) / os.sysconf("SC_CLK_TCK")
        pending.extend(_children(pid))
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        with contextlib.suppress(OSError):
            found.extend(int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
