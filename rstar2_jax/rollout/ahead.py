"""Generation that runs ahead of training by a bounded number of steps.

Batch k trains the weights of version k into version k + 1. Its collection may start once k - max_staleness steps are
trained, so every id of it is sampled from a version v with

    k - max_staleness <= v <= k

With max_staleness = 0 that is the synchronous loop: a collection starts when the step before is trained and published,
and groups left over from it are too old to be used. Above 0, collections run while the learner works, one after the
other; turns in flight when new weights arrive go on under them. The bound is an invariant: it is kept by when
collections start and by which left-over groups they may use, and checked where a batch is handed out.

Deliberately not here: what a collection is (groups.py), and the training.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from rstar2_jax.rollout import groups
from rstar2_jax.types import Group

Collect = Callable[[int, int, Sequence[Group]], Awaitable[groups.Collection]]


class StalenessError(RuntimeError):
    """A batch holds ids of weights older than allowed: a fault of this program or of an engine that lags behind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What step `step` trains on.

    Args:
        collection: the groups.
        cursor: of the source, after this collection.
        carried: how many of the groups were left over from the step before.
        dropped: left-over groups that were too old to be used.
    """

    step: int
    collection: groups.Collection
    cursor: int
    carried: int
    dropped: int


class Ahead:
    """Batches in the order of the steps.

    Args:
        collect: (step, cursor, left-over groups) -> collection.
        step, cursor, left_over: where the run stands.
        steps: of the whole run; nothing is collected for later ones.
        max_staleness: steps that generation may be ahead.
    """

    def __init__(
        self, collect: Collect, *, step: int, cursor: int, left_over: Sequence[Group], steps: int, max_staleness: int
    ) -> None:
        self._collect, self._steps, self._bound = collect, steps, max_staleness
        self._cursor, self._left_over = cursor, tuple(left_over)
        self._trained = step - max_staleness - 1  # nothing starts before the first call of `trained`
        self._changed = asyncio.Event()
        self._ready: asyncio.Queue[Batch] = asyncio.Queue()
        self._producer = asyncio.create_task(self._produce(step))

    async def next(self) -> Batch:
        """The batch of the next step.

        Raises:
            StalenessError: an id in it is older than allowed.
            Exception: whatever ended the collection.
        """
        waiting = asyncio.ensure_future(self._ready.get())
        try:
            await asyncio.wait({waiting, self._producer}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._producer.result()
                raise RuntimeError(f"no batch after step {self._steps - 1}: the run ends there")
            batch = waiting.result()
        finally:
            waiting.cancel()
        oldest = min((group.oldest_version for group in batch.collection.groups), default=batch.step)
        if batch.step - oldest > self._bound:
            raise StalenessError(
                f"step {batch.step} holds ids of weights {oldest}: {batch.step - oldest} steps old, at most "
                f"Rollout.max_staleness = {self._bound} are allowed"
            )
        return batch

    def trained(self, step: int) -> None:
        """So many steps are trained, and the engines have the weights of that version."""
        self._trained = step
        self._changed.set()

    async def close(self) -> None:
        """End the collection in flight."""
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)

    async def _produce(self, first: int) -> None:
        for step in range(first, self._steps):
            while self._trained < step - self._bound:
                self._changed.clear()
                await self._changed.wait()
            usable = [group for group in self._left_over if step - group.oldest_version <= self._bound]
            dropped = len(self._left_over) - len(usable)
            collection = await self._collect(step, self._cursor, usable)
            self._cursor += collection.prompts_used
            self._left_over = collection.surplus
            carried = sum(any(group is other for other in usable) for group in collection.groups)
            self._ready.put_nowait(
                Batch(step=step, collection=collection, cursor=self._cursor, carried=carried, dropped=dropped)
            )
