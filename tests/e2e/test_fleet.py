"""Engine processes that are killed and stopped in the middle of their work: every rollout ends, with its own result."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rstar2_jax.rollout import fleet, pool
from rstar2_jax.rollout.engine import EngineError
from tests.e2e import drills
from tests.e2e.drills import MODEL, NEW, SIZES, TURNS

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return drills.make_store(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def undisturbed(store):
    (results,) = drills.undisturbed(store)
    assert len({tuple(ids) for ids in results}) == drills.ROLLOUTS
    return results


def drill(tmp_path, store, disturb):
    """(results, pool, replicas' restarts, lines) of the rollouts on two processes that `disturb` has its way with."""

    async def main():
        lines = []
        plan = fleet.Plan(folder=tmp_path, model=MODEL, **SIZES)
        async with fleet.open_replicas(plan, 2, lines.append) as (found, replicas):
            engines = pool.Pool(found, drills.FLEET, report=lines.append)
            try:
                await engines.update_weights(store, 1)
                work = asyncio.create_task(drills.rollouts(engines))
                await disturb(engines, replicas)
                return await work, engines, replicas, lines
            finally:
                await engines.close()

    return asyncio.run(asyncio.wait_for(main(), 400))


def test_rollouts_of_a_process_killed_in_the_middle_end_on_the_other_and_the_process_comes_back(
    tmp_path, store, undisturbed
):
    lines = []
    (done,) = asyncio.run(asyncio.wait_for(drills.run(tmp_path, store, [undisturbed], lines.append), 400))
    assert (done.signal, done.equal, done.lost) == ("SIGKILL", drills.ROLLOUTS, ()) and done.moved >= 1
    assert any("engine-0 is taken down" in line for line in lines)
    assert any("engine process engine-0 ended (-9): started again" in line for line in lines)
    assert any("engine engine-0 is back with weights 1" in line for line in lines)


def test_rollouts_of_a_process_stopped_in_the_middle_end_on_the_other(tmp_path, store, undisturbed):
    stopped = []

    async def stop(engines, replicas):
        await drills.started(engines, 1)
        stopped.append(replicas[1].pid)
        os.kill(stopped[0], signal.SIGSTOP)

    results, engines, _, lines = drill(tmp_path, store, stop)
    assert results == undisturbed
    assert engines.up == ["engine-0"] and engines.counts.moved >= 1
    assert any("engine-1 is taken down" in line for line in lines)
    assert not os.path.exists(f"/proc/{stopped[0]}")  # a stopped process is ended with the others


def test_a_process_that_cannot_start_is_an_error_that_names_its_log(tmp_path):
    async def main():
        plan = fleet.Plan(folder=tmp_path, model=MODEL, slots=0, context_tokens=8, prefill_chunk_tokens=8)
        async with fleet.open_replicas(plan, 1, print):
            pass

    with pytest.raises(EngineError, match="engine-0 did not come up; its log: .*engine-0.log"):
        asyncio.run(main())
    assert "slots = 0" in (tmp_path / "engine-0.log").read_text()


def test_results_do_not_depend_on_how_many_processes_there_are(tmp_path, store, undisturbed):
    async def nothing(engines, replicas):
        return None

    results, engines, _, lines = drill(tmp_path, store, nothing)
    assert results == undisturbed and engines.counts.taken_down == 0 and lines == []
    assert all(len(ids) == 3 + TURNS * NEW for ids in results)
