"""The values that travel between the rooms.

Host values are frozen dataclasses; device values are pytrees. Every per-token field of a turn is one record of equal
lengths, checked at birth, so that a mask can never drift from its ids. Text is never stored here: it is a view of ids.

Deliberately not here: settings (settings.py) and anything that computes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import numpy as np


class CallStatus(enum.StrEnum):
    """What became of one tool call. Names before the gap come from the sandbox, those after it from the agent loop."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT_WALL = "timeout_wall"
    TIMEOUT_CPU = "timeout_cpu"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    REJECTED = "rejected"
    INFRA = "infra"

    PARSE_ERROR = "parse_error"
    UNKNOWN_TOOL = "unknown_tool"
    NOT_EXECUTED = "not_executed"

    @property
    def is_bad(self) -> bool:
        """True when the call failed through the model's own fault (counts as a bad call in p_err)."""
        return self in _BAD

    @property
    def is_counted(self) -> bool:
        """True when the call counts in p_err at all: faults of the infrastructure and refused calls count nowhere."""
        return self is CallStatus.OK or self in _BAD


_BAD = frozenset(
    {
        CallStatus.ERROR,
        CallStatus.TIMEOUT_WALL,
        CallStatus.TIMEOUT_CPU,
        CallStatus.OOM,
        CallStatus.OUTPUT_LIMIT,
        CallStatus.KILLED,
        CallStatus.PARSE_ERROR,
        CallStatus.UNKNOWN_TOOL,
    }
)


class FinishReason(enum.StrEnum):
    """Why the engine stopped a turn: a stop id was sampled, the token limit was met, or the request was aborted."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"  # the last turn made no tool call
    LENGTH = "length"  # the engine hit the token limit inside a turn
    BUDGET = "budget"  # the tool turn did not fit into the rest of the budget
    TURNS = "turns"  # the turn limit was met with a call pending
    LOST = "lost"  # a fault of ours (engine, sandbox, deadline): never graded


class Verdict(enum.StrEnum):
    """The outcome of grading. UNSCORED is a fault of ours and never becomes a reward."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNSCORED = "unscored"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem. `id` is unique in its source, `answer` is the gold integer as text, `source` names the family."""

    id: str
    question: str
    answer: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call as the model wrote it; `error` says why it could not be parsed (then `arguments` is empty)."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What one call gave: typed status, captured output, seconds waited in queues and seconds run."""

    status: CallStatus
    stdout: str = ""
    stderr: str = ""
    queue_s: float = 0.0
    run_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """Ids appended to an episode in one step: the sampled ids (mask True), then what the loop appended (mask False).

    The appended part is the forced end token where the model gave none, the rendered tool replies and the start of the
    next assistant turn. Fields with [n] have equal lengths.

    Args:
        token_ids: i32[n].
        mask: bool[n], True exactly where the policy sampled the id.
        behavior_logprobs: f32[n], log-probability under the sampling policy; 0 where mask is False.
        weights_versions: i32[n], version of the weights that sampled the id; -1 where mask is False.
        calls: parsed tool calls, in the order of the text.
        results: one for each call, same order.
        finish_reason: as the engine reported it.

    Raises:
        ValueError: lengths differ, a value stands where the mask is False, or calls and results do not pair up.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    behavior_logprobs: np.ndarray
    weights_versions: np.ndarray
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "mask": len(self.mask),
            "behavior_logprobs": len(self.behavior_logprobs),
            "weights_versions": len(self.weights_versions),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a turn's per-token fields must have equal lengths, got {lengths}")
        if np.any(self.behavior_logprobs[~self.mask] != 0) or np.any(self.weights_versions[~self.mask] != -1):
            raise ValueError("forced ids carry no logprob and no weights version: only sampled ids do")
        if len(self.calls) != len(self.results):
            raise ValueError(f"{len(self.calls)} calls but {len(self.results)} results: each call has exactly one")

    @property
    def sampled_ids(self) -> np.ndarray:
        """i32[k]: the ids that the policy sampled in this turn."""
        return self.token_ids[self.mask]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One episode: the prompt's ids, the turns, why it ended, and (after grading) its verdict.

    `seed` alone with the prompt and the weights replays it; `sample_index` is its place among the prompt's rollouts;
    `answer` is the extracted text that was graded; `engine` names the replica that generated it.
    """

    prompt_id: str
    prompt_ids: np.ndarray
    seed: int
    sample_index: int
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: str | None = None
    verdict: Verdict | None = None
    engine: str = ""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of ids that the policy sampled in the whole episode."""
        return int(sum(int(turn.mask.sum()) for turn in self.turns))

    @property
    def num_response_tokens(self) -> int:
        """Number of ids after the prompt, tool replies included."""
        return sum(len(turn.token_ids) for turn in self.turns)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Group:
    """All episodes of one prompt, graded, in the order of their sample index. Plain values, so that it can be stored.

    Args:
        prompt: the problem.
        trajectories: N graded episodes.
        p_err, p_format: penalties of each, same order (see reward/quality).

    Raises:
        ValueError: the lengths differ, an episode has no verdict, or it belongs to another prompt.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    p_err: tuple[float, ...]
    p_format: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {"trajectories": len(self.trajectories), "p_err": len(self.p_err), "p_format": len(self.p_format)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"group of prompt {self.prompt.id!r}: fields must have equal lengths, got {lengths}")
        for trajectory in self.trajectories:
            if trajectory.prompt_id != self.prompt.id or trajectory.verdict is None:
                raise ValueError(
                    f"group of prompt {self.prompt.id!r}: sample {trajectory.sample_index} of prompt "
                    f"{trajectory.prompt_id!r} has verdict {trajectory.verdict}; grade the prompt's own episodes first"
                )

    def __repr__(self) -> str:
        outcomes = "".join(t.verdict.value[0] for t in self.trajectories if t.verdict is not None)
        return f"Group({self.prompt.id!r}: {outcomes})"

    @property
    def rewards(self) -> np.ndarray:
        """f32[N]: 1 where the verdict is correct, else 0; meaningless where `valid` is False."""
        return np.asarray([t.verdict is Verdict.CORRECT for t in self.trajectories], np.float32)

    @property
    def valid(self) -> np.ndarray:
        """bool[N]: False where the episode is unscored and so leaves every statistic."""
        return np.asarray([t.verdict is not Verdict.UNSCORED for t in self.trajectories], bool)

    @property
    def penalties(self) -> np.ndarray:
        """f32[N]: p_total = p_err + p_format."""
        return np.asarray(self.p_err, np.float32) + np.asarray(self.p_format, np.float32)

    @property
    def is_live(self) -> bool:
        """True when scored episodes of both outcomes are there, so that the group has a gradient."""
        scored = self.rewards[self.valid]
        return bool(scored.size) and bool(scored.min() != scored.max())

    @property
    def oldest_version(self) -> int:
        """The oldest weights behind any sampled id; a number beyond every version where nothing was sampled."""
        turns = [turn for t in self.trajectories for turn in t.turns if turn.mask.any()]
        return min((int(turn.weights_versions[turn.mask].min()) for turn in turns), default=2**31)

    @property
    def unique_frac(self) -> float:
        """Distinct id sequences over episodes; below 1 on long answers means that seeds are not doing their work."""
        rows = [[i for turn in t.turns for i in turn.token_ids.tolist()] for t in self.trajectories]
        return len({tuple(row) for row in rows}) / max(1, len(rows))


@flax.struct.dataclass
class TrainBatch:
    """Rows for the learner, possibly packed: several sequences share a row, told apart by segment_ids (0 = padding).

    Shapes: every field is [B, T]; tokens, positions, segment_ids i32; loss_mask bool; the others f32. Token t is
    predicted from t - 1 of the same segment; loss_mask marks trained tokens at their own index.
    """

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    segment_ids: jax.Array | np.ndarray
    loss_mask: jax.Array | np.ndarray
    behavior_logprobs: jax.Array | np.ndarray
    advantages: jax.Array | np.ndarray


@flax.struct.dataclass
class TrainState:
    """What the optimizer step maps to its successor: step i32[], params and Optax state (float32 masters)."""

    step: jax.Array
    params: Any
    opt_state: Any
