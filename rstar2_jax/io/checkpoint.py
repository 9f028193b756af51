"""Checkpoints with Orbax: the train state and a small JSON record, committed together, newest good one first.

A save copies the state and returns; writing goes on behind the next steps, and what fails there is raised at the next
`check`. A checkpoint is whole or absent: Orbax writes into a temporary folder and renames. What cannot be read back (a
torn file, a missing array) is reported and the one before it is taken; the newest good one is never deleted before a
newer one is committed, and what could not be read is never deleted at all.

Of several processes each reads its own shards, and what one of them cannot read none of them takes.

Deliberately not here: what the record means (the RUN functions) and export to other formats (export.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rstar2_jax import processes
from rstar2_jax.types import TrainState

_FREE_SPACE_FACTOR = 2
_SET_ASIDE = "unreadable"


class CheckpointError(RuntimeError):
    """No checkpoint can be read, or one cannot be written; says which folder and why."""


class Checkpoints:
    """The checkpoints of one run in `folder`, one subfolder a step, the newest `keep` of them kept.

    Args:
        folder: created when it does not exist; leftovers of an interrupted save are removed.
        keep: committed checkpoints that stay, at least 1.
        warn: receives one line for each checkpoint that had to be passed over.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int, warn: Callable[[str], None] = print) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._warn = warn
        if processes.leads():
            for leftover in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):  # Orbax would wait for its next save
                shutil.rmtree(leftover)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending; waits for one that is being written.

        Raises:
            CheckpointError: writing it failed.
        """
        self.wait()
        return sorted(self._manager.all_steps())

    def check(self) -> None:
        """Raise CheckpointError where a save that went on in the background has failed; waits for nothing."""
        if not self._manager.is_saving_in_progress():  # over, well or badly: only waiting for it tells which
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises CheckpointError where that failed."""
        self._run(self._manager.wait_until_finished, "the last checkpoint could not be written")

    def _run(self, action: Callable[[], Any], what: str) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as fault:
            raise CheckpointError(f"{self._folder}: {what}: {fault}") from fault

    def save(self, step: int, state: TrainState, record: Mapping[str, Any]) -> None:
        """Copy the state and the record and begin to write them as `step`, once the save before it is committed; a step
        that is there already is left as it is. The state may be donated as soon as this returns.

        Raises:
            CheckpointError: the save before it failed, the disk has less room than twice the state, or Orbax could not
                begin.
        """
        if step in self.steps():
            return
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < _FREE_SPACE_FACTOR * size:
            raise CheckpointError(
                f"{self._folder}: {free} bytes free, but a checkpoint of {size} bytes needs "
                f"{_FREE_SPACE_FACTOR * size}; make room or point the workdir elsewhere"
            )
        whole = {**record, "environment": environment()}
        args = ocp.args.Composite(state=ocp.args.StandardSave(_apart(state)), record=ocp.args.JsonSave(whole))
        self._run(lambda: self._manager.save(step, args=args), f"step {step} could not be saved")

    def restore(self, like: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
        """(step, state, record) of the newest checkpoint that reads back whole, laid out like `like`; None if there
        is no checkpoint at all.

        Args:
            like: a state (or its shapes with shardings) of this run: its mesh decides the layout, not the file's.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be read.
        """
        found = _newest_state(self._folder, self.steps(), like, self._warn)
        if found is not None:
            self._report_environment(found[2])
        return found

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps, which could not be read, to N.unreadable, so that they can be written
        again. They stay for whoever wants to look: a file system that failed may give them back."""
        later = [found for found in processes.share(self.steps()) if found > step]
        for found in later if processes.leads() else []:
            kept = self._folder / f"{found}.{_SET_ASIDE}"
            number = itertools.count(2)
            while kept.exists():
                kept = self._folder / f"{found}.{_SET_ASIDE}-{next(number)}"
            (self._folder / str(found)).rename(kept)
            self._warn(f"kept as {kept}: delete it when nobody needs it")
        if later:
            processes.share(step)  # nobody looks before all are renamed
            self._manager.reload()

    def close(self) -> None:
        """Wait for what is being written and release the manager. Raises CheckpointError where writing failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _report_environment(self, record: Mapping[str, Any]) -> None:
        saved, here = record.get("environment", {}), environment()
        changed = {name: (saved.get(name), here[name]) for name in here if saved.get(name) != here[name]}
        if changed:
            told = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            self._warn(f"resuming under another environment ({told}): the run continues, but not bit for bit")


def restore_params(
    folder: str | os.PathLike[str], abstract: Any = None, warn: Callable[[str], None] = print
) -> tuple[Any, dict[str, Any]]:
    """(params, record) of the newest whole checkpoint below a run's `folder`, moments left unread.

    Args:
        folder: workdir of a run (its `checkpoints` folder is looked up) or a checkpoint folder itself.
        abstract: shapes, dtypes and shardings wanted; None restores float arrays onto the first device.
        warn: receives a line for a newer checkpoint that was passed over.

    Raises:
        CheckpointError: no checkpoint is there, or its parameters do not have the wanted shapes.
    """
    root = _checkpoint_root(folder)
    torn: list[str] = []
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
    with _reader(root, handlers) as manager:
        steps = sorted(manager.all_steps())
        found = _newest_whole(
            steps,
            lambda step: _read_params(manager, root, step, abstract),
            lambda step, fault: torn.append(f"step {step}: {fault}"),
        )
    if found is not None:
        if torn:
            warn(f"! {root}: passed over what cannot be read ({'; '.join(torn)})")
        return found
    if torn:
        raise CheckpointError(f"{root}: none of the checkpoints {steps} can be read ({'; '.join(torn)})")
    raise CheckpointError(f"{root}: holds no checkpoint; finish that run first or correct the path")


def restore_state(
    folder: str | os.PathLike[str], like: TrainState, warn: Callable[[str], None] = print
) -> tuple[int, TrainState, dict[str, Any]]:
    """(step, state, record) of the newest whole checkpoint of another run, in which nothing is changed.

    Args:
        folder, warn: as in `restore_params`.
        like: as in `Checkpoints.restore`.

    Raises:
        CheckpointError: no checkpoint is there, or none can be read.
    """
    root = _checkpoint_root(folder)
    with _reader(root) as manager:
        steps = sorted(manager.all_steps())
    found = _newest_state(root, steps, like, warn)
    if found is None:
        raise CheckpointError(f"{root}: holds no checkpoint; finish that run first or correct the path")
    return found


def _reader(root: Path, handlers: Mapping[str, Any] | None = None) -> ocp.CheckpointManager:
    """A manager that changes nothing and waits for no other process: else one that fails to read would leave the others
    waiting for it, or let them meet it at another checkpoint."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"reader{own}"
    )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
    return ocp.CheckpointManager(root, item_handlers=handlers, options=options)


def _newest_state(
    root: Path, steps: Sequence[int], like: TrainState, warn: Callable[[str], None]
) -> tuple[int, TrainState, dict[str, Any]] | None:
    """(step, state, record) of the newest of `steps` that reads back whole; None where there are none."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore())

    def torn(step: int, fault: str) -> None:
        warn(f"checkpoint {root / str(step)} is torn and was passed over: {fault}")

    with _reader(root) as manager:
        found = _newest_whole(steps, lambda step: (step, manager.restore(step, args=args)), torn)
    if found is not None:
        step, restored = found
        return step, restored.state, dict(restored.record)
    if steps:
        raise CheckpointError(f"{root}: none of the checkpoints {list(steps)} can be read")
    return None


def _newest_whole(steps: Sequence[int], read: Callable[[int], Any], torn: Callable[[int, str], None]) -> Any:
    """What `read` gives for the newest step that every process reads back whole; None where there is none. `torn` hears
    of the others. All processes go by what the leader lists."""
    for step in reversed(processes.share(list(steps))):
        for again in (True, False):
            restored, fault = None, ""
            try:
                restored = read(step)
            except CheckpointError:
                raise
            except Exception as error:  # Orbax reports a torn array as a bare Exception
                fault = _first_line(error)
            if processes.all_of(not fault):
                return restored
            # A file system over a network fails now and then; what is passed over is lost to the run.
            if not again:
                torn(step, fault or "another process cannot read it")
    return None


def _read_params(manager: ocp.CheckpointManager, root: Path, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
    found: Any = manager.item_metadata(step)
    stored = found["state"].tree["params"]
    if abstract is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=device), stored
        )
    _check_shapes(root, stored, abstract)
    restore_args = ocp.checkpoint_utils.construct_restore_args({"params": abstract})
    state = ocp.args.PyTreeRestore(item={"params": abstract}, restore_args=restore_args, partial_restore=True)
    restored: Any = manager.restore(step, args=ocp.args.Composite(state=state, record=ocp.args.JsonRestore()))
    return restored.state["params"], dict(restored.record)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON record of the newest checkpoint below a run's folder, without touching an array.

    Raises:
        CheckpointError: no checkpoint is there.
    """
    root = _checkpoint_root(folder)
    steps = sorted((int(path.name) for path in root.iterdir() if path.name.isdigit()), reverse=True)
    for path in (root / str(step) / "record" / "metadata" for step in steps):
        with contextlib.suppress(FileNotFoundError, ValueError):  # a torn record: the one before it says the same
            return dict(json.loads(path.read_text()))
    raise CheckpointError(f"{root}: holds no checkpoint; finish that run first or correct the path")


def environment() -> dict[str, Any]:
    """What decides whether a resumed run gives the same bits: versions and the number of visible cores."""
    return {"jax": jax.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def _apart(state: TrainState) -> TrainState:
    """The state as it is now, whatever becomes of its buffers: what lies on the host already, on the CPU backend or
    beside a device, is written from where it lies, and the next update takes that over."""

    def apart(leaf: jax.Array) -> jax.Array:
        near = leaf.sharding.memory_kind in (None, "device") and jax.default_backend() != "cpu"
        return leaf if near else jax.device_put(leaf, leaf.sharding, may_alias=False)

    return jax.tree.map(apart, state)


def _checkpoint_root(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).absolute()
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder; name the workdir of a finished run")
    return root


def _check_shapes(root: Path, stored: Any, wanted: Any) -> None:
    have = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(stored)}
    want = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(wanted)}
    wrong = [name for name in sorted(have.keys() | want.keys()) if have.get(name) != want.get(name)]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{root}: {name} has shape {have.get(name)}, but the model's settings ask for {want.get(name)} "
            f"({len(wrong)} parameters differ); use the settings that the checkpoint was trained with"
        )


def _first_line(fault: BaseException) -> str:
    return (str(fault) or type(fault).__name__).splitlines()[0][:200]
