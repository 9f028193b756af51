"""What the processes of a run over several hosts say to each other: plain values from the leader, and votes of all.

Each function here is called by all processes, in the same order; a run of one process is its own leader, and asking
costs it nothing.

Deliberately not here: joining the processes (launch.py), and what they do together (crew.py).
"""

from __future__ import annotations

import itertools
import pickle
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_T = TypeVar("_T")
_PIECE_BYTES = 2**28  # of a message, sent at once


def leads() -> bool:
    """Whether this process is the leader; the only process always is."""
    return jax.process_index() == 0


def share(value: _T | None = None) -> _T:
    """The leader's value, in every process; none of them has it before the leader is there.

    Args:
        value: what the leader says: plain values and host arrays; of the others' calls it is ignored. It travels
            between the processes of one run only, whose code is one and the same.
    """
    if jax.process_count() == 1:
        assert value is not None
        return value
    return pickle.loads(_broadcast(pickle.dumps(value) if leads() else b""))


def all_of(flag: bool) -> bool:
    """Whether the flag is set in every process; the same answer in all of them."""
    return all(_flags(flag))


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process; the same answer in all of them."""
    return any(_flags(flag))


def _flags(flag: bool) -> list[bool]:
    if jax.process_count() == 1:
        return [flag]
    return [bool(value) for value in np.asarray(multihost_utils.process_allgather(np.int32(flag)))]


def check_alike(text: str) -> None:
    """Return when every process has the same text.

    Raises:
        ValueError: in every process; names the processes and the first line in which one differs from process 0.
    """
    if jax.process_count() == 1:
        return
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(own))))
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(own)] = own
    whole = np.asarray(multihost_utils.process_allgather(padded))
    told = [row[:length].tobytes().decode() for row, length in zip(whole, lengths, strict=True)]
    odd = [rank for rank, other in enumerate(told) if other != told[0]]
    if odd:
        pairs = itertools.zip_longest(told[0].splitlines(), told[odd[0]].splitlines(), fillvalue="nothing")
        first, other = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        raise ValueError(
            f"processes {odd} were started otherwise than process 0, which has {first.strip()!r} where process "
            f"{odd[0]} has {other.strip()!r}: start all of them with the same command, files and code"
        )


def _broadcast(data: bytes) -> bytes:
    """The leader's bytes, in every process."""
    # Integers of 64 bits are cut to 32 on the way, so the length goes as two.
    high, low = multihost_utils.broadcast_one_to_all(np.array(divmod(len(data), _PIECE_BYTES), np.int32))
    size = int(high) * _PIECE_BYTES + int(low)
    sent, found = np.frombuffer(data, np.uint8), []
    for at in range(0, size, _PIECE_BYTES):
        left = min(_PIECE_BYTES, size - at)
        # Sizes of two significant binary digits, so that messages of many lengths are compiled few times.
        unit = max(1024, 1 << max(0, left.bit_length() - 2))
        piece = np.zeros(-(-left // unit) * unit, np.uint8)
        piece[: len(sent[at : at + left])] = sent[at : at + left]
        found.append(np.asarray(multihost_utils.broadcast_one_to_all(piece))[:left].tobytes())
    return b"".join(found)
