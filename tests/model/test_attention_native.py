"""The part in C of training's attention beside the portable form: sizes, segments, padding, gradients, faults."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import attention, attention_native, rows, sharding

SIZES = {  # rows, tokens, heads, key heads, width of a head
    "the box": (3, 176, 4, 2, 24),
    "of the benchmark": (2, 208, 8, 4, 64),
    "one key head for each": (2, 65, 3, 3, 64),
    "seven queries a key head": (1, 50, 14, 2, 128),
    "narrower than a vector": (2, 33, 4, 2, 6),
    "one token": (4, 1, 2, 1, 16),
    "a block and one token": (1, 17, 2, 2, 40),
    "longer than the portable form keeps weights for": (1, 1100, 2, 1, 16),
    "enough for several threads": (8, 512, 8, 4, 64),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert attention_native.available()


def arguments(sizes, segments, seed=0):
    b, t, heads, key_heads, width = sizes
    rng = np.random.default_rng(seed)
    shapes = (b, t, heads, width), (b, t, key_heads, width), (b, t, key_heads, width), (b, t, heads, width)
    *arrays, pull = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    if segments == "one":
        ids = np.ones((b, t), np.int32)
    else:  # several of all lengths; some rows begin or end with padding
        ids = np.sort(rng.integers(1, 6, (b, t)), axis=1).astype(np.int32)
        ids[::2, t - t // 5 :] = 0
        ids[1::2, : t // 7] = 0
    return *arrays, jnp.asarray(ids), pull * (ids > 0)[..., None, None]


def value_and_gradients(form, q, k, v, ids, pull):
    def run(q, k, v):
        out = form(q, k, v, ids)
        return jnp.sum(out * pull), jnp.where((ids > 0)[..., None, None], out, 0)

    return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(q, k, v)


def close(found, wanted, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance), found, wanted)


@pytest.mark.parametrize("segments", ["one", "several"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_the_portable_form(sizes, segments):
    args = arguments(sizes, segments)
    (_, found), gradients = value_and_gradients(attention_native.causal, *args)
    (_, wanted), expected = value_and_gradients(attention.portable, *args)
    close((found, gradients), (wanted, expected))


def test_it_is_as_close_to_double_precision_as_the_portable_form_where_scores_are_large():
    q, k, v, ids, _ = arguments((1, 60, 2, 2, 16), "one")
    scores = np.einsum("bthd,bshd->bhts", 6 * np.float64(q), np.float64(k)) / 4
    scores = np.where(np.tril(np.ones((60, 60), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), np.float64(v))
    forms = (attention_native.causal, attention.portable)
    ours, portable = (np.abs(form(6 * q, k, v, ids) - exact).max() for form in forms)
    assert ours < 3 * portable + 1e-6


def test_of_padding_only_what_comes_out_is_finite_and_no_real_token_sees_it():
    q, k, v, ids, _ = arguments((2, 40, 4, 2, 16), "several")
    real = (ids > 0)[..., None, None]
    clean = attention_native.causal(q, k, v, ids)
    assert np.isfinite(clean).all()
    broken = attention_native.causal(q, *(jnp.where(real, x, 9e9) for x in (k, v)), ids)
    np.testing.assert_array_equal(jnp.where(real, broken, 0), jnp.where(real, clean, 0))


def test_a_number_that_is_not_finite_is_not_hidden():
    q, k, v, ids, pull = arguments((1, 40, 2, 1, 16), "one")
    broken = k.at[0, 10].set(jnp.nan)
    out = attention_native.causal(q, broken, v, ids)
    assert np.isfinite(out[:, :10]).all() and np.isnan(out[:, 10:]).all()
    assert np.isnan(value_and_gradients(attention_native.causal, q, broken, v, ids, pull)[1][0]).any()


def test_a_row_alone_has_the_bits_that_it_has_among_many():
    args = arguments(SIZES["enough for several threads"], "several")
    together = value_and_gradients(attention_native.causal, *args)
    for row in (0, 5):
        alone = value_and_gradients(attention_native.causal, *(x[row : row + 1] for x in args))
        jax.tree.map(lambda a, b, at=row: np.testing.assert_array_equal(a[0], b[at]), alone[1], together[1])


def test_it_is_chosen_on_one_cpu_in_float32_alone():
    def text(layout, *arrays):
        return str(jax.make_jaxpr(lambda *x: attention.causal(*x, layout))(*arrays))

    *arrays, ids, _ = arguments((2, 32, 4, 2, 16), "one")
    alone, many = (sharding.Layout(sharding.make_mesh(mesh)) for mesh in ((1, 1, 1), (2, 1, 1)))
    assert "rstar2_attention_forward" in text(alone, *arrays, ids) and "ffi_call" in text(None, *arrays, ids)
    assert "ffi_call" not in text(many, *arrays, ids)
    assert "ffi_call" not in text(alone, *(x.astype(jnp.bfloat16) for x in arrays), ids)


def test_kept_by_its_name_it_is_not_computed_again():
    *arrays, ids, _ = arguments((2, 32, 4, 2, 16), "one")

    def calls(policy):
        kept = jax.checkpoint(lambda *x: jnp.sin(attention_native.causal(*x, ids)).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(kept, (0, 1, 2)))(*arrays)).count("name=rstar2_attention_forward")

    assert calls(rows._POLICIES["full"]) == calls(rows._POLICIES["block"]) + 1


@pytest.mark.parametrize("change", [(0, (2, 32, 3, 16)), (1, (2, 31, 2, 16)), (2, (2, 32, 2, 8)), (3, (2, 31))])
def test_shapes_that_do_not_go_together_are_an_error(change):
    args = list(arguments((2, 32, 4, 2, 16), "one")[:4])
    args[change[0]] = jnp.zeros(change[1], args[change[0]].dtype)
    with pytest.raises(Exception, match="attention: shapes do not go together"):
        jax.block_until_ready(jax.jit(attention_native.causal)(*args))


def test_dtypes_that_it_does_not_take_are_an_error():
    args = [x.astype(jnp.bfloat16) for x in arguments((2, 32, 4, 2, 16), "one")[:3]]
    with pytest.raises(Exception, match="attention: float32 and int32 segments are needed"):
        jax.block_until_ready(jax.jit(attention_native.causal)(*args, jnp.ones((2, 32), jnp.int32)))
