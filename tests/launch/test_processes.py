"""What the leader says to the other processes, without any: messages of any length come through."""

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental import multihost_utils

from rstar2_jax import processes


@pytest.mark.parametrize("length", [1, 1023, 1024, 4096, 10_000])
def test_a_message_travels_in_pieces_and_comes_out_whole(monkeypatch, length):
    sent = []

    def broadcast(values):
        assert values.dtype.itemsize <= 4  # wider ones would be cut
        sent.append(values)
        return values

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(processes, "_PIECE_BYTES", 4096)
    data = np.random.default_rng(length).bytes(length)
    assert processes._broadcast(data) == data
    assert len(sent) == 1 + -(-length // 4096) and max(len(piece) for piece in sent) <= 4096


def test_lengths_beyond_31_bits_are_told_in_two_numbers():
    high, low = np.array(divmod(2_600_000_000, processes._PIECE_BYTES), np.int32)
    assert int(high) * processes._PIECE_BYTES + int(low) == 2_600_000_000
