"""Trajectories on disk: every rollout with all that a viewer needs to show, filter and replay it.

A group that was finished beyond the need of its step stands in the file of the step that used it.

One step is one file, workdir/trajectories/step_000012.jsonl.gz: a header line, then one JSON line for each rollout,
those that RoC left out included. A file appears whole or not at all, and the same records give the same bytes.

Per-token arrays are written as {"dtype": "<f4", "base64": ...} (little-endian bytes), so that log-probabilities come
back bit for bit. Tool-call arguments are JSON text inside the JSON, since a model may write what strict JSON cannot
hold (NaN).

Deliberately not here: text of the turns (a view of the ids that the viewer decodes), and retention.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_jax.types import (
    CallStatus,
    FinishReason,
    Group,
    Prompt,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)

TRAJECTORIES_FOLDER = "trajectories"
FORMAT = 1

_FILE = re.compile(r"step_(\d{6,})\.jsonl\.gz")
_DTYPES = ("|b1", "<i4", "<i8", "<f4", "<f8")
_COMPRESSION = 4  # higher levels take twice the time for a few percent: log-probabilities do not compress


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Record:
    """One rollout as the trainer saw it.

    Args:
        prompt: the problem with its gold answer and source.
        group: index of the prompt's group in the step.
        trajectory: ids, masks, log-probabilities, versions, calls, results, reasons, seed, engine and verdict.
        p_err, p_format: the two penalties; None where the rollout was not scored.
        kept: True when RoC chose it for training.
        weight: weight with which RoC drew it; None where it was not drawn by weight.
        advantage: as trained on; None where it was not trained on.
    """

    prompt: Prompt
    group: int
    trajectory: Trajectory
    p_err: float | None = None
    p_format: float | None = None
    kept: bool = False
    weight: float | None = None
    advantage: float | None = None


def records(
    groups: Sequence[Group],
    kept: np.ndarray | None = None,
    advantages: np.ndarray | None = None,
    weight: Callable[[float], Any] | None = None,
    *,
    first_group: int = 0,
) -> list[Record]:
    """Every rollout of the groups, in their order, with what training made of it.

    Args:
        kept, advantages: [P, N] as selected; None where nothing was trained on.
        weight: maps a penalty to the weight that a correct rollout was drawn by; None where none was drawn by weight.
        first_group: number of the first group, where the step's file holds others before it.
    """
    found = []
    for place, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            scored = bool(group.valid[index])
            chosen = kept is not None and bool(kept[place, index])
            drawn = weight is not None and scored and bool(group.rewards[index])
            found.append(
                Record(
                    prompt=group.prompt,
                    group=first_group + place,
                    trajectory=trajectory,
                    p_err=group.p_err[index] if scored else None,
                    p_format=group.p_format[index] if scored else None,
                    kept=chosen,
                    weight=float(weight(float(group.penalties[index]))) if drawn and weight is not None else None,
                    advantage=float(advantages[place, index]) if chosen and advantages is not None else None,
                )
            )
    return found


def write_step(workdir: str | os.PathLike[str], step: int, rollouts: Iterable[Record]) -> Path:
    """The file that now holds the records of the step; an earlier file of this step is replaced.

    Raises:
        ValueError: the step is negative, or a number of a record is not finite.
    """
    if step < 0:
        raise ValueError(f"step {step}: steps are counted from 0")
    path = _path(workdir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record_to_json(record), allow_nan=False) for record in rollouts]
    header = json.dumps({"format": FORMAT, "step": step, "count": len(lines)})
    part = path.with_name(path.name + ".tmp")
    with part.open("wb") as file:
        # Neither name nor time goes into the gzip header, so that a repeated step gives the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=file, mtime=0) as packed:
            packed.writelines(line.encode() + b"\n" for line in [header, *lines])
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    return path


def read_step(workdir: str | os.PathLike[str], step: int) -> list[Record]:
    """The records of one step, in the order in which they were written.

    Raises:
        FileNotFoundError: the step has no file.
        ValueError: the file is damaged or of another format.
    """
    path = _path(workdir, step)
    try:
        with gzip.open(path, "rb") as packed, io.TextIOWrapper(packed, encoding="utf-8") as lines:
            header = json.loads(next(lines))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
            records = [record_from_json(json.loads(line)) for line in lines]
    except (gzip.BadGzipFile, EOFError, StopIteration, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    if len(records) != header["count"]:
        raise ValueError(f"{path} announces {header['count']} trajectories and holds {len(records)}")
    return records


def list_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Steps that have a file, rising."""
    folder = Path(workdir) / TRAJECTORIES_FOLDER
    names = os.listdir(folder) if folder.exists() else []
    return sorted(int(match[1]) for match in map(_FILE.fullmatch, names) if match)


def cut(workdir: str | os.PathLike[str], start_step: int) -> None:
    """Remove the files of steps >= start_step and what an interrupted write left, before a run is continued there."""
    for step in list_steps(workdir):
        if step >= start_step:
            _path(workdir, step).unlink()
    for part in (Path(workdir) / TRAJECTORIES_FOLDER).glob("step_*.tmp"):
        part.unlink()


def record_to_json(record: Record) -> dict[str, Any]:
    """JSON value of a record, in the order in which a person reads it."""
    return {
        "prompt": dataclasses.asdict(record.prompt),
        "group": int(record.group),
        "kept": bool(record.kept),
        "weight": _optional(record.weight),
        "advantage": _optional(record.advantage),
        "p_err": _optional(record.p_err),
        "p_format": _optional(record.p_format),
        "trajectory": trajectory_to_json(record.trajectory),
    }


def record_from_json(value: Mapping[str, Any]) -> Record:
    """The record that `record_to_json` wrote."""
    fields = {**value, "prompt": Prompt(**value["prompt"]), "trajectory": trajectory_from_json(value["trajectory"])}
    return Record(**fields)


def group_to_json(group: Group) -> dict[str, Any]:
    """JSON value of a graded group; `group_from_json` gives back an equal one, arrays bit for bit."""
    return {
        "prompt": dataclasses.asdict(group.prompt),
        "trajectories": [trajectory_to_json(trajectory) for trajectory in group.trajectories],
        "p_err": [float(value) for value in group.p_err],
        "p_format": [float(value) for value in group.p_format],
    }


def group_from_json(value: Mapping[str, Any]) -> Group:
    """The group that `group_to_json` wrote."""
    return Group(
        prompt=Prompt(**value["prompt"]),
        trajectories=tuple(trajectory_from_json(item) for item in value["trajectories"]),
        p_err=tuple(value["p_err"]),
        p_format=tuple(value["p_format"]),
    )


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """JSON value of a trajectory; `trajectory_from_json` gives back an equal one, arrays bit for bit."""
    return {
        "prompt_id": trajectory.prompt_id,
        "sample_index": int(trajectory.sample_index),
        "seed": int(trajectory.seed),
        "engine": trajectory.engine,
        "stop_reason": trajectory.stop_reason.value,
        "verdict": None if trajectory.verdict is None else trajectory.verdict.value,
        "answer": trajectory.answer,
        "prompt_ids": _pack(trajectory.prompt_ids),
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
    }


def trajectory_from_json(value: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_to_json` wrote."""
    fields = {
        **value,
        "stop_reason": StopReason(value["stop_reason"]),
        "verdict": None if value["verdict"] is None else Verdict(value["verdict"]),
        "prompt_ids": _unpack(value["prompt_ids"]),
        "turns": tuple(_turn_from_json(turn) for turn in value["turns"]),
    }
    return Trajectory(**fields)


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "finish_reason": turn.finish_reason.value,
        "token_ids": _pack(turn.token_ids),
        "mask": _pack(turn.mask),
        "behavior_logprobs": _pack(turn.behavior_logprobs),
        "weights_versions": _pack(turn.weights_versions),
        "calls": [_call_to_json(call) for call in turn.calls],
        "results": [
            {
                "status": result.status.value,
                "stdout": result.stdout,
                "stderr": result.stderr,
                "queue_s": float(result.queue_s),
                "run_s": float(result.run_s),
            }
            for result in turn.results
        ],
    }


def _call_to_json(call: ToolCall) -> dict[str, Any]:
    try:
        return {"name": call.name, "arguments": json.dumps(dict(call.arguments)), "error": call.error}
    except RecursionError:
        # Nested as deep as the parser just allowed: the ids still hold it, and a run must not end over its log.
        return {"name": call.name, "arguments": "{}", "error": call.error or "arguments nested too deep for the log"}


def _turn_from_json(value: Mapping[str, Any]) -> Turn:
    calls = tuple(ToolCall(**{**call, "arguments": json.loads(call["arguments"])}) for call in value["calls"])
    results = tuple(ToolResult(**{**result, "status": CallStatus(result["status"])}) for result in value["results"])
    arrays = {name: _unpack(value[name]) for name in ("token_ids", "mask", "behavior_logprobs", "weights_versions")}
    return Turn(calls=calls, results=results, finish_reason=FinishReason(value["finish_reason"]), **arrays)


def _pack(array: np.ndarray) -> dict[str, str]:
    little = np.asarray(array)
    little = little.astype(little.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in _DTYPES or little.ndim != 1:
        raise ValueError(f"array of {little.dtype}{list(little.shape)}: a trajectory holds 1-d {', '.join(_DTYPES)}")
    return {"dtype": little.dtype.str, "base64": base64.b64encode(little.tobytes()).decode()}


def _unpack(value: Mapping[str, str]) -> np.ndarray:
    if value["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {value['dtype']!r} is not one of {', '.join(_DTYPES)}")
    return np.frombuffer(base64.b64decode(value["base64"], validate=True), value["dtype"]).copy()


def _optional(number: float | None) -> float | None:
    return None if number is None else float(number)


def _path(workdir: str | os.PathLike[str], step: int) -> Path:
    return Path(workdir) / TRAJECTORIES_FOLDER / f"step_{step:06d}.jsonl.gz"
