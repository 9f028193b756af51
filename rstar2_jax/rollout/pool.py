"""Many engines as one: rollouts are seated by free KV tokens, and moved when their engine dies or stands still.

A seat (seat.py) waits in the queue of balance.py until an engine has room, sends its turns there and gives the place
back on every exit. An engine that fails, does not answer or makes no progress is taken down: its rollouts go to the
front of the queue, and a turn in flight is sampled again elsewhere with the same seed, so that on engines that are
`seeded` the result is the one that was lost. Each engine has a task that looks after it and brings it back, with the
current weights, once it answers again.

Waiting for room ends with an error when no engine has been in service for as long as an engine may stand still, or none
that could hold the rollout; how long it may take otherwise is for the rollout to say (seat.py).

Deliberately not here: the decisions (balance.py), processes (fleet.py), and trajectories (agent.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from rstar2_jax import settings
from rstar2_jax.rollout import balance, watch
from rstar2_jax.rollout import engine as contract
from rstar2_jax.rollout import seat as seats
from rstar2_jax.rollout.engine import DivergedError, EngineError, Generation, LimitError, Request, RolloutEngine

_MOST_STRIKES = 3  # failed turns or unanswered probes in a row
_FEWEST_PROBE_S = 1.0
_MOST_AWAY_S = 300.0
_MOST_AT_ONCE = 64  # rollouts seated before anything else has its turn: some milliseconds with 64 engines


class Pool:
    """A RolloutEngine over replicas of one model.

    Args:
        engines: the replicas, at least one; closed with the pool.
        policy: see settings.Fleet; which engines there are was decided already.
        report: receives one line for each engine that is taken down or brought back.
        span: entered while a turn is sampled.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        policy: settings.Fleet,
        *,
        report: Callable[[str], None] = lambda line: None,
        span: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self._engines, self._policy, self._report = list(engines), policy, report
        self.counts, self.span = seats.Counts(), span
        self._balancer = balance.of([engine.caps.kv_tokens for engine in engines], policy)
        self._seats: dict[str, seats.Seat] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._weights: tuple[str, int] | None = None
        self._updating, self._paused = 0, False  # engines owe no progress meanwhile
        self._warm_ups: tuple[Request, ...] = ()
        self._limit_s = max(policy.probe_s, _FEWEST_PROBE_S)
        self._strikes: list[set[str | int]] = [set() for _ in engines]  # since the last good turn
        self._turns = [0] * len(engines)
        self._away_s, self._away_until_s = [0.0] * len(engines), [0.0] * len(engines)
        self._down = [asyncio.Event() for _ in engines]
        self._down_s = [0.0] * len(engines)
        self._last_up_s = self.seated_s = 0.0
        self.preempted = 0  # times that an engine took away a turn's cache for others

    @property
    def caps(self) -> contract.Caps:
        """What a rollout may rely on wherever it is seated; kv_tokens of all engines together."""
        return contract.common_caps([engine.caps for engine in self._engines])

    @property
    def weights_version(self) -> int:
        """The oldest version that an engine in service samples from; -1 before the first update."""
        return min((self._engines[i].weights_version for i in self._balancer.up), default=-1)

    @property
    def versions_in_use(self) -> set[int]:
        """Versions that any engine holds, in service or not: their files must stay."""
        return {engine.weights_version for engine in self._engines}

    @property
    def up(self) -> list[str]:
        """Names of the engines in service."""
        return [self._engines[i].caps.name for i in self._balancer.up]

    def engine(self, index: int) -> RolloutEngine:
        """A replica by its index."""
        return self._engines[index]

    @contextlib.asynccontextmanager
    async def seat(
        self, name: str, *, family: str, prompt_tokens: int, budget_tokens: int
    ) -> AsyncIterator[seats.Seat]:
        """A place for one rollout, in the queue or at an engine, given back on every exit.

        Args:
            name: of the rollout, unlike any other's in flight.
            family: shared by the rollouts of one prompt.
            prompt_tokens, budget_tokens: length of the prompt, and most tokens after it.

        Raises:
            ValueError: no engine could ever hold it, or the name is taken.
        """
        if name in self._seats:
            raise ValueError(f"rollout {name!r} has a seat already: names must differ")
        self._look_after()
        rollout = balance.Rollout(name=name, family=family, prompt_tokens=prompt_tokens, budget_tokens=budget_tokens)
        seat = seats.Seat(self, rollout)
        self._seats[name] = seat
        ended = False
        try:
            self.queue(seat)
            yield seat
            ended = not seat.lost
        finally:
            del self._seats[name]
            self._balancer.release(rollout, ended=ended)
            self._place()

    async def generate(self, request: Request) -> Generation:
        """Sample one turn in a seat of its own."""
        sizes = {"prompt_tokens": len(request.prompt_ids), "budget_tokens": request.sampling.max_new_tokens}
        async with self.seat(f"one/{request.rid}", family=request.rid, **sizes) as seat:
            return await seat.turn(request)

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[n] by the first engine in service."""
        return await self._engines[self._in_service()[0]].score(token_ids)

    async def load(self) -> contract.Load:
        """The loads of the engines in service added up; rollouts in the queue wait as well."""
        loads = [await self._engines[i].load() for i in self._balancer.up]
        return contract.total_load(loads, waiting=self._balancer.waiting)

    async def alive(self) -> bool:
        """Whether any engine is in service."""
        return bool(self._balancer.up)

    async def pause(self, mode: contract.PauseMode) -> None:
        """Pause every engine in service; none comes back into service before resume."""
        self._paused = True
        try:
            await self._each(lambda engine: engine.pause(mode))
        except EngineError:
            self._paused = False
            raise

    async def resume(self) -> None:
        """Resume every engine in service."""
        self._paused = False
        await self._each(lambda engine: engine.resume())

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all, on every engine in service."""
        await self._each(lambda engine: engine.abort(rid))

    async def flush(self) -> None:
        """Forget cached prefixes on every engine in service."""
        await self._each(lambda engine: engine.flush())

    async def update_weights(self, root: str, version: int) -> None:
        """Bring every engine in service to the version; one that cannot follow is taken down.

        Where none could, an engine that comes back with the version in time will do.

        Raises:
            LimitError: this process could not ask them all.
            EngineError: none could follow; names the first reason.
        """
        self._weights = root, version
        self._look_after()
        self._updating += 1
        try:
            await self._each(lambda engine: engine.update_weights(root, version), rolling=self._policy.rolling)
        except LimitError:
            raise
        except EngineError:
            deadline_s = asyncio.get_running_loop().time() + self._policy.progress_s
            while not self._balancer.up:
                if not self._watchers or asyncio.get_running_loop().time() > deadline_s:
                    raise
                await asyncio.sleep(self._policy.probe_s / 4)
        finally:
            self._updating -= 1

    async def warm_up(self, requests: Sequence[Request]) -> None:
        """Have every engine in service compile what these requests need, and later each one that comes back before it
        takes a rollout; one that fails of them is taken down.

        Raises:
            EngineError: every engine failed.
        """
        self._warm_ups = tuple(requests)
        await self._each(self._warm)

    async def verify(self, root: str, version: int) -> None:
        """Prove the version on every engine in service; one that has other weights is taken down."""
        await self._each(lambda engine: engine.verify(root, version))

    async def close(self) -> None:
        """Stop looking after the engines, then close every one."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines))

    # What seats ask for.

    def queue(self, seat: seats.Seat) -> None:
        """Put a seat's rollout at the end of the queue."""
        seat.queued_at = asyncio.get_running_loop().time()
        self._balancer.submit(seat.rollout)
        self._place()
        self._give_up()

    def in_words(self) -> str:
        """What there is to wait for: engines in service and rollouts in the queue."""
        return f"{len(self._balancer.up)} of {len(self._engines)} engines in service, {self._balancer.waiting} waiting"

    def turn_begins(self, seat: seats.Seat) -> None:
        """A rollout's next turn is about to be sampled: at another engine, where that evens out their work."""
        if (index := self._balancer.begin(seat.rollout)) is not None and not seat.is_at(index):
            self.counts.evened += 1
            seat.sit(index)

    def turn_done(self, seat: seats.Seat, used_tokens: int, sampled_tokens: int) -> None:
        """A turn has ended well: tokens that the rollout holds after its prompt now, and those of this turn."""
        index = seat.rollout.engine
        if index is None:
            return
        self._turns[index] += 1
        self._strikes[index].clear()
        self._away_s[index] = 0.0
        self._balancer.grow(seat.rollout, used_tokens, sampled_tokens)
        if not self._policy.keep_place:
            self._balancer.release(seat.rollout, ended=False)
            seat.lose_place(queued=False)
            self._place()

    async def turn_failed(self, seat: seats.Seat, index: int, error: EngineError) -> bool:
        """A turn has failed at an engine, which is taken down unless it answers and has failed few times in a row.

        Returns whether it is down: then it was the engine's fault and not the turn's.
        """
        if index not in self._balancer.up:
            return True  # says nothing of the engine that is going to come back
        strikes = self._strikes[index]
        # A prompt that diverges does so in all of its samples, on any engine: they are one strike together.
        strikes.add(seat.rollout.family if isinstance(error, DivergedError) else len(strikes))
        alive = await watch.answers(self._engines[index], self._limit_s)
        if not alive or len(strikes) >= _MOST_STRIKES:
            self._take_down(index, str(error))
        return index not in self._balancer.up

    # Engines come and go.

    def _take_down(self, index: int, reason: str) -> None:
        if index not in self._balancer.up:
            return
        self._last_up_s = self._down_s[index] = asyncio.get_running_loop().time()
        self._down[index].set()
        # One that comes back and fails again, without a good turn in between, stays away twice as long each time.
        self._away_until_s[index] = self._last_up_s + self._away_s[index]
        self._away_s[index] = min(_MOST_AWAY_S, max(self._policy.probe_s, 2 * self._away_s[index]))
        moved = self._balancer.take_down(index)
        self._strikes[index].clear()
        self.counts.taken_down += 1
        self.counts.moved += len(moved)
        self._report(f"! engine {self._engines[index].caps.name} is taken down ({reason}); {len(moved)} rollouts move")
        for rollout in reversed(moved):
            self._balancer.submit(rollout, first=True)
            self._seats[rollout.name].queued_at = self._last_up_s
            self._seats[rollout.name].lose_place(queued=True)
        self._place()
        self._give_up()

    def _give_up(self) -> None:
        """End waiting for engines that are away for too long, or cannot come back: for any engine, or for one that is
        large enough."""
        now, away = asyncio.get_running_loop().time(), f"of {len(self._engines)} engines is in service since"

        def too_long(since_s: float) -> bool:
            return self._policy.probe_s == 0 or now - since_s > self._policy.progress_s

        if not self._balancer.up and too_long(self._last_up_s):
            error = EngineError(f"none {away} {now - self._last_up_s:.0f} s")
            for seat in self._seats.values():
                if seat.rollout.engine is None:
                    seat.fail(error)
        for rollout in self._balancer.stranded:
            seat, able = self._seats[rollout.name], self._balancer.able(rollout)
            since_s = max(seat.queued_at, *(self._down_s[i] for i in able))
            if too_long(since_s):
                names = ", ".join(self._engines[i].caps.name for i in able)
                need = f"rollout {rollout.name} needs {self._balancer.need(rollout)} KV tokens"
                seat.fail(contract.RoomError(f"{need}, and none large enough ({names}) {away} {now - since_s:.0f} s"))

    async def _bring_back(self, index: int) -> None:
        engine = self._engines[index]
        given: tuple[str, int] | None = None
        try:
            while given != self._weights and self._weights is not None:  # newer ones may come while it takes these
                given = self._weights
                await engine.update_weights(*given)
                await self._warm(engine)
        except Exception as error:  # whatever it is: nobody but this engine's watcher would ever try again
            self._report(f"! engine {engine.caps.name} answers again, but cannot serve: {error!r}")
            return
        if self._paused:
            return
        self._balancer.bring_up(index)
        for seat in self._seats.values():
            seat.hope()
        self._down[index].clear()
        self.counts.brought_back += 1
        self._report(f"engine {engine.caps.name} is back with weights {engine.weights_version}")
        self._place()

    def _place(self) -> None:
        now = (loop := asyncio.get_running_loop()).time()
        for rollout, index in (placed := self._balancer.place(_MOST_AT_ONCE)):
            seat = self._seats[rollout.name]
            self.counts.seated += 1
            self.counts.queue_s += now - seat.queued_at
            self.seated_s = now
            seat.sit(index)
        if len(placed) == _MOST_AT_ONCE:
            loop.call_soon(self._place)

    def _in_service(self) -> list[int]:
        if not self._balancer.up:
            raise EngineError(f"none of {len(self._engines)} engines is in service")
        return self._balancer.up

    async def _each(self, act: Callable[[RolloutEngine], Awaitable[None]], *, rolling: bool = False) -> None:
        failures: list[EngineError] = []

        async def one(index: int) -> None:
            engine = self._engines[index]
            try:
                await watch.unless(self._down[index], act(engine))
                if self._down[index].is_set():
                    raise EngineError(f"{engine.caps.name} was taken down meanwhile")
            except LimitError:
                raise  # no engine's fault
            except EngineError as error:
                failures.append(error)
                self._take_down(index, str(error))

        up = self._in_service()
        if rolling:
            for index in up:
                await one(index)
        else:
            for outcome in await asyncio.gather(*(one(index) for index in up), return_exceptions=True):
                if outcome is not None:
                    raise outcome
        if len(failures) == len(up):
            raise EngineError(f"none of {len(up)} engines could: {failures[0]}") from failures[0]

    async def _warm(self, engine: RolloutEngine) -> None:
        await asyncio.gather(*(engine.generate(request) for request in self._warm_ups))

    def _look_after(self) -> None:
        if not self._watchers and self._policy.probe_s > 0:
            self._watchers = [asyncio.create_task(self._watch(index)) for index in range(len(self._engines))]

    async def _watch(self, index: int) -> None:
        """Look at one engine for ever."""
        engine, silent = self._engines[index], 0
        progress = watch.Progress(self._policy.progress_s)
        while True:
            await asyncio.sleep(self._policy.probe_s)
            answers = await watch.answers(engine, self._limit_s)
            silent = 0 if answers else silent + 1
            if index not in self._balancer.up:
                if answers and not self._paused and asyncio.get_running_loop().time() >= self._away_until_s[index]:
                    progress = watch.Progress(self._policy.progress_s)
                    returning = self._bring_back(index)
                    await watch.meanwhile(returning, self._policy.progress_s, self._policy.probe_s, self._give_up)
                self._give_up()
                continue
            if silent >= _MOST_STRIKES:
                self._take_down(index, f"no answer to {silent} probes")
                continue
            working = sum(seat.in_flight for seat in self._seats.values() if seat.is_at(index))
            try:
                sign = self._turns[index], await watch.kv_tokens_used(engine, self._limit_s)
            except LimitError:
                continue
            now = asyncio.get_running_loop().time()
            stuck_s = progress.see(sign, now, idle=self._updating > 0 or self._paused or not working)
            if stuck_s is not None:
                self._take_down(index, f"no progress for {stuck_s:.0f} s with {working} turns in flight")
