"""Packing: every token once, right positions, masks from lengths, the same rows for the same lengths."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rstar2_jax import types
from rstar2_jax.data import pack


def row(ids, mask=None, advantage=1.0) -> pack.Row:
    ids = np.asarray(ids, np.int32)
    trained = np.asarray([False, *[True] * (len(ids) - 1)] if mask is None else mask, bool)
    logprobs = np.where(trained, -0.25 * np.arange(len(ids)), 0).astype(np.float32)
    return pack.Row(token_ids=ids, mask=trained, behavior_logprobs=logprobs, advantage=advantage)


@hypothesis.settings(deadline=None)  # a machine under load is no fault of packing
@hypothesis.given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(12, 20), st.integers(1, 4))
def test_every_token_of_every_sequence_appears_once_with_its_position(lengths, row_tokens, multiple):
    rows = [row(np.arange(n) + 100 * i, advantage=float(i)) for i, n in enumerate(lengths)]
    batch = pack.pack(rows, row_tokens=row_tokens, rows_multiple=multiple)
    assert batch.tokens.shape[0] % multiple == 0 and batch.tokens.shape[1] == row_tokens
    seen = {}
    for b, t in np.argwhere(batch.segment_ids > 0):
        index, position = divmod(int(batch.tokens[b, t]), 100)
        assert (index, position) not in seen
        seen[index, position] = (b, batch.segment_ids[b, t])
        assert batch.positions[b, t] == position
        assert batch.loss_mask[b, t] == (position > 0)
        assert batch.advantages[b, t] == (index if position > 0 else 0)
        assert batch.behavior_logprobs[b, t] == np.float32(-0.25 * position)
    assert set(seen) == {(i, p) for i, n in enumerate(lengths) for p in range(n)}
    homes = [{seen[i, p] for p in range(n)} for i, n in enumerate(lengths)]
    assert all(len(home) == 1 for home in homes)
    assert len({next(iter(home)) for home in homes}) == len(lengths)
    padding = batch.segment_ids == 0
    assert not batch.loss_mask[padding].any() and not batch.tokens[padding].any()


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.integers(1, 10), min_size=1, max_size=40))
def test_packing_wastes_less_than_first_fit_may(lengths):
    # First-fit decreasing needs at most 11/9 of the optimum, plus 6/9; the sum bounds the optimum from below.
    rows = pack.plan(lengths, 10)
    halves = sum(n > 5 for n in lengths)
    bound = max(-(-sum(lengths) // 10), halves)
    assert bound <= len(rows) and all(sum(lengths[i] for i in members) <= 10 for members in rows)
    assert sum(sum(lengths[i] for i in members) <= 5 for members in rows) <= 1


def test_the_same_lengths_give_the_same_rows():
    lengths = [3, 6, 4, 2, 6, 4, 3]
    assert pack.plan(lengths, 8) == pack.plan(list(lengths), 8) == [[1, 3], [4], [2, 5], [0, 6]]


def test_the_mask_is_by_length_where_pad_and_end_are_one_id():
    # F06: response 5, 6, 2 with pad = end = 2, padded to a row of 8.
    batch = pack.pack([row([9, 9, 5, 6, 2], mask=[0, 0, 1, 1, 1])], row_tokens=8, rows_multiple=1)
    assert batch.loss_mask[0].astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_an_episode_becomes_one_row_with_a_run_of_ones_for_each_turn():
    # F01, F05, F08: sampled ids as they are, forced end tokens and replies untrained, three turns = three runs.
    def turn(sampled, forced):
        n = len(sampled) + len(forced)
        mask = np.arange(n) < len(sampled)
        return types.Turn(
            token_ids=np.asarray([*sampled, *forced], np.int32),
            mask=mask,
            behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            weights_versions=np.where(mask, 3, -1).astype(np.int32),
            finish_reason=types.FinishReason.STOP,
        )

    turns = (turn([1, 2, 3], [7, 8]), turn([4], [2, 7, 8]), turn([5, 2], []))
    episode = types.Trajectory(
        prompt_id="p",
        prompt_ids=np.asarray([10, 11]),
        seed=0,
        sample_index=0,
        turns=turns,
        stop_reason=types.StopReason.ANSWERED,
    )
    built = pack.trajectory_row(episode, advantage=-0.5)
    assert built.token_ids.tolist() == [10, 11, 1, 2, 3, 7, 8, 4, 2, 7, 8, 5, 2]
    assert built.mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert built.behavior_logprobs.tolist() == (-1.0 * built.mask).tolist()
    assert built.token_ids.dtype == np.int32 and built.behavior_logprobs.dtype == np.float32


def test_the_mask_example_of_two_turns_counts_seven_trained_ids():
    mask = [0] * 5 + [1] * 4 + [0] * 6 + [1] * 3
    assert pack.pack([row(np.arange(18), mask=mask)], row_tokens=20, rows_multiple=1).loss_mask.sum() == 7


def test_a_sequence_longer_than_a_row_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match=r"\{1: 9\} .* exceed row_tokens = 8"):
        pack.pack([row(range(3)), row(range(9))], row_tokens=8, rows_multiple=1)


def test_unequal_or_empty_fields_are_refused():
    with pytest.raises(ValueError, match=r"one length above 0, got \(3, 2, 3\)"):
        pack.Row(token_ids=np.zeros(3), mask=np.zeros(2, bool), behavior_logprobs=np.zeros(3), advantage=0.0)
    with pytest.raises(ValueError, match="one length above 0"):
        row([])
    with pytest.raises(ValueError, match="nothing predicts it"):
        row([1, 2], mask=[1, 1])
    with pytest.raises(ValueError, match="nothing to pack"):
        pack.pack([], row_tokens=4, rows_multiple=1)


@pytest.mark.slow
def test_ten_thousand_random_batches_keep_every_token_and_never_waste_a_row_that_could_be_shared():
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        longest = int(rng.integers(2, 65))
        lengths = rng.integers(1, longest + 1, int(rng.integers(1, 40))).tolist()
        places = pack.plan(lengths, longest)
        assert sorted(index for members in places for index in members) == list(range(len(lengths)))
        used = [sum(lengths[index] for index in members) for members in places]
        assert max(used) <= longest and sum(n <= longest / 2 for n in used) <= 1
        if rng.random() < 0.02:
            batch = pack.pack([row(range(n)) for n in lengths], row_tokens=longest, rows_multiple=4)
            assert np.count_nonzero(batch.segment_ids) == sum(lengths)
            assert pack.waste([batch]) == pytest.approx(1 - sum(lengths) / batch.tokens.size)


def test_best_fit_leaves_the_least_room_where_first_fit_would_not():
    assert pack.plan([12, 10, 9, 1], 20) == [[0], [1, 2, 3]]
