"""The sharding table: complete, exact in its errors, and without effect on numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rstar2_jax.model import decoder, sharding
from rstar2_jax.settings import Model


def small(family: str, **changes) -> Model:
    sizes = dict(vocab_size=64, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64)
    return Model(family=family, tie_embeddings=family == "llama", **(sizes | changes))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_parameter_has_a_rule_and_every_matrix_is_split_over_both_axes(family):
    abstract = decoder.abstract_params(small(family))
    shardings = sharding.param_shardings(abstract, sharding.make_mesh((2, 2, 2)))
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
    for leaf, placed in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        assert set(placed.spec) == ({"fsdp", "tensor"} if leaf.ndim == 2 else set(placed.spec) & {"tensor"})


def test_projections_meet_in_the_middle():
    for path, spec in {
        "layers_0/attn/q/kernel": ("fsdp", "tensor"),
        "layers_0/attn/o/kernel": ("tensor", "fsdp"),
        "layers_11/mlp/up/kernel": ("fsdp", "tensor"),
        "layers_11/mlp/down/kernel": ("tensor", "fsdp"),
        "embed/embedding": ("tensor", "fsdp"),
        "layers_0/attn/q_norm/scale": (),
        "opt/0/mu/layers_0/attn/v/bias": ("tensor",),
    }.items():
        assert sharding.spec_of(path) == PartitionSpec(*spec)


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(ValueError, match="router/kernel"):
        sharding.spec_of("layers_0/router/kernel")


def test_an_axis_that_cannot_be_split_is_an_error_with_both_numbers():
    abstract = decoder.abstract_params(small("llama", vocab_size=61))
    with pytest.raises(ValueError, match=r"embed/embedding \(61, 32\): 61 cannot be split over 4 devices"):
        sharding.param_shardings(abstract, sharding.make_mesh((1, 2, 4)))


def test_a_mesh_of_more_devices_than_there_are_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="needs 1000 devices, 8 are visible"):
        sharding.make_mesh((10, 10, 10))


def test_eight_devices_give_the_loss_and_gradients_of_one():
    settings = small("qwen2", layers=1)
    model = decoder.Decoder(settings)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), decoder.abstract_params(settings)
    )
    tokens = rng.integers(0, 64, (8, 12)).astype(np.int32)
    positions, segments = np.tile(np.arange(12, dtype=np.int32), (8, 1)), np.ones((8, 12), np.int32)

    @functools.partial(jax.value_and_grad)
    def loss(params, tokens, positions, segments):
        hidden = model.apply({"params": params}, tokens, positions, segments)
        logits = model.apply({"params": params}, hidden, method="logits")
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    want = jax.jit(loss)(params, tokens, positions, segments)
    mesh = sharding.make_mesh((2, 2, 2))
    placed = jax.device_put(params, sharding.param_shardings(params, mesh))
    rows = jax.device_put((tokens, positions, segments), sharding.batch_sharding(mesh))
    value, gradient = jax.jit(loss)(placed, *rows)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_a_mesh_that_leaves_a_process_without_devices_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"processes \[1\] have no part of it"):
        sharding.make_mesh((1, 1, 1))
