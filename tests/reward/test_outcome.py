"""Verdicts: who is graded, what a fault becomes, that each trajectory carries its own."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from rstar2_jax.reward import outcome
from rstar2_jax.types import FinishReason, Prompt, StopReason, Trajectory, Turn, Verdict
from rstar2_sandbox import client as sandbox_client
from rstar2_sandbox import local, protocol, verify


class PureRules:
    """A verifier in this process: the service's pure rules, after a scripted number of faults for each key."""

    def __init__(self, faults: int = 0, delay_s: float = 0.0):
        self.faults, self.delay_s, self.keys = faults, delay_s, []

    async def verify(self, *, text: str, gold: str, key: str) -> protocol.Verification:
        self.keys.append(key)
        await asyncio.sleep(self.delay_s)
        if sum(seen.startswith(key.partition(":retry")[0]) for seen in self.keys) <= self.faults:
            return protocol.Verification(verdict=protocol.Verdict.INFRA, reason="node lost")
        return verify.judge(text, gold)


def decode(ids) -> str:
    return "".join(map(chr, ids))


def turn(sampled: str, forced: str = "") -> Turn:
    ids = np.array([*map(ord, sampled + forced)], np.int32)
    mask = np.arange(len(ids)) < len(sampled)
    return Turn(
        token_ids=ids,
        mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        weights_versions=np.where(mask, 3, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
    )


def trajectory(
    *turns: Turn, prompt_id: str = "p", index: int = 0, stop: StopReason = StopReason.ANSWERED
) -> Trajectory:
    return Trajectory(
        prompt_id=prompt_id,
        prompt_ids=np.array([1], np.int32),
        seed=11 + index,
        sample_index=index,
        turns=turns,
        stop_reason=stop,
    )


def prompt(id: str = "p", answer: str = "110") -> Prompt:
    return Prompt(id=id, question="?", answer=answer, source="test")


def graded(*trajectories: Trajectory, prompts=None, client=None, **options) -> list[Trajectory]:
    return asyncio.run(
        outcome.grade_trajectories(client or PureRules(), decode, trajectories, prompts or [prompt()], **options)
    )


@pytest.mark.parametrize(("text", "gold", "correct"), outcome.VECTORS)
def test_the_built_in_vectors_follow_the_rules_of_the_service(text, gold, correct):
    wanted = protocol.Verdict.CORRECT if correct else protocol.Verdict.WRONG
    assert verify.judge(text, gold).verdict is wanted


def test_there_are_vectors_of_both_verdicts_and_their_digest_follows_them():
    assert len(outcome.VECTORS) >= 20
    assert {correct for _, _, correct in outcome.VECTORS} == {True, False}
    assert re.fullmatch("[0-9a-f]{16}", outcome.vectors_digest())


def test_only_sampled_ids_of_the_final_turn_are_graded():
    right = r"<answer>\boxed{110}</answer>"
    early, forced, final = graded(
        trajectory(turn(right), turn("I give up")),
        trajectory(turn("I give up", forced=right)),
        trajectory(turn("hm"), turn(right, forced=r"<answer>\boxed{7}</answer>")),
    )
    assert [t.verdict for t in (early, forced, final)] == [Verdict.WRONG, Verdict.WRONG, Verdict.CORRECT]
    assert [t.answer for t in (early, forced, final)] == [None, None, "110"]


def test_an_answer_inside_tool_call_arguments_is_not_graded():
    hidden = '<tool_call>{"code": "<answer>\\\\boxed{110}</answer>"}</tool_call>'
    assert graded(trajectory(turn(hidden)))[0].verdict is Verdict.WRONG


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.BUDGET, StopReason.TURNS])
def test_a_truncated_episode_is_wrong_without_grading(stop):
    client = PureRules(faults=9)
    (got,) = graded(trajectory(turn(r"<answer>\boxed{110}</answer>"), stop=stop), client=client)
    assert got.verdict is Verdict.WRONG
    assert client.keys == []


def test_a_lost_episode_is_unscored_without_grading():
    client = PureRules()
    (got,) = graded(trajectory(stop=StopReason.LOST), client=client)
    assert got.verdict is Verdict.UNSCORED
    assert client.keys == []


def test_infrastructure_faults_are_retried_under_keys_of_their_own():
    client = PureRules(faults=2)
    (grade,) = asyncio.run(outcome.grade(client, [(r"<answer>\boxed{5}</answer>", "5", "k")]))
    assert grade.verdict is Verdict.CORRECT
    assert client.keys == ["k", "k:retry1", "k:retry2"]


def test_a_lasting_fault_ends_unscored_and_names_itself():
    client = PureRules(faults=99)
    (grade,) = asyncio.run(outcome.grade(client, [(r"<answer>\boxed{5}</answer>", "5", "k")], retries=1))
    assert grade.verdict is Verdict.UNSCORED
    assert grade.answer is None
    assert "node lost" in grade.reason
    assert len(client.keys) == 2
    (got,) = graded(trajectory(turn(r"<answer>\boxed{110}</answer>")), client=PureRules(faults=99), retries=0)
    assert got.verdict is Verdict.UNSCORED


def test_a_grader_that_never_answers_ends_unscored_at_the_deadline():
    client = PureRules(delay_s=30)
    (grade,) = asyncio.run(outcome.grade(client, [("x", "5", "question-7")], deadline_s=0.05))
    assert grade.verdict is Verdict.UNSCORED
    assert "question-7" in grade.reason
    assert "0.05 s" in grade.reason


def test_each_of_130_responses_carries_its_own_verdict():
    draw = np.random.default_rng(0)
    prompts = [prompt(f"p{i}", str(i)) for i in range(13)]
    said = [int(draw.integers(0, 13)) for _ in range(130)]
    episodes = [
        trajectory(
            turn("." * int(draw.integers(1, 40)) + rf"<answer>\boxed{{{said[at]}}}</answer>"),
            prompt_id=f"p{at % 13}",
            index=at // 13,
            stop=StopReason.LENGTH if at % 7 == 0 else StopReason.ANSWERED,
        )
        for at in range(130)
    ]
    client = PureRules()
    results = graded(*episodes, prompts=prompts, client=client)
    assert len(set(client.keys)) == len(client.keys) == sum(at % 7 != 0 for at in range(130))
    for at, (before, after) in enumerate(zip(episodes, results, strict=True)):
        right = at % 7 != 0 and said[at] == at % 13
        assert after.verdict is (Verdict.CORRECT if right else Verdict.WRONG)
        assert after.answer == (str(said[at]) if at % 7 else None)
        assert after.turns is before.turns
        assert dataclasses.replace(after, verdict=None, answer=None).sample_index == before.sample_index


def test_the_key_changes_with_the_text_and_stays_within_the_limit():
    client = PureRules()
    long_id = "x" * 500
    graded(
        trajectory(turn("a"), prompt_id=long_id),
        trajectory(turn("b"), prompt_id=long_id),
        prompts=[prompt(long_id)],
        client=client,
    )
    assert len(set(client.keys)) == 2
    assert max(map(len, client.keys)) < protocol.MAX_KEY_CHARS - 20


def test_a_missing_prompt_is_named():
    with pytest.raises(ValueError, match="'q'"):
        graded(trajectory(turn("a"), prompt_id="q"))


def test_the_self_test_passes_on_the_rules_and_names_both_rule_sets():
    assert asyncio.run(outcome.self_test(PureRules())) == f"{verify.RULES}/{outcome.vectors_digest()}"


def test_the_self_test_names_the_vector_that_a_lenient_grader_accepts():
    class Lenient(PureRules):
        async def verify(self, *, text: str, gold: str, key: str) -> protocol.Verification:
            found = protocol.Verdict.CORRECT if gold in text else protocol.Verdict.WRONG
            return protocol.Verification(verdict=found, answer=gold)

    with pytest.raises(RuntimeError, match=r"boxed\{110\}</reason>.*must be wrong, got correct"):
        asyncio.run(outcome.self_test(Lenient()))


def test_the_self_test_fails_on_a_service_that_is_down():
    with pytest.raises(RuntimeError, match="unscored.*node lost"):
        asyncio.run(outcome.self_test(PureRules(faults=10**6)))


@pytest.mark.e2e
def test_the_real_service_grades_trajectories_from_the_loop_and_passes_the_self_test():
    async def run(url: str) -> tuple[str, list[Trajectory]]:
        async with sandbox_client.Client(url, run="outcome") as client:
            fingerprint = await outcome.self_test(client)
            episodes = [trajectory(turn(rf"<answer>\boxed{{{value}}}</answer>"), index=value) for value in (109, 110)]
            return fingerprint, await outcome.grade_trajectories(client, decode, episodes, [prompt()])

    with local.start_local(slots=2) as running:
        fingerprint, episodes = asyncio.run(run(running.redis_url))
    # The version of the library that gives second opinions is part of it.
    assert re.fullmatch(rf"{verify.RULES}\+(math-verify-.+|none)/{outcome.vectors_digest()}", fingerprint)
    assert [episode.verdict for episode in episodes] == [Verdict.WRONG, Verdict.CORRECT]
