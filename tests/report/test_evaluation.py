"""Counts of an evaluation by hand, the Wilson interval against its definition, pooling, and damaged files."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax import evaluate
from rstar2_jax import settings as project
from rstar2_jax.report import evaluation
from rstar2_jax.types import CallStatus, FinishReason, StopReason, ToolCall, ToolResult, Trajectory, Turn, Verdict


def _trajectory(verdict, *statuses, sampled=4, forced=2):
    mask = np.array([True] * sampled + [False] * forced)
    turn = Turn(
        token_ids=np.zeros(sampled + forced, np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
        weights_versions=np.where(mask, 0, -1).astype(np.int32),
        calls=tuple(ToolCall(name="python", arguments={}) for _ in statuses),
        results=tuple(ToolResult(status=status) for status in statuses),
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        prompt_id="p",
        prompt_ids=np.zeros(1, np.int32),
        seed=0,
        sample_index=0,
        turns=(turn,),
        stop_reason=StopReason.ANSWERED,
        verdict=verdict,
    )


def test_an_evaluation_set_counted_by_hand():
    entry = evaluation.evaluation_set(
        "gcd",
        "trained",
        [
            _trajectory(Verdict.CORRECT, CallStatus.ERROR, CallStatus.OK),
            _trajectory(Verdict.CORRECT, CallStatus.OK, CallStatus.INFRA, CallStatus.NOT_EXECUTED),
            _trajectory(Verdict.CORRECT, sampled=10, forced=0),
            _trajectory(Verdict.WRONG, CallStatus.ERROR),  # errors of wrong trajectories do not count
            _trajectory(Verdict.UNSCORED, CallStatus.INFRA, sampled=100),
        ],
    )
    low, high = evaluation.wilson(3, 4)
    assert entry == {
        "set": "gcd",
        "kind": "trained",
        "n": 4,
        "correct": 3,
        "unscored": 1,
        "tool_episodes": 3,
        "correct_calls": 3,
        "correct_bad_calls": 1,
        "accuracy": 0.75,
        "ci95": [low, high],
        "tool_rate": 0.75,
        "call_error_rate_correct": 1 / 3,
        "mean_tokens": (4 + 4 + 10 + 4) / 4,
        "mean_response_tokens": (6 + 6 + 10 + 6) / 4,
    }


def test_rates_over_nothing_are_null():
    entry = evaluation.evaluation_set("gcd", "held_out", [])
    assert [entry[n] for n in ("accuracy", "tool_rate", "call_error_rate_correct", "mean_tokens")] == [None] * 4
    assert entry["n"] == 0 and entry["ci95"] == [0, 1]


def test_a_trajectory_that_was_never_graded_counts_as_unscored():
    assert evaluation.evaluation_set("gcd", "trained", [_trajectory(None)])["unscored"] == 1


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="kind of set 'gcd' is 'train'"):
        evaluation.evaluation_set("gcd", "train", [])


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (9, 10, 0.5958, 0.9821),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_intervals_of_small_samples(correct, n, low, high):
    assert evaluation.wilson(correct, n) == pytest.approx((low, high), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_edges_of_the_wilson_interval_are_where_the_score_test_turns(pair):
    correct, n = pair
    low, high = evaluation.wilson(correct, n)
    assert 0 <= low <= correct / n <= high <= 1
    for edge in (low, high):
        if 1e-9 < edge < 1 - 1e-9:
            score = abs(correct / n - edge) / math.sqrt(edge * (1 - edge) / n)
            assert score == pytest.approx(1.959964, rel=1e-4)
    mirrored = evaluation.wilson(n - correct, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(("correct", "n"), [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(correct, n):
    with pytest.raises(ValueError, match=f"{correct} correct of {n}"):
        evaluation.wilson(correct, n)


def test_pooled_sets_equal_one_set_of_all_trajectories():
    a = [_trajectory(Verdict.CORRECT, CallStatus.OK), _trajectory(Verdict.WRONG, sampled=9)]
    b = [_trajectory(Verdict.CORRECT, CallStatus.TIMEOUT_CPU, CallStatus.OK), _trajectory(Verdict.UNSCORED)]
    sets = [evaluation.evaluation_set(name, "trained", part) for name, part in (("a", a), ("b", b), ("empty", []))]
    sets.append(evaluation.evaluation_set("c", "held_out", a))
    whole = evaluation.evaluation_set("all", "trained", a + b)
    assert evaluation.pool(sets, "trained") == {k: v for k, v in whole.items() if k not in ("set", "kind")}
    assert evaluation.pool(sets[:3], "held_out") is None


def test_an_evaluation_file_is_read_and_checked(tmp_path):
    content = {"temperature": 1.0, "sets": [evaluation.evaluation_set("gcd", "trained", [])]}
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(content))
    assert evaluation.read_evaluation(tmp_path) == content
    lacking = {"sets": [{k: v for k, v in content["sets"][0].items() if k != "correct_calls"}]}
    for bad in ("{", "[]", "{}", '{"sets": [3]}', json.dumps(lacking), json.dumps(content).replace("trained", "other")):
        path.write_text(bad)
        with pytest.raises(ValueError, match="evaluation.json is not an evaluation"):
            evaluation.read_evaluation(tmp_path)
    with pytest.raises(FileNotFoundError):
        evaluation.read_evaluation(tmp_path / "nowhere")


def test_an_evaluation_of_other_problems_or_another_seed_is_never_taken_for_the_one_that_is_there(tmp_path, capsys):
    tiny = project.Model(
        family="qwen3", vocab_size=320, d_model=8, d_mlp=8, layers=1, heads=1, kv_heads=1, head_dim=8, max_positions=64
    )
    given = {
        "run": project.Run(workdir=str(tmp_path), steps=0, init_from="runs/stage3"),
        "model": tiny,
        "task": project.Task(source="aime24", tokenizer="box"),
        "rollout": project.Rollout(
            prompts_per_step=30, group_size=1, oversample=1, max_prompt_tokens=9, max_response_tokens=9, max_turns=1
        ),
        "sandbox": project.Sandbox(),
        "samples": 16,
    }
    asked = evaluate._asked(given["run"], given["task"], given["rollout"], 16)
    (tmp_path / "evaluation.json").write_text(json.dumps({**asked, "sets": []}))
    assert evaluate.evaluate(**given) == 0 and "is there already" in capsys.readouterr().out
    others = {
        "source = 'aime24', this run has 'aime25'": {"task": project.Task(source="aime25", tokenizer="box")},
        "samples_per_problem = 16, this run has 4": {"samples": 4},
        "seed = 0, this run has 3": {"run": dataclasses.replace(given["run"], seed=3)},
    }
    for said, changed in others.items():
        with pytest.raises(ValueError, match=f"was made with {said}: give another --workdir, or delete the file"):
            evaluate.evaluate(**{**given, **changed})
