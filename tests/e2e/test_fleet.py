"""Engine processes that are killed and stopped in the middle of their work: every rollout ends, with its own result."""

from __future__ import annotations

import asyncio
import os
import signal

import jax
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.model import decoder
from rstar2_jax.rollout import fleet, jax_engine, pool
from rstar2_jax.rollout.engine import EngineError, Request, Sampling
from rstar2_jax.weights import publish

pytestmark = pytest.mark.e2e

MODEL = settings.Model(
    family="qwen3",
    vocab_size=64,
    d_model=32,
    d_mlp=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    max_positions=256,
)
SIZES = {"slots": 4, "context_tokens": 160, "prefill_chunk_tokens": 16}
FLEET = settings.Fleet(probe_s=0.3, progress_s=120.0, expected_quantile=0)
ROLLOUTS, TURNS, NEW = 12, 4, 24


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    for version in (1, 2):
        params = decoder.init_params(MODEL, jax.random.key(version))
        publish.publish(jax.tree.map(lambda leaf: 6 * leaf, params), MODEL, root, version, keep=4)
    return str(root)


async def rollout(engines, number):
    ids = [3, 5, 7 + number]
    async with engines.seat(f"r{number}", family="", prompt_tokens=3, budget_tokens=TURNS * NEW) as seat:
        for turn in range(TURNS):
            made = await seat.turn(
                Request(
                    rid=f"{number}/{turn}",
                    prompt_ids=list(ids),
                    seed=100 * number + turn,
                    sampling=Sampling(max_new_tokens=NEW, stop_ids=()),
                )
            )
            assert set(made.weights_versions.tolist()) == {1}
            ids += made.token_ids.tolist()
    return ids


async def all_rollouts(engines):
    return await asyncio.gather(*(rollout(engines, number) for number in range(ROLLOUTS)))


@pytest.fixture(scope="module")
def undisturbed(store):
    async def main():
        engines = pool.Pool([jax_engine.JaxEngine(MODEL, **SIZES)], FLEET)
        try:
            await engines.update_weights(store, 1)
            return await all_rollouts(engines)
        finally:
            await engines.close()

    results = asyncio.run(main())
    assert len({tuple(ids) for ids in results}) == ROLLOUTS
    return results


def drill(tmp_path, store, disturb):
    """(results, pool, replicas' restarts, lines) of the rollouts on two processes that `disturb` has its way with."""

    async def main():
        lines = []
        plan = fleet.Plan(folder=tmp_path, model=MODEL, **SIZES)
        async with fleet.open_replicas(plan, 2, lines.append) as (found, replicas):
            engines = pool.Pool(found, FLEET, report=lines.append)
            try:
                await engines.update_weights(store, 1)
                work = asyncio.create_task(all_rollouts(engines))
                await disturb(engines, replicas)
                return await work, engines, replicas, lines
            finally:
                await engines.close()

    return asyncio.run(asyncio.wait_for(main(), 240))


async def started(engines):
    """Return in the middle of the work."""
    while (await engines.load()).running < 3:
        await asyncio.sleep(0.01)


def test_rollouts_of_a_process_killed_in_the_middle_end_on_the_other_and_the_process_comes_back(
    tmp_path, store, undisturbed
):
    async def kill(engines, replicas):
        await started(engines)
        os.kill(replicas[0].pid, signal.SIGKILL)
        while engines.counts.brought_back < 1:
            await asyncio.sleep(0.05)

    results, engines, replicas, lines = drill(tmp_path, store, kill)
    assert results == undisturbed
    assert engines.counts.taken_down >= 1 and engines.counts.moved >= 1
    assert replicas[0].restarts == 1 and engines.up == ["engine-0", "engine-1"]
    assert any("engine-0 is taken down" in line for line in lines)


def test_rollouts_of_a_process_stopped_in_the_middle_end_on_the_other(tmp_path, store, undisturbed):
    stopped = []

    async def stop(engines, replicas):
        await started(engines)
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
    assert np.all([len(ids) == 3 + TURNS * NEW for ids in results])
