"""Whole rows for training: the decoder's own numbers, whatever is kept for the backward pass and on any layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax import hardware, settings
from rstar2_jax.model import decoder, rows, sharding


def small(family="qwen3", **changes):
    sizes = dict(vocab_size=64, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64)
    return settings.Model(family=family, tie_embeddings=family == "llama", **(sizes | changes))


def batch(count=4, length=20):
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 0]], [8, 9, 3], axis=1) * np.ones((count, 1), np.int32)
    positions = np.concatenate([np.arange(8), np.arange(9), np.zeros(3)])[None] * np.ones((count, 1))
    return rng.integers(0, 64, (count, length)).astype(np.int32), positions.astype(np.int32), segments.astype(np.int32)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("remat", ["none", "block", "full"])
def test_states_and_gradients_are_the_decoders_whatever_is_kept(family, remat):
    model, inputs = small(family), batch()
    params = decoder.init_params(model, jax.random.key(0))

    def ours(params):
        return jnp.mean(rows.hidden(model, params, inputs, remat=remat) ** 3)

    def plain(params):
        return jnp.mean(decoder.Decoder(model).apply({"params": params}, *inputs) ** 3)

    pair = [jax.tree.leaves(jax.jit(jax.value_and_grad(f))(params)) for f in (ours, plain)]
    for got, want in zip(*pair, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_what_is_recomputed_is_not_kept():
    model = small(layers=6, d_mlp=512)
    params = decoder.abstract_params(model)
    inputs = batch(8)

    def temporaries(remat):
        step = jax.jit(jax.grad(lambda p: jnp.mean(rows.hidden(model, p, inputs, remat=remat) ** 2)))
        return step.lower(params).compile().memory_analysis().temp_size_in_bytes

    none, block, full = (temporaries(remat) for remat in ("none", "block", "full"))
    assert full < block < none and full < 0.6 * none


def test_inputs_that_are_offloaded_go_to_the_host_and_come_back():
    model, inputs = small(), batch()
    params = decoder.abstract_params(model)

    def moves(remat):
        program = jax.make_jaxpr(jax.grad(lambda p: jnp.mean(rows.hidden(model, p, inputs, remat=remat))))(params)
        return [line.strip() for line in str(program).splitlines() if "device_put[" in line]

    away, back = moves("offload")  # in the layers' scan, forward and backward: one array each, a layer's input
    assert "f32<host>[4,20,32] = device_put[" in away and "f32[4,20,32] = device_put[" in back
    assert moves("full") == []


@pytest.mark.parametrize("sequence", [(), ("tensor",)])
def test_a_mesh_and_sequence_parallelism_change_no_number(sequence):
    model, inputs = small(), batch(8)
    layout = sharding.Layout(sharding.make_mesh((2, 2, 2)), hardware.Sharding(sequence=sequence))
    params = decoder.init_params(model, jax.random.key(0))
    placed = jax.device_put(params, sharding.param_shardings(params, layout.mesh, layout.table))

    def loss(params, layout):
        return jnp.mean(rows.hidden(model, params, inputs, remat="offload", layout=layout) ** 3)

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    for got, want in zip(*map(jax.tree.leaves, (step(placed, layout), step(params, None))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes, tokens, text",
    [
        ({"vocab_size": 61}, 20, "Model.vocab_size = 61 cannot be split over 2 devices"),
        ({"kv_heads": 1}, 20, "Model.kv_heads = 1 cannot be split over 2 devices"),
        ({}, 21, "Learner.row_tokens = 21 cannot be split over 2 devices"),
    ],
)
def test_a_size_that_cannot_be_split_is_an_error_with_both_numbers(changes, tokens, text):
    layout = sharding.Layout(sharding.make_mesh((2, 2, 2)), hardware.Sharding(sequence=("tensor",)))
    with pytest.raises(ValueError, match=text):
        layout.check(small(**changes), tokens)


@pytest.mark.parametrize("table", [{"heads": ("fsdp",)}, {"sequence": ("data",)}, {"mlp": ("expert",)}])
def test_a_table_that_no_array_can_follow_is_an_error(table):
    with pytest.raises(ValueError, match="Sharding"):
        hardware.Sharding(**table)
