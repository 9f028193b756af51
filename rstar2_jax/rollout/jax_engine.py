"""The embedded rollout engine: batched decoding over a paged KV cache on this process's own device.

One worker thread owns all that is on the device; callers await futures. Between two device calls it takes in what has
arrived: requests, cancellations, weights, pauses. A call then moves every lane by up to `decode_steps` tokens: rows
that can sample do, the other lanes write prompts into the cache; it returns early when rows have ended whose places
are wanted.

The cache is a pool of pages (kv_cache.py). Whatever was computed under the weights in use and still lies there is
shared: equal prompts, common beginnings, the earlier turns of an episode. When pages run out, the youngest request
gives up its own and is computed again later, to the same bits.

New weights take effect between two calls. Requests in flight go on under them: all of their ids are computed again, so
that no key or value of old weights is ever read, and every id carries the version that sampled it.

Deliberately not here: several devices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rstar2_jax.model import decoder
from rstar2_jax.rollout import device, kv_cache, replies, slots
from rstar2_jax.rollout.engine import (
    DIVERGED,
    Caps,
    DivergedError,
    EngineError,
    Generation,
    Load,
    PauseMode,
    Request,
    checked_mode,
    checked_request,
    checked_text,
)
from rstar2_jax.settings import Model
from rstar2_jax.types import FinishReason
from rstar2_jax.weights import fetch

PAGE_TOKENS = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters since the engine was made.

    Args:
        decode_calls, decode_steps: calls of the device and the steps that they did.
        sampled_tokens, prefilled_tokens: ids that came out and ids that were written into the cache by themselves.
        shared_tokens: ids that were found in the cache when their request was seated.
        copied_pages: pages copied because two sequences part inside them.
        preempted: times that a request lost its pages to an older one.
        recomputed_tokens: ids computed again after a preemption, a retraction or new weights.
        busy_s: seconds spent on calls.
    """

    decode_calls: int = 0
    decode_steps: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    copied_pages: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    busy_s: float = 0.0


class JaxEngine:
    """A RolloutEngine on the first local device.

    Args:
        model: sizes of the decoder.
        slots: lanes, which is the most rows that sample at once; the same for the whole run.
        context_tokens: longest prompt plus response of a request.
        prefill_chunk_tokens: columns of a scoring call, the same for the whole run.
        decode_steps: most steps of a device call, up to 32; changes speed, never a sample.
        kv_tokens: ids that the cache holds at once, at least one request of full length; None for room for all slots.
        name: of this replica, as trajectories report it.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        context_tokens: int,
        prefill_chunk_tokens: int,
        decode_steps: int = 32,
        kv_tokens: int | None = None,
        name: str = "embedded",
    ) -> None:
        sizes = {"slots": slots, "prefill_chunk_tokens": prefill_chunk_tokens, "decode_steps": decode_steps}
        for what, value in sizes.items():
            if value < 1:
                raise ValueError(f"{what} = {value}: must be above 0")
        if decode_steps > device.MAX_STEPS:
            raise ValueError(f"decode_steps = {decode_steps}: at most {device.MAX_STEPS}")
        if not 2 <= context_tokens <= model.max_positions:
            raise ValueError(f"context_tokens = {context_tokens}: must be 2 to max_positions = {model.max_positions}")
        if kv_tokens is not None and kv_tokens < context_tokens:
            raise ValueError(f"kv_tokens = {kv_tokens}: must hold one request of context_tokens = {context_tokens}")
        self._model, self._resident_model, self._name = model, device.untied(model), name
        self._chunk, self._decode_steps = prefill_chunk_tokens, decode_steps
        self._pages = _pages(context_tokens) * slots if kv_tokens is None else _pages(kv_tokens)
        self._caps = Caps(
            name=name,
            vocab_size=model.vocab_size,
            max_context_tokens=context_tokens,
            kv_tokens=self._pages * PAGE_TOKENS,
            spans=True,
            seeded=True,
        )
        self._init_worker(slots, context_tokens)

    def _init_worker(self, num_slots: int, context_tokens: int) -> None:
        # The table is the worker's alone, as are params and cache.
        self._table = slots.SlotTable(num_slots, context_tokens, self._pages, PAGE_TOKENS)
        self._params: Any = None
        self._cache: decoder.Cache | None = None
        self._version, self._digest, self._sums = -1, "", []
        self._paused = False
        self._stats = Stats()
        self._changed = threading.Condition()  # guards the four below
        self._arrived: list[slots.Job] = []
        self._commands: list[tuple[Callable[[], Any], replies.Reply]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._update_lock = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    @property
    def caps(self) -> Caps:
        """What this engine can hold."""
        return self._caps

    @property
    def weights_version(self) -> int:
        """Version of the weights that new ids are sampled from; -1 before the first update."""
        return self._version

    @property
    def stats(self) -> Stats:
        """Counters so far."""
        table = self._table
        return dataclasses.replace(
            self._stats,
            shared_tokens=table.shared_tokens,
            preempted=table.preempted,
            recomputed_tokens=table.recomputed_tokens,
        )

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the awaiting task frees the row.

        Raises:
            ValueError: the request can never be served by this engine.
            EngineError: the engine is closed, dead or without weights; DivergedError: these give no finite number.
        """
        prompt_ids = self._checked(request)
        if self._version < 0:
            raise EngineError(f"{self._name} has no weights yet: call update_weights before request {request.rid}")
        job = slots.Job(request=request, prompt_ids=prompt_ids, reply=replies.Reply())
        self._submit(self._arrived, job)
        try:
            return await job.reply.future
        except asyncio.CancelledError:
            job.cancelled = True
            raise

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[n]: log-probability of each id given the ids before it, at temperature 1; the first is 0."""
        ids = checked_text(self._caps, token_ids)
        if self._version < 0:
            raise EngineError(f"{self._name} has no weights yet: call update_weights before score")
        return await self._command(functools.partial(self._score, ids))

    async def update_weights(self, root: str, version: int) -> None:
        """Fetch a committed version and sample from it on; rows keep decoding with the old weights meanwhile.

        Raises:
            EngineError: it is absent or broken (the old weights stay), or the engine is closed or dead.
        """
        async with self._update_lock:
            try:
                digest, params = await asyncio.to_thread(self._load, root, version)
            except (RuntimeError, MemoryError) as error:  # FetchError, and the device's own where there is no room
                raise EngineError(f"{self._name} keeps weights {self._version}: {error}") from error
            await self._command(functools.partial(self._swap, params, version, digest))

    async def verify(self, root: str, version: int) -> None:
        """Raise EngineError unless the weights in use are those of the committed version, unchanged since they came."""
        async with self._update_lock:
            try:
                digest = await asyncio.to_thread(fetch.digest, root, version)
            except fetch.FetchError as error:
                raise EngineError(f"{self._name} cannot be verified: {error}") from error
            if self._version < 0 or self._digest != digest:
                raise EngineError(f"{self._name} holds weights {self._version}, not those of version {version}")
            if await asyncio.to_thread(device.checksums, self._params) != self._sums:
                raise EngineError(f"{self._name}: weights {version} have changed in memory since they were fetched")

    async def load(self) -> Load:
        """What the cache holds and who waits for a row."""
        if not await self.alive():
            raise EngineError(f"{self._name} is closed or dead")
        table, free = self._table, self._table.cache.available_pages * PAGE_TOKENS
        used, waiting = min(table.held_tokens(), self._caps.kv_tokens - free), len(table.waiting) + len(self._arrived)
        return Load(kv_tokens_used=used, kv_tokens_free=free, running=len(table.rows), waiting=waiting)

    async def alive(self) -> bool:
        """True while the worker can take requests."""
        return self._thread.is_alive() and self._failure is None and not self._closing

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two device calls; `retract` sends the seated requests back to the head of the queue."""
        await self._command(functools.partial(self._pause, checked_mode(mode)))

    async def resume(self) -> None:
        """Go on where pause stopped."""
        await self._command(functools.partial(setattr, self, "_paused", False))

    async def abort(self, rid: str | None = None) -> None:
        """End requests in flight with what they have."""
        await self._command(functools.partial(self._end, rid))

    async def flush(self) -> None:
        """Offer nothing of what the cache holds to requests that come from now on; those in flight keep their pages."""
        await self._command(self._table.cache.forget)

    async def close(self) -> None:
        """End requests in flight with FinishReason.ABORT and what they have, then stop the worker."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._params = self._cache = None

    def _checked(self, request: Request) -> np.ndarray:
        count = len(request.sampling.stop_ids)
        if count > device.MAX_STOP_IDS:
            raise ValueError(f"request {request.rid}: {count} stop ids: at most {device.MAX_STOP_IDS}")
        return checked_request(self._caps, request)

    def _submit(self, queue: list[Any], item: Any) -> None:
        with self._changed:
            if self._failure is not None:
                raise EngineError(f"{self._name} is dead: {self._failure!r}") from self._failure
            if self._closing:
                raise EngineError(f"{self._name} is closed")
            queue.append(item)
            self._changed.notify()

    async def _command(self, act: Callable[[], Any]) -> Any:
        reply = replies.Reply()
        self._submit(self._commands, (act, reply))
        return await reply.future

    def _load(self, root: str, version: int) -> tuple[str, Any]:
        digest = fetch.digest(root, version)
        params = device.resident(fetch.fetch(root, version, self._model), self._model)
        return digest, jax.block_until_ready(params)

    # From here on: the worker thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # the engine's boundary: whatever happened becomes a typed error for every caller
            self._fail(error)

    def _turn(self) -> bool:
        """One round of the worker; False once the engine is closed."""
        with self._changed:
            while not (self._closing or self._commands or (self._has_work() and not self._paused)):
                self._changed.wait()
            commands, self._commands = self._commands, []
            self._table.waiting.extend(self._arrived)
            self._arrived.clear()
            closing = self._closing
        if closing:
            self._abort([reply for _, reply in commands])
            return False
        for i, (act, reply) in enumerate(commands):
            try:
                reply.resolve(act())
            except Exception:
                with self._changed:
                    self._commands = commands[i:] + self._commands  # so that _fail answers them too
                raise
        if self._paused:
            return True
        start = time.monotonic()
        self._step()
        self._count(busy_s=time.monotonic() - start)
        return True

    def _has_work(self) -> bool:
        return bool(self._arrived) or self._table.is_busy

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._end(None)
        elif mode == "retract":
            self._table.retract()
            self._table.cache.forget()

    def _end(self, rid: str | None) -> None:
        for job in list(self._table.jobs()):
            if rid is None or job.request.rid == rid:
                job.cancelled = True
                job.reply.resolve(job.generation(FinishReason.ABORT))
        self._table.drop_cancelled()

    def _step(self) -> None:
        """One call of the device: copies first, then up to `decode_steps` steps."""
        self._copy(self._table.admit())
        call = self._table.plan(self._decode_steps)
        if call is None:
            return
        self._cache, *out = device.step(self._resident_model, self._params, self._cache, *call)
        ids, logprobs, done = map(np.asarray, out)
        given, ended = self._table.record(ids, logprobs, int(done), self._version)
        sampled = int((ids >= 0).sum())
        self._count(decode_calls=1, decode_steps=int(done), sampled_tokens=sampled, prefilled_tokens=given)
        for job, finish_reason in ended:
            if np.all(np.isfinite(job.logprobs)):
                job.reply.resolve(job.generation(finish_reason))
            else:
                job.reply.fail(DivergedError(f"{self._name}: weights {self._version} {DIVERGED} ({job.request.rid})"))

    def _copy(self, copies: Sequence[kv_cache.Copy]) -> None:
        # In the order in which they were asked for: no copy reads a page that an earlier one was to write.
        for start in range(0, len(copies), device.COPIED_PAGES):
            part = copies[start : start + device.COPIED_PAGES]
            sources = np.zeros(device.COPIED_PAGES, np.int32)
            targets = np.full(device.COPIED_PAGES, self._pages, np.int32)
            sources[: len(part)], targets[: len(part)] = zip(*part, strict=True)
            self._cache = device.copy(self._cache, sources, targets)
        self._count(copied_pages=len(copies))

    def _count(self, **more: float) -> None:
        grown = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = dataclasses.replace(self._stats, **grown)

    def _swap(self, params: Any, version: int, digest: str) -> None:
        self._params, self._version, self._digest = params, version, digest
        self._sums = device.checksums(params)
        self._table.retract()
        self._table.cache.restart(version)
        self._cache = None  # freed before the new one is made; empty, so that no number of broken weights stays
        self._cache = decoder.init_cache(self._resident_model, self._pages, PAGE_TOKENS, self._model.compute_dtype)

    def _score(self, ids: np.ndarray) -> np.ndarray:
        cache = decoder.init_cache(self._model, 1, self._caps.max_context_tokens, self._model.compute_dtype)
        out = np.zeros(len(ids), np.float32)
        for start in range(0, len(ids) - 1, self._chunk):
            stop = min(start + self._chunk, len(ids) - 1)
            tokens, targets = np.zeros((2, 1, self._chunk), np.int32)
            positions = np.full((1, self._chunk), -1, np.int32)
            tokens[0, : stop - start], targets[0, : stop - start] = ids[start:stop], ids[start + 1 : stop + 1]
            positions[0, : stop - start] = np.arange(start, stop)
            cache, logprobs = device.score(self._resident_model, self._params, cache, tokens, positions, targets)
            out[start + 1 : stop + 1] = np.asarray(logprobs)[0, : stop - start]
        return out

    def _abort(self, replies: list[replies.Reply]) -> None:
        for job in self._table.jobs():
            job.reply.resolve(job.generation(FinishReason.ABORT))
        for reply in replies:
            reply.fail(EngineError(f"{self._name} was closed"))
        self._table.clear()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            replies = [reply for _, reply in self._commands] + [job.reply for job in self._arrived]
            self._commands, self._arrived = [], []
        for reply in [*replies, *(job.reply for job in self._table.jobs())]:
            failure = EngineError(f"{self._name} died: {error!r}")
            failure.__cause__ = error
            reply.fail(failure)
        self._table.clear()


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
