"""The decoder against itself: chunks, padding, packing, neighbours, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import decoder, ops
from rstar2_jax.settings import Model

FAMILIES = [("llama", True), ("qwen2", False), ("qwen3", True)]


def small(family: str, tied: bool = True, **changes) -> Model:
    sizes = dict(vocab_size=61, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64)
    return Model(family=family, tie_embeddings=tied, rope_theta=5e4, **(sizes | changes))


@functools.cache
def made(family: str, tied: bool = True, **changes):
    """(decoder, parameters with nothing left at one or zero)."""
    settings = small(family, tied, **changes)
    rng = np.random.default_rng(3)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(1 + 0.3 * noise if path[-1].key == "scale" else 0.3 * noise)

    return decoder.Decoder(settings), jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(settings))


@functools.cache
def forward(model):
    """Jitted hidden states of whole rows."""
    return jax.jit(model.apply)


@functools.cache
def extender(model):
    """Jitted chunk over a cache."""
    return jax.jit(functools.partial(model.apply, method="extend"))


@functools.cache
def head(model):
    """Jitted logits of hidden states."""
    return jax.jit(functools.partial(model.apply, method="logits"))


def whole(model, params, tokens, positions, segments):
    """Logits of whole rows."""
    hidden = forward(model)({"params": params}, tokens, positions, segments)
    return np.asarray(head(model)({"params": params}, hidden))


def rows(batch: int, tokens: int, seed: int = 0):
    ids = np.random.default_rng(seed).integers(0, 61, (batch, tokens)).astype(np.int32)
    return ids, np.tile(np.arange(tokens, dtype=np.int32), (batch, 1)), np.ones((batch, tokens), np.int32)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_parameter_tree_is_the_abstract_one_in_float32(family, tied):
    settings = small(family, tied)
    params = jax.eval_shape(lambda key: decoder.init_params(settings, key), jax.random.key(0))
    assert params == decoder.abstract_params(settings)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert ("head" in params) == (not tied)
    assert ("bias" in params["layers_0"]["attn"]["q"]) == (family == "qwen2")
    assert ("q_norm" in params["layers_0"]["attn"]) == (family == "qwen3")


def test_initial_parameters_cut_from_a_row_are_those_drawn_in_their_shapes(monkeypatch):
    settings, key = small("qwen2", False), jax.random.key(7)
    cut = decoder.init_params(settings, key)
    traced = jax.jit(decoder.init_params, static_argnums=0)(settings, key)  # fused, it rounds otherwise
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), cut, traced)
    monkeypatch.setattr(decoder, "_ROW", 0)
    jax.tree.map(np.testing.assert_array_equal, cut, decoder.init_params(settings, key))


def test_initial_parameters_have_the_promised_deviations_and_depend_on_the_key_alone():
    settings = small("llama", vocab_size=64, d_model=64, d_mlp=64, kv_heads=4, head_dim=16)  # one shape compiles once
    params = decoder.init_params(settings, jax.random.key(0))
    again = decoder.init_params(settings, jax.random.key(0))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    layer = params["layers_1"]
    assert np.std(layer["mlp"]["gate"]["kernel"]) == pytest.approx(64**-0.5, rel=0.05)
    assert np.std(layer["mlp"]["down"]["kernel"]) == pytest.approx(64**-0.5 / 2, rel=0.05)
    assert np.std(params["embed"]["embedding"]) == pytest.approx(64**-0.5, rel=0.05)
    assert not np.array_equal(layer["mlp"]["gate"]["kernel"], params["layers_0"]["mlp"]["gate"]["kernel"])
    assert not np.array_equal(layer["mlp"]["gate"]["kernel"], layer["mlp"]["up"]["kernel"])


@pytest.mark.parametrize(
    ("family", "tied", "chunks"),
    [(*family, (4, 4, 4)) for family in FAMILIES] + [("qwen3", True, c) for c in ((12,), (1,) * 12, (7, 1, 4))],
)
def test_chunks_over_the_cache_give_the_hidden_states_of_whole_rows(family, tied, chunks):
    model, params = made(family, tied)
    tokens, positions, segments = rows(2, 12)
    expected = forward(model)({"params": params}, tokens, positions, segments)
    cache = decoder.init_cache(model.settings, 2, 16)
    start, outs = 0, []
    for size in chunks:
        part = slice(start, start + size)
        out, cache = extender(model)({"params": params}, tokens[:, part], positions[:, part], cache)
        outs.append(out)
        start += size
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-5)


def test_padding_columns_of_a_chunk_write_nothing_and_change_nothing():
    model, params = made("qwen3")
    tokens, positions, _ = rows(2, 8)
    marked = jax.tree.map(lambda x: x + 7.0, decoder.init_cache(model.settings, 2, 16))
    ragged = np.where([[True] * 8, [True] * 3 + [False] * 5], positions, -1)
    out, cache = extender(model)({"params": params}, tokens, ragged, marked)
    other, _ = extender(model)({"params": params}, np.where(ragged < 0, 60, tokens), ragged, marked)
    assert np.isfinite(out).all()
    assert np.array_equal(out[0], other[0]) and np.array_equal(out[1, :3], other[1, :3])
    for keys, values in cache:
        assert (np.asarray(keys)[0, :, :, :8] != 7).all() and (np.asarray(keys)[0, :, :, 8:] == 7).all()
        assert (np.asarray(keys)[1, :, :, 3:] == 7).all() and (np.asarray(values)[1, :, 3:] == 7).all()


def test_a_position_beyond_the_cache_is_dropped():
    keys, values = jnp.zeros((1, 1, 2, 3)), jnp.zeros((1, 1, 3, 2))
    new = jnp.ones((1, 2, 1, 2))
    keys, values = ops.write_cache(keys, values, new, new, jnp.array([[3, 1]]))
    np.testing.assert_array_equal(keys[0, 0], [[0, 1, 0], [0, 1, 0]])
    np.testing.assert_array_equal(values[0, 0], [[0, 0], [1, 1], [0, 0]])


def test_an_all_padding_chunk_leaves_the_cache_bit_for_bit():
    model, params = made("llama")
    tokens, positions, _ = rows(2, 4)
    _, cache = extender(model)({"params": params}, tokens, positions, decoder.init_cache(model.settings, 2, 8))
    out, after = extender(model)({"params": params}, tokens, np.full_like(positions, -1), cache)
    assert np.isfinite(out).all()
    assert jax.tree.all(jax.tree.map(np.array_equal, cache, after))


@pytest.mark.parametrize(("family", "tied"), FAMILIES[1:])
def test_a_row_alone_padded_on_either_side_or_packed_has_the_same_logits(family, tied):
    model, params = made(family, tied)
    tokens, positions, segments = rows(1, 7)
    alone = whole(model, params, tokens, positions, segments)[0]
    batch_tokens = np.zeros((4, 32), np.int32)
    batch_positions, batch_segments = np.zeros_like(batch_tokens), np.zeros_like(batch_tokens)
    batch_tokens[3] = np.random.default_rng(9).integers(0, 61, 32)
    for row, start, segment in [(0, 0, 1), (1, 25, 1), (2, 12, 2), (3, 11, 5)]:
        here = slice(start, start + 7)
        batch_tokens[row, here], batch_positions[row, here], batch_segments[row, here] = tokens, positions, segment
    batch_segments[2, :12], batch_positions[2, :12] = 1, np.arange(12)  # packed after another sequence
    packed = whole(model, params, batch_tokens, batch_positions, batch_segments)
    assert np.isfinite(packed).all()
    for row, start in [(0, 0), (1, 25), (2, 12), (3, 11)]:
        np.testing.assert_allclose(packed[row, start : start + 7], alone, atol=1e-5)


def test_a_row_of_padding_only_is_finite_in_value_and_gradient():
    model, params = made("qwen3", layers=1)
    tokens, positions, segments = rows(2, 6)
    segments[1] = 0

    def loss(params):
        hidden = model.apply({"params": params}, tokens, positions, segments)
        logits = model.apply({"params": params}, hidden, method="logits")
        return jnp.sum(jnp.where(segments[..., None] > 0, logits, 0.0) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("columns", [1, 4])
def test_a_row_is_bit_equal_in_every_slot_and_with_any_neighbours(columns):
    # Heads as small as 8 are rotated by other code in the upper half of the slots with jax 0.12 (1 ulp); 16 is not.
    model, params = made("qwen3", head_dim=16)
    step = extender(model)
    tokens, positions, _ = rows(1, 12)

    def run(slot, seed):
        """The row's states while strangers of other lengths fill and leave the other slots."""
        rng = np.random.default_rng(seed)
        cache = jax.tree.map(lambda x: x + rng.normal(size=x.shape), decoder.init_cache(model.settings, 8, 16))
        states = []
        for start in range(0, 12, columns):
            ids = rng.integers(0, 61, (8, columns)).astype(np.int32)
            places = (rng.integers(-4, 12, (8, 1)) + np.arange(columns)).astype(np.int32)
            ids[slot], places[slot] = tokens[0, start : start + columns], positions[0, start : start + columns]
            out, cache = step({"params": params}, ids, places, cache)
            states.append(np.asarray(out[slot]))
        return np.concatenate(states)

    reference = run(0, 1)
    for slot, seed in [(0, 2), (3, 3), (4, 5), (7, 4)]:
        assert np.array_equal(run(slot, seed), reference), f"slot {slot}"


def test_rotation_by_position_depends_on_theta():
    x = jnp.ones((1, 1, 1, 4))
    cos, sin = ops.rotary_angles(jnp.array([[3]]), 4, 100.0)
    np.testing.assert_allclose(cos[0, 0], np.cos([3.0, 0.3]), atol=1e-6)
    expected = [np.cos(3) - np.sin(3), np.cos(0.3) - np.sin(0.3), np.cos(3) + np.sin(3), np.cos(0.3) + np.sin(0.3)]
    np.testing.assert_allclose(ops.rotate(x, cos, sin)[0, 0, 0], expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 56), (56, 24)])
def test_the_hand_written_gradients_equal_autodiff(shape):
    rng, (inner, outer) = np.random.default_rng(1), shape
    sizes = ((3, 17, inner), shape, (3, 17, outer), (3, 17, outer))
    x, w, up, pull = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
    w = w * inner**-0.5

    def ours(x, w, up):
        return jnp.sum(ops.silu_mul(ops.linear(x, w), up) * pull)

    def plain(x, w, up):
        gate = x @ w
        return jnp.sum(jax.nn.silu(gate) * up * pull)

    for got, want in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(x, w, up) for f in (ours, plain)), strict=True):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(got / scale, want / scale, atol=3e-6)


def test_norm_and_rotation_have_the_gradients_of_autodiff():
    rng = np.random.default_rng(5)
    x, pull = (jnp.asarray(rng.normal(size=(2, 6, 3, 8)), jnp.float32) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=8), jnp.float32)
    cos, sin = ops.rotary_angles(jnp.arange(12).reshape(2, 6), 8, 1e4)

    def plain(x, scale):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
        x1, x2 = jnp.split(normed, 2, axis=-1)
        c, s = cos[:, :, None], sin[:, :, None]
        return jnp.sum(jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1) * pull)

    def ours(x, scale):
        return jnp.sum(ops.rotate(ops.rms_norm(x, scale, 1e-5), cos, sin) * pull)

    for got, want in zip(*(jax.jit(jax.grad(f, (0, 1)))(x, scale) for f in (ours, plain)), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


def test_tables_of_a_row_hold_the_bits_of_the_angles_and_nothing_beyond_the_row():
    positions = jnp.array([[0, 1, 2, 0, 1, 5]])
    tables = ops.rotary_tables(positions, 8, 1e4)
    for table, angles in zip(tables, ops.rotary_angles(positions, 8, 1e4), strict=True):
        np.testing.assert_array_equal(table, angles)
    assert jnp.isnan(ops.rotary_tables(positions + 1, 8, 1e4)[0][0, -1]).all()


def test_no_weight_gradient_is_a_doubly_transposed_dot_on_cpu():
    model = decoder.Decoder(small("llama", layers=1))
    params = decoder.abstract_params(model.settings)
    tokens, positions, segments = rows(2, 16)

    def loss(params):
        return jnp.sum(model.apply({"params": params}, tokens, positions, segments) ** 2)

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    bad = [
        line
        for line in text.splitlines()
        if " dot(" in line and "lhs_contracting_dims={0}, rhs_contracting_dims={1}" in line
    ]
    assert not bad


def test_bfloat16_computes_near_float32_and_gives_float32_logits():
    model, params = made("qwen3", layers=1)
    low = decoder.Decoder(small("qwen3", layers=1, compute_dtype="bfloat16"))
    tokens, positions, segments = rows(2, 10)
    hidden = forward(low)({"params": params}, tokens, positions, segments)
    logits = head(low)({"params": params}, hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    reference = whole(model, params, tokens, positions, segments)
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()


@pytest.mark.parametrize("sizes", [(300, 24, 8), (300, 8, 24), (300, 16, 16), (1, 5, 3)])
def test_a_weight_gradient_is_the_product_whichever_of_its_operands_is_the_wider(sizes):
    n, i, o = sizes
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(n, i)).astype(np.float32), rng.normal(size=(n, o)).astype(np.float32)
    found = jax.jit(ops.weight_gradient)(x, dy)
    np.testing.assert_allclose(found, np.float64(x).T @ np.float64(dy), atol=1e-5 * n**0.5)
    text = jax.jit(ops.weight_gradient).lower(x, dy).as_text()
    assert ("optimization_barrier" in text) == (i > o)  # else XLA would make one product of both forms


def test_a_weight_gradient_of_bfloat16_activations_is_accumulated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (4096, 3)), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda w: ops.linear(x, w).astype(jnp.float32).sum()))(jnp.ones((3, 2)))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient[:, 0], np.asarray(x, np.float64).sum(0))
