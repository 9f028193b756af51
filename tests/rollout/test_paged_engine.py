"""The embedded engine's cache: nothing is computed twice, nothing stale is read, and running out of pages shows."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from rstar2_jax.model import decoder, pages_native
from rstar2_jax.rollout import jax_engine
from rstar2_jax.rollout.engine import EngineError, Request, Sampling
from rstar2_jax.settings import Model
from rstar2_jax.weights import publish

MODEL = Model(
    family="qwen3", vocab_size=61, d_model=32, d_mlp=48, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=512
)
SLOTS, CONTEXT = 6, 256


@pytest.fixture(scope="module")
def params():
    tree = decoder.init_params(MODEL, jax.random.key(0))
    tree["embed"]["embedding"] = jax.random.normal(jax.random.key(1), (MODEL.vocab_size, MODEL.d_model)) * 0.3
    return tree


@pytest.fixture(scope="module")
def store(tmp_path_factory, params):
    root = tmp_path_factory.mktemp("store")
    publish.publish(params, MODEL, root, 0)
    return str(root)


def with_engine(store, use, model=MODEL, **changes):
    """(what `use(engine)` returns, the engine's counters), on a fresh engine that is closed afterwards."""
    sizes = {"slots": SLOTS, "context_tokens": CONTEXT, "prefill_chunk_tokens": 8, "decode_steps": 5, **changes}

    async def run():
        engine = jax_engine.JaxEngine(model, **sizes)
        try:
            await engine.update_weights(store, 0)
            return await use(engine), engine.stats
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=300))


def request(seed, prompt, new=20, **sampling):
    return Request(
        rid=f"r{seed}",
        prompt_ids=prompt,
        seed=seed,
        sampling=Sampling(max_new_tokens=new, stop_ids=(), **sampling),
    )


def ids(seed, count):
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, size=count).tolist()


def bits(generation):
    return generation.token_ids.tobytes(), generation.logprobs.tobytes()


async def generate_all(engine, requests):
    return await asyncio.gather(*(engine.generate(r) for r in requests))


@pytest.fixture(params=["in C", "portable"])
def context(request, monkeypatch):
    """Longest sequence of an engine, whose attention over pages is either the part in C or what XLA makes."""
    if request.param == "in C":
        assert pages_native.available()
        yield CONTEXT
        return
    jax.clear_caches()  # what was traced with the part in C has the same shapes
    monkeypatch.setattr(pages_native, "available", lambda: False)
    yield CONTEXT
    jax.clear_caches()


@functools.partial(jax.jit, static_argnums=0)
def whole_row_table(model, params, row, length):
    """[positions, vocab]: log-probabilities of what follows each id of a row that ends after `length` ids."""
    places = np.arange(len(row))[None]
    module, variables = decoder.Decoder(model), {"params": params}
    hidden = module.apply(variables, row[None], places, (places < length).astype(np.int32))
    return jax.nn.log_softmax(module.apply(variables, hidden, method=decoder.Decoder.logits)[0])


def whole_row_logprobs(model, params, prompt, sampled):
    """Log-probability of each sampled id as the learner computes it."""
    row, length = np.zeros(model.max_positions, np.int32), len(prompt) + len(sampled)
    row[:length] = [*prompt, *sampled]
    table = whole_row_table(model, params, row, length)
    return np.asarray(table)[np.arange(len(prompt) - 1, length - 1), row[len(prompt) : length]]


def test_a_sample_is_the_same_bits_when_its_pages_were_taken_and_computed_again(store, context):
    requests = [request(seed, ids(seed, 20 + 9 * seed), new=120) for seed in range(8)]

    async def one_by_one(engine):
        return [await engine.generate(r) for r in requests]

    calm, unhurried = with_engine(store, one_by_one, context_tokens=context)
    tight, pressed = with_engine(
        store, lambda e: generate_all(e, requests), context_tokens=context, kv_tokens=context + 32
    )
    assert unhurried.preempted == unhurried.recomputed_tokens == 0
    assert pressed.preempted > 0 and pressed.recomputed_tokens > 0
    assert sum(g.preempted for g in tight) == pressed.preempted and not any(g.preempted for g in calm)
    assert [bits(g) for g in calm] == [bits(g) for g in tight]


@pytest.mark.parametrize("together", [True, False], ids=["beside it", "after it"])
def test_a_sequence_that_diverges_changes_no_bit_of_its_neighbours(tmp_path, context, together):
    apart = dataclasses.replace(MODEL, tie_embeddings=False)
    tree = decoder.init_params(apart, jax.random.key(0))
    poison = MODEL.vocab_size - 1  # who holds it computes NaN, and greedy sampling never draws it
    tree["embed"]["embedding"] = tree["embed"]["embedding"].at[poison].set(np.nan)
    tree["head"]["kernel"] = tree["head"]["kernel"].at[:, poison].set(0.0)
    publish.publish(tree, apart, tmp_path, 0)
    greedy = [request(seed, [1, *ids(seed, 3 + 13 * seed)], new=40, temperature=0.0) for seed in range(4)]
    greedy = [dataclasses.replace(r, prompt_ids=[i % poison for i in r.prompt_ids]) for r in greedy]
    diverging = [request(n, [poison, *ids(n, 90)], new=60, temperature=0.0) for n in (90, 91)]

    async def beside_nobody(engine):
        return await generate_all(engine, greedy)

    async def with_it(engine):
        lost = asyncio.gather(*(engine.generate(r) for r in diverging), return_exceptions=True)
        if not together:
            await lost
        found = await generate_all(engine, greedy)
        assert all(isinstance(error, EngineError) for error in await lost)
        return found

    # No more pages than are needed: those of the sequences that diverge are given to the others.
    sizes = {"context_tokens": context, "kv_tokens": context + 32}
    wanted, _ = with_engine(str(tmp_path), beside_nobody, model=apart, **sizes)
    found, _ = with_engine(str(tmp_path), with_it, model=apart, **sizes)
    assert [bits(g) for g in found] == [bits(g) for g in wanted]


def test_the_samples_of_a_prompt_compute_it_once(store):
    prompt = ids(3, 75)
    requests = [request(seed, prompt, new=30) for seed in range(2 * SLOTS)]
    generations, stats = with_engine(store, lambda e: generate_all(e, requests))
    assert stats.prefilled_tokens == len(prompt) - 1
    assert stats.shared_tokens == (2 * SLOTS - 1) * (len(prompt) - 1) and stats.copied_pages > 0
    assert len({bits(g) for g in generations}) == 2 * SLOTS


def test_the_turns_of_an_episode_compute_only_what_is_new_and_give_what_a_fresh_engine_gives(store):
    prompt, reply = ids(4, 50), ids(5, 17)

    async def episode(engine):
        first = await engine.generate(request(1, prompt, new=30))
        return [*prompt, *first.token_ids.tolist(), *reply], engine.stats

    async def both(engine):
        context, before = await episode(engine)
        return context, before, await engine.generate(request(2, context, new=30))

    (context, before, second), after = with_engine(store, both)
    # The last sampled id was never an input; the last of the reply is the first step's own.
    assert after.prefilled_tokens - before.prefilled_tokens == len(reply)
    fresh, _ = with_engine(store, lambda e: e.generate(request(2, context, new=30)))
    assert bits(second) == bits(fresh)


def test_an_episode_goes_on_beside_many_others_as_it_does_alone(store, context):
    async def episode(engine, number):
        prompt, generations = ids(number % 3, 40), []
        for turn in range(3):
            generations.append(await engine.generate(request(10 * number + turn, prompt, new=5 + 7 * number % 11)))
            prompt = [*prompt, *generations[-1].token_ids.tolist(), *ids(100 + number, 6)]
        return [bits(g) for g in generations]

    async def all_together(engine):
        return await asyncio.gather(*(episode(engine, number) for number in range(9)))

    async def in_turn(engine):
        return [await episode(engine, number) for number in range(9)]

    together, _ = with_engine(store, all_together, context_tokens=context, kv_tokens=2 * context)
    alone, _ = with_engine(store, in_turn, context_tokens=context)
    assert together == alone


def test_forgetting_the_cache_costs_a_computation_and_changes_nothing(store):
    async def use(engine):
        first = await engine.generate(request(1, ids(6, 70)))
        await engine.flush()
        again = await engine.generate(request(1, ids(6, 70)))
        return first, again

    (first, again), stats = with_engine(store, use)
    assert bits(first) == bits(again) and stats.shared_tokens == 0


def test_a_retracted_request_is_computed_again_to_the_same_bits(store):
    asked = [request(seed, ids(seed, 30), new=150) for seed in range(3)]

    async def use(engine):
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in asked]
        while engine.stats.sampled_tokens < 30:
            await asyncio.sleep(0.001)
        await engine.pause("retract")
        load = await engine.load()
        await engine.resume()
        return load, await asyncio.gather(*tasks)

    (load, retracted), stats = with_engine(store, use, decode_steps=1)
    calm, _ = with_engine(store, lambda e: generate_all(e, asked))
    assert (load.kv_tokens_used, load.running, load.waiting) == (0, 0, 3)
    assert stats.recomputed_tokens > 0 and [bits(g) for g in retracted] == [bits(g) for g in calm]


def test_bfloat16_samples_are_repeatable_and_near_the_learners_numbers(store, params):
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    asked = [request(seed, ids(seed, 40), new=20) for seed in range(5)]

    async def one_by_one(engine):
        return [await engine.generate(r) for r in asked]

    together, _ = with_engine(store, lambda e: generate_all(e, asked), model=model)
    alone, _ = with_engine(store, one_by_one, model=model)
    assert [bits(g) for g in together] == [bits(g) for g in alone]
    for r, g in zip(asked, together, strict=True):
        wanted = whole_row_logprobs(model, params, r.prompt_ids, g.token_ids)
        np.testing.assert_allclose(g.logprobs, wanted, atol=0.1)


def test_float32_log_probabilities_over_many_pages_are_the_learners(store, params):
    asked = [request(seed, ids(seed, 60 + 70 * seed), new=120) for seed in range(4)]
    generations, _ = with_engine(store, lambda e: generate_all(e, asked), context_tokens=512)
    for r, g in zip(asked, generations, strict=True):
        wanted = whole_row_logprobs(MODEL, params, r.prompt_ids, g.token_ids)
        np.testing.assert_allclose(g.logprobs, wanted, atol=1e-4)


def test_a_pool_that_cannot_hold_one_request_is_refused():
    with pytest.raises(ValueError, match="kv_tokens = 255: must hold one request of context_tokens = 256"):
        jax_engine.JaxEngine(MODEL, slots=2, context_tokens=256, prefill_chunk_tokens=8, kv_tokens=255)
