"""Conversations of published sets: small files in their real columns become ids, the assistant's trained."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from rstar2_jax import settings
from rstar2_jax.data import chat as chats
from rstar2_jax.data import files, mixture, tables, talk_sets, talks
from rstar2_jax.data import tokenizer as own
from rstar2_jax.tools import parse, python

TOOL = python.schema("run_python")
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "dict", "properties": {"a": {"type": "int"}}}}
TWO = {"name": "Look Up", "description": "d", "parameters": {"type": "dict", "properties": {}}, "required": None}


def turn(role, value, keys=("from", "value")):
    return {keys[0]: role, keys[1]: value}


def said(role, content):
    return turn(role, content, ("role", "content"))


TOOLACE = {
    "system": f"You compose functions. Here they are:\n{json.dumps([ADD, TWO])}\nReturn [func(params)] alone.",
    "conversations": [
        turn("user", "Add them, and look."),
        turn("assistant", '[add(a=1, b=[2, 3]), Look Up(text="a (b), \\"c\\"", exact=true)]'),
        turn("tool", json.dumps([{"name": "add", "results": 6}, {"name": "Look Up", "results": {"n": 1}}])),
        turn("assistant", "It is six."),
    ],
}
APIGEN = {
    "system": "Be polite.",
    "tools": json.dumps(
        [{"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}]
    ),
    "conversations": [
        turn("human", "Where is it?"),
        turn("function_call", '{"name": "find", "arguments": {"what": "it", "deep": {"x": null}}}'),
        turn("observation", '{"place": "here"}'),
        turn("gpt", "It is here."),
        turn("human", "Thanks."),
    ],
}
GLAIVE = {
    "system": "SYSTEM: You are of help. Use these if needed -\n" + json.dumps(ADD, indent=4),
    "chat": (
        "USER: What is 1+1?\n\n\nASSISTANT: <functioncall> "
        '{"name": "add", "arguments": \'{"a": 1, "why": "it\\\'s asked"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"sum": 2}\n\n\nASSISTANT: Two. <|endoftext|>'
    ),
}
MAGICODER = {
    "lang": "python",
    "raw_index": 1,
    "index": 2,
    "seed": "x",
    "openai_fingerprint": "f",
    "problem": "Print three.",
    "solution": "So:\n```python\nprint(3)\n```\nIt prints three.",
}
TULU = {"id": "t", "messages": [said("system", "Short."), said("user", "Hi"), said("assistant", "Ho")], "source": "s"}
NEMOTRON = {
    "input": [said("user", "One?"), said("assistant", "Two."), said("user", "Three?")],
    "output": "Four.",
    "category": "chat",
    "license": "odc-by",
    "reasoning": "off",
    "generator": "g",
    "used_in_training": "no",
    "version": "v1",
    "system_prompt": "detailed thinking off",
}
ROWS = {
    "toolace": TOOLACE,
    "apigen_mt": APIGEN,
    "glaive_v2": GLAIVE,
    "magicoder": MAGICODER,
    "tulu3": TULU,
    "nemotron_chat": NEMOTRON,
}


def toy_tokenizer(tmp_path, text):
    """A BPE that really merges over the places at which turns begin and end."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    built.train_from_iterator([text] * 3, trainer)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return own.Tokenizer.load(str(tmp_path))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    text = "<reason></reason>\n<answer></answer><|im_end|>\n<tool_call>\n</tool_call>" * 5
    tokenizer = toy_tokenizer(tmp_path_factory.mktemp("toy"), text)
    return chats.Chat(tokenizer, files.read_template("rstar2"))


def converted(name, row=None):
    return talk_sets.talk(name, row or ROWS[name], 0, TOOL)


def pieces(demo, chat, trained):
    """Texts of the runs of ids that are trained, or are not."""
    edges = np.flatnonzero(np.diff(demo.mask.astype(int))) + 1
    parts = zip(np.split(demo.token_ids, edges), np.split(demo.mask, edges), strict=True)
    return [chat.tokenizer.decode(ids.tolist()) for ids, mask in parts if mask[0] == trained]


def test_every_set_is_tried_here():
    assert set(ROWS) == set(talk_sets.TALK_SETS)


def test_calls_of_every_notation_become_name_and_arguments():
    assert converted("toolace").messages[1].calls == (
        ("add", {"a": 1, "b": [2, 3]}),
        ("Look Up", {"text": 'a (b), "c"', "exact": True}),
    )
    assert [m.role for m in converted("toolace").messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert converted("apigen_mt").messages[1].calls == (("find", {"what": "it", "deep": {"x": None}}),)
    assert converted("glaive_v2").messages[1].calls == (("add", {"a": 1, "why": "it's asked"}),)
    assert converted("magicoder").messages[1].calls == (("run_python", {"code": "print(3)"}),)
    assert converted("toolace").tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_source_licence_and_system_text_are_kept_and_what_follows_the_last_answer_is_not():
    assert (converted("nemotron_chat").licence, converted("toolace").licence) == ("odc-by", "apache-2.0")
    assert converted("apigen_mt").system == "Be polite." and converted("tulu3").system == "Short."
    assert converted("apigen_mt").messages[-1].text == "It is here."
    assert all(converted(name).source == name for name in ROWS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_ids_decode_to_the_rendering_of_the_whole_and_the_mask_covers_the_assistant_alone(name, chat):
    # F04, F05, F08
    talk = converted(name)
    demo = talks.render(talk, chat)
    spoken = [talks.assistant_text(m, chat) + "<|im_end|>" for m in talk.messages if m.role == "assistant"]
    assert pieces(demo, chat, True) == spoken
    messages = [{"role": "system", "content": talk.system}] if talk.system else []
    messages += [
        {"role": m.role, "content": "<reason>" + talks.assistant_text(m, chat) if m.role == "assistant" else m.text}
        for m in talk.messages
    ]
    whole = chat.render_talk(messages, talk.tools, ongoing=False)
    assert chat.tokenizer.decode(demo.token_ids.tolist()) == whole
    assert all(text.endswith("<|im_start|>assistant\n<reason>") for text in pieces(demo, chat, False)[: len(spoken)])


@pytest.mark.parametrize("name", ["toolace", "apigen_mt", "glaive_v2", "magicoder"])
def test_what_is_trained_is_read_by_the_parser_of_the_agent_loop(name, chat):
    talk = converted(name)
    text = "".join(pieces(talks.render(talk, chat), chat, True))
    wanted = [call for message in talk.messages for call in message.calls]
    assert [(call.name, dict(call.arguments), call.error) for call in parse.parse(text)] == [(*w, None) for w in wanted]


def test_no_token_reaches_over_the_place_where_sampling_starts(chat):
    # A tokenizer that merges `><` would hide the end of the forced prefix inside a token of the rendering.
    demo = talks.render(converted("tulu3"), chat)
    merged = chat.tokenizer.encode(chat.tokenizer.decode(demo.token_ids.tolist()))
    over = [chat.tokenizer.decode([i]) for i in merged if "><" in chat.tokenizer.decode([i])]
    assert merged != demo.token_ids.tolist() and over
    assert pieces(demo, chat, True)[0].startswith("</reason>")


def test_the_context_of_a_turn_is_what_inference_would_show(chat):
    talk = converted("tulu3")
    demo = talks.render(talk, chat)
    before = chat.render_talk([said("system", "Short."), said("user", "Hi")], (), ongoing=True)
    assert demo.token_ids[: int(np.argmax(demo.mask))].tolist() == chat.tokenizer.encode(before)
    assert "Solve the following problem" not in before and "<answer>" in before


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("toolace", {**TOOLACE, "conversations": TOOLACE["conversations"][1:]}, "assistant after nothing"),
        ("toolace", {**TOOLACE, "conversations": TOOLACE["conversations"][:1]}, "no assistant turn"),
        (
            "toolace",
            {**TOOLACE, "conversations": [turn("user", "x"), turn("assistant", "[gone(a=1)]")]},
            "calls a function that is not on offer",
        ),
        (
            "toolace",
            {**TOOLACE, "conversations": [turn("user", "x"), turn("assistant", "[add(1)]")]},
            "a call with arguments without names",
        ),
        (
            "toolace",
            {**TOOLACE, "conversations": [turn("user", "x"), turn("assistant", "[add(a=open('f'))]")]},
            "a call whose arguments are unreadable",
        ),
        (
            "toolace",
            {**TOOLACE, "conversations": [turn("user", "x"), turn("assistant", "[add(a=1")]},
            "a call that is no list in brackets",
        ),
        ("toolace", {"system": "s", "conversations": "text"}, "conversations is str, not list"),
        ("apigen_mt", {**APIGEN, "conversations": [turn("alien", "x")]}, "a turn of role alien"),
        ("apigen_mt", {**APIGEN, "tools": '[{"name": 3}]'}, "a function without a name"),
        (
            "apigen_mt",
            {**APIGEN, "conversations": [turn("human", "x"), turn("function_call", "{find}")]},
            "a call that is not JSON",
        ),
        (
            "apigen_mt",
            {**APIGEN, "conversations": [*APIGEN["conversations"][:2], turn("gpt", "no reply was read")]},
            "assistant after calls",
        ),
        ("glaive_v2", {**GLAIVE, "chat": "no speaker"}, "a chat that does not start with a speaker"),
        ("glaive_v2", {**GLAIVE, "system": "SYSTEM: Functions {'name': 'add'}"}, "functions that are not JSON"),
        ("magicoder", {**MAGICODER, "lang": "rust"}, "lang is rust"),
        ("magicoder", {**MAGICODER, "solution": "print(3)"}, "not exactly one Python program"),
        ("tulu3", {"messages": [said("user", "x"), said("assistant", " ")]}, "empty assistant turn"),
        ("tulu3", {"messages": [said("user", "x"), {"role": "assistant"}]}, "a turn without role or text"),
        ("nemotron_chat", {**NEMOTRON, "reasoning": "on"}, "reasoning is on"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(name, row, reason):
    with pytest.raises(tables.BadRowError) as caught:
        converted(name, row)
    assert str(caught.value) == reason


def test_a_conversation_that_spells_a_special_token_is_left_out(chat):
    talk = converted("tulu3", {"messages": [said("user", "say <|im_end|>"), said("assistant", "no")]})
    with pytest.raises(tables.BadRowError, match="spells a special token"):
        talks.render(talk, chat)


def tulu(number):
    return {"messages": [said("user", f"Say {number}."), said("assistant", str(number))]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_share_is_a_choice_by_the_seed_that_does_not_depend_on_the_number_wanted(tmp_path):
    write(tmp_path / "tulu3.jsonl", [tulu(i) for i in range(60)])
    some, read, _ = mixture.choose("tulu3", 10, str(tmp_path), TOOL, seed=1)
    more = mixture.choose("tulu3", 25, str(tmp_path), TOOL, seed=1)[0]
    other = mixture.choose("tulu3", 10, str(tmp_path), TOOL, seed=2)[0]
    assert read == 60 and len(some) == 10 and {t.id for t in some} < {t.id for t in more}
    assert [t.id for t in some] != [t.id for t in other]
    assert some == sorted(some, key=lambda talk: int(talk.id.split("/")[1]))


def test_shares_and_bad_rows_are_told_and_a_short_set_gives_what_it_has(tmp_path, chat):
    write(tmp_path / "tulu3.jsonl", [*(tulu(i) for i in range(4)), {"messages": []}, {"messages": [said("tool", "x")]}])
    (tmp_path / "magicoder").mkdir()
    write(tmp_path / "magicoder" / "data-oss.jsonl", [MAGICODER, {**MAGICODER, "lang": "cpp"}])
    mix = settings.Demonstrations(count=7, mixture=(("tulu3", 6), ("magicoder", 1)), folder=str(tmp_path))
    demos, lines = mixture.demonstrations(mix, chat, TOOL, 0)
    assert len(demos) == 5
    assert lines[0].startswith("tulu3: 4 of 6 wanted from 6 rows, licence odc-by; 2 bad rows: ")
    assert "1 x no assistant turn (such as tulu3/4)" in lines[0] and "1 x a turn of role tool" in lines[0]
    assert lines[1].startswith("magicoder: 1 of 1 wanted from 2 rows, licence mit")


def test_a_mixture_that_cannot_be_had_is_refused_with_the_remedy(tmp_path, chat):
    with pytest.raises(ValueError, match="the shares of mixture add up to 3"):
        settings.Demonstrations(count=4, mixture=(("tulu3", 3),))
    for share, said_of_it in (("unknown", "must be one of toolace, apigen_mt"), ("tulu3", "download allenai/tulu-3")):
        mix = settings.Demonstrations(count=1, mixture=((share, 1),), folder=str(tmp_path))
        with pytest.raises(ValueError, match=said_of_it):
            mixture.demonstrations(mix, chat, TOOL, 0)
    write(tmp_path / "tulu3.jsonl", [{"messages": []}])
    mix = settings.Demonstrations(count=1, mixture=(("tulu3", 1),), folder=str(tmp_path))
    with pytest.raises(ValueError, match="none of 1 rows can be used: 1 x no assistant turn"):
        mixture.demonstrations(mix, chat, TOOL, 0)
