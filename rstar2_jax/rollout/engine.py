"""The contract of a rollout engine: ids in, ids with log-probabilities and weight versions out.

An engine is one replica. Every implementation passes the same contract tests. Weights come by reference to a committed
version of the weight store (weights/), never as arrays, so that one machine and a cluster run the same path.

Deliberately not here: scheduling over several engines, and text of any kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rstar2_jax.types import FinishReason


class EngineError(RuntimeError):
    """The engine could not do what was asked (dead, refused, timed out): a fault of ours, never a reward."""


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

    temperature 0 is greedy decoding and is for evaluation and export checks only.
    """

    rid: str
    prompt_ids: Sequence[int]
    seed: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """What was sampled: ids i32[n] (a sampled stop id included), their log-probabilities f32[n] under the sampling
    temperature over the full vocabulary, the version of the weights behind each id i32[n], and why it ended."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    weights_versions: np.ndarray
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What an engine can hold: name of the replica, vocabulary, longest context, rows or KV tokens at once."""

    name: str
    vocab_size: int
    max_context_tokens: int
    kv_tokens: int


class RolloutEngine(Protocol):
    """One replica. All methods may be called from one event loop; generate is called many times at once."""

    @property
    def caps(self) -> Caps:
        """What this replica can hold."""
        ...

    @property
    def weights_version(self) -> int:
        """Version of the weights that new tokens are sampled from; -1 before the first update."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Raises EngineError when the engine failed, ValueError when the request cannot fit."""
        ...

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[n]: log-probability of each id given the ids before it; the first is 0."""
        ...

    async def update_weights(self, root: str, version: int) -> None:
        """Fetch the committed version from the weight store at root. Raises EngineError and keeps the old weights."""
        ...

    async def close(self) -> None:
        """Release what the engine holds; requests in flight end with FinishReason.ABORT."""
        ...
