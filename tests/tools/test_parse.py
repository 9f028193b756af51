"""Tool calls are read by a JSON decoder, and no text at all makes the reader fail, hang or drop a call silently."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax.tools import parse
from rstar2_jax.types import ToolCall

NAME = "execute_python_code_with_standard_io"


def _text(body: str) -> str:
    return f"thinking</reason>\n<tool_call>\n{body}\n</tool_call>"


def _call(code: str, **more: str) -> str:
    return json.dumps({"name": NAME, "arguments": {"code": code, **more}}, ensure_ascii=False)


def _only_error(text: str) -> str:
    (call,) = parse.parse(text)
    assert call.error is not None and call.arguments == {}
    return call.error


def test_a_well_formed_call_is_read_with_its_arguments():
    (call,) = parse.parse(_text(_call("print(1)", input="7\n")))
    assert call == ToolCall(name=NAME, arguments={"code": "print(1)", "input": "7\n"})


def test_text_without_a_call_gives_no_calls():
    assert parse.parse("so the answer is <answer>\\boxed{3}</answer>") == ()
    assert parse.parse("") == ()
    assert parse.parse("a stray </tool_call> only") == ()


def test_code_that_contains_the_end_tag_stays_whole():
    code = "print('</tool_call>')\nprint('<tool_call>')"
    (call,) = parse.parse(_text(_call(code)))
    assert call.error is None and call.arguments["code"] == code


def test_several_calls_keep_the_order_of_the_text():
    text = "\n".join(_text(_call(f"print({i})")) for i in range(5))
    assert [call.arguments["code"] for call in parse.parse(text)] == [f"print({i})" for i in range(5)]


def test_white_space_around_the_object_is_optional():
    text = f"<tool_call>{_call('1')}</tool_call><tool_call> \n\t{_call('2')} \r\n</tool_call>"
    assert [call.arguments["code"] for call in parse.parse(text)] == ["1", "2"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_call("print(1)")[:-1], "cannot be read"),  # the last } is missing
        ('{"name": "f", "arguments": {"code": "a\nb"}}', "control character"),  # raw newline in a string
        ("{'name': 'f', 'arguments': {'code': '1'}}", "double quotes"),  # single quotes
        ('{"name": "f", "arguments": {"code": "1",}}', "cannot be read"),  # trailing comma
        ('{"tool": "f", "arguments": {"code": "1"}}', "'name' is missing (found: 'tool', 'arguments')"),
        ('{"name": "f", "arguments": "{\\"code\\": \\"1\\"}"}', "'arguments' is a string"),
        ('{"name": "f", "arguments": ["print(1)"]}', "'arguments' is a list"),
        ('{"name": "f"}', "'arguments' is missing"),
        ('{"name": 3, "arguments": {}}', "'name' must be a string"),
        ('{"name": "", "arguments": {}}', "'name' must be a string"),
        ('[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', "a list stands inside"),
        ('"print(1)"', "a string stands inside"),
        ("17", "a number stands inside"),
        ("null", "a null stands inside"),
        ("print(1)", "Expecting value"),
        ("", "nothing stands after"),
        ('{"name": "f", "arguments": {"code": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"\\udfff": "1"}}', "surrogate"),
        ('{"name": "f", "arguments": {"n": %s}}' % ("9" * 5000), "5000 digits"),
        ('{"name": "f", "arguments": {"n": 1e999}}', "out of range"),
        ('{"name": "f", "arguments": {"n": NaN}}', "NaN is not JSON"),
        ("[" * 100_000, "nested"),
        ('{"name": "f", "arguments": {"n": %s}}' % ("[" * 50 + "]" * 50), "nested"),
        (_call("1") + " and more", "</tool_call> is missing"),
    ],
)
def test_a_malformed_call_says_why_and_the_next_call_is_still_read(body, says):
    assert says in _only_error(_text(body))
    first, second = parse.parse(_text(body) + _text(_call("print(2)")))
    assert says in (first.error or "")
    assert second == ToolCall(name=NAME, arguments={"code": "print(2)"})


def test_a_call_without_its_end_tag_is_an_error_and_hides_no_later_call():
    assert "</tool_call> is missing" in _only_error(f"<tool_call>{_call('1')}")
    first, second = parse.parse(f"<tool_call>{_call('1')}\n<tool_call>{_call('2')}</tool_call>")
    assert first.error is not None and first.name == NAME
    assert second.arguments["code"] == "2"


def test_a_broken_call_whose_code_holds_tags_gives_one_error_only():
    body = _call("print('</tool_call><tool_call>')")[:-1]
    assert "cannot be read" in _only_error(_text(body))


def test_the_place_of_a_json_error_is_counted_from_the_call_itself():
    assert "line 2, column 3" in _only_error('reason\n\n<tool_call>\n{"name": "f",\n  oops}\n</tool_call>')


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"":"', '<tool_call>["', "<tool_call>[[", "</tool_call>"])
def test_a_long_text_of_tags_is_read_in_bounded_time(unit):
    text = unit * (200_000 // len(unit))
    begin = time.monotonic()
    calls = parse.parse(text)
    assert time.monotonic() - begin < 1.0
    assert all(call.error is not None for call in calls)


def test_calls_beyond_any_reasonable_number_are_one_error():
    calls = parse.parse(_text(_call("1")) * 500)
    assert len(calls) == 129 and all(call.error is None for call in calls[:128])
    assert "more than 128 calls" in (calls[-1].error or "")


_PIECES = [*'{}[]",:\\ \n<>/a0', "<tool_call>", "</tool_call>", '"name"', '"arguments"', "\\ud800"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PIECES)))
def test_any_text_gives_calls_that_are_either_sound_or_explained(pieces):
    for call in parse.parse("".join(pieces)):
        assert isinstance(call, ToolCall)
        if call.error is None:
            assert call.name and isinstance(call.arguments, dict)
        else:
            assert call.arguments == {} and call.error.encode()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


_WRITTEN = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), _JSON, max_size=4)), max_size=4)


@settings(max_examples=100, deadline=None)
@given(_WRITTEN, st.booleans())
def test_what_was_written_as_json_comes_back_unchanged(written, ascii_only):
    bodies = [{"name": name, "arguments": arguments} for name, arguments in written]
    text = "".join(_text(json.dumps(body, ensure_ascii=ascii_only)) for body in bodies)
    assert [(call.name, call.arguments) for call in parse.parse(text)] == written


def test_the_repeat_share_is_one_for_a_policy_that_repeats_one_call():
    one, other = (ToolCall(name=NAME, arguments={"code": code}) for code in ("1", "2"))
    assert parse.repeat_share([one] * 10) == 1.0
    assert parse.repeat_share([one, other]) == 0.0
    assert parse.repeat_share([one, other, one]) == 0.5
    assert parse.repeat_share([one]) == 0.0
