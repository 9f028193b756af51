"""Programs measured side by side: each in a process of its own on one core, taking turns, so that load hits all alike.

A contestant is a script that calls `serve(prepare)`. It prepares (builds, compiles, warms up), then does one round of
work whenever it is told to. `measure` starts the contestants, gives turns and collects CPU seconds and memory.
Standard library only, since the contestants live in environments of their own.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
# How every contestant of a benchmark gets its memory: as all of them are fastest. What is freed is kept, since hundreds
# of megabytes a step would be mapped and cleared again otherwise.
HUGE_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def keeping_all() -> dict[str, str]:
    """The same where large blocks come and go: tcmalloc (Debian: libtcmalloc-minimal4), HUGE_PAGES if it is not there.

    glibc gives back large blocks of the arenas of threads, such as XLA's, and while others have their turn a virtual
    machine's host takes free memory away, which costs whoever gives most back.
    """
    library = ctypes.util.find_library("tcmalloc_minimal")
    return {"LD_PRELOAD": library, "TCMALLOC_RELEASE_RATE": "0"} if library else HUGE_PAGES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One contestant: units of work a CPU-second in each round, and memory in bytes.

    idle_bytes is what the process held before it built anything (imports included), peak_bytes the most that it held
    during the rounds.
    """

    name: str
    rates: list[float]
    told: dict[str, Any]
    idle_bytes: int
    peak_bytes: int

    @property
    def median(self) -> float:
        """Median rate."""
        ordered = sorted(self.rates)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def serve(prepare: Callable[[dict[str, Any]], tuple[Callable[[], float], dict[str, Any]]]) -> None:
    """Run as a contestant.

    Args:
        prepare: given the task, returns (work, facts); work does one round and returns its units.
    """
    task = json.loads(sys.stdin.readline())
    idle = _memory("VmRSS")
    work, facts = prepare(task)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak of the rounds alone
    print(json.dumps({"facts": facts, "idle": idle}), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        units = work()
        print(json.dumps({"units": units, "cpu": time.process_time() - began, "peak": _memory("VmHWM")}), flush=True)


def measure(
    contestants: Mapping[str, Sequence[str]],
    task: dict[str, Any],
    rounds: int,
    report: Callable[[str], None],
    memory: Mapping[str, str],
) -> list[Result]:
    """Let the contestants take turns; results in their order.

    Args:
        contestants: name -> command line.
        task: handed to each as JSON.
        rounds: turns of each; the order of the turns is rotated.
        report: receives one line for each turn.
        memory: HUGE_PAGES or keeping_all(), for all of them.
    """
    core, given = min(os.sched_getaffinity(0)), {**os.environ, **ONE_CORE, **memory}
    running = {name: _start(command, task, core, given) for name, command in contestants.items()}
    try:
        ready = {name: _read(name, process) for name, process in running.items()}
        rates: dict[str, list[float]] = {name: [] for name in running}
        peaks = dict.fromkeys(running, 0)
        names = list(running)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                process = running[name]
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                told = _read(name, process)
                rates[name].append(told["units"] / told["cpu"])
                peaks[name] = told["peak"]
                report(f"round {number + 1}: {name} {rates[name][-1]:,.0f} a CPU-second")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return [
        Result(name=n, rates=rates[n], told=ready[n]["facts"], idle_bytes=ready[n]["idle"], peak_bytes=peaks[n])
        for n in running
    ]


def _start(
    command: Sequence[str], task: dict[str, Any], core: int, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if task.get("quiet", True) else None,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    return process


def _read(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # a package may print as well
            return json.loads(line)
    raise RuntimeError(f"{name} ended with code {process.wait()}: run its command by hand with the task on stdin")


def _memory(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def table(load: str, unit: str, results: list[Result]) -> list[str]:
    """Lines for a person; `unit` is what a rate counts a CPU-second."""
    base = {result.name: result for result in results}
    lines = [f"{load}: median of {len(results[0].rates)} alternated rounds, {unit} a CPU-second"]
    for result in results:
        ratio = f"{base['ours'].median / result.median:5.2f}x" if "ours" in base else ""
        lines.append(
            f"  {result.name:<6} {result.median:8,.0f}  [{min(result.rates):,.0f}, {max(result.rates):,.0f}]  ours is "
            f"{ratio}  peak {result.peak_bytes / 1e6:,.0f} MB, {(result.peak_bytes - result.idle_bytes) / 1e6:,.0f} "
            f"above its imports  {result.told}"
        )
    return lines
