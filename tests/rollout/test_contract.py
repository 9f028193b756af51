"""What every rollout engine keeps to, whatever it runs on and however it is reached."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rstar2_jax.rollout.engine import EngineError, Load, RolloutEngine
from rstar2_jax.types import FinishReason
from tests.rollout import engines
from tests.rollout.engines import CONTEXT, MODEL, learner_logprobs, request

PLACES = [
    "in process",
    "served",
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("sglang on two ranks", marks=pytest.mark.sglang),
]
STEP_S = 0.02


@pytest.fixture(scope="module", params=PLACES)
def bench(request, weights, real_servers, tmp_path_factory):
    if request.param == "in process":
        yield engines.Bench(open=engines.in_process(weights.store), store=weights.store, params=weights.params)
    elif request.param == "served":
        with engines.served(tmp_path_factory.mktemp("served")) as (url, _):
            opener = engines.over_http(url, weights.store)
            yield engines.Bench(open=opener, store=weights.store, params=weights.params)
    else:
        server = real_servers.get(2 if "two" in request.param else 1)
        opener = engines.over_http(server.url, weights.store)
        yield engines.Bench(open=opener, store=weights.store, params=weights.params)


def close_to_learner(bench, prompt, generation, version=0):
    ids = [*prompt, *generation.token_ids.tolist()]
    wanted = learner_logprobs(bench.params[version], ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(generation.logprobs, wanted, atol=bench.logprob_atol)


async def until(holds, what, limit_s=120.0):
    """Returns the first true value of the awaited `holds()`."""
    try:
        async with asyncio.timeout(limit_s):
            while not (value := await holds()):
                await asyncio.sleep(STEP_S)
            return value
    except TimeoutError:
        raise AssertionError(f"waited {limit_s:g} s for {what}") from None


async def running(engine, count):
    async def enough():
        load = await engine.load()
        return load if load.running >= count else None

    return await until(enough, f"{count} running requests")


async def idle(engine):
    async def empty():
        load = await engine.load()
        return load.running == load.waiting == 0

    await until(empty, "an idle engine")


def start(bench, engine, count):
    """Requests that take a while, started."""
    requests = [
        request(seed, prompt=[seed + 1] * 5, new=bench.long_tokens, rid=f"long-{seed}") for seed in range(count)
    ]
    return requests, [asyncio.ensure_future(engine.generate(r)) for r in requests]


def same(a, b):
    return a.token_ids.tolist() == b.token_ids.tolist()


def test_it_says_what_it_can_hold_and_which_weights_it_has(bench):
    async def use(engine: RolloutEngine):
        return engine.caps, engine.weights_version

    caps, version = bench.run(use)
    assert caps.name and caps.vocab_size == MODEL.vocab_size and version == 0
    assert caps.kv_tokens >= caps.max_context_tokens >= CONTEXT


def test_ids_log_probabilities_and_versions_are_one_record_and_equal_the_learners(bench):
    requests = [request(seed, new=10 + seed) for seed in range(5)]

    async def use(engine):
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    for r, g in zip(requests, bench.run(use), strict=True):
        assert len(g.token_ids) == len(g.logprobs) == len(g.weights_versions) == r.sampling.max_new_tokens
        assert (g.token_ids.dtype, g.logprobs.dtype, g.weights_versions.dtype) == (np.int32, np.float32, np.int32)
        assert set(g.weights_versions.tolist()) == {0} and g.finish_reason is FinishReason.LENGTH
        assert g.token_ids.min() >= 0 and g.token_ids.max() < MODEL.vocab_size
        close_to_learner(bench, r.prompt_ids, g)


def test_greedy_decoding_gives_the_same_ids_with_and_without_neighbours(bench):
    requests = [request(seed, new=16, temperature=0.0) for seed in range(4)]

    async def use(engine):
        together = await asyncio.gather(*(engine.generate(r) for r in requests))
        return together, [await engine.generate(r) for r in requests]

    for a, b in zip(*bench.run(use), strict=True):
        assert same(a, b)


def test_a_sampled_stop_id_ends_the_turn_and_is_part_of_it(bench):
    async def use(engine):
        seeds = range(8)
        free = await asyncio.gather(*(engine.generate(request(seed, new=24, temperature=0.0)) for seed in seeds))
        seed = max(seeds, key=lambda s: len(set(free[s].token_ids.tolist())))
        ids = free[seed].token_ids.tolist()
        at = max(i for i in range(1, len(ids)) if ids[i] not in ids[:i])
        unused = next(i for i in range(MODEL.vocab_size) if i not in ids)
        stopped = await engine.generate(request(seed, new=24, temperature=0.0, stop=(unused, ids[at])))
        at_limit = await engine.generate(request(seed, new=at + 1, temperature=0.0, stop=(ids[at],)))
        return ids[: at + 1], stopped, at_limit

    wanted, stopped, at_limit = bench.run(use)
    assert stopped.token_ids.tolist() == at_limit.token_ids.tolist() == wanted
    assert len(stopped.logprobs) == len(wanted)
    assert stopped.finish_reason is at_limit.finish_reason is FinishReason.STOP


def test_seeds_make_samples_differ_and_a_seeded_engine_repeats_them(bench):
    async def use(engine):
        requests = [request(seed, prompt=[1, 2, 3], new=24) for seed in range(4)]
        first = await asyncio.gather(*(engine.generate(r) for r in requests))
        return engine.caps.seeded, first, [await engine.generate(r) for r in requests[::-1]][::-1]

    seeded, first, again = bench.run(use)
    assert len({tuple(g.token_ids.tolist()) for g in first}) == 4
    assert not seeded or all(same(a, b) for a, b in zip(first, again, strict=True))


BAD_REQUESTS = {
    "an id beyond the vocabulary": (dict(prompt=[1, MODEL.vocab_size]), f"id {MODEL.vocab_size} is outside"),
    "an id below zero": (dict(prompt=[1, -1]), "id -1 is outside"),
    "no id": (dict(prompt=[]), "needs at least one id"),
    "too long": (dict(prompt=[1] * 10, new=10_000), "do not fit the context"),
    "no new ids": (dict(prompt=[1], new=0), "max_new_tokens = 0"),
    "temperature": (dict(prompt=[1], temperature=-1.0), "temperature = -1.0"),
    "a temperature near 0": (dict(prompt=[1], temperature=2e-38), "temperature = 2e-38 must be 1e-06 or more, or 0"),
    "top_p": (dict(prompt=[1], top_p=0.0), "top_p = 0.0"),
    "top_k": (dict(prompt=[1], top_k=0), "top_k = 0"),
}


def test_requests_that_can_never_be_served_are_refused_and_hurt_nobody(bench):
    async def use(engine):
        for changes, complaint in BAD_REQUESTS.values():
            with pytest.raises(ValueError, match=complaint):
                await engine.generate(request(0, **changes))
        for ids, complaint in (([1, 10**6], "id 1000000 is outside"), ([], "at least one"), ([1] * 10_000, "context")):
            with pytest.raises(ValueError, match=complaint):
                await engine.score(ids)
        return await engine.generate(request(1))

    assert len(bench.run(use).token_ids) == 12


def test_scores_are_the_learners_log_probabilities(bench):
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, size=61).tolist()

    async def use(engine):
        return await engine.score(ids), await engine.score(ids[:1]), await engine.score(ids[:17])

    scores, single, short = bench.run(use)
    assert scores.dtype == np.float32 and scores[0] == 0 and single.tolist() == [0.0]
    np.testing.assert_allclose(scores[1:], learner_logprobs(bench.params[0], ids), atol=bench.logprob_atol)
    np.testing.assert_allclose(short, scores[:17], atol=bench.logprob_atol)


def test_an_aborted_request_gives_the_ids_that_it_has_and_the_others_go_on(bench):
    async def use(engine):
        requests, tasks = start(bench, engine, 3)
        await running(engine, 3)
        await engine.abort("nobody")
        await engine.abort("long-1")
        return requests, await asyncio.gather(*tasks)

    requests, (first, aborted, third) = bench.run(use)
    assert aborted.finish_reason is FinishReason.ABORT and len(aborted.token_ids) < bench.long_tokens
    assert len(aborted.token_ids) == len(aborted.logprobs) == len(aborted.weights_versions)
    if len(aborted.token_ids):
        close_to_learner(bench, requests[1].prompt_ids, aborted)
    assert [len(g.token_ids) for g in (first, third)] == [bench.long_tokens] * 2


def test_aborting_all_ends_all(bench):
    async def use(engine):
        _, tasks = start(bench, engine, 3)
        await running(engine, 3)
        await engine.abort()
        ended = await asyncio.gather(*tasks)
        return ended, await engine.generate(request(1))

    ended, after = bench.run(use)
    assert {g.finish_reason for g in ended} == {FinishReason.ABORT}
    assert after.finish_reason is FinishReason.LENGTH


def test_a_cancelled_request_frees_its_place(bench):
    async def use(engine):
        _, tasks = start(bench, engine, 3)
        await running(engine, 3)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await idle(engine)
        return await engine.generate(request(1))

    assert len(bench.run(use).token_ids) == 12


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_requests_in_flight_and_new_ones_until_it_is_resumed(bench, mode):
    async def use(engine):
        requests, tasks = start(bench, engine, 2)
        await running(engine, 2)
        await engine.pause(mode)
        late = asyncio.ensure_future(engine.generate(request(9, rid="late")))
        before, alive = await engine.load(), await engine.alive()
        await asyncio.sleep(0.3)
        after = await engine.load()
        assert alive and not late.done() and not any(task.done() for task in tasks)
        assert (before.kv_tokens_used, before.running) == (after.kv_tokens_used, after.running)
        await engine.pause(mode)
        await engine.resume()
        await engine.resume()
        return requests, await asyncio.gather(*tasks), await late

    requests, ended, late = bench.run(use)
    for r, g in zip(requests, ended, strict=True):
        assert g.finish_reason is FinishReason.LENGTH and len(g.token_ids) == bench.long_tokens
        close_to_learner(bench, r.prompt_ids, g)
    assert len(late.token_ids) == 12


def test_a_pause_that_aborts_ends_requests_in_flight_and_holds_new_ones(bench):
    async def use(engine):
        _, tasks = start(bench, engine, 2)
        await running(engine, 2)
        await engine.pause("abort")
        ended = await asyncio.gather(*tasks)
        late = asyncio.ensure_future(engine.generate(request(9)))
        await asyncio.sleep(0.3)
        assert not late.done() and await engine.alive()
        await engine.resume()
        return ended, await late

    ended, late = bench.run(use)
    assert {g.finish_reason for g in ended} == {FinishReason.ABORT} and len(late.token_ids) == 12


def test_a_pause_of_an_unknown_kind_is_refused(bench):
    async def use(engine):
        with pytest.raises(ValueError, match="'sleep'"):
            await engine.pause("sleep")
        return await engine.generate(request(1))

    assert len(bench.run(use).token_ids) == 12


def test_an_update_changes_what_is_sampled_and_the_version_says_so(bench):
    greedy = request(5, new=16, temperature=0.0)

    async def use(engine):
        old = await engine.generate(greedy)
        await engine.update_weights(bench.store, 1)
        assert engine.weights_version == 1
        return old, await engine.generate(greedy)

    old, new = bench.run(use)
    assert set(old.weights_versions.tolist()) == {0} and set(new.weights_versions.tolist()) == {1}
    assert not same(old, new)
    close_to_learner(bench, greedy.prompt_ids, old, version=0)
    close_to_learner(bench, greedy.prompt_ids, new, version=1)


@pytest.mark.parametrize("paused", [False, True], ids=["while running", "while paused"])
def test_requests_in_flight_go_on_under_new_weights_and_every_id_carries_its_version(bench, paused):
    async def use(engine):
        requests, tasks = start(bench, engine, 2)
        await running(engine, 2)

        async def some_ids():
            return (await engine.load()).kv_tokens_used > 2 * 8

        await until(some_ids, "some sampled ids")
        if paused:
            await engine.pause("retract")
        await engine.update_weights(bench.store, 1)
        if paused:
            assert not any(task.done() for task in tasks), "an update ends no pause that the caller began"
            await engine.resume()
        return requests, await asyncio.gather(*tasks), engine.caps.spans

    requests, ended, spans = bench.run(use)
    for r, g in zip(requests, ended, strict=True):
        versions = g.weights_versions
        assert len(g.token_ids) == bench.long_tokens and np.all(np.diff(versions) >= 0)
        if not spans:
            continue
        assert set(versions.tolist()) == {0, 1}
        ids = [*r.prompt_ids, *g.token_ids.tolist()]
        for version in (0, 1):
            wanted, at = learner_logprobs(bench.params[version], ids)[len(r.prompt_ids) - 1 :], versions == version
            np.testing.assert_allclose(g.logprobs[at], wanted[at], atol=bench.logprob_atol)


def test_a_refused_update_keeps_the_old_weights_and_the_engine(bench):
    greedy = request(5, new=16, temperature=0.0)

    async def use(engine):
        old = await engine.generate(greedy)
        with pytest.raises(EngineError, match="version 99"):
            await engine.update_weights(bench.store, 99)
        assert engine.weights_version == 0
        await engine.verify(bench.store, 0)
        return old, await engine.generate(greedy)

    old, after = bench.run(use)
    assert same(old, after) and set(after.weights_versions.tolist()) == {0}


def test_verifying_tells_the_weights_in_use_from_others(bench):
    async def use(engine):
        await engine.verify(bench.store, 0)
        with pytest.raises(EngineError, match="version 1"):
            await engine.verify(bench.store, 1)
        with pytest.raises(EngineError, match="version 99"):
            await engine.verify(bench.store, 99)
        await engine.update_weights(bench.store, 1)
        await engine.verify(bench.store, 1)
        with pytest.raises(EngineError, match="version 0"):
            await engine.verify(bench.store, 0)

    bench.run(use)


def test_load_counts_what_runs_and_what_the_cache_holds(bench):
    async def use(engine):
        before = await engine.load()
        _, tasks = start(bench, engine, 2)
        during = await running(engine, 2)
        await engine.abort()
        await asyncio.gather(*tasks)
        await idle(engine)
        return engine.caps, before, during

    caps, before, during = bench.run(use)
    assert isinstance(before, Load) and before.running == before.waiting == 0
    assert during.kv_tokens_used >= 2 * 4
    for load in (before, during):
        assert load.kv_tokens_used >= 0 and load.kv_tokens_free >= 0
        assert load.kv_tokens_used + load.kv_tokens_free <= caps.kv_tokens


def test_flushing_the_cache_changes_no_sample(bench):
    greedy = request(5, new=16, temperature=0.0)

    async def use(engine):
        first = await engine.generate(greedy)
        await engine.flush()
        return first, await engine.generate(greedy)

    first, again = bench.run(use)
    assert same(first, again)


def test_after_closing_everything_is_refused_by_name(bench):
    async def use(engine):
        name = engine.caps.name
        await engine.close()
        await engine.close()
        assert not await engine.alive()
        for call in (engine.generate(request(1)), engine.score([1, 2]), engine.load(), engine.pause("retract")):
            with pytest.raises(EngineError, match=name):
                await call

    bench.run(use)
