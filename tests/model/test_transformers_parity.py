"""Live parity with transformers: logits, gradients, and folders read across in both directions."""

import numpy as np
import pytest

from rstar2_jax.model import decoder, hf

pytestmark = pytest.mark.torch

CASES = [("llama", True), ("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3", False)]
SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 250000.0},
)


def theirs(family: str, tied: bool):
    """A random transformers model whose norms and biases are random too."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = SIZES | {"tie_word_embeddings": tied} | ({"head_dim": 32} if family == "qwen3" else {})
    config = transformers.AutoConfig.for_model(family, attn_implementation="eager", **sizes)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name else 0.0))
    return model


def ours(folder):
    """(params, function of (params, tokens, positions, segments) to logits) of a folder."""
    import jax

    params, settings = hf.load_folder(folder)
    model = decoder.Decoder(settings)

    @jax.jit
    def logits(params, tokens, positions, segments):
        hidden = model.apply({"params": params}, tokens, positions, segments)
        return model.apply({"params": params}, hidden, method="logits")

    return params, settings, logits


def row(tokens: int, seed: int = 0):
    ids = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (2, tokens)).astype(np.int32)
    return ids, np.tile(np.arange(tokens, dtype=np.int32), (2, 1)), np.ones((2, tokens), np.int32)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_logits_of_a_folder_that_transformers_wrote_are_equal(family, tied, tmp_path):
    import torch

    model = theirs(family, tied)
    model.save_pretrained(tmp_path)
    params, settings, logits = ours(tmp_path)
    assert settings.rope_theta == 250000.0 and settings.tie_embeddings == tied
    tokens, positions, segments = row(128)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits(params, tokens, positions, segments), want, atol=1e-4)


def test_left_padded_rows_are_equal_too(tmp_path):
    import torch

    model = theirs("qwen3", True)
    model.save_pretrained(tmp_path)
    params, _, logits = ours(tmp_path)
    tokens, positions, segments = row(20)
    segments[1, :6] = 0
    positions[1] = np.maximum(np.arange(20) - 6, 0)
    with torch.no_grad():
        want = model(
            torch.from_numpy(tokens).long(),
            attention_mask=torch.from_numpy(segments).long(),
            position_ids=torch.from_numpy(positions).long(),
        ).logits.numpy()
    got = np.asarray(logits(params, tokens, positions, segments))
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    np.testing.assert_allclose(got[1, 6:], want[1, 6:], atol=1e-4)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_gradients_of_the_mean_loss_are_equal(family, tied, tmp_path):
    import jax
    import torch

    model = theirs(family, tied)
    model.save_pretrained(tmp_path)
    params, settings, logits = ours(tmp_path)
    tokens, positions, segments = row(48)

    def loss(params):
        logprobs = jax.nn.log_softmax(logits(params, tokens, positions, segments)[:, :-1])
        return -jax.numpy.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    ids = torch.from_numpy(tokens).long()
    want = model(ids, labels=ids).loss
    want.backward()
    assert float(value) == pytest.approx(want.item(), rel=1e-5)
    named = dict(model.named_parameters())
    for name, array in hf.to_hf(gradient, settings).items():
        reference = named[name].grad.numpy()
        assert np.abs(array - reference).max() < 1e-4 * np.abs(reference).max(), name


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_the_folder_that_we_write(family, tied, dtype, tmp_path):
    import jax
    import torch
    import transformers

    theirs(family, tied).save_pretrained(tmp_path / "theirs")
    params, settings, logits = ours(tmp_path / "theirs")
    hf.save_folder(params, settings, tmp_path / "ours", dtype=dtype, ids=hf.SpecialIds(eos=(2,), pad=0))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.tie_word_embeddings == tied and model.generation_config.eos_token_id == 2
    stored = jax.tree.map(lambda x: x.astype(dtype).astype("float32"), params)
    tokens, positions, segments = row(64)
    with torch.no_grad():
        want = model.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits(stored, tokens, positions, segments), want, atol=1e-4)
