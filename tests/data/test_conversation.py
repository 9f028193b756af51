"""Conversations as ids: one question is what training asks; foreign text makes no structure; tools and thoughts."""

from __future__ import annotations

import pytest

from rstar2_jax.data import chat as chats
from rstar2_jax.data import conversation, files
from rstar2_jax.data import tokenizer as tokenizers

BOX = tokenizers.Tokenizer.box()
SCHEMA = {"type": "function", "function": {"name": "run_code", "parameters": {}}}


def chat(template: str = "rstar2") -> chats.Chat:
    return chats.Chat(BOX, files.read_template(template), [SCHEMA])


def ids_of(messages, template="rstar2", **more):
    pairs = [{"role": role, "content": content} for role, content in messages]
    return conversation.Conversation(chat(template), pairs, **more).prompt_ids("")


def text_of(messages, template="rstar2", **more):
    return BOX.decode(ids_of(messages, template, **more))


@pytest.mark.parametrize("template", ["rstar2", "box"])
@pytest.mark.parametrize("question", ["What is 6*7?", "say <|im_end|> and <reason>", ""])
def test_one_question_has_the_ids_of_a_training_prompt(template, question):
    assert ids_of([("user", question)], template) == chat(template).prompt_ids(question)


def test_a_conversation_is_rendered_by_the_template_as_a_whole():
    said = [("user", "6*7?"), ("assistant", "<answer>42</answer>"), ("user", "and 6*8?")]
    messages = [{"role": role, "content": content} for role, content in said]
    whole = chats.compile_template(files.read_template("rstar2")).render(
        messages=messages, tools=[SCHEMA], add_generation_prompt=True
    )
    assert text_of(said) == whole
    assert whole.count("Solve the following problem") == 1


def test_a_system_message_takes_the_place_of_the_template_s_own():
    text = text_of([("system", "You are terse."), ("user", "hello")])
    assert "You are terse." in text and "careful mathematician" not in text and "run_code" in text
    assert "careful mathematician" in text_of([("user", "hello")])


def test_a_template_without_system_messages_refuses_one():
    with pytest.raises(ValueError, match="must show each"):
        ids_of([("system", "You are terse."), ("user", "hello")], "box")


def test_replies_of_tools_share_one_turn():
    said = [("user", "q"), ("assistant", "calls"), ("tool", "one"), ("tool", "two")]
    text = text_of(said)
    assert text.count("<tool_response>") == 2 and text.endswith("<|im_start|>assistant\n<reason>")
    assert text.index("one") < text.index("two")


def test_special_tokens_in_any_message_end_no_turn():
    end = BOX.eos_ids[0]
    quiet = [("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"), ("user", "v")]
    loud = [(role, content + "<|im_end|>") for role, content in quiet]
    assert ids_of(loud).count(end) == ids_of(quiet).count(end)
    assert text_of(loud).count("<|im_end|>") == text_of(quiet).count("<|im_end|>") + 5


def test_other_tools_or_none_take_the_place_of_the_run_s():
    other = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    text = text_of([("user", "q")], tools=[other])
    assert "weather" in text and "run_code" not in text
    assert "# Tools" not in text_of([("user", "q")], tools=[])


def test_a_thought_can_be_closed_before_it_begins_in_every_turn():
    made = conversation.Conversation(chat(), [{"role": "user", "content": "q"}], thinks=False)
    assert BOX.decode(made.prompt_ids("")).endswith("<reason></reason>\n")
    assert BOX.decode(made.reply_ids(["42"])).endswith("<reason></reason>\n")
    assert made.stop_ids == chat().stop_ids and made.end_ids == chat().end_ids


def test_the_chat_that_a_conversation_is_made_from_stays_as_it_was():
    own = chat()
    before = own.prompt_ids("q")
    conversation.Conversation(own, [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], tools=[])
    assert own.prompt_ids("q") == before
