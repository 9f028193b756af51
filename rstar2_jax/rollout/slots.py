"""Who sits in which lane and what the device does next: the host's bookkeeping of the embedded engine.

A Job is one request from admission to its end; its ids, log-probabilities and weight versions grow together. First
come, first served, with two exceptions: a request whose beginning another is computing right now waits for it and
shares it, and when pages run out the request that came last gives up its own and waits at the head of the queue.

A call of the device is planned as a whole: rows that can sample keep a lane for as long as they do; rows that still
need ids in the cache bring them in their own lanes and in empty ones, step by step, and begin to sample in the step
after the last of them.

Deliberately not here: device work (device.py), pages (kv_cache.py), threads and futures (jax_engine.py).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rstar2_jax.rollout import device, kv_cache
from rstar2_jax.rollout.engine import Generation, Request
from rstar2_jax.types import FinishReason


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One request and what it has sampled so far.

    reply is the caller's handle; cancelled gives the place up; serial says when it was seated last; computed is the
    most entries that its cache has had; preempted is how often it lost them to an older one.
    """

    request: Request
    prompt_ids: np.ndarray
    reply: Any
    cancelled: bool = False
    serial: int = -1
    computed: int = 0
    preempted: int = 0
    lease: kv_cache.Lease | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        """Ids that the row holds now: the prompt and what was sampled."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def last_id(self) -> int:
        """The next step's input."""
        return self.ids[-1] if self.ids else int(self.prompt_ids[-1])

    @property
    def remaining(self) -> int:
        """Ids that it may still sample."""
        return self.request.sampling.max_new_tokens - len(self.ids)

    @property
    def held(self) -> kv_cache.Lease:
        """Its lease; only seated jobs have one."""
        assert self.lease is not None
        return self.lease

    @property
    def missing_tokens(self) -> int:
        """Ids to be written before it can sample: all but the last, which is the next step's input."""
        return self.context_tokens - 1 - self.held.filled

    def ids_from(self, start: int) -> np.ndarray:
        """i32[n]: the ids to be in the cache, from an index on."""
        ids = np.concatenate([self.prompt_ids, np.asarray(self.ids, np.int32)]) if self.ids else self.prompt_ids
        return ids[start:-1]

    def generation(self, finish_reason: FinishReason) -> Generation:
        """What goes back to the caller."""
        return Generation(
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            weights_versions=np.asarray(self.versions, np.int32),
            finish_reason=finish_reason,
            preempted=self.preempted,
        )


class Call(NamedTuple):
    """What device.step is called with."""

    rows: device.Rows
    given: device.Given
    steps: np.int32
    leave_after: np.int32


class SlotTable:
    """The seated rows, their pages and the queue in front of them.

    Args:
        lanes: rows that may be seated at once, which is what a step of the device moves.
        context_tokens: longest sequence.
        pages: of the pool; they must hold one sequence of full length.
        page_tokens: entries of a page.
    """

    def __init__(self, lanes: int, context_tokens: int, pages: int, page_tokens: int) -> None:
        self.lanes = lanes
        self._table_pages = -(-context_tokens // page_tokens)
        assert pages >= self._table_pages, "the pool holds less than one sequence"
        self.cache = kv_cache.KvCache(pages, page_tokens)
        self.waiting: collections.deque[Job] = collections.deque()
        self.rows: list[Job] = []
        self.preempted = self.recomputed_tokens = self.shared_tokens = 0
        self._seated = itertools.count()
        self._layout: list[Job] = []
        self._starts: list[int] = []
        self._written: list[tuple[Job, int, int]] = []  # (row, step, ids of it that are given in that step)

    @property
    def is_busy(self) -> bool:
        """Whether any request is seated or waits."""
        return bool(self.rows or self.waiting)

    def jobs(self) -> Iterable[Job]:
        """Every request that has not ended."""
        return itertools.chain(self.rows, self.waiting)

    def held_tokens(self) -> int:
        """Ids of seated rows; may be asked from another thread than the one that moves rows."""
        return sum(job.context_tokens for job in list(self.rows))

    def drop_cancelled(self) -> None:
        """Cancelled requests leave their rows and the queue."""
        for job in [job for job in self.rows if job.cancelled]:
            self._vacate(job)
        self.waiting = collections.deque(job for job in self.waiting if not job.cancelled)

    def admit(self) -> list[kv_cache.Copy]:
        """Drop cancelled requests, then seat waiting ones; the pages to copy before the next step."""
        self.drop_cancelled()
        promised, passed, copies = self._promised(), [], []
        while self.waiting and len(self.rows) < self.lanes:
            job = self.waiting.popleft()
            ids = job.ids_from(0)
            keys = self.cache.keys(ids)
            if promised and _longest(promised, [*keys, self.cache.name(ids, keys)]) > self.cache.known(ids, keys):
                passed.append(job)
                continue
            # A page for each row is left alone, so that the newcomer is not thrown out again at once.
            opened = self.cache.open(ids, keys, len(ids) + 1, spare=len(self.rows))
            if opened is None:
                assert self.rows, "an empty pool has room for any request"
                self.waiting.appendleft(job)
                break
            copies += opened[1]
            self._seat(job, opened[0])
            self._promise(promised, job, ids, keys)
        self.waiting.extendleft(reversed(passed))
        return copies

    def _seat(self, job: Job, lease: kv_cache.Lease) -> None:
        job.lease, job.serial = lease, next(self._seated)
        self.shared_tokens += lease.filled
        self.recomputed_tokens += max(0, job.computed - lease.filled)
        self.rows.append(job)

    def _promised(self) -> dict[bytes, int]:
        """Beginnings that seated rows are about to have in the cache, by name, and their lengths."""
        promised: dict[bytes, int] = {}
        for job in self.rows:
            if job.missing_tokens and self.waiting:
                ids = job.ids_from(0)
                self._promise(promised, job, ids, self.cache.keys(ids))
        return promised

    def _promise(self, promised: dict[bytes, int], job: Job, ids: np.ndarray, keys: Sequence[bytes]) -> None:
        if job.missing_tokens:
            promised.update((key, number * self.cache.page_tokens) for number, key in enumerate(keys) if number)
            promised[self.cache.name(ids, keys)] = len(ids)

    def _vacate(self, job: Job) -> None:
        self.cache.close(job.held)
        job.lease = None
        self.rows.remove(job)

    def retract(self) -> None:
        """Every seated row gives up its pages and waits at the head of the queue."""
        for job in sorted(self.rows, key=lambda job: -job.serial):
            self._vacate(job)
            self.waiting.appendleft(job)

    def _reserve(self, steps: int) -> None:
        """Give every row the pages that so many steps may fill; those that came last make room where there is none."""
        for job in sorted(self.rows, key=lambda job: job.serial):
            while job.lease and not self.cache.reserve(job.lease, job.context_tokens - 1 + min(steps, job.remaining)):
                last = max(self.rows, key=lambda job: job.serial)
                self.preempted += 1
                last.preempted += 1
                self._vacate(last)
                self.waiting.appendleft(last)

    def plan(self, max_steps: int) -> Call | None:
        """The next call of the device, None when no request is seated. `record` takes what came of it.

        While requests wait, the call ends when some rows have: each of their places is worth more than a step's share.
        It also ends when a beginning that a waiting request will share is complete.
        """
        if not self.rows:
            return None
        self._reserve(max_steps)
        ready = sorted((job for job in self.rows if not job.missing_tokens), key=lambda job: -job.context_tokens)
        behind = sorted((job for job in self.rows if job.missing_tokens), key=lambda job: job.serial)
        self._layout = [*ready, *behind]
        given = self._give(len(ready), behind, max_steps)
        steps = max_steps
        if behind and self.waiting and len(self.rows) < self.lanes:
            steps = min(max_steps, max(1, max(self._starts)))
        # What comes next may stand outside, in a pool's queue or behind a tool: a call is no good with few rows left.
        leave_after = max(1, self.lanes // 16) if self.waiting else -(-len(self.rows) // 4)
        return Call(self._device_rows(), given, np.int32(steps), np.int32(leave_after))

    def _give(self, ready: int, behind: Sequence[Job], max_steps: int) -> device.Given:
        """The ids that rows lack, step by step: one in a row's own lane and, where lanes may help, more in empty ones.

        Rows that came first are helped first.
        """
        given, starts = device.nothing_given(self.lanes), [max_steps] * len(behind)
        left, self._written = [(job.ids_from(job.held.filled), job.held.filled) for job in behind], []
        empty = list(range(ready + len(behind), self.lanes))
        for step in range(max_steps):
            spare = list(empty)
            for index, job in enumerate(behind):
                ids, position = left[index]
                if not len(ids):
                    continue
                helping, spare = spare[: len(ids) - 1], spare[len(ids) - 1 :]
                lanes = [ready + index, *helping]
                count = len(lanes)
                given.token[step, lanes], given.owner[step, lanes] = ids[:count], ready + index
                given.position[step, lanes] = np.arange(position, position + count)
                self._written.append((job, step, count))
                left[index] = ids[count:], position + count
                if count == len(ids):
                    starts[index] = step + 1
        self._starts = [0] * ready + starts
        return given

    def _device_rows(self) -> device.Rows:
        rows = device.empty_rows(self.lanes, self._table_pages)
        for lane, (job, start) in enumerate(zip(self._layout, self._starts, strict=True)):
            sampling, pages = job.request.sampling, job.held.pages
            rows.token[lane], rows.position[lane] = job.last_id, job.context_tokens - 1
            rows.start[lane], rows.remaining[lane] = start, job.remaining
            rows.seed_words[lane] = job.request.seed >> 32, job.request.seed & 0xFFFFFFFF
            rows.temperature[lane], rows.top_k[lane] = sampling.temperature, sampling.top_k
            rows.top_p[lane] = sampling.top_p
            rows.stop_ids[lane] = device.padded_stop_ids(sampling.stop_ids)
            rows.table[lane, : len(pages)] = pages
        return rows

    def record(
        self, ids: np.ndarray, logprobs: np.ndarray, done: int, version: int
    ) -> tuple[int, list[tuple[Job, FinishReason]]]:
        """(ids that were given, rows that ended) in the call that was planned last; the ended ones leave their lanes.

        A row that got a number that is not finite has ended too (ABORT): whatever else it sampled would have none.

        Args:
            ids, logprobs: [lanes, MAX_STEPS] as the device gave them back.
            done: steps that it did.
            version: of the weights.
        """
        given = 0
        for job, step, count in self._written:
            if step < done:
                self.cache.write(job.held, job.ids_from(job.held.filled)[:count].tolist())
                given += count
        ended, counts = [], np.sum(ids >= 0, axis=1).tolist()
        broken = set(np.nonzero(~np.isfinite(logprobs))[0].tolist())
        for lane, (job, start, count) in enumerate(zip(self._layout, self._starts, counts, strict=False)):
            if count:
                last = job.last_id
                job.ids += ids[lane, start : start + count].tolist()
                job.logprobs += logprobs[lane, start : start + count].tolist()
                job.versions += [version] * count
                self.cache.write(job.held, [last, *job.ids[-count:-1]])
                if job.request.on_ids is not None:
                    job.request.on_ids(len(job.ids) - count, job.ids[-count:])
            job.computed = max(job.computed, job.held.filled)
            if lane in broken:
                ended.append((job, FinishReason.ABORT))
            elif count and job.ids[-1] in job.request.sampling.stop_ids:
                ended.append((job, FinishReason.STOP))
            elif count and job.remaining <= 0:
                ended.append((job, FinishReason.LENGTH))
        for job, _ in ended:
            self._vacate(job)
        return given, ended

    def clear(self) -> None:
        """Forget every request."""
        self.waiting.clear()
        for job in list(self.rows):
            self._vacate(job)


def _longest(promised: dict[bytes, int], names: Sequence[bytes]) -> int:
    """Most ids that any of the names promises."""
    return max((promised.get(name, 0) for name in names), default=0)
