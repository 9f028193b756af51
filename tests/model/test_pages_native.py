"""The part in C beside the portable form: sizes, dtypes, threads, tables that are wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import pages, pages_native

SIZES = {  # rows, heads, key heads, width of a head, entries of a page, entries of the longest sequence
    "the box": (64, 4, 2, 24, 32, 100),
    "one key head for each": (5, 3, 3, 64, 32, 90),
    "seven queries a key head": (3, 14, 2, 64, 32, 70),
    "wide": (4, 10, 2, 128, 32, 200),
    "narrower than a vector": (4, 4, 2, 6, 32, 40),
    "pages of 20 entries": (6, 8, 4, 32, 20, 130),
    "pages of 3 entries": (6, 8, 4, 40, 3, 50),
    "enough for several threads": (16, 16, 8, 64, 32, 900),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert pages_native.available()


def arguments(rows, heads, key_heads, width, page, longest, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    columns = -(-longest // page)
    count = rows * columns

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, new = normal(rows, heads, width), [normal(rows, key_heads, width) for _ in range(2)]
    pool = normal(count, key_heads, width, page), normal(count, key_heads, page, width)
    positions = rng.integers(0, longest, size=rows).astype(np.int32)
    positions[:3] = longest - 1, 0, -1
    return q, *pool, *new, positions, rng.permutation(count).reshape(rows, columns).astype(np.int32)


def in_xla(q, keys, values, new_keys, new_values, positions, tables):
    keys, values = pages.write(keys, values, new_keys, new_values, positions, tables)
    return pages.attention(q, keys, values, positions, tables), keys, values


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_computes_what_the_portable_form_does(sizes):
    args = arguments(*sizes)
    found, wanted = jax.jit(pages_native.step)(*args), jax.jit(in_xla)(*args)
    part = args[5] >= 0
    np.testing.assert_allclose(found[0][part], wanted[0][part], atol=2e-6)
    np.testing.assert_array_equal(found[0][~part], 0)
    for after, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(sizes):
    args = arguments(*sizes, dtype=jnp.bfloat16)
    found = jax.jit(pages_native.step)(*args)
    exact = jax.jit(in_xla)(*(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args))
    part = args[5] >= 0
    rounded = np.asarray(exact[0], np.float32)[part]
    apart = np.abs(np.asarray(found[0], np.float32)[part] - rounded)
    assert np.all(apart <= 2**-8 * np.abs(rounded) + 1e-6)
    for after, expected in zip(found[1:], exact[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(after, np.float32), expected)


def test_scores_far_apart_underflow_to_nothing_and_an_infinite_one_is_nan():
    q, keys, values, *rest = arguments(4, 2, 1, 16, 32, 60)
    far, _, _ = jax.jit(pages_native.step)(100 * q, keys, values, *rest)
    wanted, _, _ = jax.jit(in_xla)(100 * q, keys, values, *rest)
    np.testing.assert_allclose(far[0], wanted[0], atol=1e-4)
    broken, _, _ = jax.jit(pages_native.step)(q.at[0].set(jnp.inf), keys, values, *rest)
    assert np.isnan(broken[0]).all() and np.isfinite(broken[1:]).all()


def test_a_row_alone_has_the_bits_that_it_has_among_many_on_several_threads():
    args = arguments(*SIZES["enough for several threads"])
    q, keys, values, new_keys, new_values, positions, tables = args
    together, _, _ = jax.jit(pages_native.step)(*args)
    for row in (0, 1, 7, 15):
        one = slice(row, row + 1)
        alone = [q[one], keys, values, new_keys[one], new_values[one], positions[one], tables[one]]
        np.testing.assert_array_equal(jax.jit(pages_native.step)(*alone)[0][0], together[row])


def test_the_pool_is_updated_where_it_lies():
    args = arguments(*SIZES["the box"])
    where = [leaf.unsafe_buffer_pointer() for leaf in args[1:3]]
    _, *after = jax.jit(pages_native.step, donate_argnums=(1, 2))(*args)
    assert [leaf.unsafe_buffer_pointer() for leaf in after] == where


@pytest.mark.parametrize("page", [-1, 64 * 4, 2**31 - 1])
def test_a_table_that_points_outside_the_pool_is_an_error(page):
    *args, tables = arguments(*SIZES["the box"])
    tables[0, 1] = page
    with pytest.raises(Exception, match="a page that the pool does not have"):
        jax.block_until_ready(jax.jit(pages_native.step)(*args, tables))


def test_a_position_beyond_its_table_is_an_error():
    args = arguments(*SIZES["the box"])
    args[5][4] = 4 * 32
    with pytest.raises(Exception, match="beyond its table"):
        jax.block_until_ready(jax.jit(pages_native.step)(*args))


@pytest.mark.parametrize("change", [(0, (64, 3, 24)), (3, (63, 2, 24)), (2, (256, 2, 24, 32)), (5, (63,)), (6, (64,))])
def test_shapes_that_do_not_go_together_are_an_error(change):
    args = list(arguments(*SIZES["the box"]))
    args[change[0]] = np.zeros(change[1], args[change[0]].dtype)
    with pytest.raises(Exception, match="pages: (shapes of|an argument has)"):
        jax.block_until_ready(jax.jit(pages_native.step)(*args))
