"""Groups of graded episodes: 2G for each prompt, all at once, until a step has its number of live groups.

A group is live when it holds a correct and a wrong episode; the test is on the binary outcome alone. With
`reject_equal` the others are set aside and further prompts are sampled, in rounds, until the step is full or the rounds
are used up; live groups beyond the need are handed back for the next step. What comes out depends on seeds and prompts
only, never on the order in which episodes end.

With `over_issue` that is given up for time: more prompts are asked than are needed, the step ends with the groups that
were there first, and the others are dropped and counted. Long answers are dropped more often than short ones.

Deliberately not here: the choice of G out of 2G (algo/roc), storage of surplus groups (the caller's checkpoint), and
scheduling over engines.

Source: rStar2-Agent paper, oversampling in GRPO-RoC; dynamic sampling as in DAPO (arXiv 2503.14476), with bounded
rounds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rstar2_jax import settings
from rstar2_jax.data import chat as chat_room
from rstar2_jax.reward import outcome, quality
from rstar2_jax.rollout import agent, deadline, pool
from rstar2_jax.tools import protocol
from rstar2_jax.types import Group, Prompt, StopReason, Trajectory

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Collection:
    """What one step's rollouts gave.

    Args:
        groups: to train on, in the order in which their prompts were drawn; at most prompts_per_step.
        surplus: live groups beyond the need, for the next step.
        rejected: groups with equal rewards, set aside.
        sampled: every group sampled in this step, wherever it went.
        prompts_used: prompts drawn from the source: how far its cursor moves.
        refills: rounds of further prompts.
        faults: of all episodes of this step, in a fixed order.
        episodes: run in this step; unscored: of them, those without a verdict.
        dropped: groups that were given up unfinished, as there were enough others.
    """

    groups: tuple[Group, ...]
    surplus: tuple[Group, ...]
    rejected: tuple[Group, ...]
    sampled: tuple[Group, ...]
    prompts_used: int
    refills: int
    faults: tuple[agent.Fault, ...]
    episodes: int
    unscored: int
    dropped: int = 0

    def __repr__(self) -> str:
        # Short, because asyncio prints the value of a finished task when a loop closes.
        counts = f"{len(self.groups)} groups, {len(self.surplus)} surplus, {len(self.rejected)} rejected"
        return f"Collection({counts}, {self.unscored} of {self.episodes} episodes unscored)"

    @property
    def unscored_share(self) -> float:
        """Share of this step's episodes without a verdict; above Roc.max_unscored the step is to be abandoned."""
        return self.unscored / self.episodes if self.episodes else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """All that stays the same from step to step.

    Args:
        engine, chat, tools: what episodes run with; the engine is a pool, be it of one.
        grader: sandbox client.
        rollout, roc: settings.
        seed: of the run.
        grading: entered while an episode is graded.
    """

    engine: pool.Pool
    chat: chat_room.Chat
    tools: protocol.Registry
    grader: outcome.Verifier
    rollout: settings.Rollout
    roc: settings.Roc
    seed: int
    grading: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


async def collect(
    sampler: Sampler,
    draw: Callable[[int, int], Sequence[Prompt]],
    *,
    step: int,
    carried: Sequence[Group] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Collection:
    """Groups for one step.

    A round of refill draws as many prompts as the share of live groups so far makes needed, at most a whole step's.
    With no live group to be had, the step ends with fewer than prompts_per_step groups after max_refills rounds.

    Args:
        draw: (offset, count) -> prompts: `count` prompts that start `offset` prompts behind the source's cursor.
        step: of the run; goes into every seed.
        carried: surplus of the step before, oldest first; used before anything is sampled.
        on_progress: called with (episodes done, episodes started) after each episode.

    Raises:
        ValueError: a prompt is too long, or the source gave another number of prompts than asked for.
    """
    wanted = sampler.rollout.prompts_per_step
    live = list(carried)
    rejected: list[Group] = []
    everything: list[Group] = []
    faults: list[agent.Fault] = []
    progress = _Progress(on_progress)
    seen: collections.Counter[str] = collections.Counter()
    used, rounds, sampled_live, unscored, dropped = 0, 0, 0, 0, 0
    while len(live) < wanted and rounds <= sampler.roc.max_refills:
        missing = wanted - len(live)
        count = _round_size(missing, sampled_live, used - dropped, wanted)
        count = math.ceil(count * (1 + sampler.rollout.over_issue))
        prompts = list(draw(used, count))
        if len(prompts) != count:
            raise ValueError(f"step {step}: the source gave {len(prompts)} prompts, {count} were asked for")
        sampled = await _sample_groups(sampler, prompts, step, seen, progress, missing)
        used, rounds, dropped = used + count, rounds + 1, dropped + count - len(sampled)
        for group, group_faults in sampled:
            faults.extend(group_faults)
            everything.append(group)
            unscored += int((~group.valid).sum())
            keep = _keeps(sampler, group)
            (live if keep else rejected).append(group)
            sampled_live += keep
    return Collection(
        groups=tuple(live[:wanted]),
        surplus=tuple(live[wanted:]),
        rejected=tuple(rejected),
        sampled=tuple(everything),
        prompts_used=used,
        refills=max(0, rounds - 1),
        faults=tuple(faults),
        episodes=sum(len(group.trajectories) for group in everything),
        unscored=unscored,
        dropped=dropped,
    )


async def sample_group(
    sampler: Sampler,
    prompt: Prompt,
    *,
    step: int,
    first_index: int = 0,
    on_done: Callable[[], None] | None = None,
) -> tuple[Group, list[agent.Fault]]:
    """One prompt's graded episodes, with the faults in them; each is graded as soon as it ends.

    Args:
        first_index: sample index of the first episode; above 0 where a step meets the same prompt again.
        on_done: called after each episode.
    """

    async def one(index: int) -> tuple[Trajectory, quality.Penalties, list[agent.Fault]]:
        faults: list[agent.Fault] = []
        async with sampler.engine.seat(
            f"{sampler.seed}/{step}/{prompt.id}/{index}",
            family=prompt.id,
            prompt_tokens=len(sampler.chat.prompt_ids(prompt.question)),
            budget_tokens=sampler.rollout.max_response_tokens,
        ) as seat:
            trajectory = await agent.run_episode(
                seat,
                sampler.chat,
                sampler.tools,
                prompt,
                sample_index=index,
                seed=agent.episode_seed(sampler.seed, step, prompt.id, index),
                settings=sampler.rollout,
                on_fault=faults.append,
            )
            seat.lost = trajectory.stop_reason is StopReason.LOST
        decode = sampler.chat.tokenizer.decode
        with sampler.grading():
            (graded,) = await outcome.grade_trajectories(
                sampler.grader, decode, [trajectory], [prompt], deadline_s=sampler.rollout.deadline_s
            )
        if on_done:
            on_done()
        texts = [decode(turn.sampled_ids.tolist()) for turn in graded.turns]
        return graded, quality.assess(graded, texts), faults

    parts = await deadline.together([one(first_index + i) for i in range(sampler.rollout.oversample)])
    group = Group(
        prompt=prompt,
        trajectories=tuple(trajectory for trajectory, _, _ in parts),
        p_err=tuple(float(penalties.p_err) for _, penalties, _ in parts),
        p_format=tuple(float(penalties.p_format) for _, penalties, _ in parts),
    )
    return group, [fault for _, _, faults in parts for fault in faults]


def first_indices(prompts: Sequence[Prompt], size: int, seen: collections.Counter[str]) -> list[int]:
    """Sample index of each prompt's first episode: 0, and behind the earlier ones where its id was met before.

    Args:
        size: episodes of each prompt.
        seen: episodes that each id has had; counted on.
    """
    starts = []
    for prompt in prompts:
        starts.append(seen[prompt.id])
        seen[prompt.id] += size
    return starts


async def _sample_groups(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    step: int,
    seen: collections.Counter[str],
    progress: _Progress,
    missing: int,
) -> list[tuple[Group, list[agent.Fault]]]:
    """Groups of one round, in the order of the prompts: all, or with over_issue those that were there when as many as
    are missing could be kept. A prompt met again gets sample indices of its own."""
    size = sampler.rollout.oversample
    progress.start(size * len(prompts))
    work = [
        sample_group(sampler, prompt, step=step, first_index=start, on_done=progress.finish_one)
        for prompt, start in zip(prompts, first_indices(prompts, size, seen), strict=True)
    ]
    if not sampler.rollout.over_issue:
        return await deadline.together(work)
    kept = 0

    def enough(found: tuple[Group, list[agent.Fault]]) -> bool:
        nonlocal kept
        kept += _keeps(sampler, found[0])
        return kept >= missing

    return [found for found in await deadline.until(work, enough) if found is not None]


def _keeps(sampler: Sampler, group: Group) -> bool:
    return group.is_live or not sampler.roc.reject_equal


class _Progress:
    """Counts episodes for a display."""

    def __init__(self, report: Callable[[int, int], None] | None) -> None:
        self._report = report
        self.done, self.total = 0, 0

    def start(self, count: int) -> None:
        self.total += count

    def finish_one(self) -> None:
        self.done += 1
        if self._report:
            self._report(self.done, self.total)


def _round_size(missing: int, live: int, sampled: int, most: int) -> int:
    """Prompts of the next round: ceil(missing / share of live groups so far), between `missing` and `most`."""
    if sampled == 0:
        return missing
    return min(most, max(missing, math.ceil(missing * sampled / live) if live else most))
