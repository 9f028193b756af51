"""Metrics of a run: one JSON line a step in metrics.jsonl, and the same numbers for TensorBoard.

Names are `stage/name_unit`. Line s belongs to step s, counted from 0: it is written when the update that takes the
state from step s to s + 1 is done. A run continued from the checkpoint of step s cuts the lines with step >= s first,
so that the file reads as if nothing had happened; TensorBoard is told to hide the same steps. A damaged line ends no
run: it is left where it is, and left out with a message by everyone who reads the file.

A number that is not finite never reaches the file as such: it is written as null, and `metrics/nonfinite_count` of the
same line says how many there were. None means "no value in this step" (an error rate over no calls) and is not counted.

Deliberately not here: what the numbers mean (train.py, report/) and any averaging over steps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorboardX.proto.event_pb2
import tensorboardX.proto.summary_pb2
from tensorboardX.record_writer import RecordWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
NONFINITE = "metrics/nonfinite_count"

# Protocol buffer classes are made when their module is imported, so type checkers do not see them.
_EVENTS: Any = tensorboardX.proto.event_pb2
_SUMMARIES: Any = tensorboardX.proto.summary_pb2

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.\-]+)+")


def name_part(text: str) -> str:
    """Any text as a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", text)


class MetricsWriter:
    """Appends one line a step to workdir/metrics.jsonl and mirrors it into workdir/tensorboard.

    A line reaches the disk before `write` returns, so that a checkpoint is never ahead of its metrics.

    Args:
        workdir: folder of the run; made when missing.
        start_step: first step that will be written; lines of this and later steps are cut.

    Raises:
        ValueError: the file holds something else than records of steps that rise.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, start_step: int = 0) -> None:
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        self._last_step = _cut(path, start_step)
        self._file = path.open("ab", buffering=0)
        self._board = _Board(folder / TENSORBOARD_FOLDER, start_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the numbers of one step.

        Args:
            step: above the last written one.
            metrics: finite numbers, or None for "no value"; 0-dimensional arrays are read out.

        Raises:
            ValueError: step does not advance, a name is not `stage/name_unit`, or a value is no number.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}: steps must advance")
        line: dict[str, float | int | None] = {"step": int(step)}
        nonfinite = 0
        for name, value in metrics.items():
            number = _number(name, value)
            if number is not None and not math.isfinite(number):
                nonfinite += 1
                number = None
            line[name] = number
        line[NONFINITE] = nonfinite
        left = json.dumps(line, allow_nan=False).encode() + b"\n"
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        self._last_step = int(step)
        self._board.write(
            int(step), {name: number for name, number in line.items() if name != "step" and number is not None}
        )

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(
    workdir: str | os.PathLike[str], report: Callable[[str], None] = _LOG.warning
) -> dict[str, np.ndarray]:
    """Columns of workdir/metrics.jsonl: `step` as i64[n], every other name as f64[n], NaN where a step has no value.

    Safe while the run is writing: a last line without an end is left out.

    Args:
        report: receives one message for every other line that is not the record of a step; it is left out too.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(workdir) / METRICS_FILE
    found, damaged = _parse(path)
    for number in damaged:
        report(f"{path}, line {number}: not the record of a step, left out")
    lines = [line for line, _ in found]
    names = {name: None for line in lines for name in line if name != "step"}
    columns: dict[str, np.ndarray] = {"step": np.array([line["step"] for line in lines], np.int64)}
    for name in names:
        values = [line.get(name) for line in lines]
        columns[name] = np.array([math.nan if value is None else value for value in values], np.float64)
    return columns


class _Board:
    """One event file of this start of the run, written step by step.

    tensorboardX's SummaryWriter would do, but hands events to a thread, and its flush does not wait for that thread: a
    killed run loses up to two minutes of them.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{seconds}.{nanoseconds:09d}"))
        self._put(_EVENTS.Event(file_version="brain.Event:2"))
        start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
        self._put(_EVENTS.Event(step=start_step, session_log=start))  # hides these steps of earlier files

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one step as one event."""
        values = [_SUMMARIES.Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._put(_EVENTS.Event(step=step, summary=_SUMMARIES.Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def _number(name: str, value: Any) -> float | int | None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == NONFINITE:
        raise ValueError(f"metric name {name!r}: must read stage/name_unit, such as learner/grad_norm")
    if value is None:
        return None
    if hasattr(value, "shape") and hasattr(value, "item"):
        if value.shape != ():
            raise ValueError(f"metric {name} has shape {value.shape}: reduce it to one number before writing")
        value = value.item()
    if isinstance(value, bool | int | float):
        return int(value) if isinstance(value, bool) else value
    raise ValueError(f"metric {name} = {value!r} is a {type(value).__name__}: only numbers and None can be written")


def _parse(path: Path) -> tuple[list[tuple[dict[str, Any], int]], list[int]]:
    """(record, where its line ends in the file) of every step, and the numbers of the lines that are no records; a last
    line without an end is in neither."""
    found: list[tuple[dict[str, Any], int]] = []
    damaged: list[int] = []
    end = 0
    for number, row in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        end += len(row)
        line = _record(row)
        if line is not None and row.endswith(b"\n"):
            found.append((line, end))
        elif row.endswith(b"\n"):
            damaged.append(number)
    return found, damaged


def _record(row: bytes) -> dict[str, Any] | None:
    """The record of a step in a line, or None."""
    try:
        line = json.loads(row)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return line if all(value is None or isinstance(value, int | float) for value in line.values()) else None


def _cut(path: Path, start_step: int) -> int | None:
    """Leave only lines up to the last one with step < start_step in the file; that step, or None."""
    if not path.exists():
        return None
    found, damaged = _parse(path)
    if damaged and not found:
        raise ValueError(f"{path}, line {damaged[0]}: not the record of a step, nor is any other; remove the file")
    kept = [line["step"] for line, _ in found if line["step"] < start_step]
    if [line["step"] for line, _ in found[: len(kept)]] != kept or kept != sorted(set(kept)):
        raise ValueError(f"{path}: steps do not rise from line to line; repair or remove the file")
    with path.open("r+b") as file:
        file.truncate(found[len(kept) - 1][1] if kept else 0)
        os.fsync(file.fileno())
    return kept[-1] if kept else None
