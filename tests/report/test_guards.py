"""Guards: a collapse by hand, what only looks like one, and alarms that are raised once until they clear."""

from __future__ import annotations

import pytest

from rstar2_jax.report import guards


def look(step, accuracy, tokens=100.0, repeats=0.0, n=400.0):
    return guards.Look(step=step, accuracy=accuracy, n=n, tokens=tokens, repeats=repeats)


RISE = [look(0, 0.4), look(10, 0.6), look(20, 0.8)]


def test_a_fall_that_lasts_with_answers_that_grow_is_a_collapse_and_names_the_best_step():
    said = guards.collapse([*RISE, look(30, 0.6, tokens=160), look(40, 0.5, tokens=200)])
    assert said is not None and said.startswith("collapse: accuracy fell from 0.80 (step 20) to 0.50 (step 40)")
    assert "grew from 100 to 200 tokens" in said and "weights of step 20" in said
    assert "calls repeat" in guards.collapse([*RISE, look(30, 0.6, repeats=0.3), look(40, 0.5, repeats=0.4)])


@pytest.mark.parametrize(
    "after",
    [
        [look(30, 0.6, tokens=160)],  # one look only
        [look(30, 0.6, tokens=160), look(40, 0.79, tokens=160)],  # it came back
        [look(30, 0.6), look(40, 0.5)],  # no longer answers, no repetition: something else
        [look(30, 0.78, tokens=160), look(40, 0.77, tokens=160)],  # within noise
        [look(30, 0.6, tokens=160, n=8), look(40, 0.6, tokens=160, n=8)],  # too few answers to tell
    ],
)
def test_what_only_looks_like_a_collapse_is_none(after):
    assert guards.collapse([*RISE, *after]) is None


def test_looks_are_exams_where_there_are_some_and_blocks_of_steps_otherwise():
    steps = [
        (s, {"rollout/reward_mean": s / 10, "rollout/episodes": 8.0, "rollout/response_tokens_mean": 5.0})
        for s in range(12)
    ]
    found = guards.looks(steps)
    assert [(x.step, round(x.accuracy, 2), x.n) for x in found] == [(4, 0.2, 40.0), (9, 0.7, 40.0)]
    exam = (12, {"eval/accuracy": 0.9, "eval/scored": 30.0, "eval/response_tokens_mean": 7.0})
    assert guards.looks([*steps, exam]) == [look(12, 0.9, tokens=7.0, n=30.0)]
    assert guards.best(found).step == 9 and guards.best([]) is None


def test_an_alarm_is_raised_once_until_it_clears():
    watch = guards.Guards()
    bad = {"rollout/episodes": 100.0, "rollout/unscored": 5.0}
    good = {"rollout/episodes": 100.0, "rollout/unscored": 1.0}
    said = [watch.add(step, told)[0] for step, told in enumerate([bad, bad, good, bad])]
    assert [len(new) for new in said] == [1, 0, 0, 1] and "5 of 100 episodes have no verdict" in said[0][0]
    assert watch.add(9, bad)[1]["guard/unscored"] == 1.0 and watch.add(10, good)[1]["guard/unscored"] == 0.0


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"rollout/live_groups_frac": 0.1}, {"rollout/live_groups_frac": 0.1}, "live groups: 10% of the last 5"),
        ({"learner/grad_norm": 0.1}, {"learner/grad_norm": 1.2}, "norm 1.2, ten times the usual 0.1"),
        ({}, {"mismatch/logprob_gap_max": 6.0}, "differ by 6.0 nats at one token"),
        ({"mismatch/mult_prob_error": 1.1}, {"mismatch/mult_prob_error": 1.1}, "factor of 1.10 for 5 steps"),
    ],
)
def test_each_guard_says_what_it_saw(before, now, said):
    watch = guards.Guards(
        [(step, before) for step in range(4)] if "learner/grad_norm" not in before else [(s, before) for s in range(9)]
    )
    new, told = watch.add(99, now)
    assert len(new) == 1 and said in new[0] and sum(told.values()) == 1


def test_steps_without_values_raise_nothing():
    watch = guards.Guards()
    for step in range(30):
        new, told = watch.add(step, {"learner/grad_norm": None, "rollout/reward_mean": None})
        assert new == [] and set(told.values()) == {0.0}


def test_the_disk_is_forecast_from_what_the_saves_so_far_took():
    gib = 2**30
    assert guards.disk([], gib, 100) is None and guards.disk([(10, 50 * gib)], gib, 100) is None
    assert guards.disk([(10, 50 * gib), (20, 46 * gib)], gib, 100) is None  # 14 GiB left
    assert "at step 120" in guards.disk([(10, 50 * gib), (20, 46 * gib)], 4 * gib, 120)
    assert "no room for 2 checkpoints of 2.0 GiB" in guards.disk([(10, 3 * gib)], 2 * gib, 100)


def test_a_disk_that_fills_is_said_once_while_the_run_goes_on():
    gib = 2**30
    watch = guards.Guards(checkpoint_bytes=gib, last_step=100)
    said = [watch.add(step, {"disk/free_bytes": (50.0 - step) * gib}) for step in range(8)]
    assert [len([line for line in lines if line.startswith("disk:")]) for lines, _ in said] == [0] * 4 + [1] + [0] * 3
    assert said[-1][1]["guard/disk"] == 1.0
