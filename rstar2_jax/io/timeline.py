"""How many things of each kind go on at the same time: generation, tools, grading, training. One line a step.

timeline.jsonl, beside metrics.jsonl:

    {"step": 3, "start_s": 41.2, "bin_s": 0.25, "busy": {"generate": [12.0, 64.0, 31.5], "learn": [0.0, 0.0, 0.9]}}

start_s counts from the start of the process that wrote the line; entry i of a kind is the mean number of its spans
under way in the bin from start_s + i * bin_s on. A line covers the time since the line before.

Deliberately not here: single spans (a step of the paper's has a hundred thousand), and drawing (report/timeline.py).
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

TIMELINE_FILE = "timeline.jsonl"
_MOST_BINS = 400


class Timeline:
    """Counts spans as they begin and end. One event loop uses it.

    Args:
        workdir: folder of the run.
        now: source of seconds.
    """

    def __init__(self, workdir: str | Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = Path(workdir) / TIMELINE_FILE, now
        self._origin = self._since = now()
        self._running: collections.Counter[str] = collections.Counter()
        self._before: collections.Counter[str] = collections.Counter()
        self._changes: list[tuple[float, str, int]] = []

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Something of this kind goes on inside the `with` block."""
        self._change(kind, 1)
        try:
            yield
        finally:
            self._change(kind, -1)

    def flush(self, step: int) -> None:
        """Write the line of a step."""
        end = self._now()
        length = max(end - self._since, 1e-6)
        bin_s = max(0.05, length / _MOST_BINS)
        busy = {kind: self._means(kind, bin_s, end) for kind in sorted({*self._before, *self._running})}
        rounded = {kind: [round(value, 3) for value in values] for kind, values in busy.items()}
        line = {"step": step, "start_s": round(self._since - self._origin, 3), "bin_s": bin_s, "busy": rounded}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._since, self._before, self._changes = end, self._running.copy(), []

    def _change(self, kind: str, by: int) -> None:
        self._running[kind] += by
        self._changes.append((self._now(), kind, by))

    def _means(self, kind: str, bin_s: float, end: float) -> list[float]:
        """Seconds under way in each bin over its length."""
        bins = max(1, math.ceil((end - self._since) / bin_s - 1e-9))
        total = np.zeros(bins + 1)
        times = [self._since, *(t for t, k, _ in self._changes if k == kind), end]
        level = np.cumsum([self._before[kind], *(by for _, k, by in self._changes if k == kind)])
        for start, stop, count in zip(times[:-1], times[1:], level, strict=True):
            first, last = (start - self._since) / bin_s, (stop - self._since) / bin_s
            if count == 0 or last <= first:
                continue
            edges = np.unique([first, *range(math.ceil(first), math.floor(last) + 1), last])
            np.add.at(total, np.minimum(np.floor(edges[:-1]).astype(int), bins), np.diff(edges) * count)
        total[bins - 1] += total[bins]
        return total[:bins].tolist()


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
