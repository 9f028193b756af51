"""Kinds of tokens, the share of highest entropy, and the text that each id adds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.report import tokens
from rstar2_jax.types import CallStatus, FinishReason, StopReason, ToolCall, ToolResult, Trajectory, Turn

BOX = tokenizers.Tokenizer.box()
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def turn(text, appended="", status=None):
    ids, more = BOX.encode(text), BOX.encode(appended)
    mask = np.arange(len(ids) + len(more)) < len(ids)
    calls = () if status is None else (ToolCall(name="f", arguments={}),)
    return Turn(
        token_ids=np.asarray([*ids, *more], np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        weights_versions=np.where(mask, 3, -1).astype(np.int32),
        calls=calls,
        results=() if status is None else (ToolResult(status=status),),
        finish_reason=FinishReason.STOP,
    )


def trajectory(*turns):
    return Trajectory(
        prompt_id="p", prompt_ids=np.arange(4, dtype=np.int32), seed=0, sample_index=0, turns=turns,
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def reading(*turns, entropies=None, threshold=0.5):
    made = trajectory(*turns)
    count = 4 + made.num_response_tokens
    return tokens.read(made, np.ones(count) if entropies is None else entropies, threshold, BOX.decode)


def by_kind(turn_tokens):
    """(kind, text) of each run of tokens of one kind."""
    runs = []
    for token in turn_tokens:
        if runs and runs[-1][0] is token.kind:
            runs[-1][1] += token.text
        else:
            runs.append([token.kind, token.text])
    return [tuple(run) for run in runs]


def test_each_part_of_an_episode_has_its_kind():
    read = reading(
        turn("I compute.</reason>\n" + CALL, "\n<reply 1>", CallStatus.ERROR),
        turn("Oh.</reason>\n" + CALL, "\n<reply 2>", CallStatus.OK),
        turn("Good: <answer> soon.</reason>\n<answer>\\boxed{4}</answer>"),
    )
    kind = tokens.Kind
    assert by_kind(read.turns[0]) == [
        (kind.THOUGHT, "I compute.</reason>\n"), (kind.CODE, CALL), (None, "\n<reply 1>")
    ]  # fmt: skip
    assert by_kind(read.turns[1]) == [
        (kind.AFTER_ERROR, "Oh.</reason>\n"), (kind.CODE, CALL), (None, "\n<reply 2>")
    ]  # fmt: skip
    assert by_kind(read.turns[2]) == [
        (kind.AFTER_REPLY, "Good: <answer> soon.</reason>\n"), (kind.ANSWER, "<answer>\\boxed{4}</answer>")
    ]  # fmt: skip


def test_a_call_that_never_ends_is_a_call_to_the_end():
    assert by_kind(reading(turn("a<tool_call> <answer>")).turns[0])[1] == (tokens.Kind.CODE, "<tool_call> <answer>")


def test_entropies_belong_to_the_ids_of_the_row_behind_the_prompt():
    made = trajectory(turn("ab", "xy"), turn("c"))
    read = tokens.read(made, np.arange(9.0), 5.0, BOX.decode)
    assert [t.entropy for t in read.turns[0]][:2] == [4, 5] and [t.entropy for t in read.turns[1]] == [8]
    assert [t.high for turn_tokens in read.turns for t in turn_tokens] == [False, True, False, False, True]
    assert tokens.sampled_positions(made).tolist() == [False] * 4 + [True, True, False, False, True]


def test_the_threshold_leaves_a_fifth_above_it():
    rows = [np.arange(50.0), np.arange(50.0, 100.0)]
    assert sum(int((row >= tokens.threshold(rows)).sum()) for row in rows) == 20
    with pytest.raises(ValueError, match="nothing to analyse"):
        tokens.threshold([])


def test_the_table_counts_what_a_plain_loop_counts():
    entropies = np.random.default_rng(0).random(400)
    read = reading(turn("ab</reason>\n" + CALL, "r", CallStatus.OK), turn("cd<answer>4"), entropies=entropies)
    rows = {row["kind"]: row for row in tokens.table([read])}
    found = [token for turn_tokens in read.turns for token in turn_tokens if token.kind is not None]
    highs = sum(token.high for token in found)
    for kind in tokens.Kind:
        mine = [token for token in found if token.kind is kind]
        assert rows[kind.value]["tokens"] == len(mine)
        if mine:
            assert rows[kind.value]["entropy_mean"] == pytest.approx(sum(t.entropy for t in mine) / len(mine))
            assert rows[kind.value]["share_of_high"] == pytest.approx(sum(t.high for t in mine) / highs)
    assert rows["after an error"]["entropy_mean"] is None
    assert rows["all"]["tokens"] == len(found) and rows["all"]["share"] == 1


def test_frequent_high_tokens_come_with_how_often_they_occur():
    entropies = np.zeros(8)
    entropies[[4, 6]] = 1, 3
    read = reading(turn("abaa"), entropies=entropies)
    assert tokens.frequent([read], (tokens.Kind.THOUGHT,)) == [
        {"text": "a", "high": 2, "occurs": 3, "entropy_mean": 2.0}
    ]
    assert tokens.frequent([read], (tokens.Kind.CODE,)) == []


@given(st.text(alphabet="aé数😀 \n", max_size=60))
def test_pieces_add_up_to_the_text_with_whole_characters(text):
    ids = BOX.encode(text)
    pieces = tokens.pieces(ids, BOX.decode)
    assert len(pieces) == len(ids) and "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, BOX.vocab_size - 1), max_size=80))
def test_pieces_of_any_ids_have_the_length_of_the_ids(ids):
    assert len(tokens.pieces(ids, BOX.decode)) == len(ids)
