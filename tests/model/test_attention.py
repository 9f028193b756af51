"""Attention over whole rows: a plain loop, the two forms against each other, their gradients and their memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import attention, fused, sharding


def made(tokens, rows=2, seed=0, heads=4, kv_heads=2, dim=8):
    rng = np.random.default_rng(seed)
    sizes = ((rows, tokens, heads, dim), (rows, tokens, kv_heads, dim), (rows, tokens, kv_heads, dim))
    return tuple(jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)


def segments_of(*rows):
    """One row of ids for each tuple of lengths; what is left of the longest is padding."""
    longest = max(map(sum, rows))
    ids = [np.repeat(np.arange(1, len(lengths) + 1), lengths) for lengths in rows]
    return jnp.asarray([np.pad(row, (0, longest - len(row))) for row in ids], jnp.int32)


def test_attention_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(1, 9, 4, 8)), rng.normal(size=(1, 9, 2, 8)), rng.normal(size=(1, 9, 2, 8))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]])
    expected = np.zeros((9, 4, 8))
    for t in range(7):
        for head in range(4):
            seen = [s for s in range(t + 1) if segments[0, s] == segments[0, t]]
            scores = np.array([q[0, t, head] @ k[0, s, head // 2] for s in seen]) / np.sqrt(8)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[t, head] = sum(w * v[0, s, head // 2] for w, s in zip(weights, seen, strict=True))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    for form in (attention.dense, attention.blockwise, attention.causal):
        out = jax.jit(form)(*arrays, jnp.asarray(segments))
        np.testing.assert_allclose(np.asarray(out)[0, :7], expected[:7], atol=2e-6)
        assert np.isfinite(out).all()


def test_query_blocks_equal_one_dense_square(monkeypatch):
    q, k, v = made(50)
    segments = segments_of((20, 15, 10), (20, 30))
    whole = jax.jit(attention.dense)(q, k, v, segments)
    monkeypatch.setattr(attention, "QUERY_BLOCK_TOKENS", 16)
    blocks = jax.jit(lambda *args: attention.dense(*args))(q, k, v, segments)
    np.testing.assert_allclose(blocks, whole, atol=2e-6)


@pytest.mark.parametrize("lengths", [((50,), (50,)), ((3, 30, 17), (40, 2)), ((16, 16, 16), (1, 31))])
def test_blockwise_attention_and_its_gradients_equal_those_of_the_dense_form(monkeypatch, lengths):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    segments = segments_of(*lengths)
    q, k, v = made(segments.shape[1])
    pull = made(segments.shape[1], seed=1)[0] * (segments > 0)[..., None, None]

    def run(form, *arrays):
        return jnp.sum(form(*arrays, segments) * pull)

    for got, want in zip(*(jax.jit(jax.value_and_grad(functools.partial(run, form), (0, 1, 2)))(q, k, v)
                           for form in (attention.blockwise, attention.dense)), strict=True):  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6, rtol=1e-5), got, want)


def test_blocks_before_the_first_segment_of_a_block_of_queries_are_not_visited(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 8)
    segments = segments_of((8, 8, 16), (4, 12, 16))
    assert attention._first_blocks(segments).tolist() == [0, 0, 2, 2]
    q, k, v = made(32)
    poisoned = k.at[:, :16].set(jnp.nan)  # a block that is visited spreads it, masked or not
    out = jax.jit(attention.blockwise)(q, poisoned, v, segments)
    assert np.isfinite(out[:, 16:]).all() and not np.isfinite(out[:, :16]).all()


def test_padding_left_right_or_between_changes_no_real_token(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    q, k, v = made(20, rows=1)
    alone = jax.jit(attention.dense)(q, k, v, jnp.ones((1, 20), jnp.int32))
    for left, right in ((0, 30), (30, 0), (7, 23)):
        shifted = [jnp.pad(x, ((0, 0), (left, right), (0, 0), (0, 0)), constant_values=9.0) for x in (q, k, v)]
        segments = jnp.pad(jnp.ones((1, 20), jnp.int32), ((0, 0), (left, right)))
        for form in (attention.dense, attention.blockwise):
            out = jax.jit(form)(*shifted, segments)[:, left : left + 20]
            np.testing.assert_allclose(out, alone, atol=2e-6)


@pytest.mark.parametrize("tokens", [40, 1500])
def test_split_over_devices_it_gives_the_numbers_of_one(tokens):
    layout = sharding.Layout(sharding.make_mesh((2, 2, 2)))
    q, k, v = made(tokens, rows=4)
    segments = segments_of((tokens,), (tokens // 2, tokens - tokens // 2), (tokens - 3,), (tokens,))

    def loss(q, k, v, layout):
        return jnp.sum(jnp.sin(attention.causal(q, k, v, segments, layout)))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), step(q, k, v, layout), step(q, k, v, None)
    )


def test_memory_of_the_blockwise_form_grows_with_the_row_and_not_with_its_square():
    def temporaries(tokens):
        shapes = [jax.ShapeDtypeStruct((1, tokens, heads, 32), jnp.float32) for heads in (4, 2, 2)]
        segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        grad = jax.grad(lambda q, k, v, s: jnp.sum(attention.blockwise(q, k, v, s) ** 2), (0, 1, 2))
        return jax.jit(grad).lower(*shapes, segments).compile().memory_analysis().temp_size_in_bytes

    # Up to 32,768 tokens of these sizes a buffer of the row fits where a block's scores were; beyond, nothing hides.
    short, middle, long = (temporaries(tokens) for tokens in (65536, 131072, 262144))
    assert (long - middle) / (middle - short) == pytest.approx(2.0, rel=0.05)  # 4 would be the square
    assert long < 2700 * 262144


def test_boundaries_of_a_fused_kernel_are_the_runs_of_the_ids_and_too_many_are_seen():
    found, fits = fused.boundaries(segments_of((20, 12), (7, 25)))
    assert found.tolist() == [0, 20, 32, 39, 64] and fits
    assert not fused.boundaries(segments_of((20, 12), (7, 13, 12)))[1]
    assert not fused.boundaries(segments_of((1,) * 32, (32,)))[1]


def test_a_fused_kernel_that_is_absent_is_refused_with_what_to_do():
    fused.require("portable", "float32")
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="Learner.attention = 'aiter'.*'portable'"):
            fused.require("aiter", "bfloat16")


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a ROCm device")
def test_a_fused_kernel_gives_the_numbers_of_the_portable_form():
    fused.require("aiter", "bfloat16")
    segments = segments_of((700, 300, 24), (1024,))
    q, k, v = (x.astype(jnp.bfloat16) for x in made(1024, dim=64))

    def run(form, *arrays):
        return jnp.sum(form(*arrays, segments).astype(jnp.float32) ** 2)

    forms = (fused.aiter, attention.dense)
    got, want = (jax.jit(jax.value_and_grad(functools.partial(run, form), (0, 1, 2)))(q, k, v) for form in forms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.05, rtol=0.05), got, want)
