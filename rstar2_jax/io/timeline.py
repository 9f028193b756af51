"""How many things of each kind go on at the same time: generation, tools, grading, training. One line a step.

timeline.jsonl, beside metrics.jsonl:

    {"step": 3, "start_s": 41.2, "bin_s": 0.2, "busy": {"generate": [12.0, 64.0, 31.5], "learn": [0.0, 0.0, 0.9]}}

start_s counts from the start of the process that wrote the line; entry i of a kind is the mean number of its spans
under way in the bin from start_s + i * bin_s on. A line covers the time since the line before. `close` writes the last
one: it holds what no step has told, all of it in a run that knows no steps.

Spans are added to the bins as they end, and bins become twice as long when a line would have too many: a process that
writes no line for a week needs no more memory than one that writes each minute.

Deliberately not here: single spans (a step of the paper's has a hundred thousand), and drawing (report/timeline.py).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

TIMELINE_FILE = "timeline.jsonl"
_MOST_BINS = 400
_SHORTEST_BIN_S = 0.05


class Timeline:
    """Counts spans as they begin and end. One event loop uses it.

    Args:
        workdir: folder of the run.
        now: source of seconds.
    """

    def __init__(self, workdir: str | Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = Path(workdir) / TIMELINE_FILE, now
        self._origin, self._next_step = now(), 0
        self._running: collections.Counter[str] = collections.Counter()
        self._begin(self._origin)

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Something of this kind goes on inside the `with` block."""
        self._change(kind, 1)
        try:
            yield
        finally:
            self._change(kind, -1)

    def flush(self, step: int) -> None:
        """Write the line of a step. Raises OSError where the disk takes none."""
        end = self._now()
        for kind in self._running:
            self._fill(kind, end)
        self._widen(end)
        bins = max(1, math.ceil((end - self._since) / self._bin_s - 1e-9))
        busy = {kind: (self._spent[kind][:bins] / self._bin_s).round(3).tolist() for kind in sorted(self._spent)}
        start_s = round(self._since - self._origin, 3)
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "start_s": start_s, "bin_s": self._bin_s, "busy": busy}) + "\n")
        self._next_step = step + 1
        self._begin(end)

    def close(self) -> None:
        """Write what went on since the last line, if anything did, as the line of the step after it."""
        if self._spent:
            self.flush(self._next_step)

    def _begin(self, since: float) -> None:
        self._since, self._bin_s = since, _SHORTEST_BIN_S
        self._running = +self._running  # what has ended is no part of the next line
        self._spent = {kind: np.zeros(_MOST_BINS) for kind in self._running}  # seconds under way in each bin
        self._until = dict.fromkeys(self._running, since)  # to where they are counted

    def _change(self, kind: str, by: int) -> None:
        self._fill(kind, self._now())
        self._running[kind] += by

    def _fill(self, kind: str, until: float) -> None:
        """Add what went on of a kind since it changed last."""
        self._widen(until)
        spent = self._spent.setdefault(kind, np.zeros(_MOST_BINS))
        since, self._until[kind] = self._until.get(kind, until), until
        first, last = ((at - self._since) / self._bin_s for at in (since, until))
        inner = range(math.floor(first) + 1, math.ceil(last))  # edges of bins between the two
        for start, stop in itertools.pairwise([first, *inner, last]):
            spent[min(int(start), _MOST_BINS - 1)] += (stop - start) * self._running[kind] * self._bin_s

    def _widen(self, until: float) -> None:
        """Make bins long enough for a line up to then."""
        while until - self._since > _MOST_BINS * self._bin_s:
            self._bin_s *= 2
            for kind, spent in self._spent.items():
                self._spent[kind] = np.concatenate([spent.reshape(-1, 2).sum(axis=1), np.zeros(_MOST_BINS // 2)])


def cut(workdir: str | Path, start_step: int) -> None:
    """Leave only lines of steps below start_step, for a run that does the others again; a torn line goes too."""
    path = Path(workdir) / TIMELINE_FILE
    if not path.exists():
        return
    kept = [line for line in read_timeline(workdir) if line["step"] < start_step]
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    new.replace(path)


def read_timeline(workdir: str | Path) -> list[dict]:
    """The lines of workdir/timeline.jsonl; torn ones are left out.

    Raises:
        FileNotFoundError: there is no such file.
    """
    lines = []
    for text in (Path(workdir) / TIMELINE_FILE).read_text().splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def end_s(line: dict) -> float:
    """Where a line ends, in seconds since the start of its process."""
    return line["start_s"] + line["bin_s"] * max((len(values) for values in line["busy"].values()), default=0)


def in_a_row(lines: Sequence[dict]) -> tuple[list[dict], list[float]]:
    """(the lines with start_s counted over all starts of the run, where a later start begins).

    The clock of each process begins at 0. A process that goes on follows the end of what is left of the one before: the
    pause between them is cut, however long it was.

    >>> first, again = ({"step": n, "start_s": 0.0, "bin_s": 0.5, "busy": {"learn": [1.0, 0.0]}} for n in (0, 1))
    >>> lines, starts = in_a_row([first, again])
    >>> [line["start_s"] for line in lines], starts
    ([0.0, 1.0], [1.0])
    """
    placed, starts, offset = [], [], 0.0
    for number, line in enumerate(lines):
        if number and line["start_s"] <= lines[number - 1]["start_s"]:
            offset = end_s(placed[-1])
            starts.append(offset)
        placed.append({**line, "start_s": line["start_s"] + offset})
    return placed, starts
