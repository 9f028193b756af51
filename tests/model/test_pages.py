"""Attention over pages: a plain loop over the entries, whole rows, and the same bits whatever stands beside a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import decoder, pages, pages_native
from rstar2_jax.settings import Model

ROWS, HEADS, KV_HEADS, DIM, PAGE, COLUMNS = 5, 4, 2, 8, 4, 4


def portable(q, keys, values, new_keys, new_values, positions, tables):
    keys, values = pages.write(keys, values, new_keys, new_values, positions, tables)
    return pages.attention(q, keys, values, positions, tables), keys, values


STEPS = {"portable": jax.jit(portable), "in C": jax.jit(pages_native.step)}


@pytest.fixture(params=list(STEPS))
def step(request):
    """The portable form, and the part in C, which is there wherever the tests are run."""
    assert request.param == "portable" or pages_native.available()
    return STEPS[request.param]


@pytest.fixture
def attention(step):
    """Attention to a pool in which all is written: a step that writes what stands there."""

    def attend(q, keys, values, positions, tables):
        at = np.maximum(positions, 0)
        page = np.take_along_axis(tables, (at // PAGE)[:, None], axis=1)[:, 0]
        return step(q, keys, values, keys[page, :, :, at % PAGE], values[page, :, at % PAGE], positions, tables)[0]

    return attend


def pool(seed, count=ROWS * COLUMNS):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, KV_HEADS, DIM, PAGE)).astype(np.float32)
    return keys, rng.normal(size=(count, KV_HEADS, PAGE, DIM)).astype(np.float32)


def queries(seed, rows=ROWS):
    return np.random.default_rng(seed).normal(size=(rows, HEADS, DIM)).astype(np.float32)


def tables(seed):
    return np.random.default_rng(seed).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(np.int32)


def plain_attention(q, keys, values, position, table):
    """One query in double precision, entry by entry."""
    out = np.zeros((HEADS, DIM))
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        places = [(table[i // PAGE], i % PAGE) for i in range(position + 1)]
        scores = (
            np.array([np.dot(q[head].astype(np.float64), keys[page, kv, :, at]) for page, at in places]) * DIM**-0.5
        )
        weights = np.exp(scores - scores.max())
        for weight, (page, at) in zip(weights / weights.sum(), places, strict=True):
            out[head] += weight * values[page, kv, at]
    return out


def test_it_is_the_softmax_over_the_entries_at_or_before_the_position(attention):
    (keys, values), q, table = pool(0), queries(1), tables(2)
    positions = np.array([0, 3, 4, 9, 15], np.int32)
    got = attention(q, keys, values, positions, table)
    for row in range(ROWS):
        wanted = plain_attention(q[row], keys, values, positions[row], table[row])
        np.testing.assert_allclose(got[row], wanted, atol=1e-5)


def test_a_longer_neighbour_changes_no_bit_of_a_row(attention):
    (keys, values), q, table = pool(3), queries(4), tables(5)
    short = attention(q, keys, values, np.array([2, 5, 1, 0, 3], np.int32), table)
    long = attention(q, keys, values, np.array([2, 5, 15, -1, 15], np.int32), table)
    np.testing.assert_array_equal(short[:2], long[:2])


def test_groups_of_rows_give_the_same_bits_as_all_at_once(monkeypatch):
    (keys, values), q, table = pool(6), queries(7), tables(8)
    positions = np.array([1, 14, 6, 11, 3], np.int32)
    whole = jax.jit(lambda *args: pages.attention(*args))(q, keys, values, positions, table)
    monkeypatch.setattr(pages, "GROUP_BYTES", 2 * 4 * KV_HEADS * DIM * PAGE)
    apart = jax.jit(lambda *args: pages.attention(*args))(q, keys, values, positions, table)
    np.testing.assert_array_equal(whole, apart)


def test_a_row_that_takes_no_part_is_finite_and_writes_nothing(step):
    (keys, values), q, table = pool(9), queries(10), tables(11)
    nobody = np.full(ROWS, -1, np.int32)
    new = np.ones((ROWS, KV_HEADS, DIM), np.float32)
    out, *after = step(q, keys, values, new, new, nobody, table)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(after[0], keys)
    np.testing.assert_array_equal(after[1], values)


@pytest.mark.parametrize("rest", [0.0, np.nan, np.inf], ids=str)
def test_what_stands_beyond_a_query_changes_no_bit_of_it_not_even_nan(attention, rest):
    (keys, values), q, table = pool(16), queries(17), tables(18)
    positions = np.array([0, 3, 6, -1, 15], np.int32)
    wanted = attention(q, keys, values, positions, table)
    for row, position in enumerate(positions):
        for at in range(position + 1, COLUMNS * PAGE):
            keys[table[row, at // PAGE], :, :, at % PAGE] = values[table[row, at // PAGE], :, at % PAGE] = rest
    taking_part = positions >= 0
    got = attention(q, keys, values, positions, table)
    np.testing.assert_array_equal(got[taking_part], wanted[taking_part])


def test_an_entry_is_written_where_the_table_says_and_nowhere_else(step):
    (keys, values), table = pool(12), tables(13)
    positions = np.array([0, 7, 15, -1, 10], np.int32)
    new_keys, new_values = (np.random.default_rng(s).normal(size=(ROWS, KV_HEADS, DIM)) for s in (14, 15))
    wanted_keys, wanted_values = keys.copy(), values.copy()
    for row, position in enumerate(positions):
        if position >= 0:
            page, at = table[row, position // PAGE], position % PAGE
            wanted_keys[page, :, :, at], wanted_values[page, :, at] = new_keys[row], new_values[row]
    new = new_keys.astype(np.float32), new_values.astype(np.float32)
    _, *got = step(queries(15), keys, values, *new, positions, table)
    np.testing.assert_array_equal(got[0], wanted_keys)
    np.testing.assert_array_equal(got[1], wanted_values)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_tokens_over_pages_in_any_lanes_give_the_hidden_states_of_whole_rows(family):
    model = Model(
        family=family, vocab_size=61, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64
    )
    params = decoder.init_params(model, jax.random.key(0))
    module, variables = decoder.Decoder(model), {"params": params}
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, 61, size=(2, 11)), 11
    places = np.tile(np.arange(length), (2, 1))
    wanted = module.apply(variables, tokens, places, np.ones_like(tokens))
    table = rng.permutation(6).reshape(2, 3).astype(np.int32)
    cache = decoder.init_cache(model, 6, PAGE)
    step = jax.jit(lambda *args: module.apply(variables, *args, method="step"))
    # Three lanes take the tokens of both rows as they come, several of one row in a step as well.
    order = [(row, at) for at in range(length) for row in (0, 1)]
    for start in range(0, len(order), 3):
        lanes = order[start : start + 3] + [(0, -1)] * (3 - len(order[start : start + 3]))
        ids = np.array([tokens[row, at] if at >= 0 else 0 for row, at in lanes], np.int32)
        positions = np.array([at for _, at in lanes], np.int32)
        owners = np.array([row for row, _ in lanes], np.int32)
        hidden, cache = step(ids, decoder.Places(positions, table[owners]), cache)
        for lane, (row, at) in enumerate(lanes):
            if at >= 0:
                np.testing.assert_allclose(hidden[lane], wanted[row, at], atol=1e-5)
    assert jnp.isfinite(cache[0][0]).all()
