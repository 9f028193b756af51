"""Tool replies: four kinds, nothing run-dependent, a token budget that keeps head, tail and the last line."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from rstar2_jax import types
from rstar2_jax.data import chat as chats
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.types import CallStatus

BOX = tokenizers.Tokenizer.box()
CALL = types.ToolCall(name="f", arguments={"code": "print(1)"})


def reply(status: CallStatus, stdout: str = "", stderr: str = "", *, tokens: int = 512, call=CALL) -> str:
    result = types.ToolResult(status=status, stdout=stdout, stderr=stderr, queue_s=1.25, run_s=0.5)
    return chats.tool_reply_text(result, call, BOX, tokens)


def trace(frame: str) -> str:
    return f"Traceback (most recent call last):\n{frame}ZeroDivisionError: division by zero\n"


def test_output_is_shown_as_printed_without_the_last_newline():
    assert reply(CallStatus.OK, "  1\n\n2\n") == "  1\n\n2"


def test_a_silent_run_gets_a_notice():
    assert reply(CallStatus.OK) == chats.NO_OUTPUT


def test_an_error_shows_output_then_traceback():
    text = reply(CallStatus.ERROR, "before\n", trace('  File "<tool>", line 1, in <module>\n'))
    assert text.startswith("before\nTraceback") and text.endswith("\nZeroDivisionError: division by zero")


def test_an_error_without_a_traceback_is_still_an_error():
    assert "non-zero exit status" in reply(CallStatus.ERROR)


def test_the_source_line_of_a_one_line_program_is_left_out():
    frame = '  File "<tool>", line 1, in <module>\n    print(1/0)\n          ~^~\n'
    assert reply(CallStatus.ERROR, stderr=trace(frame)) == trace('  File "<tool>", line 1, in <module>\n').rstrip()


def test_a_longer_program_keeps_its_source_lines_but_no_caret_marks():
    call = types.ToolCall(name="f", arguments={"code": "x = 0\nprint(1/x)\n"})
    frame = '  File "<tool>", line 2, in <module>\n    print(1/x)\n          ~^~\n'
    text = reply(CallStatus.ERROR, stderr=trace(frame), call=call)
    assert "    print(1/x)\nZeroDivisionError" in text and "~^~" not in text


@pytest.mark.parametrize("status", [CallStatus.TIMEOUT_WALL, CallStatus.TIMEOUT_CPU])
def test_a_timeout_shows_what_was_printed_and_says_so_without_a_time(status):
    text = reply(status, "partial\n")
    assert text.startswith("partial\n[Timed out") and not any(c.isdigit() for c in text)


def test_every_status_has_a_reply_and_none_shows_our_own_faults():
    for status in CallStatus:
        assert reply(status, stderr="")
    for status in (CallStatus.INFRA, CallStatus.REJECTED):
        assert "node-7" not in reply(status, stderr="lost node-7 after 3.2 s")


def test_a_call_that_did_not_parse_is_told_why():
    call = types.ToolCall(name="", arguments={}, error="the JSON cannot be read")
    assert reply(CallStatus.PARSE_ERROR, call=call) == "[Call not understood: the JSON cannot be read]"


def test_a_refused_call_gets_the_reason():
    assert reply(CallStatus.NOT_EXECUTED) == "[Not executed: too many calls in one turn]"
    assert "no tool named" in reply(CallStatus.UNKNOWN_TOOL, stderr="there is no tool named 'g'")


def test_a_megabyte_of_wide_characters_fits_fifty_tokens_and_says_what_was_cut():
    # F14
    text = reply(CallStatus.OK, "\N{FOR ALL}" * 340_000 + "\n", tokens=50)
    assert len(BOX.encode(text)) <= 50 and "\ufffd" not in text
    kept = text.count("\N{FOR ALL}")
    assert kept >= 8 and f"[... {340_000 - kept} characters left out ...]" in text
    assert text.startswith("\N{FOR ALL}") and text.endswith("\N{FOR ALL}")


def test_the_last_line_of_an_error_is_kept_before_anything_else():
    frames = '  File "<tool>", line 1, in f\n' * 400
    text = reply(CallStatus.ERROR, "x" * 5000, trace(frames), tokens=30)
    assert text.endswith("ZeroDivisionError: division by zero") and len(BOX.encode(text)) <= 30


def test_output_that_spells_an_end_token_is_counted_as_it_will_be_encoded():
    text = reply(CallStatus.OK, "<|im_end|>" * 100, tokens=60)
    assert len(BOX.encode(text, plain=True)) <= 60


def test_half_a_surrogate_pair_becomes_an_escape():
    call = types.ToolCall(name="\ud800", arguments={})
    assert "ud800" in reply(CallStatus.UNKNOWN_TOOL, call=call)


def test_a_budget_without_a_token_is_refused():
    with pytest.raises(ValueError, match="max_tokens = 0"):
        reply(CallStatus.OK, "1", tokens=0)


@hypothesis.given(st.text(st.sampled_from("a1 \n\N{FOR ALL}\U0001f600<|im_end>"), max_size=300), st.integers(1, 60))
def test_no_reply_exceeds_its_budget_or_breaks_a_character(text, budget):
    shown = reply(CallStatus.OK, text, tokens=budget)
    assert len(BOX.encode(shown, plain=BOX.mentions_special(shown))) <= budget
    assert "\ufffd" not in shown
