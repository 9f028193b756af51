"""The cluster in a terminal, once a second."""

from __future__ import annotations

import asyncio
import collections
import shutil
import sys

from rstar2_sandbox import metrics
from rstar2_sandbox.connection import LOST, connect

CLEAR = "\x1b[H\x1b[2J"
EVERY_S = 1.0


def picture(cluster: metrics.Cluster, before: metrics.Cluster | None, width: int) -> str:
    """The cluster as text.

    Args:
        before: the cluster one interval earlier, for the rates; None leaves them out.
        width: of the terminal in characters; longer lines are cut.
    """
    lines = [
        f"nodes {len(cluster.nodes)}   Redis {cluster.used_bytes / 2**20:.1f} MiB   given up {cluster.dead_letters}",
        "",
        f"{'lane':10}{'runs':>6}{'entries':>9}{'oldest':>9}{'calls/s':>9}",
    ]
    now, then = _by_lane(cluster), _by_lane(before) if before else None
    for lane, waiting in cluster.waiting.items():
        rate = f"{max(0, now[lane] - then[lane]) / EVERY_S:.0f}" if then is not None else ""
        lines.append(f"{lane:10}{len(cluster.runs[lane]):6}{waiting:9}{cluster.age_s[lane]:8.1f}s{rate:>9}")
    lines += ["", f"{'node':34}{'busy':>11}{'held':>6}{'sess.':>7}{'run p50/p95/p99 ms':>22}{'wait p99 ms':>13}  tier"]
    for name, report in sorted(cluster.nodes.items()):
        running, held = report["lanes"].get("execute", [0, 0])
        times = "/".join(f"{1000 * seconds:.0f}" for seconds in report["run_s"].get("execute", []))
        sessions = f"{report['sessions']}/{report['session_slots']}"
        wait = f"{1000 * report['queue_s'][-1]:.0f}"
        busy = f"{running}/{report['slots']}"
        lines.append(f"{name:34.34}{busy:>11}{held:6}{sessions:>7}{times:>22}{wait:>13}  {report['tier']}")
    statuses: collections.Counter[str] = collections.Counter()
    for report in cluster.nodes.values():
        statuses.update(report["counts"])
    lines += ["", "  ".join(f"{name} {count}" for name, count in sorted(statuses.items()))]
    return "\n".join(line[:width] for line in lines) + "\n"


def _by_lane(cluster: metrics.Cluster) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for report in cluster.nodes.values():
        for name, count in report["counts"].items():
            found[name.partition("/")[0]] += count
    return found


async def show(redis_url: str, *, once: bool) -> None:
    """Print the picture; again every second unless `once`. Raises what a lost connection raises when `once`."""
    server, before = connect(redis_url), None
    try:
        while True:
            try:
                cluster = await metrics.look(server)
                text = picture(cluster, before, shutil.get_terminal_size((160, 40)).columns)
                before = cluster
            except LOST as error:
                if once:
                    raise
                text = f"no answer from Redis: {error}\n"
            sys.stdout.write(text if once else CLEAR + text)
            sys.stdout.flush()
            if once:
                return
            await asyncio.sleep(EVERY_S)
    finally:
        await server.aclose()


async def probe(redis_url: str, node: str) -> int:
    """Exit code 0 when a node of that name has reported within the last seconds, else 1, with a line that says so."""
    server = connect(redis_url)
    try:
        alive = any(name.rpartition(":")[0] == node for name in (await metrics.look(server)).nodes)
    finally:
        await server.aclose()
    print(f"{node} is alive" if alive else f"{node} has not reported for {metrics.STALE_S:.0f} s")
    return 0 if alive else 1
