"""The account of the pages against a pool that is moved by hand: every lease reads its own ids, nothing leaks."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rstar2_jax.rollout import kv_cache

PAGE = 4


def ids(*values):
    return np.array(values, np.int32)


def opened(cache, sequence, entries=None):
    """(lease, copies) of a sequence that fits."""
    got = cache.open(sequence, cache.keys(sequence), len(sequence) if entries is None else entries)
    assert got is not None
    return got


def written(cache, sequence):
    """A lease whose entries all stand for the sequence."""
    lease, _ = opened(cache, sequence)
    cache.write(lease, sequence[lease.filled :])
    return lease


def known(cache, sequence):
    return cache.known(sequence, cache.keys(sequence))


def test_an_empty_cache_knows_nothing_and_lends_what_is_asked_for():
    cache = kv_cache.KvCache(5, PAGE)
    lease, copies = opened(cache, ids(1, 2, 3), entries=9)
    assert (lease.filled, copies, len(set(lease.pages))) == (0, [], 3)
    assert (cache.held_pages, cache.available_pages) == (3, 2)


def test_full_pages_are_shared_and_counted_once():
    cache = kv_cache.KvCache(8, PAGE)
    first = written(cache, ids(*range(9)))
    second, copies = opened(cache, ids(*range(8), 50), entries=9)
    assert second.pages[:2] == first.pages[:2] and second.filled == 8 and not copies
    assert cache.held_pages == 4
    cache.close(first)
    assert cache.held_pages == 3


def test_a_page_that_is_not_full_is_copied_while_another_holds_it():
    cache = kv_cache.KvCache(8, PAGE)
    first = written(cache, ids(1, 2, 3, 4, 5, 6))
    second, copies = opened(cache, ids(1, 2, 3, 4, 5, 6, 7), entries=8)
    assert second.filled == 6
    assert copies == [kv_cache.Copy(first.pages[1], second.pages[1])] and first.pages[1] != second.pages[1]


def test_a_page_that_nobody_holds_is_taken_over_and_written_further():
    cache = kv_cache.KvCache(8, PAGE)
    first = written(cache, ids(1, 2, 3, 4, 5, 6))
    pages = list(first.pages)
    cache.close(first)
    second, copies = opened(cache, ids(1, 2, 3, 4, 5, 6, 7))
    assert second.pages == pages and second.filled == 6 and not copies


def test_a_fork_inside_a_page_copies_the_common_part_only():
    cache = kv_cache.KvCache(8, PAGE)
    cache.close(written(cache, ids(1, 2, 3, 4)))
    lease, copies = opened(cache, ids(1, 2, 9, 9))
    assert lease.filled == 2 and len(copies) == 1
    cache.write(lease, ids(9, 9))
    assert known(cache, ids(1, 2, 3, 4)) == 4 and known(cache, ids(1, 2, 9, 9)) == 4


def test_the_next_turn_of_an_episode_finds_all_that_was_sampled():
    cache = kv_cache.KvCache(16, PAGE)
    prompt, sampled, reply = ids(1, 2, 3, 4, 5), [6, 7, 8, 9], ids(10, 11)
    lease, _ = opened(cache, prompt)
    cache.write(lease, prompt)
    for one in sampled:
        assert cache.reserve(lease, lease.filled + 1)
        cache.write(lease, [one])
    cache.close(lease)
    turn = np.concatenate([prompt, ids(*sampled), reply])
    assert known(cache, turn) == len(prompt) + len(sampled)
    assert opened(cache, turn)[0].filled == len(prompt) + len(sampled)


def test_the_longest_idle_page_goes_first_and_ends_go_before_beginnings():
    cache = kv_cache.KvCache(4, PAGE)
    for first in (1, 2):
        cache.close(written(cache, ids(*[first] * 8)))
    lease, _ = opened(cache, ids(3, 3, 3, 3))
    assert known(cache, ids(*[1] * 8)) == 4 and known(cache, ids(*[2] * 8)) == 8
    assert cache.reserve(lease, 12)
    assert known(cache, ids(*[1] * 8)) == 0 and known(cache, ids(*[2] * 8)) == 4


def test_nothing_changes_when_the_pool_lacks_pages():
    cache = kv_cache.KvCache(3, PAGE)
    lease = written(cache, ids(*range(8)))
    asked = ids(*range(8), 1, 2)
    assert cache.open(asked, cache.keys(asked), 13) is None
    assert not cache.reserve(lease, 13) and len(lease.pages) == 2
    assert cache.reserve(lease, 12) and cache.available_pages == 0


def test_a_reused_page_is_not_counted_as_room_for_the_rest():
    cache = kv_cache.KvCache(2, PAGE)
    cache.close(written(cache, ids(*range(8))))
    asked = ids(*range(8), 9)
    assert cache.open(asked, cache.keys(asked), 9) is None and known(cache, asked) == 8


def test_two_that_compute_the_same_leave_one_copy_behind():
    cache = kv_cache.KvCache(6, PAGE)
    sequence = ids(1, 2, 3, 4)
    first, second = opened(cache, sequence)[0], opened(cache, sequence)[0]
    for lease in (first, second):
        cache.write(lease, sequence)
    cache.close(second)
    cache.close(first)
    assert len(cache._idle) == 1 and known(cache, sequence) == 4


def test_new_weights_know_nothing_of_the_old_ones():
    cache = kv_cache.KvCache(4, PAGE)
    sequence = ids(*range(6))
    old = cache.keys(sequence)
    cache.close(written(cache, sequence))
    cache.restart(1)
    assert known(cache, sequence) == 0 and cache.available_pages == 4
    assert not set(old) & set(cache.keys(sequence))


def test_new_weights_under_an_open_lease_are_our_own_mistake():
    cache = kv_cache.KvCache(4, PAGE)
    opened(cache, ids(1))
    with pytest.raises(AssertionError, match="lease of the old weights"):
        cache.restart(1)


def test_sizes_must_be_above_zero():
    with pytest.raises(ValueError, match="pages = 0"):
        kv_cache.KvCache(0, PAGE)
    with pytest.raises(ValueError, match="page_tokens = 0"):
        kv_cache.KvCache(3, 0)


class Pool:
    """A pool of ids beside the account, moved as the device would move its entries."""

    def __init__(self, pages):
        self.cache, self.entries = kv_cache.KvCache(pages, PAGE), np.full((pages, PAGE), -1)
        self.live = []  # (lease, ids)

    def open(self, sequence, room):
        got = self.cache.open(sequence, self.cache.keys(sequence), len(sequence) + room)
        if got is None:
            return
        lease, copies = got
        before = self.entries.copy()
        for copy in copies:
            self.entries[copy.target] = before[copy.source]
        assert list(self.read(lease)) == sequence[: lease.filled].tolist()
        self.put(lease, sequence[lease.filled :])
        self.live.append((lease, sequence))

    def put(self, lease, values):
        for offset, value in enumerate(values, lease.filled):
            self.entries[lease.pages[offset // PAGE], offset % PAGE] = value
        self.cache.write(lease, values)

    def extend(self, at, values):
        lease, sequence = self.live[at]
        if self.cache.reserve(lease, len(sequence) + len(values)):
            self.put(lease, values)
            self.live[at] = lease, np.concatenate([sequence, values])

    def close(self, at):
        self.cache.close(self.live.pop(at)[0])

    def read(self, lease):
        return self.entries[lease.pages].reshape(-1)[: lease.filled]

    def check(self):
        for lease, sequence in self.live:
            assert list(self.read(lease)) == sequence.tolist()
        held = {page for lease, _ in self.live for page in lease.pages}
        counts = [sum(page in lease.pages for lease, _ in self.live) for page in range(len(self.entries))]
        assert [page.references for page in self.cache._pages] == counts
        assert self.cache.held_pages == len(held)
        assert not held & (set(self.cache._free) | set(self.cache._idle))
        assert self.cache.available_pages + len(held) == len(self.entries)
        offered = {page for pages in self.cache._children.values() for page in pages}
        assert offered == {n for n, page in enumerate(self.cache._pages) if page.parent is not None}
        assert set(self.cache._full.values()) <= offered


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(lambda values: np.array(values, np.int32))
ACTIONS = st.one_of(
    st.tuples(st.just("open"), SEQUENCES, st.integers(0, 6)),
    st.tuples(st.just("extend"), st.integers(0, 9), SEQUENCES),
    st.tuples(st.just("close"), st.integers(0, 9), st.none()),
    st.tuples(st.just("restart"), st.integers(0, 3), st.none()),
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.integers(1, 12), st.lists(ACTIONS, max_size=40))
def test_every_lease_reads_its_own_ids_whatever_happens_beside_it(pages, actions):
    pool = Pool(pages)
    for what, a, b in actions:
        if what == "open":
            pool.open(a, b)
        elif what == "restart":
            while pool.live:
                pool.close(0)
            pool.cache.restart(a)
        elif pool.live and what == "extend":
            pool.extend(a % len(pool.live), b)
        elif pool.live:
            pool.close(a % len(pool.live))
        pool.check()
    while pool.live:
        pool.close(0)
    assert pool.cache.held_pages == 0
