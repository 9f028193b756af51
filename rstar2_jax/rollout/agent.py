"""One episode: the model writes a turn, its tool calls run, their replies are appended, until it answers or must stop.

Ids only: what the engine sampled is appended as it is and trained on; what the loop appends (a missing end token, tool
replies, the start of the next assistant turn) has mask 0 and no log-probability. Text is decoded from a turn's sampled
ids for reading its calls and is never encoded again.

Every wait has the deadline of the settings, and an error names what was waited for. Waiting for room in an engine, at
first or after an engine failed, does not count against a turn's; it has a limit of its own: when no rollout at all was
given a place for as long as the slowest one that holds a place could take. A
fault of ours ends the episode as LOST, with the finished turns kept and a Fault reported; so does a call that the
infrastructure failed.

Deliberately not here: grading, the choice among engines and repeated attempts at a lost turn (pool.py), and history
editing.

Source: rStar2-Agent paper, multi-turn rollout with a Python environment. Deviations: seeds for each turn, replies for
refused and malformed calls, and a tool turn that does not fit is left out as a whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rstar2_jax.data import chat as chat_room
from rstar2_jax.rollout import deadline
from rstar2_jax.rollout.engine import Caps, EngineError, Generation, LimitError, Request, RoomError, Sampling
from rstar2_jax.settings import Rollout
from rstar2_jax.tools import parse, protocol
from rstar2_jax.types import CallStatus, FinishReason, Prompt, StopReason, ToolCall, ToolResult, Trajectory, Turn

_LOG = logging.getLogger(__name__)


class Seat(Protocol):
    """Where an episode samples its turns: a place in a pool of engines (seat.py)."""

    @property
    def caps(self) -> Caps:
        """Of the engine behind it."""
        ...

    async def ready(self, limit_s: float) -> None:
        """Return when there is room for the episode. Raises EngineError when there never will be, RoomError when nobody
        was given a place for so long."""
        ...

    async def generate(self, request: Request) -> Generation | None:
        """Sample one turn; None when the place was lost meanwhile: to be asked again when there is room."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of ours in an episode: never a reward, always counted.

    Args:
        kind: `deadline`, `room`, `limit`, `engine`, `tool` or `unexpected`.
        prompt_id, sample_index, turn: where it happened.
        waiting_for: what the episode was waiting for.
        message: the error in words.
        lost: True when it ended the episode.
    """

    kind: str
    prompt_id: str
    sample_index: int
    turn: int
    waiting_for: str
    message: str
    lost: bool


_KINDS = {deadline.DeadlineError: "deadline", RoomError: "room", LimitError: "limit"}
_OURS = frozenset({CallStatus.INFRA, CallStatus.REJECTED})


@dataclasses.dataclass(kw_only=True, slots=True)
class _Episode:
    """What one running episode knows."""

    engine: Seat
    chat: chat_room.Chat
    tools: protocol.Registry
    prompt: Prompt
    prompt_ids: list[int]
    sample_index: int
    seed: int
    settings: Rollout
    turns: list[Turn] = dataclasses.field(default_factory=list)
    waiting_for: str = "its start"
    faults: list[Fault] = dataclasses.field(default_factory=list)

    @property
    def rid(self) -> str:
        """Name of the turn that comes next, unique among the requests in flight."""
        return f"{self.prompt.id}/{self.sample_index}/{len(self.turns)}-{self.seed:08x}"

    @property
    def name(self) -> str:
        """Name of the whole episode, unique in the run: a step's seeds differ from those of all others."""
        return _digest([self.prompt.id, self.sample_index, self.seed], 16).hex()

    def context_ids(self) -> list[int]:
        """All ids so far; the one place where the context is put together."""
        context = list(self.prompt_ids)
        for turn in self.turns:
            context += turn.token_ids.tolist()
        return context

    def fault(self, kind: str, error: BaseException | str, *, lost: bool, waiting_for: str = "") -> None:
        """Record and log one fault."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        fault = Fault(
            kind=kind,
            prompt_id=self.prompt.id,
            sample_index=self.sample_index,
            turn=len(self.turns),
            waiting_for=waiting_for or self.waiting_for,
            message=message,
            lost=lost,
        )
        self.faults.append(fault)
        _LOG.warning("episode fault (%s)%s: %s", kind, ", episode lost" if lost else "", message)


def episode_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one episode in [0, 2**31): a stable hash, the same on every machine and in every process."""
    return _hash31("episode", run_seed, step, prompt_id, sample_index)


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn in [0, 2**31), from the seed of its episode."""
    return _hash31("turn", seed, turn)


def remaining_tokens(settings: Rollout, turns: Sequence[Turn]) -> int:
    """Ids that an episode may still append: max_response_tokens - sum of the turns' lengths, never below 0.

    Counted from the record each time, so that a resumed episode can neither stop early nor overrun.
    """
    return max(0, settings.max_response_tokens - sum(len(turn.token_ids) for turn in turns))


def repeat_call_frac(trajectory: Trajectory) -> float:
    """Share of an episode's calls, after its first, that equal an earlier one; 1 warns of a policy in a loop."""
    return parse.repeat_share([call for turn in trajectory.turns for call in turn.calls])


async def run_episode(
    engine: Seat,
    chat: chat_room.Chat,
    tools: protocol.Registry,
    prompt: Prompt,
    *,
    sample_index: int,
    seed: int,
    settings: Rollout,
    on_fault: Callable[[Fault], None] | None = None,
) -> Trajectory:
    """One trajectory, ungraded. It is LOST when a fault of ours ended it, with the finished turns kept.

    A call that the infrastructure failed (INFRA or REJECTED) ends it too: an answer without its tool is our fault.

    After each turn the first of these that holds ends the episode: the engine met the token limit (LENGTH, nothing of
    the turn is executed); no tool call (ANSWERED); no token left (BUDGET); turn limit (TURNS, the calls are not
    executed); the tool replies and one more id do not fit (BUDGET, nothing is appended).

    Args:
        sample_index: place among the prompt's rollouts.
        seed: of the episode (see episode_seed); with the prompt and the weights it replays the episode.
        on_fault: called for each fault, after the episode.

    Raises:
        ValueError: the prompt is longer than settings.max_prompt_tokens, or the episode may outgrow the engine.
    """
    episode = _Episode(
        engine=engine,
        chat=chat,
        tools=tools,
        prompt=prompt,
        prompt_ids=list(chat.prompt_ids(prompt.question)),
        sample_index=sample_index,
        seed=seed,
        settings=settings,
    )
    _check_fits(episode)
    try:
        async with tools.episode(episode.name) as episode.tools:
            stop_reason = await _run(episode)
    except (deadline.DeadlineError, EngineError) as error:
        episode.fault(_KINDS.get(type(error), "engine"), error, lost=True)
        stop_reason = StopReason.LOST
    except Exception as error:  # one of the three places of fault tolerance: a lost episode never ends the step
        _LOG.warning("unexpected fault in episode turn %s", episode.rid, exc_info=error)
        episode.fault("unexpected", error, lost=True)
        stop_reason = StopReason.LOST
    if on_fault is not None:
        for fault in episode.faults:
            on_fault(fault)
    return Trajectory(
        prompt_id=prompt.id,
        prompt_ids=np.asarray(episode.prompt_ids, np.int32),
        seed=seed,
        sample_index=sample_index,
        turns=tuple(episode.turns),
        stop_reason=stop_reason,
        engine=engine.caps.name,
    )


async def _run(episode: _Episode) -> StopReason:
    """Turns until a reason to stop."""
    while True:
        generation = await _generate(episode)
        stop_reason = await _finish_turn(episode, generation)
        if stop_reason is not None:
            return stop_reason


async def _generate(episode: _Episode) -> Generation:
    """The next turn from the engine, checked."""
    settings = episode.settings
    limit = remaining_tokens(settings, episode.turns)
    request = Request(
        rid=episode.rid,
        prompt_ids=episode.context_ids(),
        seed=turn_seed(episode.seed, len(episode.turns)),
        sampling=Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=limit,
            stop_ids=tuple(episode.chat.stop_ids),
        ),
    )
    room_s = 2 * settings.max_turns * settings.deadline_s  # by then every rollout that holds a place must have ended
    generation = None
    while generation is None:
        episode.waiting_for = f"room in an engine, request {request.rid}"
        await episode.engine.ready(room_s)
        episode.waiting_for = f"engine {episode.engine.caps.name!r}, request {request.rid}"
        generation = await deadline.within(
            functools.partial(episode.engine.generate, request),
            settings.deadline_s,
            f"{episode.waiting_for} (prompt {episode.prompt.id}, turn {len(episode.turns)})",
        )
    if generation.finish_reason is FinishReason.ABORT:
        raise EngineError(f"{episode.waiting_for}: the engine aborted it after {len(generation.token_ids)} ids")
    if len(generation.token_ids) > limit:
        raise EngineError(f"{episode.waiting_for}: {len(generation.token_ids)} ids came, {limit} were allowed")
    return generation


async def _finish_turn(episode: _Episode, generation: Generation) -> StopReason | None:
    """Run the calls of what was sampled and append the turn to the record; the one place where turns are appended."""
    settings = episode.settings
    sampled = _make_turn(generation)
    if generation.finish_reason is FinishReason.LENGTH:
        episode.turns.append(sampled)
        return StopReason.LENGTH
    sampled_ids, ended = _without_end(generation.token_ids, episode.chat.stop_ids)
    calls = parse.parse(episode.chat.tokenizer.decode(sampled_ids))
    if not calls:
        episode.turns.append(sampled)
        return StopReason.ANSWERED
    out_of_budget = remaining_tokens(settings, [*episode.turns, sampled]) == 0
    if out_of_budget or len(episode.turns) + 1 >= settings.max_turns:
        refused = _refused(len(calls), "the episode ended before this call was executed")
        episode.turns.append(_make_turn(generation, calls=calls, results=refused))
        return StopReason.BUDGET if out_of_budget else StopReason.TURNS
    results = await _run_calls(episode, calls)
    if any(result.status in _OURS for result in results):
        episode.turns.append(_make_turn(generation, calls=calls, results=results))
        return StopReason.LOST
    replies = [
        chat_room.tool_reply_text(result, call, episode.chat.tokenizer, settings.max_reply_tokens)
        for call, result in zip(calls, results, strict=True)
    ]
    appended = [*(() if ended else episode.chat.end_ids), *episode.chat.reply_ids(replies)]
    turn = _make_turn(generation, appended, calls, results)
    if remaining_tokens(settings, [*episode.turns, turn]) == 0:
        episode.turns.append(_make_turn(generation, calls=calls, results=results))
        return StopReason.BUDGET
    episode.turns.append(turn)
    return None


async def _run_calls(episode: _Episode, calls: tuple[ToolCall, ...]) -> tuple[ToolResult, ...]:
    """One result for each call, in call order; all run at once. Raises DeadlineError after all have ended."""
    limit = episode.settings.max_calls_per_turn
    places = [f"tool {call.name[:80]!r}, call {index} of request {episode.rid}" for index, call in enumerate(calls)]
    episode.waiting_for = f"{min(limit, len(calls))} tool calls of request {episode.rid}"
    where = f" (prompt {episode.prompt.id}, turn {len(episode.turns)})"
    outcomes = await asyncio.gather(
        *(
            deadline.within(
                functools.partial(episode.tools.run, call, key=_call_key(episode.rid, index, call)),
                episode.settings.deadline_s,
                places[index] + where,
            )
            for index, call in enumerate(calls[:limit])
        ),
        return_exceptions=True,
    )
    results = []
    for place, outcome in zip(places, outcomes, strict=False):
        if isinstance(outcome, deadline.DeadlineError):
            raise outcome
        if not isinstance(outcome, ToolResult):
            fault = outcome if isinstance(outcome, BaseException) else f"gave {outcome!r} instead of a ToolResult"
            episode.fault("tool", fault, lost=True, waiting_for=place + where)
            outcome = ToolResult(status=CallStatus.INFRA, stderr="the tool was not available")
        elif outcome.status in _OURS:
            reason = outcome.stderr or "no reason given"
            episode.fault("tool", f"{outcome.status.value}: {reason}", lost=True, waiting_for=place + where)
        results.append(outcome)
    refused = f"at most {limit} calls are executed in one turn; this one was not"
    return (*results, *_refused(len(calls[limit:]), refused))


def _refused(count: int, reason: str) -> tuple[ToolResult, ...]:
    return (ToolResult(status=CallStatus.NOT_EXECUTED, stderr=reason),) * count


def _make_turn(
    generation: Generation,
    appended: Sequence[int] = (),
    calls: tuple[ToolCall, ...] = (),
    results: tuple[ToolResult, ...] = (),
) -> Turn:
    """One record: the sampled ids with mask True, then the appended ids with mask False."""
    sampled, forced = len(generation.token_ids), len(appended)
    return Turn(
        token_ids=np.concatenate([np.asarray(generation.token_ids, np.int32), np.asarray(appended, np.int32)]),
        mask=np.arange(sampled + forced) < sampled,
        behavior_logprobs=np.concatenate([np.asarray(generation.logprobs, np.float32), np.zeros(forced, np.float32)]),
        weights_versions=np.concatenate(
            [np.asarray(generation.weights_versions, np.int32), np.full(forced, -1, np.int32)]
        ),
        calls=calls,
        results=results,
        finish_reason=generation.finish_reason,
    )


def _without_end(token_ids: np.ndarray, end_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Ids without a sampled end token, and whether there was one; any of the end ids will do."""
    ids = [int(i) for i in token_ids]
    ended = bool(ids) and ids[-1] in end_ids
    return (ids[:-1] if ended else ids), ended


def _check_fits(episode: _Episode) -> None:
    settings, caps, length = episode.settings, episode.engine.caps, len(episode.prompt_ids)
    if length > settings.max_prompt_tokens:
        raise ValueError(
            f"prompt {episode.prompt.id!r} has {length} ids, above Rollout.max_prompt_tokens = "
            f"{settings.max_prompt_tokens}: drop it from the data or raise the limit"
        )
    needed = settings.max_prompt_tokens + settings.max_response_tokens
    if needed > caps.max_context_tokens:
        raise ValueError(
            f"Rollout.max_prompt_tokens + max_response_tokens = {needed}, above the {caps.max_context_tokens} context "
            f"tokens of engine {caps.name!r}: lower one of them or give the engine a longer context"
        )


def _call_key(rid: str, index: int, call: ToolCall) -> str:
    """Names one execution: the same again only for the same code at the same place of the same run."""
    return _digest([rid, index, call.name, dict(call.arguments)], 16).hex()


def _hash31(*parts: int | str) -> int:
    return int.from_bytes(_digest(list(parts), 8), "big") >> 33


def _digest(parts: list[Any], size: int) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size).digest()
