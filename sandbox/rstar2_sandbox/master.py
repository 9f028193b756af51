"""The cluster's centre: starts a Redis server when none is given, and returns the calls of dead nodes to the queue.

The reaper runs on the master and, under a lock, on every node, so that one machine needs no master at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import subprocess
from typing import Any

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.client import LOST, connect
from rstar2_sandbox.protocol import Call, Outcome, Status, Verdict, Verification

REAP_S = 1.0
LOCK_MS = 3000
IDLE_CONSUMER_MS = 60_000

logger = logging.getLogger(__name__)


def find_redis_server() -> str:
    """Path of redis-server. Raises FileNotFoundError that says how to get one."""
    for name in (shutil.which("redis-server"), "/usr/bin/redis-server", "/usr/local/bin/redis-server"):
        if name and os.access(name, os.X_OK):
            return name
    raise FileNotFoundError(
        "redis-server was found neither on PATH nor in /usr/bin: install it (Debian: apt-get install redis-server), "
        "or give the address of a running Redis"
    )


def redis_config(folder: str, password: str, *, port: int = 0, bind: str = "127.0.0.1") -> str:
    """Configuration of a server that keeps nothing on disk. Port 0: only a socket file in the folder."""
    lines = [
        f"dir {folder}",
        'save ""',
        "appendonly no",
        f"requirepass {password}",
        "maxmemory-policy noeviction",
        "client-output-buffer-limit pubsub 256mb 128mb 60",
        f"logfile {folder}/redis.log",
        f"port {port}",
    ]
    lines += [f"bind {bind}"] if port else [f"unixsocket {folder}/redis.sock", "unixsocketperm 700"]
    return "\n".join(lines) + "\n"


def start_redis(config: str, **options: object) -> subprocess.Popen[bytes]:
    """Start a server; the configuration goes through a pipe, so that the password stands in no command line."""
    process = subprocess.Popen(
        [find_redis_server(), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        **options,  # type: ignore[arg-type]
    )
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    return process


def infra_result(call: Call, detail: str) -> Outcome | Verification:
    """The typed answer to a call that the service could not do."""
    if call.lane == keys.VERIFY:
        return Verification(verdict=Verdict.INFRA, reason=detail)
    return Outcome(status=Status.INFRA, detail=detail)


class Reaper:
    """Returns entries of nodes whose heartbeat is gone to their stream, one call an entry, or ends them as INFRA."""

    def __init__(self, server: Any, name: str) -> None:
        self._redis = server
        self._name = name
        self.requeued = 0
        self.dead_letters = 0

    async def run(self) -> None:
        """Look once a second, forever."""
        while True:
            try:
                if await self._redis.set(keys.reaper_lock(), self._name, nx=True, px=LOCK_MS):
                    await self.reap()
                    await self._redis.delete(keys.reaper_lock())
            except LOST as error:
                logger.debug("the reaper waits for Redis: %s", error)
            await asyncio.sleep(REAP_S)

    async def reap(self) -> None:
        """Look once."""
        seconds, micros = await self._redis.time()
        now = seconds + micros / 1e6
        members = await self._redis.zrangebyscore(keys.nodes(), now, "+inf")
        alive = {member.rpartition(b"/")[0] for member in members}
        await self._redis.zremrangebyscore(keys.nodes(), "-inf", now - 60)
        for lane in keys.LANES:
            if not await self._redis.exists(keys.stream(lane)):
                continue
            for consumer in await self._redis.xinfo_consumers(keys.stream(lane), keys.GROUP):
                if consumer["name"] in alive:
                    continue
                if consumer["pending"]:
                    await self._return_entries(lane, consumer["name"])
                elif consumer["idle"] > IDLE_CONSUMER_MS:
                    await self._redis.xgroup_delconsumer(keys.stream(lane), keys.GROUP, consumer["name"])

    async def _return_entries(self, lane: str, owner: bytes) -> None:
        stream = keys.stream(lane)
        pending = await self._redis.xpending_range(stream, keys.GROUP, "-", "+", 100, consumername=owner)
        for row in pending:
            entry = row["message_id"]
            found = await self._redis.xrange(stream, entry, entry)
            calls = _calls_of(found[0][1]) if found else []
            async with self._redis.pipeline(transaction=True) as pipe:
                for call in calls:
                    self._return_call(pipe, call, owner.decode("utf-8", "replace"))
                pipe.xack(stream, keys.GROUP, entry)
                pipe.xdel(stream, entry)
                await pipe.execute()

    def _return_call(self, pipe: Any, call: Call, owner: str) -> None:
        """Alone in its entry, so that a call that kills its nodes takes no neighbour with it."""
        deliveries = call.deliveries + 1
        if deliveries >= protocol.MAX_DELIVERIES:
            self.dead_letters += 1
            detail = f"given up after {deliveries} deliveries: each node that had it died, the last was {owner}"
            payload = protocol.encode_result(call.key, infra_result(call, detail))
            pipe.set(keys.result(call.run, call.key), payload, nx=True, ex=protocol.INFRA_TTL_S)
            pipe.publish(call.reply, payload)
            return
        self.requeued += 1
        again = protocol.encode_calls([dataclasses.replace(call, deliveries=deliveries)])
        pipe.xadd(keys.stream(call.lane), {"calls": again})


def _calls_of(fields: dict[bytes, bytes]) -> list[Call]:
    try:
        return protocol.decode_calls(fields.get(b"calls", b""))
    except protocol.ProtocolError as error:
        logger.error("an unreadable entry of a dead node was dropped: %s", error)
        return []


async def serve(redis_url: str) -> None:
    """Run the reaper against a Redis until cancelled."""
    server = connect(redis_url)
    try:
        await Reaper(server, f"master-{os.getpid()}").run()
    finally:
        await server.aclose()
