"""Attention over whole rows: a plain loop, the two forms against each other, their gradients and their memory."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import attention, fused, ops, sharding


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


def test_runs_of_a_row_are_its_segments_and_its_padding_and_too_many_are_seen():
    lengths, starts, fits = fused.runs(segments_of((3, 2), (6,)))
    assert lengths.tolist() == [[3, 2, 1, -1, -1, -1], [6, -1, -1, -1, -1, -1]]
    assert starts.tolist() == [[0, 3, 5, -1, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1]]
    assert not fits  # three in a row that is built for one
    assert fused.runs(segments_of((20, 12), (7, 25)))[2]
    assert not fused.runs(segments_of((20, 12), (7, 13, 12)))[2]


class Engine(types.ModuleType):
    """A stand-in for transformer_engine.jax.attention, whose real kernel has never run here.

    Names, order of arguments, enumerations and the way from lengths and beginnings to segments are those of version
    2.20 (`asks_for_rows`) or of 2.10 to 2.19. It computes with the portable form, and outside of a compiled function,
    so that it can look at what it is handed. Not modelled: which sizes have a kernel, the kernel's numbers.
    """

    class AttnBiasType(enum.Enum):
        NO_BIAS = 0

    class AttnMaskType(enum.Enum):
        CAUSAL_MASK = 2
        PADDING_CAUSAL_MASK = 3

    class QKVLayout(enum.Enum):
        BSHD_BSHD_BSHD = 0
        THD_THD_THD = 1

    class AttnSoftmaxType(enum.Enum):
        VANILLA_SOFTMAX = 0

    class SequenceDescriptor:
        @classmethod
        def from_seqlens_and_offsets(cls, seqlens, seq_offsets):
            made = cls()
            made.lengths, made.starts = (np.asarray(a) for a in (seqlens[0], seq_offsets[0]))
            assert all((np.asarray(pair[0]) == np.asarray(pair[1])).all() for pair in (seqlens, seq_offsets))
            return made

    def __init__(self, asks_for_rows=True, has_kernel=True):
        super().__init__("transformer_engine.jax.attention")
        self.has_kernel, self.told, self.asked = has_kernel, False, None
        if not asks_for_rows:
            self.is_fused_attn_kernel_available = self.is_fused_attn_kernel_available_before_2_20

    @contextlib.contextmanager
    def global_shard_guard(self, resource):
        self.told = resource == "no axis"
        yield
        self.told = False

    def is_fused_attn_kernel_available(
        self, is_training, batch_size, q_dtype, kv_dtype, qkv_layout, attn_bias_type, attn_mask_type, softmax_type,
        dropout_probability, q_num_heads, kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v,
        window_size=None, return_max_logit=False, bottom_right_diagonal=None, bias_batch=None, bias_heads=None,
        bias_seqlen_q=None, bias_seqlen_kv=None, max_segments_per_seq=1,
    ):  # fmt: skip
        assert (batch_size, max_segments_per_seq) == (2, 4)
        return self.is_fused_attn_kernel_available_before_2_20(
            is_training, q_dtype, kv_dtype, qkv_layout, attn_bias_type, attn_mask_type, softmax_type,
            dropout_probability, q_num_heads, kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v,
        )  # fmt: skip

    def is_fused_attn_kernel_available_before_2_20(
        self, is_training, q_dtype, kv_dtype, qkv_layout, attn_bias_type, attn_mask_type, softmax_type,
        dropout_probability, q_num_heads, kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v,
        window_size=None,
    ):  # fmt: skip
        self.asked = (attn_bias_type, attn_mask_type, qkv_layout, softmax_type, dropout_probability, is_training)
        sizes = (q_num_heads, kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v)
        assert (sizes, q_dtype, kv_dtype) == ((4, 2, 50, 50, 8, 8), jnp.float32, jnp.float32)
        return self.has_kernel

    def fused_attn(
        self, qkv, bias, sequence_descriptor, seed, attn_bias_type, attn_mask_type, qkv_layout, softmax_type,
        scaling_factor, dropout_probability, is_training, max_segments_per_seq=1, window_size=None,
        context_parallel_strategy=None, context_parallel_causal_load_balanced=False, context_parallel_axis="",
        context_checkpoint_name="context", softmax_offset=None,
    ):  # fmt: skip
        assert self.told and bias is None and seed is None and context_checkpoint_name == ops.KEPT
        taken = (attn_bias_type, attn_mask_type, qkv_layout, softmax_type, dropout_probability, is_training)
        assert taken == self.asked == (
            self.AttnBiasType.NO_BIAS, self.AttnMaskType.PADDING_CAUSAL_MASK, self.QKVLayout.THD_THD_THD,
            self.AttnSoftmaxType.VANILLA_SOFTMAX, 0.0, True,
        )  # fmt: skip
        q, k, v = qkv
        lengths, starts = sequence_descriptor.lengths, sequence_descriptor.starts
        assert lengths.shape == q.shape[:2] and starts.shape == (q.shape[0], q.shape[1] + 1)
        ids = self.segments(lengths, starts, max_segments_per_seq)
        return attention.dense(q * (scaling_factor * q.shape[-1] ** 0.5), k, v, jnp.asarray(ids))

    @staticmethod
    def segments(lengths, starts, most):
        """Ids of the rows, by its rule: what is no -1 is joined over the rows, beginnings counted from the first."""
        rows, tokens = lengths.shape
        begins = np.where(starts >= 0, starts + np.arange(rows)[:, None] * tokens, -1)
        begins, lengths = begins[begins >= 0], lengths[lengths > 0]
        ids = np.zeros(rows * tokens, np.int32)
        for number, (begin, length) in enumerate(zip(begins[: rows * most], lengths[: rows * most], strict=True)):
            ids[begin : begin + length] = number + 1
        return ids.reshape(rows, tokens)


@pytest.fixture
def engine(monkeypatch):
    """Puts an Engine where the package would be."""

    def install(**options):
        made = Engine(**options)
        sharding_module = types.ModuleType("transformer_engine.jax.sharding")
        sharding_module.MeshResource, sharding_module.global_shard_guard = lambda: "no axis", made.global_shard_guard
        for name in ("transformer_engine", "transformer_engine.jax"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, sharding_module.__name__, sharding_module)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    fused._engine.cache_clear()
    yield install
    fused._engine.cache_clear()


ONE = sharding.Layout(sharding.make_mesh((1, 1, 1)), attention="transformer_engine")


@pytest.mark.parametrize("asks_for_rows", [True, False])
@pytest.mark.parametrize("ids", [[[1], [1]], [[1, 1, 2, 3, 3], [4, 4, 4, 4, 7]], [[0, 1, 1, 2, 0], [1, 0, 2, 2, 0]]])
def test_what_transformer_engine_is_handed_gives_the_portable_numbers(engine, ids, asks_for_rows):
    engine(asks_for_rows=asks_for_rows)
    segments = jnp.repeat(jnp.asarray(ids), 50 // len(ids[0]), axis=1)
    q, k, v = made(50)

    def run(layout, *arrays):
        out = attention.causal(*arrays, segments, layout)
        real = jnp.where((segments > 0)[..., None, None], out, 0)
        return jnp.sum(jnp.sin(real)), (real, jnp.isfinite(out).all())

    for got, want in zip(*(jax.value_and_grad(functools.partial(run, layout), (0, 1, 2), has_aux=True)(q, k, v)
                           for layout in (ONE, None)), strict=True):  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6, rtol=1e-5), got, want)


def test_rows_of_more_segments_than_transformer_engine_was_built_for_are_nan(engine):
    engine()
    assert np.isnan(attention.causal(*made(50), segments_of((10,) * 5, (50,)), ONE)).all()


def test_sizes_that_transformer_engine_has_no_kernel_for_are_refused(engine):
    engine(has_kernel=False)
    with pytest.raises(
        ValueError, match="'transformer_engine'.*no fused kernel for float32 rows of 50 tokens.*portable"
    ):
        attention.causal(*made(50), segments_of((50,), (50,)), ONE)


@pytest.mark.parametrize("name", fused.KERNELS)
def test_a_fused_kernel_that_is_absent_is_refused_with_what_to_do(name, monkeypatch):
    fused.require("portable", "float32")
    monkeypatch.setitem(sys.modules, fused._SOURCES[name][0], None)
    with pytest.raises(ValueError, match=f"Learner.attention = '{name}', but this .* install .* 'portable'"):
        fused.require(name, "bfloat16")


@pytest.mark.parametrize("name", fused.KERNELS)
def test_a_fused_kernel_is_refused_on_cpus_and_in_another_dtype(name, engine, monkeypatch):
    module = engine()
    if name == "aiter":
        monkeypatch.setattr(fused.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match=f"'{name}' needs a ROCm device.*'portable'"):
        fused.require(name, "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=f"'{name}' computes in bfloat16, but Model.compute_dtype = 'float32'"):
        fused.require(name, "float32")
    fused.require(name, "bfloat16")


def test_a_transformer_engine_of_other_arguments_is_refused(engine, monkeypatch):
    engine()
    monkeypatch.delattr(Engine, "AttnSoftmaxType")
    with pytest.raises(ValueError, match="'transformer_engine'.* older than 2.10: install .* 'portable'"):
        fused.require("transformer_engine", "bfloat16")


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a ROCm device")
@pytest.mark.parametrize("name", fused.KERNELS)
def test_a_fused_kernel_gives_the_numbers_of_the_portable_form(name):
    try:
        fused.require(name, "bfloat16")
    except ValueError as error:
        pytest.skip(str(error))
    segments = segments_of((700, 300), (1024,))  # and padding
    q, k, v = (x.astype(jnp.bfloat16) for x in made(1024, dim=64))

    def run(form, *arrays):
        return jnp.sum(form(*arrays, segments).astype(jnp.float32) ** 2)

    forms = (fused.KERNELS[name], attention.dense)
    got, want = (jax.jit(jax.value_and_grad(functools.partial(run, form), (0, 1, 2)))(q, k, v) for form in forms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.05, rtol=0.05), got, want)
