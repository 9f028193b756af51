"""The embedded engine: exact samples on any engine state, true versions, no silent end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import decoder
from rstar2_jax.rollout import device
from rstar2_jax.rollout.engine import DivergedError, EngineError, Request, RolloutEngine, Sampling
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.settings import Model
from rstar2_jax.types import FinishReason
from rstar2_jax.weights import publish

MODEL = Model(
    family="qwen3", vocab_size=61, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=256
)
SLOTS, CONTEXT, CHUNK = 6, 256, 8


def sharpened(key):
    """Random parameters whose distributions are neither flat nor certain, so that samples differ between weights."""
    params = decoder.init_params(MODEL, jax.random.key(key))
    table = jax.random.normal(jax.random.key(100 + key), (MODEL.vocab_size, MODEL.d_model))
    params["embed"]["embedding"] = table * 0.3
    return params


@pytest.fixture(scope="module")
def params():
    return {version: sharpened(version) for version in (0, 1)}


@pytest.fixture(scope="module")
def store(tmp_path_factory, params):
    root = tmp_path_factory.mktemp("store")
    for version, tree in params.items():
        publish.publish(tree, MODEL, root, version)
    return str(root)


def make_engine(**changes):
    sizes = {"slots": SLOTS, "context_tokens": CONTEXT, "prefill_chunk_tokens": CHUNK, "decode_steps": 5, **changes}
    return JaxEngine(MODEL, **sizes)


def with_engine(store, use, *, version=0, **changes):
    """What `use(engine)` returns, on a fresh engine that is closed afterwards."""

    async def run():
        engine = make_engine(**changes)
        try:
            await engine.update_weights(store, version)
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=120))


def request(seed, *, prompt=None, new=20, stop=(), rid=None, **sampling):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, MODEL.vocab_size, size=rng.integers(1, 30)).tolist() if prompt is None else prompt
    return Request(
        rid=rid or f"r{seed}",
        prompt_ids=prompt,
        seed=seed,
        sampling=Sampling(max_new_tokens=new, stop_ids=tuple(stop), **sampling),
    )


def bits(generation):
    return (
        generation.token_ids.tobytes(),
        generation.logprobs.tobytes(),
        generation.weights_versions.tobytes(),
        generation.finish_reason,
    )


async def generate_all(engine, requests):
    return await asyncio.gather(*(engine.generate(r) for r in requests))


@jax.jit
def whole_row_logprobs(params, row, length):
    at = jnp.arange(CONTEXT)[None]
    model, variables = decoder.Decoder(MODEL), {"params": params}
    hidden = model.apply(variables, row[None], at, (at < length).astype(jnp.int32))
    return jax.nn.log_softmax(model.apply(variables, hidden, method=decoder.Decoder.logits)[0])


def learner_table(params, ids):
    """[n - 1, vocab]: log-probabilities of what follows each id, as the learner computes them on a whole row."""
    row = np.zeros(CONTEXT, np.int32)
    row[: len(ids)] = ids
    return np.asarray(whole_row_logprobs(params, row, len(ids)))[: len(ids) - 1]


def learner_logprobs(params, ids):
    """Log-probability of every id but the first."""
    return learner_table(params, ids)[np.arange(len(ids) - 1), ids[1:]]


def test_the_engine_satisfies_the_protocol(store):
    async def use(engine):
        checked: RolloutEngine = engine
        caps = checked.caps
        assert (caps.name, caps.vocab_size, caps.max_context_tokens) == ("embedded", MODEL.vocab_size, CONTEXT)
        assert caps.kv_tokens == SLOTS * CONTEXT
        return checked.weights_version

    assert with_engine(store, use) == 0


def test_log_probabilities_equal_the_learners_on_the_same_weights(store, params):
    requests = [request(seed) for seed in range(6)]
    for r, g in zip(requests, with_engine(store, lambda e: generate_all(e, requests)), strict=True):
        ids = [*r.prompt_ids, *g.token_ids.tolist()]
        np.testing.assert_allclose(g.logprobs, learner_logprobs(params[0], ids)[-len(g.token_ids) :], atol=1e-4)


def test_scores_equal_the_learners_log_probabilities(store, params):
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, size=61).tolist()

    async def use(engine):
        return await engine.score(ids), await engine.score(ids[:1]), await engine.score(ids[: CHUNK + 1])

    scores, single, short = with_engine(store, use)
    assert scores[0] == 0 and single.tolist() == [0.0]
    np.testing.assert_allclose(scores[1:], learner_logprobs(params[0], ids), atol=1e-4)
    np.testing.assert_allclose(short, scores[: CHUNK + 1], atol=1e-6)


def test_a_sample_is_the_same_bits_alone_in_a_crowd_in_other_slots_and_other_orders(store):
    requests = [request(seed, new=5 + seed) for seed in range(14)]
    # Neighbours that truncate or decode greedily must not touch the others either.
    requests += [
        request(90, top_p=0.5),
        request(91, top_k=3),
        request(92, temperature=0.0),
        request(93, temperature=0.6),
    ]

    async def one_by_one(engine):
        return [await engine.generate(r) for r in requests]

    async def staggered(engine):
        tasks = []
        for r in requests[::-1]:
            tasks.append(asyncio.ensure_future(engine.generate(r)))
            await asyncio.sleep(0.002)
        return (await asyncio.gather(*tasks))[::-1]

    alone = with_engine(store, one_by_one)
    crowd = with_engine(store, lambda e: generate_all(e, requests))
    reverse = with_engine(store, staggered)
    single_steps = with_engine(store, lambda e: generate_all(e, requests), decode_steps=1)
    for a, *others in zip(alone, crowd, reverse, single_steps, strict=True):
        assert all(bits(a) == bits(other) for other in others)


def test_seeds_make_samples_differ_and_one_seed_repeats_its_own(store):
    prompt = [1, 2, 3]
    requests = [request(seed, prompt=prompt, new=24) for seed in [*range(8), 2**63 + 5, 0]]
    generations = with_engine(store, lambda e: generate_all(e, requests))
    texts = [tuple(g.token_ids.tolist()) for g in generations]
    assert len(set(texts[:9])) == 9
    assert bits(generations[0]) == bits(generations[9])


def first_appearance(ids, after):
    """Index beyond `after` of an id that does not stand before it."""
    return next(i for i in range(after, len(ids)) if ids[i] not in ids[:i])


def test_a_stop_id_ends_the_turn_and_is_part_of_it(store):
    free = with_engine(store, lambda e: e.generate(request(3, new=30)))
    assert free.finish_reason is FinishReason.LENGTH and len(free.token_ids) == 30
    ids = free.token_ids.tolist()
    at = first_appearance(ids, 2)
    unused = next(i for i in range(MODEL.vocab_size) if i not in ids)
    stopped = with_engine(store, lambda e: e.generate(request(3, new=30, stop=(unused, ids[at]))))
    assert stopped.finish_reason is FinishReason.STOP
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: at + 1])
    np.testing.assert_array_equal(stopped.logprobs, free.logprobs[: at + 1])


def test_a_stop_id_sampled_at_the_limit_is_a_stop_and_another_id_there_is_length(store):
    ids = with_engine(store, lambda e: e.generate(request(3, new=30))).token_ids.tolist()
    at = first_appearance(ids, 2)

    async def use(engine):
        return await generate_all(engine, [request(3, new=at + 1), request(3, new=at + 1, stop=(ids[at],))])

    plain, at_limit = with_engine(store, use)
    assert (plain.finish_reason, at_limit.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert plain.token_ids.tolist() == at_limit.token_ids.tolist() == ids[: at + 1]


def test_greedy_decoding_takes_the_most_probable_id_each_time(store, params):
    prompt = [5, 9, 2]
    got = with_engine(store, lambda e: e.generate(request(1, prompt=prompt, new=12, temperature=0.0)))
    best = learner_table(params[0], [*prompt, *got.token_ids.tolist()]).argmax(axis=-1)
    np.testing.assert_array_equal(best[len(prompt) - 1 :], got.token_ids)


@pytest.mark.parametrize("prompt_tokens", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK, CONTEXT - 1])
def test_prompts_of_any_length_give_the_learners_numbers(store, params, prompt_tokens):
    prompt = np.random.default_rng(prompt_tokens).integers(0, MODEL.vocab_size, size=prompt_tokens).tolist()
    got = with_engine(store, lambda e: e.generate(request(4, prompt=prompt, new=min(5, CONTEXT - prompt_tokens))))
    ids = [*prompt, *got.token_ids.tolist()]
    np.testing.assert_allclose(got.logprobs, learner_logprobs(params[0], ids)[-len(got.token_ids) :], atol=1e-4)


def test_equal_and_overlapping_prompts_share_prefill_without_changing_a_bit(store):
    rng = np.random.default_rng(8)
    system, question = (rng.integers(0, MODEL.vocab_size, size=n).tolist() for n in (2 * CHUNK + 3, 9))
    groups = [system + question, system + question[:4], system, system + question + question, [3], system[:CHUNK]]
    requests = [request(10 * g + i, prompt=prompt, new=4 + i) for i in range(5) for g, prompt in enumerate(groups)]

    async def one_by_one(engine):
        fresh = []
        for r in requests:
            await engine.update_weights(store, 0)  # forgets the cache
            fresh.append(await engine.generate(r))
        return fresh, engine.stats

    async def together(engine):
        first = await generate_all(engine, requests)
        return first, await generate_all(engine, requests[::-1]), engine.stats

    fresh, apart = with_engine(store, one_by_one)
    first, second, shared = with_engine(store, together)
    for a, b, c in zip(fresh, first, second[::-1], strict=True):
        assert bits(a) == bits(b) == bits(c)
    assert shared.copied_pages > 0 and shared.prefilled_tokens < apart.prefilled_tokens / 2


def test_a_finished_rows_place_is_taken_at_once(store):
    lengths = [30, 2, 2, 2, 2, 2] * 4
    requests = [request(i, prompt=[i], new=n) for i, n in enumerate(lengths)]

    async def use(engine):
        await generate_all(engine, requests)
        return engine.stats

    stats = with_engine(store, use)
    assert stats.sampled_tokens == sum(lengths)
    waves = 4 * 30  # steps if each batch of six waited for its longest row
    assert stats.decode_steps < waves / 2


def test_requests_go_on_waiting_for_no_one_when_all_rows_end_together(store):
    requests = [request(seed, prompt=[1, 2, 3], new=5) for seed in range(2 * SLOTS + 1)]
    assert all(len(g.token_ids) == 5 for g in with_engine(store, lambda e: generate_all(e, requests)))


def test_shapes_are_fixed_whatever_the_occupancy_and_the_requests(store):
    requests = [request(seed, new=1 + seed % 9, top_p=1.0 - 0.04 * (seed % 3)) for seed in range(20)]
    with_engine(store, lambda e: generate_all(e, requests[:1]))
    functions = (device.copy, device.step)
    before = [function._cache_size() for function in functions]
    with_engine(store, lambda e: generate_all(e, requests))
    assert [function._cache_size() for function in functions] == before


def test_new_weights_give_what_a_fresh_engine_gives(store):
    same = request(7, new=25)

    async def use(engine):
        old = await engine.generate(same)
        await engine.update_weights(store, 1)
        assert engine.weights_version == 1
        return old, await engine.generate(same)

    old, new = with_engine(store, use)
    fresh = with_engine(store, lambda e: e.generate(same), version=1)
    assert bits(new) == bits(fresh)
    assert set(old.weights_versions) == {0} and set(new.weights_versions) == {1}
    assert old.token_ids.tolist() != new.token_ids.tolist()


def test_a_turn_in_flight_during_an_update_carries_true_versions(store, params):
    long = [request(seed, prompt=[seed + 1] * 4, new=240) for seed in range(SLOTS)]

    async def use(engine):
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in long]
        while engine.stats.sampled_tokens < 4 * SLOTS:  # all have begun
            await asyncio.sleep(0.001)
        await engine.pause("in_place")  # on a loaded machine fetching takes longer than the turns
        await engine.update_weights(store, 1)
        await engine.resume()
        return await asyncio.gather(*tasks)

    mixed = 0
    for r, g in zip(long, with_engine(store, use, decode_steps=1), strict=True):
        versions = g.weights_versions
        assert np.all(np.diff(versions) >= 0) and set(versions) <= {0, 1}
        mixed += len(set(versions.tolist())) == 2
        ids = [*r.prompt_ids, *g.token_ids.tolist()]
        for version in (0, 1):
            wanted = learner_logprobs(params[version], ids)[-len(g.token_ids) :]
            np.testing.assert_allclose(g.logprobs[versions == version], wanted[versions == version], atol=1e-4)
    assert mixed == SLOTS


def test_a_version_that_is_absent_leaves_the_old_weights_in_place(store):
    async def use(engine):
        with pytest.raises(EngineError, match=r"keeps weights 0: version 99 is not in"):
            await engine.update_weights(store, 99)
        assert engine.weights_version == 0
        return await engine.generate(request(1))

    assert len(with_engine(store, use).token_ids)


def test_nothing_is_sampled_before_the_first_weights():
    async def run():
        engine = make_engine()
        try:
            assert engine.weights_version == -1
            with pytest.raises(EngineError, match="no weights yet"):
                await engine.generate(request(1))
            with pytest.raises(EngineError, match="no weights yet"):
                await engine.score([1, 2])
        finally:
            await engine.close()

    asyncio.run(run())


BAD_REQUESTS = {
    "does not fit": (request(0, prompt=[1] * 250, new=15), r"prompt 250 \+ 15 new ids do not fit the context of 256"),
    "id too large": (request(0, prompt=[1, 61]), "id 61 is outside the vocabulary of 61"),
    "id below zero": (request(0, prompt=[-1]), "id -1 is outside"),
    "empty": (request(0, prompt=[]), "needs at least one id"),
    "no new ids": (request(0, prompt=[1], new=0), "max_new_tokens = 0"),
    "temperature": (request(0, prompt=[1], temperature=-1.0), "temperature = -1.0"),
    "top_p": (request(0, prompt=[1], top_p=0.0), "top_p = 0.0"),
    "top_k": (request(0, prompt=[1], top_k=0), "top_k = 0"),
    "stop ids": (request(0, prompt=[1], stop=range(9)), "9 stop ids: at most 8"),
    "seed": (dataclasses.replace(request(0, prompt=[1]), seed=-3), "seed = -3"),
    "seed in part": (dataclasses.replace(request(0, prompt=[1]), seed=1.5), "seed = 1.5 must be a whole number"),
    "id in part": (request(0, prompt=[1, 2.5]), "id 2.5 must be a whole number"),
    "ids in part": (request(0, prompt=[1], new=4.5), "max_new_tokens = 4.5 must be a whole number"),
    "truth": (request(0, prompt=[1], top_k=True), "top_k = True must be a whole number"),
    "top_k too large": (request(0, prompt=[1], top_k=2**31), "top_k = 2147483648 must be below"),
    "stop id too large": (request(0, prompt=[1], stop=[2**40]), r"stop_ids = \(1099511627776,\) must be in"),
    "hot without end": (request(0, prompt=[1], temperature=np.inf), "temperature = inf must be a finite number"),
}


def test_requests_that_are_refused_cost_the_engine_nothing(store):
    async def use(engine):
        for bad, complaint in BAD_REQUESTS.values():
            with pytest.raises(ValueError, match=complaint):
                await engine.generate(bad)
        return await engine.generate(request(1))

    assert len(with_engine(store, use).token_ids) == 20


@pytest.mark.parametrize("bad, complaint", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_request_that_can_never_be_served_is_refused_with_its_numbers(store, bad, complaint):
    async def use(engine):
        with pytest.raises(ValueError, match=complaint):
            await engine.generate(bad)

    with_engine(store, use)


def test_a_text_that_is_too_long_to_score_is_refused(store):
    async def use(engine):
        with pytest.raises(ValueError, match="257 ids to score: the context holds 256"):
            await engine.score([1] * 257)

    with_engine(store, use)


def test_bad_sizes_are_refused_at_birth():
    with pytest.raises(ValueError, match="slots = 0"):
        make_engine(slots=0)
    with pytest.raises(ValueError, match="decode_steps = 33: at most 32"):
        make_engine(decode_steps=33)
    with pytest.raises(ValueError, match="context_tokens = 257: must be 2 to max_positions = 256"):
        make_engine(context_tokens=257)


def test_a_cancelled_request_gives_its_row_to_the_next_one(store):
    async def use(engine):
        blockers = [asyncio.ensure_future(engine.generate(request(i, prompt=[1], new=240))) for i in range(SLOTS)]
        queued = [asyncio.ensure_future(engine.generate(request(50 + i, prompt=[2], new=2))) for i in range(3)]
        await asyncio.sleep(0)
        for task in [*blockers, queued[0]]:
            task.cancel()
        outcomes = await asyncio.gather(*blockers, queued[0], return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        return await asyncio.gather(*queued[1:])

    assert [len(g.token_ids) for g in with_engine(store, use)] == [2, 2]


def test_cancelling_leaves_the_neighbours_bits_alone(store):
    kept = request(5, new=30)
    alone = with_engine(store, lambda e: e.generate(kept))

    async def use(engine):
        doomed = [asyncio.ensure_future(engine.generate(request(i, new=30))) for i in range(20, 28)]
        task = asyncio.ensure_future(engine.generate(kept))
        await asyncio.sleep(0.01)
        for other in doomed:
            other.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        return await task

    assert bits(with_engine(store, use)) == bits(alone)


def test_closing_ends_requests_in_flight_with_abort_and_what_they_have(store):
    async def run():
        engine = make_engine(decode_steps=1)
        await engine.update_weights(store, 0)
        tasks = [asyncio.ensure_future(engine.generate(request(i, prompt=[1], new=240))) for i in range(SLOTS + 3)]
        while engine.stats.decode_calls < 1:
            await asyncio.sleep(0.001)
        await engine.close()
        generations = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(request(1))
        await engine.close()
        return generations

    generations = asyncio.run(asyncio.wait_for(run(), timeout=120))
    assert {g.finish_reason for g in generations} == {FinishReason.ABORT}
    assert 1 <= len(generations[0].token_ids) < 60 and not len(generations[-1].token_ids)
    assert not [t for t in threading.enumerate() if t.name.startswith("engine-")]


def test_a_fault_in_the_worker_reaches_every_caller_and_later_ones(store):
    async def run():
        engine = make_engine(decode_steps=1)
        await engine.update_weights(store, 0)
        tasks = [asyncio.ensure_future(engine.generate(request(i, prompt=[1], new=240))) for i in range(SLOTS + 3)]
        while engine.stats.decode_calls < 1:
            await asyncio.sleep(0.001)
        # What a device fault amounts to: the cache is gone under the worker.
        for leaf in jax.tree.leaves(engine._params):
            leaf.delete()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert "embedded died" in str(outcomes[0]) and outcomes[0].__cause__ is not None
        with pytest.raises(EngineError, match="embedded is dead"):
            await engine.generate(request(1))
        with pytest.raises(EngineError, match="embedded is dead"):
            await engine.update_weights(store, 1)
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), timeout=120))


def test_weights_without_finite_numbers_are_an_error_and_leave_no_trace_after_the_next_update(store, tmp_path, params):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params[0])
    publish.publish(broken, MODEL, tmp_path, 3)
    same = request(2, new=10)

    async def use(engine):
        await engine.update_weights(str(tmp_path), 3)
        outcomes = await asyncio.gather(
            *(engine.generate(request(i, new=10)) for i in range(SLOTS)), return_exceptions=True
        )
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert "weights 3 give no finite number" in str(outcomes[0])
        await engine.update_weights(store, 0)
        return await engine.generate(same)

    assert bits(with_engine(store, use)) == bits(with_engine(store, lambda e: e.generate(same)))


def test_a_request_without_finite_numbers_gives_its_lane_back_at_once(tmp_path, params):
    publish.publish(jax.tree.map(lambda leaf: leaf * np.nan, params[0]), MODEL, tmp_path, 0)

    async def use(engine):
        with pytest.raises(DivergedError, match="weights 0 give no finite number"):
            await engine.generate(request(1, prompt=[1], new=200))
        return engine.stats.decode_steps

    assert with_engine(str(tmp_path), use) <= 5


def test_bfloat16_weights_on_the_device_give_the_numbers_of_the_float32_masters(params):
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    resident = device.resident(params[0], model)
    assert resident["embed"]["embedding"].dtype == jnp.bfloat16 and resident["norm"]["scale"].dtype == jnp.float32
    tokens, positions = jnp.arange(12)[None], jnp.arange(12)[None]
    apply = jax.jit(lambda p: decoder.Decoder(model).apply({"params": p}, tokens, positions, jnp.ones_like(tokens)))
    a, b = apply(params[0]), apply(resident)
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
