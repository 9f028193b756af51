"""Asking a finished model: its weights in an engine, many problems in flight, graded groups back.

What evaluation and curation share. The weights are read into the memory of this host, in float32 and whole, and the
engines fetch them from the weight store: no device has to hold them beside an engine.

Deliberately not here: what is made of the answers.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from rstar2_jax import begin, settings
from rstar2_jax.report import console
from rstar2_jax.rollout import deadline, groups, tier
from rstar2_jax.types import Group, Prompt
from rstar2_jax.weights import publish

_GROUPS_AT_ONCE = 64
_OF_RUN = ("init_from", "seed")
_OF_TASK = ("source", "path", "difficulty", "families", "tools", "tool_name", "template")
_OF_ROLLOUT = (
    "temperature", "top_p", "top_k", "max_response_tokens", "max_turns", "max_calls_per_turn", "max_reply_tokens"
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A tier whose engine holds the model's weights, and the sampler that asks it."""

    tier: tier.Tier
    sampler: groups.Sampler


@contextlib.asynccontextmanager
async def open_room(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    screen: console.Console,
) -> AsyncIterator[Room]:
    """The model of `run.init_from` ready to be asked `rollout.oversample` times for each problem.

    The weights go through the weight store, as in training.

    Raises:
        ValueError, checkpoint.CheckpointError: the weights are missing or are not those of `model`.
    """
    workdir = Path(run.workdir)
    async with tier.open_tier(workdir, model, task, rollout, sandbox, report=screen.note) as rooms:
        weights = str(workdir / "weights")
        publish.prepare(weights, -1)
        params = begin.load_params(run.init_from, model, run.seed)
        publish.publish(params, model, weights, 0, dtype=rollout.fleet.published_dtype(model.compute_dtype), keep=1)
        del params
        await rooms.engine.update_weights(weights, 0)
        sampler = rooms.sampler(rollout, settings.Roc(reject_equal=False), run.seed)
        await rooms.warm_up("1", rollout)
        yield Room(tier=rooms, sampler=sampler)


def identity(run: settings.Run, task: settings.Task, rollout: settings.Rollout) -> dict[str, Any]:
    """What was asked of whom and how, as JSON gives it back: answers that differ in any of it do not belong together.

    Lengths of prompts, shapes of the engine and time limits are left out: an answer does not depend on them.
    """
    parts = ((run, _OF_RUN), (task, _OF_TASK), (rollout, _OF_ROLLOUT))
    found = {name: getattr(owner, name) for owner, names in parts for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


async def ask(
    sampler: groups.Sampler, problems: Sequence[Prompt], step: int, name: str, screen: console.Console
) -> list[Group]:
    """Graded groups of all problems, a bounded number of them in flight, in the order of the problems."""
    limit = asyncio.Semaphore(_GROUPS_AT_ONCE)
    done = 0

    def finished() -> None:
        nonlocal done
        done += 1
        screen.progress(name, done, len(problems) * sampler.rollout.oversample)

    async def one(problem: Prompt, first: int) -> Group:
        async with limit:
            found = await groups.sample_group(sampler, problem, step=step, first_index=first, on_done=finished)
            return found[0]

    # Rows of a file may carry one id twice: their rollouts need names of their own.
    starts = groups.first_indices(problems, sampler.rollout.oversample, collections.Counter())
    return await deadline.together([one(problem, start) for problem, start in zip(problems, starts, strict=True)])


def refuse_long(name: str, problems: Sequence[Prompt], length: Callable[[Prompt], int], limit: int) -> None:
    """Refuse a set with a prompt above the limit: an evaluation that leaves problems out measures something else.

    Args:
        length: tokens of a prompt as the model sees it.

    Raises:
        ValueError: which problem it is.
    """
    longest = max(problems, key=length)
    if length(longest) > limit:
        raise ValueError(
            f"set {name}: problem {longest.id!r} has {length(longest)} tokens, above Rollout.max_prompt_tokens = "
            f"{limit}; an evaluation leaves no problem out: raise the limit"
        )
