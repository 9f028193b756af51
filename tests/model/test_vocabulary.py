"""Log-probabilities over the vocabulary: the plain softmax and its autodiff, chunks, devices, sizes of buffers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax import hardware
from rstar2_jax.learner import hlo
from rstar2_jax.model import sharding, vocabulary

ROWS, TOKENS, WIDTH, VOCAB = 4, 24, 16, 64


def made(tied, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(ROWS, TOKENS, WIDTH)), dtype)
    table = jnp.asarray(0.3 * rng.normal(size=(VOCAB, WIDTH) if tied else (WIDTH, VOCAB)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (ROWS, TOKENS)), jnp.int32)
    wanted = jnp.asarray(rng.random((ROWS, TOKENS)) < [[0.5], [0.0], [1.0], [0.2]])
    return hidden, table, targets, wanted


def plain(hidden, table, targets, wanted, how):
    """Everything at once, by JAX's own softmax."""
    logits = (hidden @ (table.T if how.tied else table).astype(hidden.dtype)).astype(jnp.float32) / how.temperature
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return jnp.where(wanted, picked, 0), jnp.where(wanted, entropy, 0)


def value_and_gradients(function, how, arrays, seed=3):
    rng = np.random.default_rng(seed)
    pulls = [jnp.asarray(rng.normal(size=(ROWS, TOKENS)), jnp.float32) for _ in range(2)]
    hidden, table, targets, wanted = arrays

    def run(hidden, table):
        found = function(hidden, table, targets, wanted, how)
        return sum(jnp.sum(jnp.sin(x) * pull) for x, pull in zip(found, pulls, strict=True)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(hidden, table)
    return found, gradients


def close(left, right, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), left, right)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [7, 16, 512])
@pytest.mark.parametrize("temperature, keep", [(1.0, False), (0.6, False), (0.6, True)])
def test_values_and_gradients_are_those_of_the_plain_softmax(monkeypatch, tied, chunk, temperature, keep):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", chunk)
    how, arrays = vocabulary.How(temperature, tied, keep=keep), made(tied)
    close(value_and_gradients(vocabulary.token_statistics, how, arrays), value_and_gradients(plain, how, arrays), 3e-6)


def test_nothing_wanted_gives_zeros_and_no_gradient():
    hidden, table, targets, wanted = made(True)
    arrays = hidden, table, targets, jnp.zeros_like(wanted)
    found, gradients = value_and_gradients(vocabulary.token_statistics, vocabulary.How(1.0, True), arrays)
    assert not any(np.any(x) for x in (*found, *gradients))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("other", [np.nan, np.inf, 1e4])  # the last gives logits whose exponential is infinite
def test_what_is_not_wanted_may_be_anything(monkeypatch, keep, chunk, other):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", chunk)
    hidden, table, targets, wanted = made(False)
    arrays = jnp.where(wanted[..., None], hidden, other), table, targets, wanted
    how = vocabulary.How(1.0, False, keep=keep)
    found, gradients = value_and_gradients(vocabulary.token_statistics, how, arrays)
    zeros = jnp.where(wanted[..., None], hidden, 0), table, targets, wanted
    expected = value_and_gradients(vocabulary.token_statistics, how, zeros)
    jax.tree.map(np.testing.assert_array_equal, (found, gradients), expected)


LAYOUTS = [
    ((8, 1, 1), hardware.Sharding()),
    ((1, 4, 2), hardware.Sharding(sequence=("tensor",))),
    ((2, 2, 2), hardware.Sharding()),
    ((2, 2, 2), hardware.Sharding(sequence=("tensor",), embed=())),
    ((2, 2, 2), hardware.Sharding(rows=("data",), embed=("fsdp",))),
    ((1, 1, 8), hardware.Sharding(sequence=("tensor",), vocab=())),
]


@pytest.mark.parametrize("tied, keep", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("mesh, table", LAYOUTS)
def test_split_over_devices_they_are_those_of_one(mesh, table, tied, keep):
    hidden, weights, *others = made(tied)
    arrays = jnp.tile(hidden, (2, 1, 1)), weights, *(jnp.tile(x, (2, 1)) for x in others)
    layout = sharding.Layout(sharding.make_mesh(mesh), table)

    def run(hidden, weights, how):
        logprobs, entropies = vocabulary.token_statistics(hidden, weights, *arrays[2:], how)
        return jnp.sum(jnp.sin(logprobs) + jnp.cos(entropies) * arrays[3])

    step = jax.jit(jax.value_and_grad(run, (0, 1)), static_argnums=2)
    alone = step(*arrays[:2], vocabulary.How(0.8, tied))
    spread = step(*arrays[:2], vocabulary.How(0.8, tied, layout, keep))
    close(spread, alone, 3e-6)


def test_bfloat16_states_give_float32_numbers_and_a_float32_table_gradient():
    how = vocabulary.How(1.0, False)
    low, high = made(False, jnp.bfloat16), made(False)
    found, (dhidden, dtable) = value_and_gradients(vocabulary.token_statistics, how, low)
    want, (_, dwant) = value_and_gradients(vocabulary.token_statistics, how, high)
    assert found[0].dtype == jnp.float32 and dtable.dtype == jnp.float32 and dhidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[0], want[0], atol=0.1)
    np.testing.assert_allclose(dtable, dwant, atol=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_no_buffer_holds_the_logits_of_all_tokens_and_the_table_gradient_is_reduced_once(monkeypatch, tied):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", 8)
    layout = sharding.Layout(sharding.make_mesh((1, 4, 2)), hardware.Sharding(sequence=("tensor",)))
    hidden, table, targets, wanted = made(tied)
    how = vocabulary.How(1.0, tied, layout)

    @functools.partial(jax.jit, out_shardings=jax.sharding.NamedSharding(
        layout.mesh, layout.spec(*(("vocab", "embed") if tied else ("embed", "vocab")))))  # fmt: skip
    def gradient(table):
        return jax.grad(lambda t: vocabulary.token_statistics(hidden, t, targets, wanted, how)[0].sum())(table)

    text = gradient.lower(table).compile().as_text()
    sizes = [dims for kind, dims in hlo.array_sizes(text) if kind == "f32"]
    assert not [dims for dims in sizes if VOCAB // 2 in dims and np.prod(dims) >= TOKENS * VOCAB // 2]
    large = [one for one in hlo.collectives(text) if one.size >= 4 * WIDTH * VOCAB // 8]
    reduced = [one for one in large if one.kind in ("all-reduce", "reduce-scatter")]
    assert sum(one.times for one in reduced) == 1, large


@pytest.mark.parametrize("keep, kept_bytes, products", [(True, 1 << 20, 3), (True, 64, 4), (False, 1 << 20, 4)])
def test_small_logits_are_kept_in_place_of_a_product_and_large_ones_never(monkeypatch, keep, kept_bytes, products):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(vocabulary, "KEPT_BYTES", kept_bytes)
    hidden, table, targets, wanted = made(True)
    how = vocabulary.How(1.0, True, keep=keep)

    def loss(hidden, table):
        return vocabulary.token_statistics(hidden, table, targets, wanted, how)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, table))
    parts = vocabulary.KEPT_CHUNKS if products == 3 else 1
    assert text.count("dot_general[") == products * parts
    # Four chunks of 24 tokens where they are kept, each in an array of its own, and chunks of 8 where they are not.
    assert (f"f32[{ROWS * TOKENS // vocabulary.KEPT_CHUNKS},{VOCAB}]" in text) == (products == 3)
    assert f"f32[{ROWS * TOKENS},{VOCAB}]" not in text
    scored = str(jax.make_jaxpr(loss)(hidden, table))
    assert scored.count("dot_general[") == 1 and " cond[" not in scored  # nothing is kept without a gradient


def test_chunks_that_nothing_is_wanted_of_are_passed_over_where_logits_are_kept(monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", 8)
    hidden, table, targets, wanted = made(True)
    wanted = wanted.at[:].set(False).at[0, :5].set(True)  # one chunk of four
    how, arrays = vocabulary.How(0.7, True, keep=True), (hidden, table, targets, wanted)
    *_, kept = vocabulary._fwd(*arrays, how)[1]
    assert len(kept) == vocabulary.KEPT_CHUNKS and np.any(kept[0]) and not any(np.any(part) for part in kept[1:])
    close(value_and_gradients(vocabulary.token_statistics, how, arrays), value_and_gradients(plain, how, arrays), 3e-6)
