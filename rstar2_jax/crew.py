"""The processes of a run over several hosts: one leads, the others do their share of what it is at.

The leader (process 0) drives rollouts, writes metrics and decides; everything that all processes must do together
(updates, checkpoints, publishing of shards) begins with the leader sharing what is to be done. Alone, sharing is free.

Deliberately not here: joining the processes (launch.py), and what they do (train.py).
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_T = TypeVar("_T")


def leads() -> bool:
    """Whether this process is the leader; the only process always is."""
    return jax.process_index() == 0


def share(value: _T | None = None) -> _T:
    """The leader's value, in every process. To be called by all of them, in the same order.

    Args:
        value: what the leader has to say: plain values and host arrays; of the others' calls it is ignored. It travels
            between the processes of one run only, whose code is one and the same.
    """
    if jax.process_count() == 1:
        assert value is not None
        return value
    data = np.frombuffer(pickle.dumps(value) if leads() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int64(len(data))))
    # Whole kilobytes, so that messages of many sizes are compiled few times.
    padded = np.zeros(_rounded(size), np.uint8)
    padded[: len(data)] = data
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size].tobytes())


def _rounded(size: int) -> int:
    """The next size with two significant binary digits: at most half more, and few of them."""
    step = max(1024, 1 << max(0, size.bit_length() - 2))
    return -(-size // step) * step
