"""Which prefilled ids may be copied: whole chunks, or everything when the whole prompt is equal."""

from __future__ import annotations

import numpy as np

from rstar2_jax.rollout import prefixes

CHUNK = 4


def ids(*values):
    return np.array(values, np.int32)


def table_with(slot, *values):
    table = prefixes.PrefixTable(3, 16, CHUNK)
    for start in range(0, len(values), CHUNK):
        table.write(slot, start, ids(*values[start : start + CHUNK]))
    return table


def test_an_empty_table_offers_nothing():
    assert prefixes.PrefixTable(3, 16, CHUNK).best(ids(1, 2, 3))[1] == 0


def test_equal_ids_are_offered_whole():
    assert table_with(2, 1, 2, 3, 4, 5, 6).best(ids(1, 2, 3, 4, 5, 6)) == (2, 6)


def test_a_longer_or_shorter_row_offers_whole_chunks_only():
    table = table_with(1, 1, 2, 3, 4, 5, 6)
    assert table.best(ids(1, 2, 3, 4, 5, 6, 7)) == (1, 4)
    assert table.best(ids(1, 2, 3, 4, 5)) == (1, 4)
    assert table.best(ids(1, 2, 3))[1] == 0
    assert table.best(ids(1, 2, 3, 9, 5))[1] == 0


def test_writing_from_the_start_forgets_what_the_row_held_beyond():
    table = table_with(0, 1, 2, 3, 4, 5, 6)
    table.write(0, 0, ids(1, 2, 3, 4))
    assert table.best(ids(1, 2, 3, 4, 5, 6)) == (0, 4)


def test_decoding_over_entries_takes_them_off_the_offer():
    table = table_with(0, 1, 2, 3, 4, 5, 6)
    table.cut(0, 5)
    assert table.best(ids(1, 2, 3, 4, 5, 6)) == (0, 4)
    assert table.best(ids(1, 2, 3, 4, 5)) == (0, 5)
    table.cut(0, 8)
    assert table.best(ids(1, 2, 3, 4, 5)) == (0, 5)


def test_copies_of_one_call_all_see_the_rows_as_they_were():
    table = table_with(0, 1, 2, 3, 4)
    table.write(1, 0, ids(5, 6, 7, 8))
    table.copy([0, 1], [1, 2], [4, 4])
    assert table.best(ids(5, 6, 7, 8)) == (2, 4)
    assert table.best(ids(1, 2, 3, 4))[1] == 4


def test_nothing_is_offered_after_new_weights():
    table = table_with(0, 1, 2, 3, 4)
    table.clear()
    assert table.best(ids(1, 2, 3, 4))[1] == 0
