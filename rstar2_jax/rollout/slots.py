"""Who sits in which row of the decode batch: the host's bookkeeping of the embedded engine.

First come, first served; a row that ends gives its place to the next request at once. One Job is one request from
admission to its end; its ids, log-probabilities and weight versions grow together.

Deliberately not here: device work (device.py), threads and futures (jax_engine.py).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from rstar2_jax.rollout import device
from rstar2_jax.rollout.engine import Generation, Request
from rstar2_jax.types import FinishReason


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One request and what it has sampled so far. `reply` is the caller's handle, `cancelled` gives the place up."""

    request: Request
    prompt_ids: np.ndarray
    reply: Any
    cancelled: bool = False
    prefilled: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        """Ids that the row holds now: the prompt and what was sampled."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def needs_prefill(self) -> bool:
        """True until all ids but the last are in the cache; the last one is the next decode step's input."""
        return self.prefilled < self.context_tokens - 1

    def next_chunk(self, chunk: int) -> tuple[int, np.ndarray]:
        """(start, ids) of the next prefill chunk."""
        context = np.concatenate([self.prompt_ids, np.asarray(self.ids, np.int32)])
        return self.prefilled, context[self.prefilled : min(self.prefilled + chunk, len(context) - 1)]

    def generation(self, finish_reason: FinishReason) -> Generation:
        """What goes back to the caller."""
        return Generation(
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weights_versions=np.asarray(self.versions, np.int32),
            finish_reason=finish_reason,
        )


class SlotTable:
    """Rows of the decode batch and the queue in front of them.

    Args:
        slots: rows of the decode batch.
    """

    def __init__(self, slots: int) -> None:
        self.waiting: collections.deque[Job] = collections.deque()
        self.rows: list[Job | None] = [None] * slots
        self._device_rows = device.empty_rows(slots)

    @property
    def seated(self) -> int:
        """Rows that hold a request."""
        return sum(job is not None for job in self.rows)

    @property
    def is_busy(self) -> bool:
        """True while any request, seated or waiting, has not ended."""
        return bool(self.waiting) or self.seated > 0

    def jobs(self) -> Iterable[Job]:
        """Every request that has not ended, seated ones first."""
        return itertools.chain((job for job in self.rows if job is not None), self.waiting)

    def admit(self) -> None:
        """Drop cancelled requests, then seat waiting ones in the order of their arrival."""
        for slot, job in enumerate(self.rows):
            if job is not None and job.cancelled:
                self.vacate(slot)
        for slot, job in enumerate(self.rows):
            if job is None:
                arrived = self._next_waiting()
                if arrived is None:
                    return
                self.rows[slot] = arrived
                self._seat(slot, arrived)

    def _next_waiting(self) -> Job | None:
        while self.waiting:
            job = self.waiting.popleft()
            if not job.cancelled:
                return job
        return None

    def _seat(self, slot: int, job: Job) -> None:
        sampling, rows = job.request.sampling, self._device_rows
        rows.seed_words[slot] = job.request.seed >> 32, job.request.seed & 0xFFFFFFFF
        rows.temperature[slot] = sampling.temperature
        rows.top_k[slot], rows.top_p[slot] = sampling.top_k, sampling.top_p
        rows.stop_ids[slot] = device.padded_stop_ids(sampling.stop_ids)

    def vacate(self, slot: int) -> None:
        """Free a row. Its sampling values go back to the neutral ones, so that it costs the batch nothing."""
        self.rows[slot] = None
        rows = self._device_rows
        rows.temperature[slot], rows.top_k[slot], rows.top_p[slot] = 1.0, -1, 1.0

    def prefill_batch(self, rows: int, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(slots [rows], tokens [rows, chunk], positions [rows, chunk]) of the next prefill call, None if none is due.

        The jobs' progress is moved on: the caller must run the call.
        """
        pending = [slot for slot, job in enumerate(self.rows) if job is not None and job.needs_prefill][:rows]
        if not pending:
            return None
        slots = np.full(rows, len(self.rows), np.int32)  # beyond the last slot: takes no part
        tokens, positions = np.zeros((rows, chunk), np.int32), np.full((rows, chunk), -1, np.int32)
        for i, slot in enumerate(pending):
            job = self.rows[slot]
            assert job is not None
            start, ids = job.next_chunk(chunk)
            slots[i] = slot
            tokens[i, : len(ids)], positions[i, : len(ids)] = ids, np.arange(start, start + len(ids))
            job.prefilled += len(ids)
        return slots, tokens, positions

    def decode_rows(self) -> device.Rows:
        """Device rows of the next decode call: every seated request takes part."""
        rows = self._device_rows
        for slot, job in enumerate(self.rows):
            rows.position[slot] = -1
            if job is not None:
                rows.token[slot] = job.ids[-1] if job.ids else job.prompt_ids[-1]
                rows.position[slot] = job.context_tokens - 1
                rows.remaining[slot] = job.request.sampling.max_new_tokens - len(job.ids)
        return rows

    def record(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> list[tuple[Job, FinishReason]]:
        """Append a decode call's output to the seated requests; those that ended leave their rows and come back."""
        ended, counts = [], np.sum(ids >= 0, axis=1).tolist()
        for slot, job in enumerate(self.rows):
            if job is None:
                continue
            count = counts[slot]
            job.ids += ids[slot, :count].tolist()
            job.logprobs += logprobs[slot, :count].tolist()
            job.versions += [version] * count
            job.prefilled = job.context_tokens - 1
            sampling = job.request.sampling
            if job.ids[-1] in sampling.stop_ids:
                ended.append((job, FinishReason.STOP))
            elif len(job.ids) >= sampling.max_new_tokens:
                ended.append((job, FinishReason.LENGTH))
            else:
                continue
            self.vacate(slot)
        return ended

    def recompute(self) -> None:
        """Forget what the cache holds: seated requests are prefilled again with all of their ids."""
        for job in self.rows:
            if job is not None:
                job.prefilled = 0

    def clear(self) -> None:
        """Forget every request."""
        self.waiting.clear()
        for slot in range(len(self.rows)):
            self.vacate(slot)
