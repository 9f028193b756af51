"""What nodes count, and how it is shown to a monitoring system.

A node writes its counts to Redis once a second (Tally). Whoever shows them reads them there: `top`, and the endpoint
for Prometheus, of which one for the whole cluster is enough.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from rstar2_sandbox import keys
from rstar2_sandbox.connection import LOST, connect

KEPT = 1000
STALE_S = 10.0
SHARES = (0.5, 0.95, 0.99)


def share(values: list[float], part: float) -> float:
    """The value below which a part of the values lie; 0 for none.

    >>> share([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


class Tally:
    """Counts of one node since its start, and the times of its last calls."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._run_s: dict[str, collections.deque[float]] = {}
        self._queue_s: collections.deque[float] = collections.deque(maxlen=KEPT)

    def waited(self, seconds: float) -> None:
        """An execution waited so long for its start."""
        self._queue_s.append(max(0.0, seconds))

    def finished(self, lane: str, status: str, run_s: float) -> None:
        """A call ended."""
        self._counts[f"{lane}/{status}"] += 1
        self._run_s.setdefault(lane, collections.deque(maxlen=KEPT)).append(run_s)

    def report(self) -> dict[str, Any]:
        """Counts by lane and status, and shares of the times in seconds."""
        run_s = {lane: [share(list(times), part) for part in SHARES] for lane, times in self._run_s.items()}
        return {
            "counts": dict(self._counts),
            "run_s": run_s,
            "queue_s": [share(list(self._queue_s), part) for part in SHARES],
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The cluster at one moment.

    Args:
        nodes: what each live node reported, by name.
        waiting: calls' entries in the streams, by lane; age_s: age of the oldest that no node has taken, by lane.
        runs: runs by lane.
        dead_letters: calls that were given up.
        used_bytes: memory of Redis.
    """

    nodes: dict[str, dict[str, Any]]
    waiting: dict[str, int]
    age_s: dict[str, float]
    runs: dict[str, list[str]]
    dead_letters: int
    used_bytes: int


async def look(server: Any) -> Cluster:
    """Read the cluster's state. Raises what a lost connection raises."""
    seconds, micros = await server.time()
    now = seconds + micros / 1e6
    nodes = {}
    for name, text in (await server.hgetall(keys.statistics())).items():
        report = json.loads(text)
        if now - report["at"] < STALE_S:
            nodes[name.decode("utf-8", "replace")] = report
    waiting, age_s, runs = {}, {}, {}
    for lane in keys.LANES:
        runs[lane] = sorted(run.decode("utf-8", "replace") for run in await server.smembers(keys.runs(lane)))
        waiting[lane], age_s[lane] = 0, 0.0
        for run in runs[lane]:
            length, age = await _stream(server, keys.stream(lane, run), now)
            waiting[lane] += length
            age_s[lane] = max(age_s[lane], age)
    memory = await server.info("memory")
    return Cluster(
        nodes=nodes,
        waiting=waiting,
        age_s=age_s,
        runs=runs,
        dead_letters=await server.xlen(keys.dead_letters()),
        used_bytes=int(memory["used_memory"]),
    )


async def _stream(server: Any, stream: str, now: float) -> tuple[int, float]:
    """Entries of a stream, and the age of the oldest that no node has taken."""
    length = await server.xlen(stream)
    last = b"0-0"
    if length:
        try:
            last = (await server.xinfo_groups(stream))[0]["last-delivered-id"]
        except (IndexError, *LOST):
            pass
    oldest = await server.xrange(stream, b"(" + last, b"+", count=1) if length else []
    return length, max(0.0, now - int(oldest[0][0].partition(b"-")[0]) / 1000) if oldest else 0.0


class Collector:
    """What prometheus_client asks at each scrape.

    Args:
        redis_url: address of the cluster's Redis.
    """

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url

    def collect(self) -> Iterator[Any]:
        """The families of metrics."""
        from prometheus_client import core

        up = core.GaugeMetricFamily("rstar2_sandbox_up", "1 when the cluster's Redis answers")
        try:
            cluster = asyncio.run(self._look())
        except LOST:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from _families(core, cluster)

    async def _look(self) -> Cluster:
        server = connect(self._url)
        try:
            return await look(server)
        finally:
            await server.aclose()


def _families(core: Any, cluster: Cluster) -> Iterator[Any]:
    for name, text, values in (
        ("queue_age_seconds", "Age of the oldest call that no node has taken", cluster.age_s),
        ("queue_entries", "Entries in the streams, taken ones included", cluster.waiting),
        ("runs", "Runs that use the lane", {lane: len(runs) for lane, runs in cluster.runs.items()}),
    ):
        family = core.GaugeMetricFamily(f"rstar2_sandbox_{name}", text, labels=["lane"])
        for lane, value in values.items():
            family.add_metric([lane], value)
        yield family
    yield core.GaugeMetricFamily("rstar2_sandbox_nodes", "Nodes alive", value=len(cluster.nodes))
    yield core.GaugeMetricFamily("rstar2_sandbox_redis_bytes", "Memory of Redis", value=cluster.used_bytes)
    yield core.GaugeMetricFamily("rstar2_sandbox_dead_letters", "Calls given up", value=cluster.dead_letters)
    slots = core.GaugeMetricFamily("rstar2_sandbox_slots", "Slots", labels=["node", "tier"])
    busy = core.GaugeMetricFamily("rstar2_sandbox_busy", "Calls that run", labels=["node", "lane"])
    held = core.GaugeMetricFamily("rstar2_sandbox_held", "Calls that wait on the node", labels=["node", "lane"])
    calls = core.CounterMetricFamily("rstar2_sandbox_calls", "Calls ended", labels=["node", "lane", "status"])
    run_s = core.GaugeMetricFamily("rstar2_sandbox_run_seconds", "Run time", labels=["node", "lane", "share"])
    queue_s = core.GaugeMetricFamily("rstar2_sandbox_queue_seconds", "Wait before the start", labels=["node", "share"])
    for node, report in cluster.nodes.items():
        slots.add_metric([node, report["tier"]], report["slots"])
        for lane, (running, waiting) in report["lanes"].items():
            busy.add_metric([node, lane], running)
            held.add_metric([node, lane], waiting)
        for name, count in report["counts"].items():
            calls.add_metric([node, *name.split("/")], count)
        for lane, times in report["run_s"].items():
            for part, seconds in zip(SHARES, times, strict=True):
                run_s.add_metric([node, lane, str(part)], seconds)
        for part, seconds in zip(SHARES, report["queue_s"], strict=True):
            queue_s.add_metric([node, str(part)], seconds)
    yield from (slots, busy, held, calls, run_s, queue_s)


def serve(redis_url: str, port: int, bind: str, stop: threading.Event | None = None) -> None:
    """Serve the metrics until interrupted. Raises ImportError with the remedy when prometheus-client is not there."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'rstar2-sandbox[metrics]'") from error
    registry = CollectorRegistry()
    registry.register(Collector(redis_url))
    server, thread = start_http_server(port, bind, registry)
    print(json.dumps({"metrics": f"http://{bind}:{server.server_port}/metrics"}), flush=True)
    try:
        while stop is None or not stop.wait(0.2):
            time.sleep(0.2)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
