"""Generation ahead of training: when collections start, what they may use, the bound, faults, restarts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rstar2_jax.rollout import ahead, groups, statistics
from rstar2_jax.types import FinishReason, Group, Prompt, StopReason, Trajectory, Turn, Verdict


def group(name, *versions):
    """A group of one episode a version."""
    made = []
    for version in versions:
        turn = Turn(
            token_ids=np.array([5, 6], np.int32),
            mask=np.array([True, False]),
            behavior_logprobs=np.array([-1, 0], np.float32),
            weights_versions=np.array([version, -1], np.int32),
            calls=(),
            results=(),
            finish_reason=FinishReason.STOP,
        )
        made.append(
            Trajectory(
                prompt_id=name,
                prompt_ids=np.zeros(1, np.int32),
                seed=0,
                sample_index=len(made),
                turns=(turn,),
                stop_reason=StopReason.ANSWERED,
                verdict=Verdict.WRONG,
            )
        )
    zeros = (0.0,) * len(made)
    prompt = Prompt(id=name, question="?", answer="1", source="s")
    return Group(prompt=prompt, trajectories=tuple(made), p_err=zeros, p_format=zeros)


class World:
    """Collections of two groups, one of them surplus where there is room; ids are of the version at their start."""

    def __init__(self, step=0):
        self.version = step
        self.calls = []
        self.running = 0

    async def collect(self, step, cursor, left_over):
        self.running += 1
        assert self.running == 1
        version = self.version
        self.calls.append((step, cursor, version, [g.prompt.id for g in left_over]))
        await asyncio.sleep(0)
        made = [group(f"{step}/{n}", version) for n in range(2)]
        live = [*left_over, *made]
        self.running -= 1
        return groups.Collection(
            groups=tuple(live[:2]),
            surplus=tuple(live[2:]),
            rejected=(),
            sampled=tuple(made),
            prompts_used=2,
            refills=0,
            faults=(),
            episodes=2,
            unscored=0,
        )


def settle():
    return asyncio.sleep(0.01)


def run_steps(bound, steps=5, first=0, cursor=0, left_over=()):
    """(world, batches, what had been started when each batch was trained)."""

    async def main():
        world = World(first)
        line = ahead.Ahead(
            world.collect, step=first, cursor=cursor, left_over=left_over, steps=steps, max_staleness=bound
        )
        batches, started = [], []
        for step in range(first, steps):
            line.trained(step)
            batches.append(await line.next())
            await settle()
            started.append(len(world.calls) + first)
            world.version = step + 1
        await line.close()
        return world, batches, started

    return asyncio.run(main())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_collection_starts_when_its_step_is_no_further_ahead_than_allowed(bound):
    world, batches, started = run_steps(bound, steps=6)
    assert [batch.step for batch in batches] == list(range(6))
    assert started == [min(6, step + 1 + bound) for step in range(6)]
    for step, _, version, _ in world.calls:
        assert step - bound <= version <= step


def test_nothing_is_collected_before_it_is_said_how_far_training_is():
    async def main():
        world = World()
        line = ahead.Ahead(world.collect, step=0, cursor=0, left_over=(), steps=3, max_staleness=2)
        await settle()
        assert world.calls == []
        line.trained(0)
        await settle()
        assert len(world.calls) == 3
        await line.close()

    asyncio.run(main())


def test_the_synchronous_loop_uses_no_group_left_over_and_counts_it():
    left = group("old", -1), group("older", -2)
    world, batches, _ = run_steps(0, left_over=left)
    assert [batch.dropped for batch in batches] == [2, 0, 0, 0, 0]
    assert all(batch.carried == 0 and call[3] == [] for batch, call in zip(batches, world.calls, strict=True))


def test_groups_left_over_are_used_while_they_are_young_enough():
    left = group("young", 3), group("mixed", 4, 2)
    world, batches, _ = run_steps(1, steps=6, first=4, cursor=8, left_over=left)
    assert world.calls[0] == (4, 8, 4, ["young"])
    assert batches[0].carried == 1 and batches[0].dropped == 1
    # Its second group stays over, is one step old in the next step and may be used there.
    assert world.calls[1][3] == ["4/1"]


def test_the_cursor_of_a_batch_is_the_one_to_restart_from():
    whole, batches, _ = run_steps(1, steps=4)
    again, rest, _ = run_steps(1, steps=4, first=2, cursor=batches[1].cursor)
    assert [batch.cursor for batch in batches] == [2, 4, 6, 8]
    assert [call[:2] for call in again.calls] == [call[:2] for call in whole.calls[2:]]
    assert [batch.step for batch in rest] == [2, 3]


def test_a_batch_with_ids_older_than_allowed_is_an_error_and_no_batch():
    async def lagging(step, cursor, left_over):
        world = World(step)
        world.version = 0
        return await world.collect(step, cursor, left_over)

    async def main():
        line = ahead.Ahead(lagging, step=3, cursor=0, left_over=(), steps=9, max_staleness=2)
        line.trained(3)
        with pytest.raises(ahead.StalenessError, match="step 3 holds ids of weights 0: 3 steps old, at most .* = 2"):
            await line.next()
        await line.close()

    asyncio.run(main())


def test_what_ends_a_collection_ends_the_wait_for_its_batch():
    async def broken(step, cursor, left_over):
        raise ValueError("prompt too long")

    async def main():
        line = ahead.Ahead(broken, step=0, cursor=0, left_over=(), steps=2, max_staleness=0)
        line.trained(0)
        with pytest.raises(ValueError, match="prompt too long"):
            await line.next()
        await line.close()

    asyncio.run(main())


def test_closing_ends_the_collection_in_flight():
    ended = []

    async def endless(step, cursor, left_over):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(step)

    async def main():
        line = ahead.Ahead(endless, step=0, cursor=0, left_over=(), steps=2, max_staleness=0)
        line.trained(0)
        await settle()
        await line.close()

    asyncio.run(main())
    assert ended == [0]


def test_staleness_is_told_in_steps_and_empty_groups_have_none():
    told = statistics.staleness([group("a", 4), group("b", 3, 4), group("c")], 4)
    assert told == {"rollout/staleness_mean": pytest.approx(1 / 3), "rollout/staleness_max": 1.0}
    assert statistics.staleness([], 4) == {"rollout/staleness_mean": None, "rollout/staleness_max": 0.0}
