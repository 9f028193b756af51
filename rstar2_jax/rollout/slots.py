"""Who sits in which row of the decode batch: the host's bookkeeping of the embedded engine.

First come, first served; a row that ends gives its place to the next request at once. One Job is one request from
admission to its end; its ids, log-probabilities and weight versions grow together. The table decides what the device
does next and keeps account of what its cache holds.

Deliberately not here: device work (device.py), threads and futures (jax_engine.py).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from rstar2_jax.rollout import device, prefixes
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

    @property
    def context_ids(self) -> np.ndarray:
        """i32[n]: the prompt and what was sampled."""
        return np.concatenate([self.prompt_ids, np.asarray(self.ids, np.int32)]) if self.ids else self.prompt_ids

    def generation(self, finish_reason: FinishReason) -> Generation:
        """What goes back to the caller."""
        return Generation(
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weights_versions=np.asarray(self.versions, np.int32),
            finish_reason=finish_reason,
        )


class Copy(NamedTuple):
    """Copy cache rows: sources[i] to targets[i]; a target beyond the last slot takes no part."""

    sources: np.ndarray
    targets: np.ndarray


class Prefill(NamedTuple):
    """Write one chunk of each named slot: slots [r], tokens [r, c], positions [r, c] (-1 is padding)."""

    slots: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray


class Decode(NamedTuple):
    """Sample in every row that takes part, until `leave_after` of them have ended or the call's steps are used up."""

    rows: device.Rows
    leave_after: np.int32


class SlotTable:
    """Rows of the decode batch and the queue in front of them.

    Args:
        slots: rows of the decode batch.
        context_tokens: entries of a row of the cache.
        prefill_rows, chunk_tokens: shape of a prefill call.
    """

    def __init__(self, slots: int, context_tokens: int, prefill_rows: int, chunk_tokens: int) -> None:
        self.waiting: collections.deque[Job] = collections.deque()
        self.rows: list[Job | None] = [None] * slots
        self._device_rows = device.empty_rows(slots)
        self._prefixes = prefixes.PrefixTable(slots, context_tokens, chunk_tokens)
        self._prefill_rows, self._chunk = prefill_rows, chunk_tokens
        self._was_put_off = False

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

    def next_step(self) -> Copy | Prefill | Decode | None:
        """The next device call, None when no request is seated. Progress is moved on: the caller must run the call.

        Copies come first, then prefill, then decoding. A prefill call that few rows wait for is put off once, for one
        decode call, while most rows can decode: others may join it.
        """
        copies, prefills = self._plan()
        if copies:
            return self._copy(copies)
        held_up = sum(job is not None and job.needs_prefill for job in self.rows)
        few = held_up < self._prefill_rows and held_up < self.seated / 2 and self.seated > len(self.rows) / 2
        put_off = few and not self._was_put_off
        self._was_put_off = bool(prefills) and put_off
        if prefills and not put_off:
            return self._prefill(prefills)
        return self._decode(self._prefill_rows - held_up) if self.seated else None

    def _plan(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """((source, slot, entries) of copies, slots to prefill), both at most one call long.

        Of requests with equal ids only the first is prefilled; the others wait for its row and copy it.
        """
        copies, prefills, found = [], [], {}
        for slot, job in enumerate(self.rows):
            if job is None or not job.needs_prefill or len(copies) == self._prefill_rows:
                continue
            ids = job.context_ids[:-1]
            key = ids.tobytes()
            follows = key in found
            source, held = found.setdefault(key, self._prefixes.best(ids)) if not follows else found[key]
            if follows and held < len(ids):
                continue
            if held > job.prefilled:
                copies.append((source, slot, held))
            elif len(prefills) < self._prefill_rows:
                prefills.append(slot)
        return copies, prefills

    def _copy(self, copies: list[tuple[int, int, int]]) -> Copy:
        sources, targets = np.zeros(self._prefill_rows, np.int32), np.full(self._prefill_rows, len(self.rows), np.int32)
        count, (from_, to, held) = len(copies), zip(*copies, strict=True)
        sources[:count], targets[:count] = from_, to
        for slot, length in zip(to, held, strict=True):
            self._job(slot).prefilled = length
        self._prefixes.copy(list(from_), list(to), held)
        return Copy(sources, targets)

    def _prefill(self, pending: list[int]) -> Prefill:
        rows, chunk = self._prefill_rows, self._chunk
        slots = np.full(rows, len(self.rows), np.int32)
        tokens, positions = np.zeros((rows, chunk), np.int32), np.full((rows, chunk), -1, np.int32)
        for i, slot in enumerate(pending):
            job = self._job(slot)
            start = job.prefilled
            ids = job.context_ids[start : min(start + chunk, job.context_tokens - 1)]
            slots[i] = slot
            tokens[i, : len(ids)], positions[i, : len(ids)] = ids, np.arange(start, start + len(ids))
            self._prefixes.write(slot, start, ids)
            job.prefilled += len(ids)
        return Prefill(slots, tokens, positions)

    def _decode(self, room: int) -> Decode:
        rows = self._device_rows
        for slot, job in enumerate(self.rows):
            rows.position[slot] = -1
            if job is not None and not job.needs_prefill:
                rows.token[slot] = job.ids[-1] if job.ids else job.prompt_ids[-1]
                rows.position[slot] = job.context_tokens - 1
                rows.remaining[slot] = job.request.sampling.max_new_tokens - len(job.ids)
                self._prefixes.cut(slot, min(job.prefilled, len(job.prompt_ids) - 1))
        return Decode(rows, np.int32(min(len(self.waiting), max(room, 1)) or len(self.rows)))

    def _job(self, slot: int) -> Job:
        job = self.rows[slot]
        assert job is not None
        return job

    def record(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> list[tuple[Job, FinishReason]]:
        """Append a decode call's output to the seated requests; those that ended leave their rows and come back."""
        ended, counts = [], np.sum(ids >= 0, axis=1).tolist()
        for slot, (job, count) in enumerate(zip(self.rows, counts, strict=True)):
            if job is None or not count:
                continue
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
        self._prefixes.clear()
        for job in self.rows:
            if job is not None:
                job.prefilled = 0

    def clear(self) -> None:
        """Forget every request."""
        self.waiting.clear()
        for slot in range(len(self.rows)):
            self.vacate(slot)
