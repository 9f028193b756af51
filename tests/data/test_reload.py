"""A saved tokenizer with its template gives the same ids through transformers."""

from __future__ import annotations

import pytest

from rstar2_jax.data import chat as chats
from rstar2_jax.data import files
from rstar2_jax.data import tokenizer as tokenizers

SCHEMA = {"type": "function", "function": {"name": "execute_python_code_with_standard_io", "parameters": {}}}


@pytest.mark.torch
@pytest.mark.parametrize("template", ["rstar2", "box"])
def test_transformers_loads_a_saved_folder_and_renders_the_same_ids(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    box = tokenizers.Tokenizer.box()
    text = files.read_template(template)
    chat = chats.Chat(box, text, [SCHEMA])
    box.save(str(tmp_path), chat_template=text)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.eos_token_id == box.eos_ids[0] and loaded.pad_token_id == box.pad_id
    assert len(loaded) == box.vocab_size

    question = "37*52 mod 41"
    first = {"role": "assistant", "content": "<reason></reason>\n<tool_call>\n{}\n</tool_call>"}
    turns = [{"role": "user", "content": question}, first, {"role": "tool", "content": "38"}]
    rendered = loaded.apply_chat_template(turns[:1], tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    assert rendered == chat.prompt_text(question)
    whole = loaded.apply_chat_template(turns, tools=[SCHEMA], add_generation_prompt=True, return_dict=True)["input_ids"]
    said = [*box.encode(first["content"].removeprefix("<reason>")), *chat.end_ids]
    assert whole == [*chat.prompt_ids(question), *said, *chat.reply_ids(["38"])]
    sampled = [*box.encode("</reason>\n<answer>\\boxed{38}</answer>"), box.eos_ids[0]]
    assert loaded.decode(sampled) == box.decode(sampled)
