"""The cluster's centre: starts a Redis server when none is given, and returns the calls of dead nodes to the queue.

The reaper runs on the master and, under a lock, on every node, so that one machine needs no master at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from typing import Any

import redis.exceptions

from rstar2_sandbox import keys, linux, protocol
from rstar2_sandbox.connection import LOST, connect, end_tasks
from rstar2_sandbox.protocol import Call, Outcome, Status, Verdict, Verification

REAP_S = 1.0
LOCK_MS = 3000
FORGET_S = 60.0
ROWS = 100  # entries of a dead node that are looked at together
DEAD_LETTER_CHARS = 4096
TRIES, QUICK_S = 3, 5.0  # so many ends of its Redis within so many seconds of its start are too many

# KEYS: stream, dead letters. ARGV: group, entry, seconds that a fault is kept, number of entries to write again, these;
# then for each call that is given up: result key, channel, result, letter. One reaper alone gets past the first line.
_RETURN = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
local at = 5 + tonumber(ARGV[4])
for index = 5, at - 1 do redis.call('XADD', KEYS[1], '*', 'calls', ARGV[index]) end
while at < #ARGV do
  redis.call('SET', ARGV[at], ARGV[at + 2], 'NX', 'EX', ARGV[3])
  redis.call('PUBLISH', ARGV[at + 1], '[' .. ARGV[at + 2] .. ']')
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'letter', ARGV[at + 3])
  at = at + 4
end
return 1
"""
_LOCK = keys.GO_ON + "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])"
_FORGET_RUN = (
    "if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]); redis.call('SREM', KEYS[2], ARGV[1]) end"
)

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


def redis_config(
    folder: str, password: str, *, port: int = 0, bind: str = "127.0.0.1", max_bytes: int = 0, keep: bool = False,
    users: str = "",
) -> str:  # fmt: skip
    """Configuration of a server.

    Args:
        folder: for its socket, its log, and its data if it keeps any.
        port: 0: only a socket file in the folder.
        max_bytes: memory at which it refuses calls (clients then wait and try again); 0: no bound.
        keep: write what it holds to disk, so that it survives a restart.
        users: file of Redis users (see deploy/redis-users.acl), of which a copy goes into the folder; empty: the
            password opens everything.
    """
    lines = [
        f"dir {_word(folder)}",
        'save ""',
        f"appendonly {'yes' if keep else 'no'}",
        f"maxmemory {max_bytes}",
        *([] if users else [f"requirepass {_word(password)}"]),
        "maxmemory-policy noeviction",
        "client-output-buffer-limit pubsub 256mb 128mb 60",
        f"logfile {_word(log_of(folder))}",
        f"port {port}",
    ]
    lines += [f"aclfile {_word(_without_comments(users, folder))}"] if users else []
    lines += [f"bind {bind}"] if port else [f"unixsocket {_word(folder + '/redis.sock')}", "unixsocketperm 700"]
    return "\n".join(lines) + "\n"


def _word(text: str) -> str:
    """A text as one word of the configuration, whatever it holds."""
    return json.dumps(text, ensure_ascii=False)


def log_of(folder: str) -> str:
    """Where a server with that folder writes what it has to say."""
    return os.path.join(folder, "redis.log")


def _without_comments(users: str, folder: str) -> str:
    """A copy of a file of users as Redis reads it: it takes no comments."""
    path = os.path.join(folder, "users.acl")
    with open(users) as file:
        lines = [line for line in file if line.startswith("user ")]
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.writelines(lines)
    return path


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
        self._silent = False
        self.requeued = 0
        self.dead_letters = 0

    async def run(self) -> None:
        """Look once a second, forever."""
        while True:
            try:
                if await self._redis.eval(_LOCK, 1, keys.reaper_lock(), self._name, LOCK_MS):
                    await self.reap()
                    await self._redis.delete(keys.reaper_lock())
                self._silent = False
            except LOST as error:
                if not self._silent:
                    logger.warning("the reaper waits for Redis: %s", error)
                self._silent = True
            await asyncio.sleep(REAP_S)

    async def reap(self) -> None:
        """Look once."""
        seconds, micros = await self._redis.time()
        now = seconds + micros / 1e6
        members = await self._redis.zrangebyscore(keys.nodes(), now, "+inf")
        alive = {member.rpartition(b"/")[0] for member in members}
        for member in await self._redis.zrangebyscore(keys.nodes(), "-inf", now - FORGET_S):
            await self._forget_node(member)
        for lane in keys.LANES:
            for run in await self._redis.smembers(keys.runs(lane)):
                await self._tend(lane, run.decode("utf-8", "replace"), alive, now)

    async def _forget_node(self, member: bytes) -> None:
        name = member.rpartition(b"/")[0].decode("utf-8", "replace")
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(keys.at_node(name))
            pipe.hdel(keys.statistics(), name)
            pipe.zrem(keys.nodes(), member)
            await pipe.execute()

    async def _tend(self, lane: str, run: str, alive: set[bytes], now: float) -> None:
        """Look after one stream: return what dead nodes hold; forget a run that has sent nothing for a while."""
        stream = keys.stream(lane, run)
        try:
            about = await self._redis.xinfo_stream(stream)
            consumers = await self._redis.xinfo_consumers(stream, keys.GROUP)
        except redis.exceptions.ResponseError:
            return  # no stream or no group yet: no node has anything of it
        for consumer in consumers:
            if consumer["name"] in alive:
                continue
            if consumer["pending"]:
                await self._return_entries(stream, consumer["name"])
            elif consumer["idle"] > 1000 * FORGET_S:
                await self._redis.xgroup_delconsumer(stream, keys.GROUP, consumer["name"])
        last = int(bytes(about["last-generated-id"]).partition(b"-")[0])
        if not about["length"] and now - last / 1000 > FORGET_S:
            await self._redis.eval(_FORGET_RUN, 2, stream, keys.runs(lane), run)

    async def _return_entries(self, stream: str, owner: bytes) -> None:
        while True:
            rows = await self._redis.xpending_range(stream, keys.GROUP, "-", "+", ROWS, consumername=owner)
            for row in rows:
                await self._return_entry(stream, owner, row["message_id"])
            if len(rows) < ROWS:
                return

    async def _return_entry(self, stream: str, owner: bytes, entry: bytes) -> None:
        found = await self._redis.xrange(stream, entry, entry)
        again, ended = [], []
        for call in _calls_of(found[0][1]) if found else []:
            deliveries = await self._deliveries(call)
            if deliveries < protocol.MAX_DELIVERIES:
                # Alone in its entry, so that a call that kills its nodes takes no neighbour with it.
                again.append(protocol.encode_calls([dataclasses.replace(call, deliveries=deliveries)]))
            else:
                ended += _dead_letter(call, owner.decode("utf-8", "replace"))
        arguments = [keys.GROUP, entry, protocol.INFRA_TTL_S, len(again), *again, *ended]
        if await self._redis.eval(_RETURN, 2, stream, keys.dead_letters(), *arguments):
            self.requeued += len(again)
            self.dead_letters += len(ended) // 4

    async def _deliveries(self, call: Call) -> int:
        """Nodes that may have died of a call: the first counts always, later ones only if they had started it."""
        if not call.deliveries:
            return 1
        noted = await self._redis.get(keys.started(call.run, call.key))
        return call.deliveries + (int(noted or 0) >= call.deliveries)


def _dead_letter(call: Call, owner: str) -> list[str]:
    """Result key, channel, result, and what is kept for a person to look at."""
    detail = f"given up after {call.deliveries + 1} deliveries: each node that had it died, the last was {owner}"
    payload = protocol.encode_result(call.key, infra_result(call, detail))
    known = {"run": call.run, "key": call.key, "lane": call.lane, "detail": detail, "body": dict(call.body)}
    return [keys.result(call.run, call.key), call.reply, payload, json.dumps(known)[:DEAD_LETTER_CHARS]]


def _calls_of(fields: dict[bytes, bytes]) -> list[Call]:
    try:
        return protocol.decode_calls(fields.get(b"calls", b""))
    except protocol.ProtocolError as error:
        logger.error("an unreadable entry of a dead node was dropped: %s", error)
        return []


async def serve(redis_url: str, config: str = "", log: str = "") -> None:
    """Run the reaper against a Redis until SIGTERM or cancelled; with a configuration, that Redis too.

    Args:
        config: of a server to keep running (see redis_config); log: the file that it writes to.

    Raises:
        RuntimeError: that server does not stay; the message says what it wrote.
    """
    server, stop = connect(redis_url), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    jobs = [Reaper(server, f"master-{os.getpid()}").run(), *([_keep_redis(config, log)] if config else [])]
    tasks = [asyncio.create_task(job) for job in jobs]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks([stopped, *tasks])
        await server.aclose()


async def _keep_redis(config: str, log: str) -> None:
    """Run a server, and again whenever it ends; it ends with this task, and with this process however that ends."""
    quick = 0
    while True:
        started = time.monotonic()
        process = start_redis(config, preexec_fn=functools.partial(linux.prctl, linux.PR_SET_PDEATHSIG, signal.SIGTERM))
        try:
            while process.poll() is None:
                await asyncio.sleep(0.1)
        finally:
            process.terminate()
            process.wait()
        said = ""
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            said = next((line.strip() for line in reversed(file.readlines()[-50:]) if "#" in line), "")
        quick = quick + 1 if time.monotonic() - started < QUICK_S else 0
        if quick >= TRIES:
            raise RuntimeError(f"redis-server ended {quick} times in a row at once; it said: {said or 'nothing'}")
        logger.error("redis-server ended with %d and is started again; it said: %s", process.returncode, said)
        await asyncio.sleep(0.1 * 4**quick)
