"""What a step's episodes looked like: hand-counted numbers, and nothing from episodes without a verdict."""

from __future__ import annotations

import numpy as np
import pytest

from rstar2_jax.rollout import statistics
from rstar2_jax.types import CallStatus, FinishReason, Group, Prompt, StopReason, ToolCall, ToolResult, Trajectory, Turn
from rstar2_jax.types import Verdict as V


def episode(prompt_id, index, verdict, statuses=(), sampled=3):
    call = ToolCall(name="python", arguments={"code": "1"})
    turn = Turn(
        token_ids=np.arange(sampled + 2, dtype=np.int32) + index,
        mask=np.arange(sampled + 2) < sampled,
        behavior_logprobs=np.where(np.arange(sampled + 2) < sampled, -1.0, 0).astype(np.float32),
        weights_versions=np.where(np.arange(sampled + 2) < sampled, 0, -1).astype(np.int32),
        calls=(call,) * len(statuses),
        results=tuple(ToolResult(status=status) for status in statuses),
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        prompt_id=prompt_id,
        prompt_ids=np.zeros(2, np.int32),
        seed=index,
        sample_index=index,
        turns=(turn,),
        stop_reason=StopReason.LOST if verdict is V.UNSCORED else StopReason.ANSWERED,
        verdict=verdict,
    )


def group(name, source, episodes):
    zeros = (0.0,) * len(episodes)
    prompt = Prompt(id=name, question="q", answer="1", source=source)
    return Group(prompt=prompt, trajectories=tuple(episodes), p_err=zeros, p_format=zeros)


OK, BAD, INFRA = CallStatus.OK, CallStatus.ERROR, CallStatus.INFRA
GROUPS = [
    group(
        "a",
        "gcd",
        [
            episode("a", 0, V.CORRECT, (BAD, OK), sampled=5),
            episode("a", 1, V.WRONG, (BAD,), sampled=1),
            episode("a", 2, V.UNSCORED, (INFRA, OK)),
        ],
    ),
    group("b", "hub:x y", [episode("b", 0, V.CORRECT), episode("b", 1, V.CORRECT, (OK,))]),
]


def test_the_numbers_are_those_counted_by_hand():
    told = statistics.describe(GROUPS)
    expected = {
        "rollout/reward_mean": 3 / 4,
        "rollout/live_groups_frac": 1 / 2,
        "rollout/all_correct_frac": 1 / 2,
        "rollout/tool_rate": 3 / 4,
        "rollout/calls_per_episode": 4 / 4,
        "rollout/call_error_rate": 2 / 4,
        "rollout/call_error_rate_correct": 1 / 3,
        "rollout/sampled_tokens_mean": (5 + 1 + 3 + 3) / 4,
        "rollout/repeat_call_frac": 1 / 3,
        "rollout/episodes": 5,
        "rollout/unscored": 1,
        "rollout/lost": 1,
        "rollout/status_ok": 3,
        "rollout/status_error": 2,
        "rollout/status_infra": 1,
        "rollout/stop_lost": 1,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)


def test_reward_is_told_by_source_under_names_that_metrics_can_bear():
    told = statistics.describe(GROUPS)
    assert told["reward/gcd_mean"] == 0.5 and told["reward/hub_x_y_mean"] == 1.0


def test_without_an_episode_there_is_no_value_and_no_crash():
    told = statistics.describe([])
    assert told["rollout/reward_mean"] is None and told["rollout/episodes"] == 0
