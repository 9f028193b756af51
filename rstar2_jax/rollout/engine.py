"""The contract of a rollout engine: ids in, ids with log-probabilities and weight versions out.

An engine is one replica. Every implementation passes the same contract tests (tests/rollout/test_contract.py). Weights
come by reference to a committed version of the weight store (weights/), never as arrays, so that one machine and a
cluster run the same path.

Deliberately not here: scheduling over several engines, and text of any kind.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from rstar2_jax import settings
from rstar2_jax.types import FinishReason

DIVERGED = "give no finite number"  # said of such a sequence in any error, so that it is known over HTTP as well
PauseMode = Literal["abort", "retract", "in_place"]


class EngineError(RuntimeError):
    """The engine could not do what was asked (dead, refused, timed out): a fault of ours, never a reward."""


class RoomError(EngineError):
    """No engine gave a place within the limit: no turn was slow, the engines were full or the only fit was away."""


class DivergedError(EngineError):
    """The weights in use give no finite number for one sequence. Another engine with these weights would say the same;
    only where it befalls many prompts may the engine be at fault."""


class LimitError(EngineError):
    """This process has met a limit of its own on the way to an engine; names it and the remedy. It says nothing of the
    engine, and another one would not be reached either."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How ids are drawn: temperature first, then top-k, then top-p; log-probabilities are of the full support."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One turn to generate. The same (prompt_ids, seed, sampling, weights) gives the same ids on any engine state.

    temperature 0 is greedy decoding and is for evaluation and export checks only; any other is at least
    settings.LEAST_TEMPERATURE.

    on_ids, where an engine can, is called from a thread of its own with (place of the first, ids) as ids come; a turn
    that is sampled again begins at place 0 again.
    """

    rid: str
    prompt_ids: Sequence[int]
    seed: int
    sampling: Sampling
    on_ids: Callable[[int, list[int]], None] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """What was sampled: ids i32[n] (a sampled stop id included), their log-probabilities f32[n] under the sampling
    temperature over the full vocabulary, the version of the weights behind each id i32[n], and why it ended; how often
    its cache was taken away for others meanwhile, and computed again."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    weights_versions: np.ndarray
    finish_reason: FinishReason
    preempted: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What an engine can hold and do.

    Args:
        name: of the replica.
        vocab_size, max_context_tokens: ids below the one, prompt plus response up to the other.
        kv_tokens: ids that its cache holds at once, over all requests.
        spans: the engine itself says which version sampled each id, so that weights may change inside a turn.
        seeded: (prompt_ids, seed, sampling, weights) gives the same ids again, whatever else runs.
    """

    name: str
    vocab_size: int
    max_context_tokens: int
    kv_tokens: int
    spans: bool = False
    seeded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What an engine holds now: ids in its cache and room for more, requests that run and requests that wait."""

    kv_tokens_used: int
    kv_tokens_free: int
    running: int
    waiting: int


def common_caps(each: Sequence[Caps]) -> Caps:
    """What a rollout may rely on whichever of the engines it is at; kv_tokens of all of them together."""
    return Caps(
        name=each[0].name if len(each) == 1 else f"pool of {len(each)}",
        vocab_size=min(caps.vocab_size for caps in each),
        max_context_tokens=min(caps.max_context_tokens for caps in each),
        kv_tokens=sum(caps.kv_tokens for caps in each),
        spans=all(caps.spans for caps in each),
        seeded=all(caps.seeded for caps in each),
    )


def total_load(loads: Sequence[Load], *, waiting: int) -> Load:
    """The loads added up, with so many requests that wait outside of the engines."""
    return Load(
        kv_tokens_used=sum(load.kv_tokens_used for load in loads),
        kv_tokens_free=sum(load.kv_tokens_free for load in loads),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads) + waiting,
    )


def checked_request(caps: Caps, request: Request) -> np.ndarray:
    """i32[n]: the prompt's ids, once it is sure that the request can be served.

    Raises:
        ValueError: it never can; names the value and its limit.
    """
    ids, sampling = _checked_ids(caps, request.prompt_ids, f"request {request.rid}"), request.sampling
    _check_kinds(request)
    needed, held = len(ids) + sampling.max_new_tokens, caps.max_context_tokens
    least = settings.LEAST_TEMPERATURE
    warm = sampling.temperature >= least
    rules = [
        (sampling.max_new_tokens > 0, f"max_new_tokens = {sampling.max_new_tokens} must be above 0"),
        (needed <= held, f"prompt {len(ids)} + {sampling.max_new_tokens} new ids do not fit the context of {held}"),
        (warm or sampling.temperature == 0, f"temperature = {sampling.temperature} must be {least:g} or more, or 0"),
        (0 < sampling.top_p <= 1, f"top_p = {sampling.top_p} must be in (0, 1]"),
        (sampling.top_k == -1 or sampling.top_k > 0, f"top_k = {sampling.top_k} must be above 0, or -1 for off"),
        (sampling.top_k < 2**31, f"top_k = {sampling.top_k} must be below 2**31, or -1 for off"),
        (all(0 <= i < 2**31 for i in sampling.stop_ids), f"stop_ids = {sampling.stop_ids} must be in [0, 2**31)"),
        (0 <= request.seed < 2**64, f"seed = {request.seed} must be in [0, 2**64)"),
    ]
    for ok, complaint in rules:
        if not ok:
            raise ValueError(f"request {request.rid}: {complaint}")
    return ids


def _check_kinds(request: Request) -> None:
    """Refuse what is no number of its kind: no engine could be sent it, and the embedded one would end of it."""
    sampling = request.sampling
    whole = {"seed": request.seed, "max_new_tokens": sampling.max_new_tokens, "top_k": sampling.top_k}
    whole |= {f"stop_ids[{number}]": value for number, value in enumerate(sampling.stop_ids)}
    for name, value in whole.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise ValueError(f"request {request.rid}: {name} = {value!r} must be a whole number")
    for name, value in {"temperature": sampling.temperature, "top_p": sampling.top_p}.items():
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"request {request.rid}: {name} = {value!r} must be a finite number")


def checked_mode(mode: PauseMode) -> PauseMode:
    """The way to pause. Raises ValueError where there is no such way."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(get_args(PauseMode))}")
    return mode


def checked_text(caps: Caps, token_ids: Sequence[int]) -> np.ndarray:
    """i32[n]: ids to score. Raises ValueError where they are none, outside the vocabulary or too many."""
    ids = _checked_ids(caps, token_ids, "score")
    if len(ids) > caps.max_context_tokens:
        raise ValueError(f"{len(ids)} ids to score: the context holds {caps.max_context_tokens}")
    return ids


def _checked_ids(caps: Caps, token_ids: Sequence[int], what: str) -> np.ndarray:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"{what}: needs at least one id")
    if ids.dtype.kind not in "iu":
        bad = next((i for i in token_ids if not isinstance(i, numbers.Integral)), ids.dtype)
        raise ValueError(f"{what}: id {bad!r} must be a whole number below 2**63")
    if ids.min() < 0 or ids.max() >= caps.vocab_size:
        bad = next(i for i in ids.tolist() if not 0 <= i < caps.vocab_size)
        raise ValueError(f"{what}: id {bad} is outside the vocabulary of {caps.vocab_size}")
    return ids.astype(np.int32)


class RolloutEngine(Protocol):
    """One replica. All methods may be called from one event loop; generate is called many times at once.

    Every fault of the engine or of the way to it is an EngineError, one of this process a LimitError; a request that
    can never be served, whoever asks, is a ValueError.
    """

    @property
    def caps(self) -> Caps:
        """What this replica can hold and do."""
        ...

    @property
    def weights_version(self) -> int:
        """Version of the weights that new tokens are sampled from; -1 before the first update."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one turn; cancelling the awaiting task frees its place.

        Raises EngineError when the engine failed, ValueError when the request cannot fit.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[n]: log-probability of each id given the ids before it, at temperature 1; the first is 0."""
        ...

    async def load(self) -> Load:
        """What the engine holds now: cheap, and answered while it is paused."""
        ...

    async def alive(self) -> bool:
        """Whether the engine answers at all: cheap, also while it is paused or busy. Progress is judged by other signs.

        Never raises an EngineError but a LimitError: nobody knows then.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until resume; requests that come meanwhile are held. Pausing again applies the new mode.

        Args:
            mode: what becomes of requests in flight. `abort` ends them with what they have (FinishReason.ABORT),
                `retract` takes their cache away and computes it again after resume, `in_place` leaves it as it is.
        """
        ...

    async def resume(self) -> None:
        """Sample again; without effect on an engine that is not paused."""
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with FinishReason.ABORT and the ids sampled so far; an unknown rid is no error."""
        ...

    async def flush(self) -> None:
        """Forget cached prefixes. Never needed after an update: the cache belongs to a version of the weights."""
        ...

    async def update_weights(self, root: str, version: int) -> None:
        """Fetch the committed version from the weight store at root. Raises EngineError and keeps the old weights."""
        ...

    async def verify(self, root: str, version: int) -> None:
        """Return when the weights in use are those of the committed version, by checksum; else raise EngineError."""
        ...

    async def close(self) -> None:
        """Release what the engine holds; requests in flight end with FinishReason.ABORT."""
        ...
