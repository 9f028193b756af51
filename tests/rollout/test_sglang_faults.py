"""The client against servers that fail: every fault has its name, and no server samples from unknown weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import resource

import jax
import numpy as np
import pytest

from rstar2_jax.model import decoder
from rstar2_jax.rollout import sglang, watch
from rstar2_jax.rollout import sglang_wire as wire
from rstar2_jax.rollout.engine import DIVERGED, DivergedError, EngineError, LimitError
from rstar2_jax.settings import Model
from rstar2_jax.types import FinishReason
from rstar2_jax.weights import publish
from tests.rollout import faulty
from tests.rollout.engines import free_port, request

MODEL = Model(
    family="qwen3", vocab_size=40, d_model=16, d_mlp=24, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=64
)
SHORT = sglang.Deadlines(connect_s=0.4, probe_s=0.4, control_s=0.4, update_s=0.4, turn_s=0.4)
PREFETCH = "/weights_checker"
UPDATE, GENERATE, CONTINUE = "/update_weights_from_disk", "/generate", "/continue_generation"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    for version in (0, 1):
        publish.publish(decoder.init_params(MODEL, jax.random.key(version)), MODEL, root, version)
    return str(root)


def with_server(use, *, deadlines=SHORT, ready=None, **kind):
    """What `use(server, engine)` returns; `ready` is a store whose version 0 the server is given first."""

    async def run():
        server = faulty.FaultyServer(**kind)
        async with server.running() as url:
            engine = await sglang.connect(url, MODEL, name="far", deadlines=deadlines)
            try:
                if ready is not None:
                    await engine.update_weights(ready, 0)
                    server.asked.clear()
                return await use(server, engine)
            finally:
                await engine.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=30))


def turn(**changes):
    return request(0, **{"prompt": [1, 2, 3], "new": 4, **changes})


def test_a_sound_server_is_believed(store):
    async def use(server, engine):
        return await engine.generate(turn()), engine.caps, await engine.load(), engine.features, server.bodies(GENERATE)

    generation, caps, load, features, (body,) = with_server(use, ready=store)
    assert generation.token_ids.tolist() == [1, 2, 3, 4] and generation.weights_versions.tolist() == [0] * 4
    assert (caps.name, caps.kv_tokens, caps.max_context_tokens, caps.spans, caps.seeded) == (
        "far",
        200,
        64,
        True,
        False,
    )
    assert (load.kv_tokens_used, load.kv_tokens_free, load.running, load.waiting) == (60, 140, 2, 4)
    assert features.plugin and features.release == "0.5.23"
    assert body["sampling_params"]["ignore_eos"] is False and body["extra_key"] == "0.1"


def test_nothing_is_sampled_from_weights_that_did_not_come_from_the_store():
    async def use(server, engine):
        assert engine.weights_version == -1
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.generate(turn())
        return server.paths()

    assert GENERATE not in with_server(use)


def test_an_address_where_nothing_listens_is_an_engine_error():
    async def run():
        with pytest.raises(EngineError, match="gone failed in /model_info"):
            await sglang.connect(f"http://127.0.0.1:{free_port()}", MODEL, name="gone", deadlines=SHORT)

    asyncio.run(run())


def test_another_model_is_refused_when_connecting():
    async def run():
        server = faulty.FaultyServer()
        server.faults["/model_info"] = lambda reply: reply | {"model_type": "llama"}
        async with server.running() as url:
            with pytest.raises(EngineError, match="serves a llama model, the settings say qwen3"):
                await sglang.connect(url, MODEL, deadlines=SHORT)

    asyncio.run(run())


BROKEN_TURNS = {
    "dies": ("die", "failed in request r0"),
    "hangs": ("hang", "waited 0.4 s for request r0"),
    "cut": ("cut", "broken JSON"),
    "torn": ("torn", "failed in request r0"),
    "html": ("html", "cannot be read"),
    "too deep": ("deep", "broken JSON"),
    "503": (503, "refused request r0: 503, status 503"),
    "another's": (lambda r: r | {"meta_info": r["meta_info"] | {"id": "other"}}, "is one to 'other'"),
    "too few log-probabilities": (
        lambda r: r | {"meta_info": r["meta_info"] | {"output_token_logprobs": [[-1.0, 1, None]]}},
        "1 log-probabilities for 4 ids",
    ),
    "log-probabilities of other ids": (lambda r: r | {"output_ids": [4, 3, 2, 1]}, "or for other ids"),
    "no number": (
        lambda r: (
            r | {"meta_info": r["meta_info"] | {"output_token_logprobs": [[None, i, None] for i in (1, 2, 3, 4)]}}
        ),
        "give no finite number: log-probability nan",
    ),
    "spans with a hole": (
        lambda r: r | {"meta_info": r["meta_info"] | {"weight_versions": [{"version": "0", "start": 1, "end": 4}]}},
        "leave ids without a version",
    ),
    "spans too short": (
        lambda r: r | {"meta_info": r["meta_info"] | {"weight_versions": [{"version": "0", "start": 0, "end": 3}]}},
        "cover 3 of 4",
    ),
    "ended early": (
        lambda r: {
            "output_ids": [],
            "meta_info": r["meta_info"] | {"output_token_logprobs": [], "weight_versions": []},
        },
        "ended at its limit 4 with 0 ids",
    ),
    "unknown reason": (lambda r: r | {"meta_info": r["meta_info"] | {"finish_reason": {"type": "tired"}}}, "tired"),
    "nothing": (lambda r: [], "cannot be read"),
}


@pytest.mark.parametrize("fault, complaint", BROKEN_TURNS.values(), ids=BROKEN_TURNS.keys())
def test_a_broken_turn_is_an_engine_error_with_its_name_and_is_sent_only_once(store, fault, complaint):
    async def use(server, engine):
        server.faults[GENERATE] = fault
        with pytest.raises(EngineError, match=complaint) as caught:
            await engine.generate(turn())
        assert "far" in str(caught.value)
        del server.faults[GENERATE]
        return len(server.bodies(GENERATE)), await engine.generate(turn())

    times, after = with_server(use, ready=store)
    assert times == 1 and len(after.token_ids) == 4


BROKEN_UPDATES = {
    "dies": ("die", "failed in the update to version 1"),
    "hangs": ("hang", "waited 0.4 s for the update to version 1"),
    "touched": (lambda r: {"success": False, "message": "weights updated, cache not flushed"}, "cache not flushed"),
    "500": (500, "refused the update to version 1: 500"),
    "some ranks": (
        lambda r: {"success": False, "message": f"Succeeded. | {wire.UNTOUCHED}: torn."},
        "refused the update to version 1: 400",
    ),
}


@pytest.mark.parametrize("fault, complaint", BROKEN_UPDATES.values(), ids=BROKEN_UPDATES.keys())
def test_after_an_update_of_unknown_outcome_nothing_is_sampled_until_one_succeeds(store, fault, complaint):
    async def use(server, engine):
        server.faults[UPDATE] = fault
        with pytest.raises(EngineError, match=complaint):
            await engine.update_weights(store, 1)
        assert server.paths()[-1] == CONTINUE, "a server is never left paused"
        with pytest.raises(EngineError, match="holds unknown weights"):
            await engine.generate(turn())
        with pytest.raises(EngineError, match="holds unknown weights"):
            await engine.score([1, 2])
        del server.faults[UPDATE]
        await engine.update_weights(store, 1)
        return engine.weights_version, await engine.generate(turn())

    version, generation = with_server(use, ready=store)
    assert version == 1 and set(generation.weights_versions.tolist()) == {1}


def test_an_update_that_is_refused_before_a_weight_is_touched_leaves_the_engine_in_use(store):
    async def use(server, engine):
        server.faults[UPDATE] = lambda reply: {"success": False, "message": f"{wire.UNTOUCHED}: torn."}
        version = server.version
        with pytest.raises(EngineError, match="far keeps weights 0: .*torn"):
            await engine.update_weights(store, 1)
        server.version = version
        assert server.paths() == [PREFETCH, "/pause_generation", UPDATE, CONTINUE]
        return engine.weights_version, await engine.generate(turn())

    version, generation = with_server(use, ready=store)
    assert version == 0 and set(generation.weights_versions.tolist()) == {0}


def test_a_version_is_read_ahead_until_it_is_there_before_the_server_is_paused(store):
    async def use(server, engine):
        answers = iter([wire.NOT_YET, wire.NOT_YET, ""])

        def slow(reply):
            text = next(answers)
            return {"success": False, "message": text} if text else reply

        server.faults[PREFETCH] = slow
        await engine.update_weights(store, 1)
        return server.paths()

    paths = with_server(use, ready=store, deadlines=sglang.Deadlines())
    assert paths == [PREFETCH, PREFETCH, PREFETCH, "/pause_generation", UPDATE, CONTINUE]


def test_a_version_that_cannot_be_read_ahead_is_refused_without_a_pause(store):
    async def use(server, engine):
        server.faults[PREFETCH] = lambda reply: {"success": False, "message": "rank 1: torn"}
        with pytest.raises(EngineError, match="keeps weights 0: .*rank 1: torn"):
            await engine.update_weights(store, 1)
        server.faults[PREFETCH] = lambda reply: {"success": False, "message": wire.NOT_YET}
        with pytest.raises(EngineError, match="waited 0.4 s for reading version 1 ahead"):
            await engine.update_weights(store, 1)
        return server.paths(), await engine.generate(turn())

    paths, generation = with_server(use, ready=store)
    assert set(paths) == {PREFETCH} and len(generation.token_ids) == 4


def test_a_server_that_reports_another_version_after_an_update_is_not_believed(store):
    async def use(server, engine):
        server.faults["/model_info"] = lambda reply: reply | {"weight_version": "0"}
        with pytest.raises(EngineError, match="reports weights 0 after the update to version 1"):
            await engine.update_weights(store, 1)
        with pytest.raises(EngineError, match="holds unknown weights"):
            await engine.generate(turn())
        with pytest.raises(EngineError, match="holds weights 0, not those of version 1"):
            await engine.verify(store, 1)

    with_server(use, ready=store)


def test_a_version_that_the_store_lacks_is_refused_before_the_server_is_asked(store):
    async def use(server, engine):
        for call in (engine.update_weights(store, 99), engine.verify(store, 99)):
            with pytest.raises(EngineError, match="keeps weights 0: version 99 is not in"):
                await call
        return server.asked

    assert with_server(use, ready=store) == []


def test_a_server_without_the_plugin_is_told_what_to_install(store):
    async def use(server, engine):
        with pytest.raises(EngineError, match=r"cannot read the weight store.*no-deps.*it is '0.5.15'"):
            await engine.update_weights(store, 0)
        return server.paths()

    assert UPDATE not in with_server(use, release="0.5.15", plugin=False, spans=False)


def test_a_server_without_spans_is_not_paused_for_an_update_so_that_no_turn_has_two_versions(store):
    async def use(server, engine):
        await engine.update_weights(store, 1)
        return engine.caps.spans, server.paths(), await engine.generate(turn())

    spans, paths, generation = with_server(use, ready=store, release="0.5.19", spans=False)
    assert not spans and paths == [PREFETCH, UPDATE]
    assert generation.weights_versions.tolist() == [1] * 4


def test_a_server_that_was_replaced_samples_nothing_before_it_has_weights_again(store):
    async def use(server, engine):
        server.version = "default"
        with pytest.raises(EngineError, match="from weights that are not from the store"):
            await engine.generate(turn())
        assert engine.weights_version == -1
        await engine.update_weights(store, 1)
        assert (await engine.generate(turn())).weights_versions.tolist() == [1] * 4
        server.version = "default"
        assert await engine.alive() and engine.weights_version == -1
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.generate(turn())

    with_server(use, ready=store)


def test_a_pause_of_the_caller_outlives_an_update(store):
    async def use(server, engine):
        await engine.pause("in_place")
        await engine.update_weights(store, 1)
        before = server.paths()
        await engine.resume()
        return before, server.paths()

    before, after = with_server(use, ready=store)
    assert before == ["/pause_generation", PREFETCH, UPDATE] and after == [*before, CONTINUE]


def test_prefixes_cached_under_other_weights_are_never_shared(store):
    async def use(server, engine):
        for version in (1, 0, 0):
            await engine.generate(turn())
            await engine.update_weights(store, version)
        await engine.generate(turn())
        return [body["extra_key"] for body in server.bodies(GENERATE)], server.bodies(UPDATE)

    keys, updates = with_server(use, ready=store)
    assert len(set(keys)) == 4
    assert all(body["flush_cache"] is True and body["load_format"] == "auto" for body in updates)


def test_names_on_the_wire_begin_no_other_name_so_that_an_abort_ends_one_turn(store):
    async def use(server, engine):
        server.hold.clear()
        tasks = [asyncio.ensure_future(engine.generate(turn(rid=rid))) for rid in ("a", "a1", "a11")]
        while len(server.bodies(GENERATE)) < 3:
            await asyncio.sleep(0.01)
        await engine.abort("a")
        await engine.abort("nobody")
        server.hold.set()
        await asyncio.gather(*tasks)
        return [body["rid"] for body in server.bodies(GENERATE)], server.bodies("/abort_request")

    names, aborts = with_server(use, ready=store, deadlines=sglang.Deadlines())
    assert [body["rid"] for body in aborts] == [next(name for name in names if name.endswith("/a"))]
    assert not any(a != b and a.startswith(b) for a in names for b in names)


def test_a_cancelled_turn_is_ended_on_the_server(store):
    async def use(server, engine):
        server.hold.clear()
        task = asyncio.ensure_future(engine.generate(turn()))
        while not server.bodies(GENERATE):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not server.bodies("/abort_request"):
            await asyncio.sleep(0.01)
        return server.bodies(GENERATE)[0]["rid"], server.bodies("/abort_request")

    name, aborts = with_server(use, ready=store, deadlines=sglang.Deadlines())
    assert aborts == [{"rid": name}]


def test_liveness_is_no_exception_and_never_asks_for_health(store):
    async def use(server, engine):
        alive = [await engine.alive()]
        for fault in ("die", "hang", 500, "cut"):
            server.faults["/model_info"] = fault
            alive.append(await engine.alive())
        return alive, [path for path, _ in server.asked]

    alive, asked = with_server(use, ready=store)
    assert alive == [True, False, False, False, False] and "/health" not in asked


@contextlib.contextmanager
def no_file_left():
    """This process may open nothing more for as long as this lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_may_open_no_more_files_blames_itself_by_name_and_no_server(store):
    async def use(server, engine):
        with no_file_left():
            with pytest.raises(LimitError, match=r"request r0 did not reach far: .*RLIMIT_NOFILE = \d+ .*ulimit -Hn"):
                await engine.generate(turn())
            with pytest.raises(LimitError, match="model_info did not reach far"):
                await engine.alive()
            assert await watch.answers(engine, 1.0)
            with pytest.raises(LimitError, match="loads did not reach far"):
                await watch.kv_tokens_used(engine, 1.0)
        return server.asked, await engine.generate(turn())

    asked, after = with_server(use, ready=store)
    assert [path for path, _ in asked] == [GENERATE] and len(after.token_ids) == 4


UNSENDABLE = {
    "temperature": (math.inf, "temperature = inf must be a finite number"),
    "top_p": (math.nan, "top_p = nan must be a finite number"),
    "top_k": (2.5, "top_k = 2.5 must be a whole number"),
    "stop": ((7, math.nan), r"stop_ids\[1\] = nan must be a whole number"),
    "new": ("4", "max_new_tokens = '4' must be a whole number"),
    "prompt": ([1, math.nan], "id nan must be a whole number"),
}


@pytest.mark.parametrize("field", UNSENDABLE)
def test_what_is_no_number_that_json_knows_is_refused_by_field_and_value_before_it_is_sent(store, field):
    value, complaint = UNSENDABLE[field]

    async def use(server, engine):
        with pytest.raises(ValueError, match=f"request r0: {complaint}"):
            await engine.generate(turn(**{field: value}))
        return server.bodies(GENERATE)

    assert with_server(use, ready=store) == []


def test_numbers_of_numpy_are_sent_as_numbers(store):
    async def use(server, engine):
        few = turn(new=np.int64(4), top_k=np.int32(5), temperature=np.float32(0.5), stop=(np.int64(39),))
        await engine.generate(dataclasses.replace(few, seed=np.uint32(7), prompt_ids=np.array([1, 2, 3], np.int32)))
        return server.bodies(GENERATE)[0]

    body = with_server(use, ready=store)
    assert body["input_ids"] == [1, 2, 3] and body["sampling_params"]["stop_token_ids"] == [39]
    assert [body["sampling_params"][name] for name in ("top_k", "temperature", "sampling_seed")] == [5, 0.5, 7]


@pytest.mark.parametrize("fault", ["refused", "no number"])
def test_a_sequence_that_diverges_on_the_server_is_known_as_such(store, fault):
    diverges = {"success": False, "message": f"embedded: weights 0 {DIVERGED} (r0)"}

    async def use(server, engine):
        server.faults[GENERATE] = BROKEN_TURNS[fault][0] if fault in BROKEN_TURNS else lambda reply: diverges
        with pytest.raises(DivergedError, match=f"far.*{DIVERGED}"):
            await engine.generate(turn())

    with_server(use, ready=store)


def test_a_load_without_end_is_an_engine_error(store):
    async def use(server, engine):
        server.faults["/v1/loads"] = lambda reply: {"loads": [reply["loads"][0] | {"num_used_tokens": math.inf}]}
        with pytest.raises(EngineError, match="far: a load cannot be read"):
            await engine.load()

    with_server(use, ready=store)


def test_a_turn_that_the_server_ends_for_want_of_room_is_an_abort_with_its_ids(store):
    def aborted(reply):
        meta = reply["meta_info"] | {"finish_reason": {"type": "abort", "message": "out of memory"}}
        meta |= {
            "output_token_logprobs": meta["output_token_logprobs"][:2],
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        }
        return {"output_ids": [1, 2], "meta_info": meta}

    async def use(server, engine):
        server.faults[GENERATE] = aborted
        return await engine.generate(turn())

    generation = with_server(use, ready=store)
    assert generation.finish_reason is FinishReason.ABORT and generation.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_survives_the_way_over_the_wire(seed):
    sent = wire.generate_body(dataclasses.replace(request(0, prompt=[1]), seed=seed), "r", "k")["sampling_params"]
    assert -(2**63) <= sent["sampling_seed"] < 2**63 and wire.unsigned(sent["sampling_seed"]) == seed


def test_a_server_that_counts_a_request_as_running_for_a_moment_is_asked_again_to_flush(store):
    async def use(server, engine):
        refusals = [{"success": False, "message": "Flush cache failed."}] * 2
        server.faults["/flush_cache"] = lambda reply: refusals.pop() if refusals else reply
        await engine.flush()
        asked = len(server.bodies("/flush_cache"))
        server.faults["/flush_cache"] = 400
        with pytest.raises(EngineError, match="/flush_cache"):
            await engine.flush()
        return asked

    assert with_server(use, ready=store) == 3
