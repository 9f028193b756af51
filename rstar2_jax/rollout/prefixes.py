"""Which rows of the cache hold which prefilled ids, so that equal prompts are computed once and copied.

Only what a prefill call wrote counts, and only whole chunks of it, or all of it when the whole prompt is equal: a copy
is then bit for bit what prefilling the row itself would have written. Entries that decoding wrote are never shared,
since the shapes of the two computations differ.

Deliberately not here: anything on the device, and sharing of memory (rows are copied).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PrefixTable:
    """Ids behind the prefilled entries of each row, of the weights in use.

    Args:
        slots: rows of the cache.
        context_tokens: entries of a row.
        chunk_tokens: columns of a prefill call.
    """

    def __init__(self, slots: int, context_tokens: int, chunk_tokens: int) -> None:
        self._ids = np.full((slots, context_tokens), -1, np.int32)
        self._lengths = np.zeros(slots, np.int32)
        self._chunk = chunk_tokens

    def write(self, slot: int, start: int, ids: np.ndarray) -> None:
        """A prefill call writes ids from entry `start` on; entries beyond them are another sequence's."""
        stop = start + len(ids)
        assert self._lengths[slot] >= start, "a prefill continues what the row holds"
        self._ids[slot, start:stop], self._ids[slot, stop:] = ids, -1
        self._lengths[slot] = stop

    def cut(self, slot: int, length: int) -> None:
        """Entries of a row from `length` on are about to hold something else."""
        self._ids[slot, length:] = -1
        self._lengths[slot] = min(length, self._lengths[slot])

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """The first entries of some rows now stand in others as well; all are read before any is written."""
        self._ids[targets] = self._ids[sources]
        self._lengths[targets] = self._lengths[sources]
        for target, length in zip(targets, lengths, strict=True):
            self.cut(target, length)

    def clear(self) -> None:
        """The cache holds nothing (new weights)."""
        self._ids[:], self._lengths[:] = -1, 0

    def best(self, ids: np.ndarray) -> tuple[int, int]:
        """(slot, entries) of the row that holds most of what prefilling these ids would write; entries may be 0."""
        differs = self._ids[:, : len(ids)] != ids
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
        whole = (common == len(ids)) & (self._lengths == len(ids))
        usable = np.where(whole, common, common // self._chunk * self._chunk)
        slot = int(usable.argmax())
        return slot, int(usable[slot])
