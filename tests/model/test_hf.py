"""Hugging Face names both ways, config.json both ways, folders of safetensors, and golden logits of transformers."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from rstar2_jax.model import decoder, hf
from rstar2_jax.settings import Model

GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "golden").glob("logits_*.npz"))


def load_golden(path: pathlib.Path):
    """(settings, params, file) of one golden checkpoint."""
    file = np.load(path)
    settings = hf.settings_from_config(json.loads(str(file["config"])))
    weights = {name.removeprefix("weight:"): file[name] for name in file.files if name.startswith("weight:")}
    return settings, hf.from_hf(weights, settings), file


def jitted_logits(settings, params, file):
    """Logits of a golden file's rows."""
    model = decoder.Decoder(settings)

    def compute(params, tokens, positions):
        hidden = model.apply({"params": params}, tokens, positions, np.ones_like(file["tokens"]))
        return model.apply({"params": params}, hidden, method="logits")

    return np.asarray(jax.jit(compute)(params, file["tokens"], file["positions"]))


def small(family="llama", tied=True, **changes) -> Model:
    sizes = dict(vocab_size=40, d_model=16, d_mlp=24, layers=2, heads=4, kv_heads=2, head_dim=4, max_positions=64)
    return Model(family=family, tie_embeddings=tied, **(sizes | changes))


def drawn(settings):
    """Random parameters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), decoder.abstract_params(settings)
    )


def test_golden_files_cover_every_family_with_both_heads():
    assert len(GOLDEN) == 6


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_logits_equal_transformers_on_a_random_checkpoint(path):
    settings, params, file = load_golden(path)
    logits = jitted_logits(settings, params, file)
    np.testing.assert_allclose(logits, file["logits"], atol=2e-5)


def test_golden_logits_notice_a_forgotten_rope_theta():
    settings, params, file = load_golden(GOLDEN[0])
    assert settings.rope_theta == 54321.0
    logits = jitted_logits(dataclasses.replace(settings, rope_theta=10000.0), params, file)
    assert np.abs(logits - file["logits"]).max() > 1e-2


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_names_there_and_back_are_bit_exact(path):
    settings, params, _ = load_golden(path)
    again = hf.from_hf(hf.to_hf(params, settings), settings)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_settings_survive_their_own_config(family, tied):
    settings = small(family, tied, rope_theta=1e6, rms_eps=1e-5)
    ids = hf.SpecialIds(bos=1, eos=(2, 5), pad=2)
    config = json.loads(json.dumps(hf.config_from_settings(settings, ids, dtype="bfloat16")))
    assert hf.settings_from_config(config) == settings
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 5], 2)


def test_rope_theta_is_read_in_both_spellings():
    config = hf.config_from_settings(small(rope_theta=777.0), hf.SpecialIds())
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k != "rope_theta"}
    assert hf.settings_from_config(old).rope_theta == hf.settings_from_config(new).rope_theta == 777.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_config_that_the_decoder_cannot_honour_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        hf.settings_from_config(hf.config_from_settings(small(), hf.SpecialIds()) | change)


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 10**9), ("float32", 3000), ("bfloat16", 10**9)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_read_back_as_it_was_written(tmp_path, dtype, shard_bytes, tied):
    settings = small("qwen3", tied)
    params = drawn(settings)
    hf.save_folder(params, settings, tmp_path, dtype=dtype, ids=hf.SpecialIds(eos=(3,)), shard_bytes=shard_bytes)
    again, read = hf.load_folder(tmp_path)
    assert read == settings
    stored = jax.tree.map(lambda x: np.asarray(x.astype(dtype), np.float32), params)
    assert jax.tree.all(jax.tree.map(np.array_equal, stored, again))
    shards = list(tmp_path.glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 3000) == (tmp_path / hf.INDEX_NAME).is_file()
    assert not list(tmp_path.glob("*.partial"))
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 3


def rewrite(folder: pathlib.Path, edit) -> None:
    tensors = safetensors.numpy.load_file(folder / hf.SINGLE_NAME)
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / hf.SINGLE_NAME)


def test_a_missing_misshapen_or_unknown_tensor_is_an_error_that_names_it(tmp_path):
    settings = small()
    hf.save_folder(drawn(settings), settings, tmp_path)
    original = (tmp_path / hf.SINGLE_NAME).read_bytes()
    name = "model.layers.1.mlp.up_proj.weight"
    edits = [
        (lambda t: t.pop(name), "up_proj.*missing"),
        (lambda t: t.update({name: t[name].T.copy()}), r"up_proj.*\(16, 24\).*\(24, 16\)"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[name]}), r"layers\.2"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "tie_word_embeddings"),
    ]
    for edit, words in edits:
        (tmp_path / hf.SINGLE_NAME).write_bytes(original)
        rewrite(tmp_path, edit)
        with pytest.raises(ValueError, match=words):
            hf.load_folder(tmp_path)


def test_a_repeated_tied_head_and_old_rotary_buffers_are_accepted(tmp_path):
    settings = small()
    params = drawn(settings)
    hf.save_folder(params, settings, tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}))
    again, _ = hf.load_folder(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        hf.load_folder(tmp_path)
    hf.write_json(tmp_path / "config.json", hf.config_from_settings(small(), hf.SpecialIds()))
    with pytest.raises(ValueError, match="safetensors"):
        hf.load_folder(tmp_path)


def test_parameters_of_another_model_are_not_written(tmp_path):
    params = drawn(small())
    with pytest.raises(ValueError, match="20 tensors where a qwen3 model of 2 layers has 24"):
        hf.save_folder(params, small("qwen3"), tmp_path)
    with pytest.raises(ValueError, match="shape"):
        hf.save_folder(params, small(vocab_size=41), tmp_path)
    with pytest.raises(ValueError, match="float16"):
        hf.save_folder(params, small(), tmp_path, dtype="float16")
