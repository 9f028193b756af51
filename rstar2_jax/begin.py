"""How a run begins: its tokenizer, its first parameters, or the state it had when it was stopped.

Deliberately not here: what a run does once it has begun.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rstar2_jax import settings
from rstar2_jax.algo import optimizer as optimizers
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.io import checkpoint
from rstar2_jax.learner import update
from rstar2_jax.model import decoder, hf
from rstar2_jax.types import TrainState
from rstar2_jax.weights import fetch

TOKENIZER_FOLDER = "tokenizer"
_FREE = ("compute_dtype", "max_positions")  # a model is the same at another precision or context length


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """Where a run stands: the state, the steps that are done, and the record saved beside it (empty when fresh)."""

    state: TrainState
    step: int
    record: dict[str, Any]


def load_params(init_from: str, model: settings.Model, seed: int, where: Any = None) -> Any:
    """First parameters: random for an empty `init_from`, else those of a finished run, of a weight store (the newest
    version, such as in RUN/best) or of a Hugging Face folder.

    Args:
        where: tree of shardings like the parameters, so that stored ones are read by each device as it needs them;
            None for the host's memory, which holds models that no single device does.

    Raises:
        fetch.FetchError: a version of a weight store is torn or of another model.
        ValueError: the folder holds neither, or its sizes are not those of `model`.
        checkpoint.CheckpointError: the run's checkpoint cannot be read or has other shapes.
    """
    if not init_from:
        return decoder.init_params(model, jax.random.key(seed))
    folder = Path(init_from)
    if (folder / "config.json").is_file():
        found = hf.settings_from_config(hf.read_config(folder))
        if dataclasses.replace(found, compute_dtype=model.compute_dtype, max_positions=model.max_positions) != model:
            raise ValueError(f"{folder} has sizes {found}, but the run's model is {model}: use those of the folder")
        return hf.load_folder(str(folder), where or _host(model))[0]
    abstract = decoder.abstract_params(model)
    where = where or _host(model)
    if (version := fetch.latest_version(folder)) is not None:
        return jax.tree.map(jax.device_put, fetch.fetch(folder, version, model), where)
    wanted = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), abstract, where)
    params, record = checkpoint.restore_params(folder, wanted)
    _check_model(folder, record, model)
    return params


def _host(model: settings.Model) -> Any:
    """Where parameters lie in the host's memory: JAX's CPU backend, or the first device where there is no such."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(device), decoder.abstract_params(model))


def _check_model(folder: Path, record: dict[str, Any], model: settings.Model) -> None:
    """Raise ValueError where a run's record tells of another model."""
    found = {name: value for name, value in record.get("model", {}).items() if name not in _FREE}
    asked = {name: value for name, value in _plain(model).items() if name not in _FREE}
    differing = [name for name in asked if found and found.get(name) != asked[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{folder} was trained with Model.{name} = {found.get(name)}, the run asks for {asked[name]}: use "
            "the sizes that it was trained with"
        )


def identity(kind: str, run: settings.Run, model: settings.Model) -> dict[str, Any]:
    """What must stay the same when a run is continued, as JSON: part of every checkpoint's record."""
    return {"kind": kind, "seed": run.seed, "model": _plain(model)}


def begin(
    kind: str,
    run: settings.Run,
    model: settings.Model,
    learner: update.Learner,
    store: checkpoint.Checkpoints,
    same: Mapping[str, Any] = types.MappingProxyType({}),
) -> Beginning:
    """The state to go on from: the newest good checkpoint of the run, else its first state at step 0.

    The first state follows `run.optimizer_start`: `reset` starts moments at zero (the paper's stage 3), `restart` takes
    over those of `run.init_from` and warms up again, `continue` takes over its place in the schedule as well.

    Args:
        same: what the record must hold besides `identity` for the run to be the same.

    Raises:
        ValueError: moments are wanted without a run to take moments from, or the workdir holds another run: of another
            kind, seed or model, or otherwise than `same`.
    """
    if store.steps():
        _check_same_run(run, checkpoint.read_record(run.workdir), {**identity(kind, run, model), **same})
    found = store.restore(learner.abstract())
    if found is not None:
        step, state, record = found
        store.set_aside_after(step)
        return Beginning(state=state, step=step, record=record)
    if run.optimizer_start != "reset":
        return Beginning(state=_with_moments(run, model, learner.abstract()), step=0, record={})
    first = load_params(run.init_from, model, run.seed, learner.where)
    return Beginning(state=learner.create(first), step=0, record={})


def save_tokenizer(tokenizer: tokenizers.Tokenizer, template: str, workdir: Path) -> None:
    """Keep the tokenizer and its chat template beside the run's checkpoints, for export and evaluation."""
    tokenizer.save(str(workdir / TOKENIZER_FOLDER), chat_template=template)


def _plain(model: settings.Model) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(model)))


def _check_same_run(run: settings.Run, record: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if record.get(name) != value:
            raise ValueError(
                f"{run.workdir} holds a run with {name} = {record.get(name)}, this one has {name} = {value}: "
                "go on with the old value, or give another --workdir"
            )


def _with_moments(run: settings.Run, model: settings.Model, like: TrainState) -> TrainState:
    folder = Path(run.init_from) / "checkpoints"
    if not run.init_from or not folder.is_dir():
        raise ValueError(
            f"Run.optimizer_start = {run.optimizer_start!r} needs a finished run in Run.init_from, got "
            f"{run.init_from!r}: name its workdir or set optimizer_start = 'reset'"
        )
    _check_model(folder, checkpoint.read_record(run.init_from), model)
    before: Any = checkpoint.restore_state(run.init_from, like)[1]
    kept = before.opt_state
    if run.optimizer_start == "restart":
        kept = optimizers.restart_schedule(kept)
    return before.replace(step=jnp.zeros_like(before.step), opt_state=kept)
