"""pass@k against drawing every subset, majorities by hand, problems by id, faults that count nowhere."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_jax.report import samples
from rstar2_jax.types import CallStatus, FinishReason, Group, Prompt, StopReason, ToolCall, ToolResult, Trajectory, Turn
from rstar2_jax.types import Verdict as V


def episode(prompt_id, verdict, answer=None, *statuses, length=3):
    turn = Turn(
        token_ids=np.arange(length, dtype=np.int32),
        mask=np.ones(length, bool),
        behavior_logprobs=np.full(length, -1, np.float32),
        weights_versions=np.zeros(length, np.int32),
        calls=tuple(ToolCall(name="t", arguments={}) for _ in statuses),
        results=tuple(ToolResult(status=status) for status in statuses),
        finish_reason=FinishReason.STOP,
    )
    ids = np.zeros(1, np.int32)
    return Trajectory(
        prompt_id=prompt_id, prompt_ids=ids, seed=0, sample_index=0, turns=(turn,),
        stop_reason=StopReason.ANSWERED, verdict=verdict, answer=answer,
    )  # fmt: skip


def group(prompt_id, *episodes, p_format=None, question="Same text?"):
    prompt = Prompt(id=prompt_id, question=question, answer="3", source="s")
    rows = tuple(episode(prompt_id, *e) for e in episodes)
    return Group(prompt=prompt, trajectories=rows, p_err=(0.0,) * len(rows), p_format=p_format or (0.0,) * len(rows))


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(case):
    n, correct, k = case
    outcomes = [True] * correct + [False] * (n - correct)
    hit = [any(subset) for subset in itertools.combinations(outcomes, k)]
    assert samples.pass_at(n, correct, k) == pytest.approx(np.mean(hit))


def test_pass_at_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 correct of 2, k = 1"):
        samples.pass_at(2, 3, 1)
    with pytest.raises(ValueError, match="k = 3"):
        samples.pass_at(2, 1, 3)


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ([("3", True), ("3", True), ("4", False)], 1),
        ([("4", False), ("4", False), ("3", True)], 0),
        ([("1,000", True), ("1000", True), ("7", False), ("8", False)], 1),
        ([("3", True), ("4", False)], 0.5),
        ([(None, False), (None, False), ("3", True)], 1),
        ([(None, False)], 0),
        ([("\\frac12", True), ("\\frac 12", True), ("5", False)], 1),
    ],
)
def test_the_majority_s_answer_counts(answers, value):
    assert samples.majority(answers) == value


def test_two_problems_with_equal_text_are_two_problems_and_one_id_twice_is_refused():
    # F65
    first = group("a", (V.CORRECT, "3"), (V.WRONG, "4"))
    second = group("b", (V.WRONG, "4"), (V.WRONG, "4"))
    told = samples.describe([first, second])
    assert told["problems"] == 2 and told["pass_at"] == {"1": 0.25, "2": 0.5} and told["maj_at"] == {"2": 0.25}
    with pytest.raises(ValueError, match="problem 'a' has two groups"):
        samples.describe([first, first])


def test_unscored_samples_leave_their_problem_and_a_problem_without_a_verdict_counts_nowhere():
    broken = group("b", (V.UNSCORED, None), (V.UNSCORED, None))
    partly = group("a", (V.CORRECT, "3"), (V.UNSCORED, None))
    full = group("c", (V.WRONG, "1"), (V.CORRECT, "3"))
    told = samples.describe([broken, partly, full])
    assert told["problems"] == 2 and told["pass_at"] == {"1": 0.75, "2": 1.0}
    assert samples.describe([broken])["pass_at"] == {} and "ci95" not in samples.describe([broken])


def test_the_interval_is_over_problems_not_over_answers():
    # Ten problems, half always solved, half never: 160 equal answers would give +-0.08, ten problems give +-0.3.
    groups = [group(f"p{i}", *[(V.CORRECT if i % 2 else V.WRONG, "3")] * 16) for i in range(10)]
    low, high = samples.describe(groups)["ci95"]
    assert 0.15 <= low <= 0.25 and 0.75 <= high <= 0.85


@pytest.mark.parametrize(("verdict", "low", "high"), [(V.WRONG, 0, 0.2775), (V.CORRECT, 0.7225, 1)])
def test_problems_that_are_all_or_never_solved_still_leave_room_for_chance(verdict, low, high):
    groups = [group(f"p{i}", *[(verdict, "3")] * 4) for i in range(10)]
    assert samples.describe(groups)["ci95"] == pytest.approx([low, high], abs=5e-5)


def test_format_skill_is_read_from_statuses_and_penalties():
    bad, unknown, infra = CallStatus.PARSE_ERROR, CallStatus.UNKNOWN_TOOL, CallStatus.INFRA
    one = group(
        "a",
        (V.CORRECT, "3", CallStatus.OK, bad, infra),
        (V.WRONG, None, unknown, CallStatus.ERROR),
        (V.UNSCORED, None, bad),
        p_format=(0.5, 1.0, 1.0),
    )
    told = samples.describe([one])
    assert told["format"] == {"valid_calls": 0.5, "closed_answers": 0.5, "single_answers": 0.0}
    assert told["statuses"] == {"error": 1, "infra": 1, "ok": 1, "parse_error": 1, "unknown_tool": 1}
    assert told["stops"] == {"answered": 2} and told["tokens"] == {"p50": 3.0, "p95": 3.0, "max": 3.0}
    assert samples.describe([dataclasses.replace(one, trajectories=(), p_err=(), p_format=())])["format"] == {
        "valid_calls": None,
        "closed_answers": None,
        "single_answers": None,
    }
