"""Export: what is written is what was trained, and a defect is an error."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rstar2_jax import begin, export, settings
from rstar2_jax.data import tokenizer
from rstar2_jax.io import checkpoint
from rstar2_jax.model import decoder, hf
from rstar2_jax.types import TrainState

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "check_export.py"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def small(family="qwen3", tied=True) -> settings.Model:
    return settings.Model(
        family=family,
        vocab_size=320,
        d_model=32,
        d_mlp=48,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope_theta=3e4,
        tie_embeddings=tied,
        max_positions=256,
    )


def drawn(model: settings.Model, seed: int = 0):
    """Parameters far from any tie between logits."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * noise if path[-1].key == "scale" else 0.3 * noise)

    return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(model))


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizer.Tokenizer.box().save(str(tmp_path / "box"), chat_template=TEMPLATE)
    return tmp_path / "box"


def finished_run(folder: pathlib.Path, model: settings.Model):
    """A run's workdir with one checkpoint and its tokenizer; gives the parameters in it."""
    params = drawn(model)
    store = checkpoint.Checkpoints(folder / "checkpoints", keep=1)
    store.save(3, TrainState(step=jnp.int32(3), params=params, opt_state={}), {"cursor": 0})
    store.close()
    begin.save_tokenizer(tokenizer.Tokenizer.box(), TEMPLATE, folder)
    return params


def test_a_checkpoint_becomes_a_folder_with_everything_in_it(tmp_path, capsys):
    model, out = small(), tmp_path / "out"
    params = finished_run(tmp_path / "run", model)
    run = settings.Run(workdir=str(out), steps=0, init_from=str(tmp_path / "run"))
    assert export.export(run=run, model=model, dtype="float32") == 0
    again, found = hf.load_folder(out)
    assert found == model
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    report = json.loads((out / export.REPORT_FILE).read_text())
    assert report["max_delta_logit"] == 0.0 and report["same_top1"] == 1.0 and report["tensors"] == 13
    box = tokenizer.Tokenizer.box()
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == box.eos_ids[0] and config["pad_token_id"] == box.pad_id
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == box.eos_ids[0]
    assert tokenizer.Tokenizer.load(str(out)).encode("gcd(84, 36)") == box.encode("gcd(84, 36)")
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert (out / "clock.json").is_file()
    assert export.export(run=run, model=model, dtype="float32") == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_bfloat16_keeps_the_next_id_of_sixteen_prompts(family, tied, tmp_path, tokenizer_folder):
    model = small(family, tied)
    params = drawn(model)
    export.export_folder(params, model, tokenizer_folder, tmp_path / "out", "bfloat16")
    found = export.verify_export(tmp_path / "out", params, model, "bfloat16")
    assert found.max_delta_logit == 0.0 < found.rounding_delta_logit < 0.3
    assert found.same_top1 == 1.0
    stored = safetensors.numpy.load_file(tmp_path / "out" / hf.SINGLE_NAME)
    assert {array.dtype for array in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert ("lm_head.weight" in stored) == (not tied)


def test_a_missing_tensor_in_the_written_folder_is_an_error(tmp_path, tokenizer_folder):
    model = small()
    params = drawn(model)
    export.export_folder(params, model, tokenizer_folder, tmp_path / "out", "float32")
    path = tmp_path / "out" / hf.SINGLE_NAME
    tensors = safetensors.numpy.load_file(path)
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ValueError, match="k_norm.*missing"):
        export.verify_export(tmp_path / "out", params, model, "float32")


def test_weights_that_are_not_the_trained_ones_are_an_error_that_says_by_how_much(tmp_path, tokenizer_folder):
    model = small()
    export.export_folder(drawn(model, seed=1), model, tokenizer_folder, tmp_path / "out", "float32")
    with pytest.raises(export.ExportError, match=r"differ by .* allowed is 1e-04"):
        export.verify_export(tmp_path / "out", drawn(model), model, "float32")


def test_a_config_that_reads_back_differently_is_an_error(tmp_path, tokenizer_folder):
    model = small()
    params = drawn(model)
    export.export_folder(params, model, tokenizer_folder, tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10000.0
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(export.ExportError, match="10000"):
        export.verify_export(tmp_path / "out", params, model, "float32")


def test_what_cannot_be_exported_is_refused_by_name(tmp_path, tokenizer_folder):
    model = small()
    params = drawn(model)
    with pytest.raises(ValueError, match="float16"):
        export.export_folder(params, model, tokenizer_folder, tmp_path / "out", "float16")
    narrow = dataclasses.replace(model, vocab_size=100)
    with pytest.raises(ValueError, match="do not belong together"):
        export.export_folder(params, narrow, tokenizer_folder, tmp_path / "out", "float32")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        export.find_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="init_from is empty"):
        export.export(run=settings.Run(workdir=str(tmp_path), steps=0), model=model, dtype="float32")


def test_greedy_ids_are_those_of_whole_rows():
    model = small()
    params = drawn(model)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]]
    ids, logits = export.greedy(params, model, prompts, 4)
    module = decoder.Decoder(model)

    @jax.jit
    def whole(tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = module.apply({"params": params}, tokens, positions, segments)
        return module.apply({"params": params}, hidden, method="logits")

    for row, prompt in enumerate(prompts):
        sequence = list(prompt)
        for step in range(4):
            tokens, segments = np.zeros((1, 10), np.int32), np.zeros((1, 10), np.int32)
            tokens[0, : len(sequence)], segments[0, : len(sequence)] = sequence, 1
            last = np.asarray(whole(tokens, segments))[0, len(sequence) - 1]
            if step == 0:
                np.testing.assert_allclose(logits[row], last, atol=1e-5)
            sequence.append(int(last.argmax()))
        assert sequence[len(prompt) :] == ids[row].tolist()


@pytest.mark.torch
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_transformers_gives_the_same_logits_and_greedy_text(family, tied, tmp_path):
    pytest.importorskip("transformers")
    model, out = small(family, tied), tmp_path / "out"
    finished_run(tmp_path / "run", model)
    run = settings.Run(workdir=str(out), steps=0, init_from=str(tmp_path / "run"))
    export.export(run=run, model=model, dtype="float32")
    checked = subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    report = json.loads((out / export.REPORT_FILE).read_text())
    assert report["transformers_max_delta_logit"] < 1e-4
    assert report["transformers_equal_texts"] == report["transformers_prompts"] == 16


@pytest.mark.torch
def test_the_check_with_transformers_notices_other_weights(tmp_path):
    pytest.importorskip("transformers")
    model, out = small(), tmp_path / "out"
    finished_run(tmp_path / "run", model)
    run = settings.Run(workdir=str(out), steps=0, init_from=str(tmp_path / "run"))
    export.export(run=run, model=model, dtype="float32")
    hf.save_folder(drawn(model, seed=2), model, out)
    checked = subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True)
    assert checked.returncode == 1
    assert "logits differ by" in checked.stdout
