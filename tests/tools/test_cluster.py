"""The run's connection to a cluster: its name there, and the end of what an earlier process of the run left."""

import asyncio
import pathlib
import time

import pytest

from rstar2_jax import settings
from rstar2_jax.tools import cluster
from rstar2_sandbox import client, local
from rstar2_sandbox.protocol import Execution, Limits, Status


def test_two_folders_of_one_name_are_two_runs_and_a_restart_is_the_same(tmp_path):
    one, other = tmp_path / "a" / "stage1", tmp_path / "b" / "stage1"
    assert cluster.name_of(one) == cluster.name_of(one) != cluster.name_of(other)
    assert cluster.name_of(one).startswith("stage1-")
    assert len(cluster.name_of(pathlib.Path("x" * 255))) < 200


def test_a_run_that_starts_ends_what_its_killed_predecessor_left(tmp_path):
    name = cluster.name_of(tmp_path)

    async def scene(address):
        killed = client.Client(address, run=name)
        limits = Limits(wall_s=60)
        left = [
            asyncio.create_task(killed.execute(Execution(code="import time\ntime.sleep(50)", limits=limits)))
            for _ in range(6)
        ]
        await asyncio.sleep(1.0)
        started = time.monotonic()
        async with cluster.connect(name, settings.Sandbox(redis_url=address)) as caller:
            outcome = await caller.execute(Execution(code="print('mine')"))
            took_s = time.monotonic() - started
        ended = await asyncio.gather(*left)
        await killed.close()
        return outcome, took_s, ended

    with local.start_local(slots=1) as running:
        outcome, took_s, ended = asyncio.run(scene(running.redis_url))
    assert outcome.stdout == "mine\n" and took_s < 15
    assert {one.status for one in ended} == {Status.REJECTED}


def test_a_cluster_that_does_not_answer_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "GRACE_S", 0.5)

    async def scene():
        async with cluster.connect("r", settings.Sandbox(redis_url=f"unix://{tmp_path}/none.sock")):
            raise AssertionError("it was opened")

    with pytest.raises(ConnectionError, match="none.sock"):
        asyncio.run(scene())
