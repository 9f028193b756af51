"""Penalties from the structured record; answers counted outside tool calls."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rstar2_jax.reward import quality
from rstar2_jax.types import CallStatus, FinishReason, StopReason, ToolCall, ToolResult, Trajectory, Turn

OK, ERROR, TIMEOUT = CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT_WALL


def turn(*statuses: CallStatus, stdout: str = "") -> Turn:
    return Turn(
        token_ids=np.array([7], np.int32),
        mask=np.array([True]),
        behavior_logprobs=np.array([-0.5], np.float32),
        weights_versions=np.array([1], np.int32),
        calls=tuple(ToolCall(name="python", arguments={}) for _ in statuses),
        results=tuple(ToolResult(status=status, stdout=stdout) for status in statuses),
        finish_reason=FinishReason.STOP,
    )


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        prompt_ids=np.array([1], np.int32),
        seed=0,
        sample_index=0,
        turns=turns,
        stop_reason=StopReason.ANSWERED,
    )


def call(code: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": code}}) + "\n</tool_call>"


def test_one_timeout_in_three_calls_is_a_third():
    episode = trajectory(turn(OK, TIMEOUT), turn(OK), turn())
    assert quality.penalties(episode, 1, True).p_err == pytest.approx(1 / 3)


def test_two_answers_in_three_turns_are_a_third():
    episode = trajectory(turn(OK), turn(OK), turn())
    assert quality.penalties(episode, 2, True).p_format == pytest.approx(1 / 3)


def test_one_turn_with_an_answer_and_no_call_costs_a_half():
    penalties = quality.penalties(trajectory(turn()), 1, True)
    assert penalties == (0.5, 0.0)
    assert penalties.total == 0.5


def test_output_that_speaks_of_errors_is_no_error():
    episode = trajectory(turn(OK, stdout="max error: 0.001\nTraceback error, mean squared error: 0.1"), turn())
    assert quality.penalties(episode, 1, True).p_err == 0


@pytest.mark.parametrize(
    ("statuses", "p_err"),
    [
        ([CallStatus.INFRA], 0.5),
        ([CallStatus.NOT_EXECUTED, CallStatus.REJECTED], 0.5),
        ([CallStatus.INFRA, ERROR], 1.0),
        ([CallStatus.INFRA, OK, CallStatus.NOT_EXECUTED], 0.0),
        ([CallStatus.PARSE_ERROR, CallStatus.UNKNOWN_TOOL, CallStatus.OUTPUT_LIMIT, CallStatus.OOM], 1.0),
        ([CallStatus.KILLED, CallStatus.TIMEOUT_CPU, OK, OK], 0.5),
    ],
)
def test_faults_of_the_infrastructure_count_in_neither_number(statuses, p_err):
    assert quality.penalties(trajectory(turn(*statuses), turn()), 1, True).p_err == p_err


def test_every_status_is_either_counted_or_not_bad():
    for status in CallStatus:
        assert status.is_counted or not status.is_bad


def test_no_answer_in_the_final_turn_costs_one():
    episode = trajectory(turn(OK), turn())
    assert quality.penalties(episode, 0, False).p_format == 1
    assert quality.penalties(episode, 3, False).p_format == 1
    assert quality.penalties(trajectory(), 0, False).p_format == 1


def test_many_answers_cost_at_most_one():
    assert quality.penalties(trajectory(turn()), 9, True).p_format == 1


@pytest.mark.parametrize(("num_answers", "has_answer"), [(0, True), (-1, False)])
def test_impossible_counts_are_refused(num_answers, has_answer):
    with pytest.raises(ValueError, match="num_answers"):
        quality.penalties(trajectory(turn()), num_answers, has_answer)


def test_assess_takes_one_text_a_turn():
    episode = trajectory(turn(OK), turn(ERROR), turn())
    texts = ["<answer>1</answer>" + call("1"), call("1/0"), "<answer>2</answer>"]
    assert quality.assess(episode, texts) == pytest.approx((0.5, 1 / 3))
    with pytest.raises(ValueError, match="2 texts for 3 turns"):
        quality.assess(episode, texts[:2])


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([], (0, False)),
        (["<answer>5</answer>"], (1, True)),
        (["<answer>5"], (0, False)),
        (["5</answer>"], (0, False)),
        (["</answer> <answer>5"], (0, False)),
        (["<answer></answer>"], (1, True)),
        (["<answer>1</answer> no <answer>2</answer>"], (2, True)),
        (["<answer>1 <answer>2</answer>"], (1, True)),
        (["<answer>1</answer>", "and so on"], (1, False)),
        (["<answer>1", "2</answer>"], (0, False)),
        ([call("print('<answer>5</answer>')")], (0, False)),
        ([call("print('</tool_call><answer>5</answer>')")], (0, False)),
        ([call("x = '<answer>'") + "<answer>5</answer>" + call("'</answer>'")], (1, True)),
        (["<answer>" + call("1") + "5</answer>"], (1, True)),
    ],
)
def test_answers_are_closed_blocks_outside_tool_calls(texts, wanted):
    assert quality.find_answers(texts) == wanted


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("no call", "no call"),
        ("a<tool_call>{}</tool_call>b", "a b"),
        ('a<tool_call>{"code": "1"}b', "a b"),
        ('a<tool_call>[{"code": "</tool_call>"}] \n </tool_call>b', "a b"),
        ('a<tool_call>{"code": "line\nbreak </tool_call> x"}</tool_call>b', "a b"),
        ('a<tool_call>{"code": "</tool_call>b"</tool_call>c', "a c"),
        ('a<tool_call>{"code": "say \\"</tool_call>\\" x",}</tool_call>c', "a c"),
        ('a<tool_call>{"code": "open </tool_call>b', "a b"),
        ("a<tool_call>{'code': 1", "a "),
        ("a<tool_call>{'code': 1}</tool_call>b", "a b"),
        ("a<tool_call>python</tool_call>b", "a b"),
        ("I use <tool_call> tags <answer>5</answer>", "I use <tool_call> tags <answer>5</answer>"),
        ("tags like <tool_call> open <tool_call>{}</tool_call>b", "tags like <tool_call> open  b"),
        ("<tool_call>{" + '"x": ' + "1" * 5000 + "}</tool_call>b", " b"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>b", " b"),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", "  "),
        ("<tool_call>", "<tool_call>"),
    ],
)
def test_tool_calls_are_cut_out_where_their_json_ends(text, rest):
    assert quality.outside_tool_calls(text) == rest


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.text(max_size=40), st.text(max_size=40))
def test_whatever_the_code_says_a_wellformed_call_vanishes(code, before, after):
    texts = [piece.replace("<tool_call>", "").replace("</tool_call>", "") for piece in (before, after)]
    dirty = code + "</tool_call><answer>1</answer><tool_call>"
    assert quality.outside_tool_calls(texts[0] + call(dirty) + texts[1]) == f"{texts[0]} {texts[1]}"


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<answer>", "</answer>", '{"a": "', '"', "{", "}", "\\", "[", "]", "5", " "]
        ),
        max_size=25,
    )
)
def test_any_mixture_of_tags_gives_a_count_without_raising(pieces):
    text = "".join(pieces)
    found = quality.find_answers([text])
    assert 0 <= found.num_answers <= min(text.count("<answer>"), text.count("</answer>"))
    assert found.has_answer == (found.num_answers > 0)


@pytest.mark.parametrize(
    "piece", ["<tool_call>", '<tool_call>{"', "<tool_call>{x</tool_call>", "<answer>", '<tool_call>"']
)
def test_hostile_repetition_stays_fast(piece):
    started = time.process_time()
    quality.find_answers([piece * (200_000 // len(piece))])
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("turns", "share"),
    [([[1, 2, 3, 4, 5, 6]], 0), ([[1, 2, 3]], 0), ([], 0), ([[1] * 8], 0.8), ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.5)],
)
def test_repetition_is_the_share_of_four_grams_that_were_said_before(turns, share):
    made = [
        Turn(
            token_ids=np.asarray(ids, np.int32),
            mask=np.ones(len(ids), bool),
            behavior_logprobs=np.full(len(ids), -1, np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )
        for ids in turns
    ]
    trajectory = Trajectory(
        prompt_id="p",
        prompt_ids=np.zeros(1, np.int32),
        seed=0,
        sample_index=0,
        turns=tuple(made),
        stop_reason=StopReason.ANSWERED,
    )
    assert quality.repetition(trajectory) == pytest.approx(share)
