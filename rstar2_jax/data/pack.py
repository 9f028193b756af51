"""Episodes to rows for the learner: best-fit decreasing packing, exact masks, positions that start anew.

    row of the batch = segment 1 | segment 2 | ... | padding      (segment_ids 1, 2, ..., 0)

All bookkeeping is by lengths: no id is ever compared with a pad or an end id, since they may be equal.

Deliberately not here: the choice of the episodes and their advantages (algo/).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rstar2_jax import types


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """One sequence to train on.

    Args:
        token_ids: i32[n], prompt included.
        mask: bool[n], True on trained ids. The first id has no predecessor, so it cannot be trained.
        behavior_logprobs: f32[n], 0 where mask is False.
        advantage: of the whole sequence.

    Raises:
        ValueError: lengths differ, the sequence is empty, or its first id is masked for training.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    behavior_logprobs: np.ndarray
    advantage: float

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.mask), len(self.behavior_logprobs))
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(f"ids, mask and logprobs of a row must have one length above 0, got {lengths}")
        if self.mask[0]:
            raise ValueError("the first id of a row is marked as trained, but nothing predicts it")


def trajectory_row(trajectory: types.Trajectory, advantage: float) -> Row:
    """The row of an episode: its prompt with mask False, then its turns as they were recorded."""
    prompt = np.asarray(trajectory.prompt_ids, np.int32)
    turns = trajectory.turns
    return Row(
        token_ids=np.concatenate([prompt, *(turn.token_ids for turn in turns)]).astype(np.int32),
        mask=np.concatenate([np.zeros(len(prompt), bool), *(turn.mask for turn in turns)]),
        behavior_logprobs=np.concatenate(
            [np.zeros(len(prompt), np.float32), *(turn.behavior_logprobs for turn in turns)]
        ).astype(np.float32),
        advantage=float(advantage),
    )


def plan(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Which sequences share a row: best-fit decreasing (the longest sequence left goes where it leaves least), ties by
    index, so the same lengths give the same rows.

    Args:
        lengths: tokens of each sequence.
        row_tokens: tokens of a row.

    Returns:
        For each row the indices of its sequences, in the order in which they lie in it.

    Raises:
        ValueError: a sequence is longer than a row.

    >>> plan([3, 6, 4, 2], 8)
    [[1, 3], [2, 0]]
    """
    too_long = {i: n for i, n in enumerate(lengths) if n > row_tokens}
    if too_long:
        raise ValueError(f"sequences {too_long} (index: tokens) exceed row_tokens = {row_tokens}: raise it")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(free, (lengths[index], 0))
        if place == len(free):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = free.pop(place)
        rows[row].append(index)
        bisect.insort(free, (left - lengths[index], row))
    return rows


def waste(batches: Iterable[types.TrainBatch]) -> float:
    """Share of the positions that hold no token, over all batches."""
    sizes = [(np.count_nonzero(batch.segment_ids), np.size(batch.segment_ids)) for batch in batches]
    return 1 - sum(used for used, _ in sizes) / sum(size for _, size in sizes)


def pack(rows: Sequence[Row], *, row_tokens: int, rows_multiple: int) -> types.TrainBatch:
    """The sequences as one batch [B, row_tokens] of numpy arrays, B a multiple of rows_multiple.

    Positions count from 0 in each segment. Advantages and behavior_logprobs stand on trained ids and are 0 elsewhere;
    rows that only fill up to the multiple are padding throughout.

    Args:
        rows: sequences, at least one.
        row_tokens: T, at least the longest sequence.
        rows_multiple: B is rounded up to a multiple of it (the learner's microbatch_rows).

    Raises:
        ValueError: no sequence, or one longer than a row.
    """
    if not rows:
        raise ValueError("nothing to pack: a batch needs at least one sequence")
    places = plan([len(row.token_ids) for row in rows], row_tokens)
    shape = (-(-len(places) // rows_multiple) * rows_multiple, row_tokens)
    batch = types.TrainBatch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        behavior_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )
    for b, members in enumerate(places):
        start = 0
        for segment, index in enumerate(members, start=1):
            row = rows[index]
            span = slice(start, start + len(row.token_ids))
            batch.tokens[b, span] = row.token_ids
            batch.positions[b, span] = np.arange(len(row.token_ids))
            batch.segment_ids[b, span] = segment
            batch.loss_mask[b, span] = row.mask
            batch.behavior_logprobs[b, span] = np.where(row.mask, row.behavior_logprobs, 0)
            batch.advantages[b, span] = np.where(row.mask, row.advantage, 0)
            start = span.stop
    return batch
