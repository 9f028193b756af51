"""What a cluster does under load: its rate, the wait at a share of that rate, a burst, and quick calls among slow ones.

Times are wall times of the machine as it is; CPU per call, against the physical floor, is measured by
benchmarks/sandbox.py of the repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any

import redis.exceptions

from rstar2_sandbox import metrics
from rstar2_sandbox.client import Client
from rstar2_sandbox.connection import connect
from rstar2_sandbox.protocol import Execution, Limits, Outcome, Status

OUTSTANDING = 64
LOOP = "while True: pass"
LOOP_S = 5.0
REPORTED_S = 2.5  # until the nodes' reports hold what has ended


class Load:
    """Drives one cluster through one client.

    Args:
        redis_url: address of its Redis.
        code: the program that is run again and again.
    """

    def __init__(self, redis_url: str, code: str = "print(1)") -> None:
        self._url = redis_url
        self._code = code

    async def _timed(self, caller: Client, code: str, limits: Limits) -> tuple[float, Outcome]:
        started = time.monotonic()
        outcome = await caller.execute(Execution(code=code, limits=limits))
        return time.monotonic() - started, outcome

    async def closed(self, seconds: float, loops: float = 0.0, outstanding: int = OUTSTANDING) -> dict[str, Any]:
        """Keep `outstanding` calls in flight for a while; a share of them are five-second loops. Times are of the
        others."""
        draw, times, ends = random.Random(0), [], time.monotonic() + seconds

        async def keep_going(caller: Client) -> None:
            while time.monotonic() < ends:
                loop = draw.random() < loops
                took, outcome = await self._timed(
                    caller, LOOP if loop else self._code, Limits(wall_s=LOOP_S, queue_s=600.0)
                )
                _expect(outcome, Status.TIMEOUT_WALL if loop else Status.OK)
                if not loop:
                    times.append(took)

        started = time.monotonic()
        async with Client(self._url, run=f"bench-closed-{time.time_ns()}") as caller:
            await asyncio.gather(*(keep_going(caller) for _ in range(outstanding)))
        return {"calls_per_s": len(times) / (time.monotonic() - started)} | _shape(times)

    async def open(self, rate: float, seconds: float) -> dict[str, Any]:
        """Offer calls at random moments, so many a second on average, whatever becomes of the earlier ones."""
        draw, tasks = random.Random(0), []
        async with Client(self._url, run=f"bench-open-{time.time_ns()}") as caller:
            at = started = time.monotonic()
            while at < started + seconds:
                at += draw.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                tasks.append(asyncio.create_task(self._timed(caller, self._code, Limits(wall_s=LOOP_S))))
            done = await asyncio.gather(*tasks)
        for _, outcome in done:
            _expect(outcome, Status.OK)
        return {"offered_per_s": rate} | _shape([took for took, _ in done])

    async def burst(self, calls: int) -> dict[str, Any]:
        """Submit so many calls at once; every one must be answered with its own number, and be run once."""
        server = connect(self._url)
        limits = Limits(queue_s=3600.0)
        await asyncio.sleep(REPORTED_S)
        before = await self._executed(server)
        with contextlib.suppress(
            redis.exceptions.ResponseError
        ):  # a user who may not: the peak is then since its start
            await server.config_resetstat()
        started = time.monotonic()
        async with Client(self._url, run=f"bench-burst-{time.time_ns()}") as caller:
            programs = [Execution(code=f"print({number})", limits=limits) for number in range(calls)]
            outcomes = await asyncio.gather(*(caller.execute(program) for program in programs))
        took_s = time.monotonic() - started
        right = sum(outcome.stdout == f"{number}\n" for number, outcome in enumerate(outcomes))
        await asyncio.sleep(REPORTED_S)
        executed = await self._executed(server) - before
        memory = await server.info("memory")
        await server.aclose()
        return {
            "calls": calls,
            "answered_right": right,
            "executed": executed,
            "seconds": took_s,
            "redis_peak_mib": memory["used_memory_peak"] / 2**20,
        }

    async def _executed(self, server: Any) -> int:
        cluster = await metrics.look(server)
        counts = [report["counts"] for report in cluster.nodes.values()]
        return sum(count for part in counts for name, count in part.items() if name.startswith("execute/"))


def _expect(outcome: Outcome, status: Status) -> None:
    if outcome.status is not status:
        raise RuntimeError(
            f"a call of the benchmark ended as {outcome.status}: {outcome.detail or outcome.stderr:.300}"
        )


def _shape(times: list[float]) -> dict[str, float]:
    mean = sum(times) / max(1, len(times))
    return {"calls": len(times), "mean_s": mean} | {
        f"p{round(100 * part)}_s": metrics.share(times, part) for part in metrics.SHARES
    }


async def report(redis_url: str, seconds: float, burst_calls: int) -> int:
    """Measure a cluster and print one JSON line for each figure; the exit code is 1 when a promise is not kept."""
    load = Load(redis_url)
    await load.closed(1.0)
    full = await load.closed(seconds)
    print(json.dumps({"what": f"{OUTSTANDING} outstanding"} | full), flush=True)
    wait = await load.open(0.7 * full["calls_per_s"], seconds)
    print(json.dumps({"what": "at 70% of that rate"} | wait), flush=True)
    slow = await load.closed(seconds, loops=0.05)
    print(json.dumps({"what": "5% five-second loops", "p50_ratio": slow["p50_s"] / full["p50_s"]} | slow), flush=True)
    kept = wait["mean_s"] <= 0.3 and wait["p99_s"] <= 1.0
    if burst_calls:
        burst = await load.burst(burst_calls)
        print(json.dumps({"what": "at once"} | burst), flush=True)
        kept = kept and burst["answered_right"] == burst["executed"] == burst_calls
    return 0 if kept else 1
