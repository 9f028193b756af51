"""How an episode is told: where the answer begins, where it stops, and that the way it came does not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_jax.completions import reply

REPLIES = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"


def told(turns, *, opened="<reason>", split=True, stop=(), single=False, pieces_of=(), **ending):
    """(content, reasoning, narrator) of turns, each given in growing pieces of the sizes in `pieces_of`."""
    narrator = reply.Narrator(opened, split=split, stop=stop, single=single)
    pieces = []
    for number, text in enumerate(turns):
        for size in pieces_of:
            pieces += narrator.wrote(text[:size])
        if number + 1 < len(turns):
            pieces += narrator.replied(text, REPLIES)
    pieces += narrator.ended(turns[-1], **{"answers": True, **ending})
    texts = ["".join(p.text for p in pieces if p.field == field) for field in (reply.CONTENT, reply.REASONING)]
    return (*texts, narrator)


def test_the_answer_begins_behind_the_thought():
    content, reasoning, _ = told(["I add.</reason>\n<answer>\\boxed{5}</answer>"])
    assert (content, reasoning) == ("<answer>\\boxed{5}</answer>", "I add.")


def test_an_answer_inside_a_thought_that_never_closes_is_an_answer():
    content, reasoning, _ = told(["so <answer>\\boxed{5}</answer>"])
    assert (content, reasoning) == ("<answer>\\boxed{5}</answer>", "so ")


def test_a_thought_without_an_answer_leaves_the_content_empty():
    content, reasoning, _ = told(["on and on"])
    assert (content, reasoning) == ("", "on and on")


def test_a_turn_that_opens_its_own_thought_is_told_apart_and_one_that_does_not_is_all_answer():
    assert told(["<think>hm</think>\n\nYes."], opened="")[:2] == ("Yes.", "hm")
    assert told(["Yes."], opened="")[:2] == ("Yes.", "")
    assert told(["<th"], opened="")[:2] == ("<th", "")


def test_calls_and_their_replies_belong_to_the_reasoning():
    turns = ["I run.</reason>\n<tool_call>\n{}\n</tool_call>", "Good.</reason>\n<answer>42</answer>"]
    content, reasoning, _ = told(turns)
    assert content == "<answer>42</answer>"
    assert reasoning == "I run.\n<tool_call>\n{}\n</tool_call>\n<tool_response>\n42\n</tool_response>\nGood."


def test_in_full_nothing_is_left_out():
    turns = ["I run.</reason>\n<tool_call>\n{}\n</tool_call>", "Good.</reason>\n<answer>42</answer>"]
    content, reasoning, _ = told(turns, split=False)
    assert reasoning == ""
    assert content == f"<reason>{turns[0]}\n<tool_response>\n42\n</tool_response>\n<reason>{turns[1]}"


def test_calls_that_nobody_answered_are_no_answer():
    content, reasoning, _ = told(["</reason>\n<tool_call>{}</tool_call>"], answers=False)
    assert content == "" and reasoning == "<tool_call>{}</tool_call>"


def test_a_client_s_calls_end_the_text_before_them():
    content, _, _ = told(["</reason>\nI look.\n<tool_call>{}</tool_call>"], answers=False, calls_apart=True)
    assert content == "I look."


@pytest.mark.parametrize("split", [True, False])
def test_a_stop_text_ends_the_answer_and_is_left_out(split):
    content, _, narrator = told(["</reason>one\n\ntwo Question: three"], split=split, stop=["Question:", "\n\n"])
    assert content.removeprefix("<reason></reason>") == "one" and narrator.stopped


def test_a_stop_text_that_is_never_complete_is_let_through():
    content, _, narrator = told(["</reason>one Quest"], stop=["Question:"], split=False)
    assert content.endswith("one Quest") and not narrator.stopped


def test_the_stop_text_that_is_complete_first_counts():
    cut = reply.Cut(["abc", "b"])
    assert cut.feed("xabc", final=True) == "xa" and cut.met


def test_the_answer_of_a_single_turn_is_told_while_it_is_written():
    narrator = reply.Narrator("<reason>", split=True, single=True)
    text = "hm</reason>\n Paris is  <tool_call>{}</tool_call>"
    steps = [narrator.wrote(text[:size]) for size in range(len(text) + 1)]
    early = [piece for pieces in steps for piece in pieces]
    assert "".join(p.text for p in early if p.field == reply.CONTENT) == "Paris is"
    assert len([p for p in early if p.field == reply.CONTENT]) > 5
    assert narrator.ended(text, answers=False, calls_apart=True) == []


MARKS = ["</reason>", "<answer>", "</answer>", "<reason>", "<think>", "</think>"]
WORDS = [*MARKS, "<tool_call>", "<tool", "ab", "b", "<", "/", " x", " "]
texts = st.lists(st.sampled_from(WORDS), max_size=10).map("".join)


@given(
    turns=st.lists(texts, min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 60), max_size=6).map(sorted),
    opened=st.sampled_from(["<reason>", "<think>\n", ""]),
    split=st.booleans(),
    stop=st.lists(st.sampled_from(["ab", "b", "x<", "</answer>"]), max_size=3),
    ending=st.fixed_dictionaries({"answers": st.booleans(), "calls_apart": st.booleans(), "single": st.booleans()}),
)
def test_what_is_told_does_not_depend_on_how_it_came(turns, sizes, opened, split, stop, ending):
    fixed = {"opened": opened, "split": split, "stop": stop, **ending}
    if ending["single"]:
        turns = turns[:1]
    at_once, streamed = told(turns, **fixed), told(turns, pieces_of=sizes, **fixed)
    assert at_once[:2] == streamed[:2]
    assert at_once[2].stopped == streamed[2].stopped


@given(turns=st.lists(texts, min_size=1, max_size=3))
def test_without_a_stop_text_nothing_that_was_written_is_lost(turns):
    content, reasoning, _ = told(turns, opened="")
    squeezed = "".join((content + reasoning).split())
    for mark in ("</reason>", "</think>", "<reason>", "<think>"):
        squeezed = squeezed.replace(mark, "")
    for turn in turns:
        for word in ("ab", "x"):
            assert squeezed.count(word) >= turn.count(word)
