"""From graded groups to micro-batches: the numpy way beside the jitted one, and every rollout at its own place."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.learner import batch
from rstar2_jax.types import FinishReason, Group, Prompt, StopReason, Trajectory, Turn, Verdict

ROLLOUT = settings.Rollout(
    prompts_per_step=4, group_size=4, oversample=8, max_prompt_tokens=8, max_response_tokens=24, max_turns=2
)
ROC, LOSS = settings.Roc(), settings.Loss()
LEARNER = settings.Learner(optimizer=settings.Optimizer(lr=1e-3), microbatch_rows=2, row_tokens=32)


def make_group(number, rewards, penalties=None, unscored=()):
    prompt = Prompt(id=f"p{number}", question="q", answer="1", source="t")
    trajectories = []
    for index, reward in enumerate(rewards):
        length = 2 + (7 * number + 3 * index) % 11
        turn = Turn(
            token_ids=np.arange(length, dtype=np.int32) + 10 * index,
            mask=np.arange(length) < length - 1,
            behavior_logprobs=np.where(np.arange(length) < length - 1, -0.5, 0).astype(np.float32),
            weights_versions=np.where(np.arange(length) < length - 1, 3, -1).astype(np.int32),
            finish_reason=FinishReason.STOP,
        )
        verdict = Verdict.CORRECT if reward else Verdict.WRONG
        trajectories.append(
            Trajectory(
                prompt_id=prompt.id,
                prompt_ids=np.full(3, 100 + number, np.int32),
                seed=index,
                sample_index=index,
                turns=(turn,),
                stop_reason=StopReason.ANSWERED,
                verdict=Verdict.UNSCORED if index in unscored else verdict,
            )
        )
    zeros = (0.0,) * len(rewards)
    return Group(prompt=prompt, trajectories=tuple(trajectories), p_err=penalties or zeros, p_format=zeros)


def test_exactly_g_scored_rollouts_are_kept_and_advantages_are_those_of_the_kept_rewards():
    groups = [make_group(0, [1, 0] * 4), make_group(1, [1] + [0] * 7, unscored=(3,)), make_group(2, [1, 1, 0])]
    chosen = batch.select(groups, jax.random.key(0), ROLLOUT, ROC, LOSS)
    assert chosen.kept.shape == chosen.advantages.shape == (3, 8)
    assert chosen.kept.sum(axis=1).tolist() == [4, 4, 3]
    assert not chosen.kept[1, 3]
    for place, group in enumerate(groups):
        kept = np.flatnonzero(chosen.kept[place])
        rewards = group.rewards[kept]
        expected = (rewards - rewards.mean()) / rewards.std()
        np.testing.assert_allclose(chosen.advantages[place, kept], expected, atol=1e-6)
        assert not np.delete(chosen.advantages[place], kept).any()


def test_a_groups_choice_does_not_depend_on_how_many_groups_follow_it():
    groups = [make_group(n, [1, 0, 0, 1, 0, 1, 1, 0]) for n in range(4)]
    key = jax.random.key(5)
    whole = batch.select(groups, key, ROLLOUT, ROC, LOSS)
    for count in range(4):
        part = batch.select(groups[:count], key, ROLLOUT, ROC, LOSS)
        np.testing.assert_array_equal(part.kept, whole.kept[:count])
        np.testing.assert_array_equal(part.advantages, whole.advantages[:count])


def test_rows_carry_their_own_ids_masks_and_advantage():
    groups = [make_group(n, [1, 0, 0, 1, 0, 1, 1, 0]) for n in range(2)]
    chosen = batch.select(groups, jax.random.key(1), ROLLOUT, ROC, LOSS)
    rows = batch.rows(groups, chosen)
    assert len(rows) == 8
    places = [(g, i) for g in range(2) for i in range(8) if chosen.kept[g, i]]
    for row, (g, i) in zip(rows, places, strict=True):
        trajectory = groups[g].trajectories[i]
        assert row.token_ids.tolist() == [100 + g] * 3 + trajectory.turns[0].token_ids.tolist()
        assert row.mask.tolist() == [False] * 3 + trajectory.turns[0].mask.tolist()
        assert row.advantage == pytest.approx(float(chosen.advantages[g, i]))


def test_a_group_of_equal_rewards_gives_no_row_and_no_optimizer_step():
    groups = [make_group(0, [1] * 8)]
    rows = batch.rows(groups, batch.select(groups, jax.random.key(0), ROLLOUT, ROC, LOSS))
    assert rows == [] and batch.minibatches(rows, LEARNER) == []


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_minibatches_deal_every_trained_token_once_and_normalise_over_their_own(count, aggregation):
    groups = [make_group(n, [1, 0, 0, 1, 0, 1, 1, 0]) for n in range(3)]
    rows = batch.rows(groups, batch.select(groups, jax.random.key(2), ROLLOUT, ROC, LOSS))
    how = settings.Learner(
        optimizer=LEARNER.optimizer,
        loss=settings.Loss(aggregation=aggregation),
        microbatch_rows=2,
        row_tokens=32,
        minibatches=count,
    )
    work = batch.minibatches(rows, how)
    assert len(work) == count
    trained = [sum(float(part.loss_mask.sum()) for part in step.microbatches) for step in work]
    assert sum(trained) == sum(row.mask.sum() for row in rows)
    for number, (step, tokens) in enumerate(zip(work, trained, strict=True)):
        assert step.normaliser == (tokens if aggregation == "token_mean" else len(rows[number::count]))
        assert all(part.tokens.shape == (2, 32) for part in step.microbatches)


def test_rows_that_do_not_divide_into_microbatches_are_refused():
    groups = [make_group(0, [1, 0] * 4)]
    rows = batch.rows(groups, batch.select(groups, jax.random.key(0), ROLLOUT, ROC, LOSS))
    whole = batch.pack.pack(rows, row_tokens=16, rows_multiple=3)
    with pytest.raises(ValueError, match="do not divide into micro-batches of 2"):
        batch.cut(whole, 2)


def test_overlong_filtering_trains_on_no_rollout_that_was_cut_off_and_leaves_the_advantages_alone():
    whole = make_group(0, [1, 0, 0, 0])
    ends = (StopReason.ANSWERED, StopReason.LENGTH, StopReason.TURNS, StopReason.ANSWERED)
    ended = [dataclasses.replace(t, stop_reason=end) for t, end in zip(whole.trajectories, ends, strict=True)]
    group = dataclasses.replace(whole, trajectories=tuple(ended))
    masking = settings.Roc(truncated="masked")
    chosen = batch.select([group], jax.random.key(0), ROLLOUT, masking, LOSS)
    plain = batch.select([group], jax.random.key(0), ROLLOUT, ROC, LOSS)
    assert (chosen.advantages == plain.advantages).all()
    everything, masked = batch.rows([group], chosen), batch.rows([group], chosen, masking)
    assert len(everything) == 4 and [row.advantage for row in masked] == [
        everything[0].advantage,
        everything[3].advantage,
    ]


def test_repetition_counts_in_the_penalty_by_its_weight():
    repeating, fresh = np.tile(np.arange(4, dtype=np.int32), 3), np.arange(12, dtype=np.int32)
    turns = [
        dataclasses.replace(make_group(0, [1]).trajectories[0].turns[0], **turn_of(ids)) for ids in (repeating, fresh)
    ]
    base = make_group(0, [1] * 8 + [0] * 8)
    said = [dataclasses.replace(t, turns=(turns[i % 2],)) for i, t in enumerate(base.trajectories)]
    group = dataclasses.replace(base, trajectories=tuple(said))
    kept = [
        batch.select([group], jax.random.key(n), ROLLOUT, settings.Roc(repetition_weight=weight), LOSS).kept[0, :8]
        for weight in (0.0, 50.0)
        for n in range(20)
    ]
    plain, weighed = np.mean(kept[:20], axis=0), np.mean(kept[20:], axis=0)
    assert weighed[1::2].mean() > 0.45 > 0.1 > weighed[::2].mean() and abs(plain[::2].mean() - plain[1::2].mean()) < 0.2


def turn_of(ids):
    ones = np.ones(len(ids))
    return {
        "token_ids": ids,
        "mask": ones.astype(bool),
        "behavior_logprobs": -ones.astype(np.float32),
        "weights_versions": ones.astype(np.int32),
    }
