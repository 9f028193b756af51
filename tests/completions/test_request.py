"""What may be asked: fields that are honoured, neutral values, refusals that name the field and the remedy."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_jax.completions import request

USER = {"role": "user", "content": "6*7?"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(**fields):
    return request.read({"model": "m", "messages": [USER], **fields})


def refusal(**fields):
    with pytest.raises(request.RefusedError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_the_least_request_takes_everything_from_the_run():
    assert read() == request.Asked(model="m", messages=({"role": "user", "content": "6*7?"},))


def test_the_request_of_a_common_harness_is_read():
    asked = read(
        temperature=0.6, top_p=0.95, max_tokens=512, seed=7, min_p=0.0, repetition_penalty=1.0,
        chat_template_kwargs={"thinking": True}, user="me", n=None, stop=None,
    )  # fmt: skip
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.seed) == (0.6, 0.95, 512, 7)
    assert asked.n == 1 and asked.thinks and asked.stop == ()


@pytest.mark.parametrize("temperature", [0, 0.0, 5e-324, 2e-38, 9e-7])
def test_a_temperature_of_zero_or_near_it_is_greedy_whatever_top_k_says(temperature):
    asked = read(temperature=temperature, top_k=50)
    assert (asked.temperature, asked.top_k) == (None, 1)


def test_the_least_temperature_is_sampled_with():
    assert read(temperature=1e-6).temperature == 1e-6


def test_both_ways_to_say_no_top_k_are_one():
    assert read(top_k=0).top_k == read(top_k=-1).top_k == -1


def test_the_newer_name_of_the_token_limit_wins():
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    "field, neutral, other",
    [
        ("min_p", 0.0, 0.1),
        ("repetition_penalty", 1, 1.1),
        ("presence_penalty", 0, -1),
        ("frequency_penalty", 0.0, 0.5),
        ("logit_bias", {}, {"50": 1}),
        ("logprobs", False, True),
        ("logprobs", False, 0),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("tool_choice", "auto", "required"),
        ("tool_choice", "none", {"type": "function", "function": {"name": "f"}}),
        ("min_tokens", 0, 5),
        ("ignore_eos", False, True),
    ],
)
def test_what_cannot_be_honoured_passes_at_its_neutral_value_only(field, neutral, other):
    read(**{field: neutral})
    error = refusal(**{field: other})
    assert error.field == field and error.code == "unsupported_value"
    assert f"{field} = {json.dumps(other)} cannot be honoured: " in error.message


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("top_p", 0), ("top_p", 1.5),
        ("top_k", 2.5), ("top_k", -2), ("n", 0), ("n", 10_000), ("seed", 2**63), ("seed", 1.0), ("max_tokens", 0),
        ("stop", ""), ("stop", ["a"] * 17), ("stop", 3), ("stream", "yes"), ("stream_options", {"x": 1}),
        ("tools", [{"type": "retrieval"}]), ("chat_template_kwargs", []), ("model", 3), ("messages", []),
        ("messages", "hello"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_rule(field, value):
    error = refusal(**{field: value})
    assert error.field == field and "must be" in error.message


def test_an_unknown_field_is_named():
    error = refusal(best_of=4)
    assert error.field == "best_of" and error.code == "unknown_parameter"


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thoughts_can_be_switched_off_by_the_template_s_variable(name):
    assert read(chat_template_kwargs={name: True}).thinks
    assert not read(chat_template_kwargs={name: False}).thinks


def test_another_variable_of_the_template_is_refused_by_its_path():
    assert refusal(chat_template_kwargs={"date": "today"}).field == "chat_template_kwargs.date"


def test_tools_of_the_client_replace_those_of_the_run_and_none_removes_all():
    assert read().tools is None and read(tools=[]).tools is None
    assert read(tools=[TOOL]).tools == (TOOL,)
    assert read(tools=[TOOL], tool_choice="none").tools == ()


def test_parts_of_text_are_joined_and_other_parts_are_refused():
    parts = [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]
    assert read(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "6*7?"
    picture = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    assert refusal(messages=[{"role": "user", "content": picture}]).field == "messages[0].content"


def test_calls_of_an_earlier_turn_are_written_as_the_model_wrote_them():
    asked = read(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                           {"role": "tool", "tool_call_id": "c", "content": "1"}])  # fmt: skip
    assert asked.messages[1]["content"] == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "messages, words",
    [
        ([USER, {"role": "system", "content": "s"}], "only first"),
        ([USER, {"role": "assistant", "content": "a"}], "the last one"),
        ([{"role": "system", "content": "s"}], "a user must have spoken"),
        ([{"role": "tool", "content": "s"}, USER], "must follow the assistant"),
        ([{"role": "robot", "content": "s"}], "a role among"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        (["hello"], "must be an object"),
    ],
)
def test_messages_out_of_order_are_refused_with_their_place(messages, words):
    assert words in refusal(messages=messages).message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted(request._HONOURED | set(request._NEUTRAL)) + ["odd"])


@given(st.dictionaries(names, values, max_size=6) | values)
def test_no_body_does_anything_but_be_read_or_refused(body):
    base = {"model": "m", "messages": [USER]}
    for tried in (body, {**base, **body} if isinstance(body, dict) else body):
        try:
            request.read(tried)
        except request.RefusedError as error:
            assert error.message


def test_a_broken_call_of_an_earlier_turn_is_refused():
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    error = refusal(messages=[USER, {"role": "assistant", "tool_calls": [broken]}, {"role": "tool", "content": "1"}])
    assert error.field == "messages[1].tool_calls"


def nested(depth, kind="{"):
    value = 1
    for _ in range(depth):
        value = {"a": value} if kind == "{" else [value]
    return value


@pytest.mark.parametrize("kind", ["{", "["])
@pytest.mark.parametrize("name", ["tools", "stop", "messages", "logit_bias", "metadata", "seed", "unknown"])
def test_what_is_nested_so_deep_that_it_cannot_be_written_again_is_refused(name, kind):
    for depth in (102, 900, 980):
        error = refusal(**{name: nested(depth, kind)})
        assert error.field == name and f"{name} is nested more than 100 levels deep" in error.message


def test_tools_and_calls_are_read_up_to_the_depth_that_is_refused():
    def tool(depth):
        return {"type": "function", "function": {"name": "add", "parameters": nested(depth)}}

    def said(depth):
        call = {"function": {"name": "add", "arguments": '{"a":' * depth + "1" + "}" * depth}}
        return [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]

    assert read(tools=[tool(97)]).tools == (tool(97),)
    assert refusal(tools=[tool(98)]).field == "tools"
    assert len(read(messages=said(100)).messages) == 3
    assert refusal(messages=said(101)).field == refusal(messages=said(980)).field == "messages[1].tool_calls"
