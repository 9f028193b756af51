"""When an engine process that keeps ending is left alone."""

from __future__ import annotations

import asyncio
import errno
import json
import sys

import pytest

from rstar2_jax.rollout import fleet, sglang
from rstar2_jax.rollout.engine import EngineError
from tests.rollout.engines import MODEL


def test_rare_restarts_never_add_up_and_many_in_a_row_do():
    restarts = fleet.Restarts(20, 3600.0)
    assert all(restarts.allowed(6 * 3600.0 * number) for number in range(200)) and restarts.total == 200
    late = 1e9
    assert [restarts.allowed(late + number) for number in range(21)] == [True] * 20 + [False]
    assert restarts.total == 220


def test_the_window_moves_on():
    restarts = fleet.Restarts(2, 10.0)
    assert [restarts.allowed(now) for now in (0.0, 6.0, 9.0, 10.0, 11.0, 16.0)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_a_process_that_cannot_be_started_for_want_of_files_is_started_when_there_are_some(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "_LOOK_S", 0.05)
    real, wants = asyncio.create_subprocess_exec, [OSError(errno.EMFILE, "Too many open files")] * 2

    async def spawn(*_, **more):
        if wants:
            raise wants.pop()
        answers = json.dumps({"url": "http://127.0.0.1:9"})
        return await real(sys.executable, "-c", f"print({answers!r}, flush=True); input()", **more | {"stdin": -1})

    class Silent:
        async def alive(self):
            return True

    async def act():
        plan = fleet.Plan(folder=tmp_path, model=MODEL, slots=1, context_tokens=64, prefill_chunk_tokens=8)
        said = []
        replica = fleet.Replica(plan, "engine-0", said.append)
        monkeypatch.setattr(fleet.asyncio, "create_subprocess_exec", spawn)
        with pytest.raises(EngineError, match="engine-0 cannot be started: .*RLIMIT_NOFILE"):
            await replica._launch()
        replica._process = await real(sys.executable, "-c", "")
        replica._keeper = asyncio.create_task(replica._keep(Silent()))
        async with asyncio.timeout(60.0):
            while replica._port != 9:
                await asyncio.sleep(0.01)
        await replica.stop()
        return said

    said = asyncio.run(act())
    assert [line for line in said if "cannot be started" in line] and "started again" in said[-1]


def test_when_one_process_does_not_come_up_the_clients_of_the_others_are_closed(tmp_path, monkeypatch):
    opened = []

    async def start(replica):
        if opened:
            raise EngineError("the second one does not come up")
        opened.append(sglang.SglangEngine("http://127.0.0.1:9", MODEL))
        return opened[0]

    monkeypatch.setattr(fleet.Replica, "start", start)

    async def act():
        plan = fleet.Plan(folder=tmp_path, model=MODEL, slots=1, context_tokens=64, prefill_chunk_tokens=8)
        with pytest.raises(EngineError, match="the second one"):
            async with fleet.open_replicas(plan, 2, print):
                pass
        return opened[0]._session.closed

    assert asyncio.run(act())
