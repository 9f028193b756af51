"""The tokenizer: lossless text, ids as the only truth, end and pad tokens from the folder's files."""

from __future__ import annotations

import json

import hypothesis
import pytest
import tokenizers as hf
from hypothesis import strategies as st

from rstar2_jax.data import tokenizer as tokenizers

BOX = tokenizers.Tokenizer.box()


def toy_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE with the merges that break re-encoding of sampled ids."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("}", "}"), ("Ċ", "Ċ")]
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    built = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = hf.decoders.ByteLevel()
    built.add_special_tokens(["<|end|>"])
    return tokenizers.Tokenizer(built.to_str(), {"eos_token": "<|end|>", "pad_token": "<|end|>"}, ["<|end|>"])


@hypothesis.given(st.text())
def test_any_text_survives_the_built_in_vocabulary(text):
    assert BOX.decode(BOX.encode(text)) == text
    assert BOX.decode(BOX.encode(text, plain=True)) == text


@hypothesis.given(st.text())
def test_spans_lie_inside_the_text_and_end_at_its_end(text):
    spans = BOX.spans(text)
    assert all(0 <= a <= b <= len(text) for a, b in spans)
    assert not text or spans[-1][1] == len(text)


def test_the_built_in_vocabulary_has_320_ids_and_every_one_decodes():
    assert BOX.vocab_size == 320
    assert all(BOX.decode([i]) for i in range(BOX.vocab_size))


def test_each_fixed_piece_of_the_protocol_is_one_id():
    call = '<tool_call>\n{"name": "execute_python_code_with_standard_io", "arguments": {"code": "'
    for piece in ("<|im_start|>", "<|im_end|>", "<reason>", "</reason>\n", call, '"}}\n</tool_call>', "}</answer>"):
        assert len(BOX.encode(piece)) == 1, piece


def test_plain_text_never_contains_a_special_id():
    ids = BOX.encode("say <|im_end|>\n<|im_start|>assistant", plain=True)
    assert not set(ids) & {BOX.token_to_id("<|im_end|>"), BOX.token_to_id("<|im_start|>")}
    assert BOX.mentions_special("a<|im_end|>") and not BOX.mentions_special("<tool_call>")


def test_pad_and_end_tokens_of_the_built_in_vocabulary():
    assert BOX.eos_ids == (BOX.token_to_id("<|im_end|>"),)
    assert BOX.pad_id == BOX.token_to_id("<|endoftext|>")
    assert BOX.special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_sampled_ids_do_not_survive_decoding_and_encoding():
    # F01: why text is only a view. A path that encodes what it decoded would train on other ids than were sampled.
    toy = toy_bpe()
    sampled = [toy.token_to_id(digit) for digit in "123"]
    assert toy.decode(sampled) == "123"
    assert len(toy.encode("123")) == 1


def test_a_saved_folder_loads_as_the_same_tokenizer(tmp_path):
    BOX.save(str(tmp_path), chat_template="{{ messages }}")
    again = tokenizers.Tokenizer.load(str(tmp_path))
    text = "<|im_start|>user\n37*52 mod 41<|im_end|>\n"
    assert again.encode(text) == BOX.encode(text)
    assert (again.vocab_size, again.eos_ids, again.pad_id) == (BOX.vocab_size, BOX.eos_ids, BOX.pad_id)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_names_further_end_tokens_in_its_generation_config(tmp_path):
    # F07: a chat model may end turns with another token than tokenizer.eos.
    BOX.save(str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    assert tokenizers.Tokenizer.load(str(tmp_path)).eos_ids == (256, 258)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    BOX.save(str(tmp_path))
    stored = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(3)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(tokenizers.Tokenizer.load(str(tmp_path)).encode("hello")) == 5


def test_a_folder_without_a_tokenizer_or_an_end_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json there"):
        tokenizers.Tokenizer.load(str(tmp_path))
    BOX.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no end token"):
        tokenizers.Tokenizer.load(str(tmp_path))
