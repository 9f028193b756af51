"""The endpoint over real HTTP: the agent loop in the real sandbox, streams, refusals, faults, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import types
from typing import Any

import aiohttp
import jax
import pytest
from aiohttp import web

from rstar2_jax.completions import front
from rstar2_jax.model import decoder
from rstar2_jax.rollout.engine import EngineError
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.settings import Endpoint, Model
from rstar2_jax.weights import publish
from tests.completions.conftest import NAME, ROLLOUT, TASK, Script

pytestmark = pytest.mark.e2e

MODEL = Model(
    family="qwen3", vocab_size=320, d_model=32, d_mlp=64, layers=2, heads=2, kv_heads=1, head_dim=16, max_positions=4096
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

DEEP_TOOLS = (  # read by Python, and too deep to be written by it a few calls further down
    f'{{"model": "{NAME}", "messages": [{{"role": "user", "content": "q"}}], "tools": [{{"type": "function", '
    '"function": {"name": "f", "parameters": ' + '{"a":' * 900 + "1" + "}" * 900 + "}}]}"
).encode()


def call(code, name=TASK.tool_name):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


TURNS = ["I run it.</reason>\n" + call("print(6*7)"), "Good.</reason>\n<answer>\\boxed{42}</answer>"]


def sampling(store, *, context=4000):
    """Opens an engine that samples from random weights: it writes gibberish, for as long as it may."""

    async def made():
        publish.publish(decoder.init_params(MODEL, jax.random.key(0)), MODEL, store, 0, keep=1)
        opened = JaxEngine(MODEL, slots=4, context_tokens=context, prefill_chunk_tokens=64, decode_steps=4)
        await opened.update_weights(str(store), 0)
        return opened

    return made


def message(body):
    return body["choices"][0]["message"]


def test_a_question_is_answered_with_the_help_of_the_sandbox(serve, chat):
    async def use(served):
        return await served.post()

    status, body = serve(Script(chat, TURNS), use)
    assert status == 200 and body["object"] == "chat.completion" and body["model"] == NAME
    assert message(body)["content"] == "<answer>\\boxed{42}</answer>"
    assert message(body)["reasoning_content"].startswith("I run it.\n<tool_call>")
    assert "<tool_response>\n42\n</tool_response>" in message(body)["reasoning_content"]
    choice, usage = body["choices"][0], body["usage"]
    assert choice["finish_reason"] == "stop" and choice["episode"]["turns"] == 2
    sampled = sum(len(chat.tokenizer.encode(turn)) + 1 for turn in TURNS)
    thought = sampled - len(chat.tokenizer.encode("<answer>\\boxed{42}</answer>")) - 1
    assert usage["completion_tokens"] == sampled and usage["prompt_tokens"] == len(chat.prompt_ids("6*7?"))
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - thought) <= 1


def test_a_question_without_history_has_the_ids_that_training_asks_with(serve, chat):
    script = Script(chat, TURNS)
    serve(script, lambda served: served.post("What is 6*7?"))
    assert list(script.requests[0].prompt_ids) == chat.prompt_ids("What is 6*7?")


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("stop", [[], ["boxed"]])
def test_a_stream_tells_what_an_answer_at_once_tells(serve, chat, separate, stop):
    async def use(served):
        fields = {"seed": 5, "separate_reasoning": separate, "stop": stop, "n": 2}
        return await served.post(**fields), await served.stream(stream_options={"include_usage": True}, **fields)

    (_, body), events = serve(Script(chat, TURNS), use)
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"] == body["usage"]
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    for choice in body["choices"]:
        deltas = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert deltas[0]["delta"]["role"] == "assistant"
        for field in ("content", "reasoning_content"):
            assert "".join(d["delta"].get(field, "") for d in deltas) == choice["message"].get(field, "")
        assert [d["finish_reason"] for d in deltas][-1] == choice["finish_reason"]
        assert all(d["finish_reason"] is None for d in deltas[:-1])
        assert len(deltas) > 5
        assert deltas[-1]["episode"] == choice["episode"]


def test_the_model_s_ids_are_told_while_it_samples_them(serve, tmp_path):
    async def use(served):
        fields = {"max_tokens": 60, "seed": 3}  # random weights: of many more ids one would be the end of a turn
        return await served.stream(**fields), await served.post(**fields), await served.post(**fields)

    events, (_, body), (_, again) = serve(sampling(tmp_path / "w"), use)
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    told = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert len(told) > 1 and "".join(told) == message(body)["reasoning_content"]
    assert message(body) == message(again) and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 60


def test_choices_of_one_seed_differ_and_each_is_given_again_by_its_own(serve, tmp_path):
    async def use(served):
        _, many = await served.post(max_tokens=20, seed=3, n=3)
        seeds = [choice["episode"]["seed"] for choice in many["choices"]]
        alone = [await served.post(max_tokens=20, seed=seed) for seed in seeds]
        _, cold = await served.post(max_tokens=20, temperature=0, n=2)
        return many, [body for _, body in alone], cold

    many, alone, cold = serve(sampling(tmp_path / "w"), use)
    texts = [choice["message"]["reasoning_content"] for choice in many["choices"]]
    assert len(set(texts)) == 3 and many["choices"][0]["episode"]["seed"] == 3
    assert texts == [message(body)["reasoning_content"] for body in alone]
    greedy = [choice["message"]["reasoning_content"] for choice in cold["choices"]]
    assert greedy[0] == greedy[1]


def test_tools_of_the_client_are_called_by_the_client(serve, chat):
    script = Script(chat, ["I look.</reason>\nOne moment.\n" + call("x", "weather")])

    async def use(served):
        first = await served.post("Weather?", tools=[TOOL])
        return first, await served.stream("Weather?", tools=[TOOL])

    (status, body), events = serve(script, use)
    assert status == 200 and body["choices"][0]["finish_reason"] == "tool_calls"
    assert message(body)["content"] == "One moment." and message(body)["reasoning_content"] == "I look."
    (made,) = message(body)["tool_calls"]
    assert made["function"]["name"] == "weather" and json.loads(made["function"]["arguments"]) == {"code": "x"}
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta] == [made["function"]]
    told = [delta["content"] for delta in deltas if delta.get("content")]
    assert len(told) > 1 and "".join(told) == "One moment."
    shown = chat.tokenizer.decode(script.requests[0].prompt_ids)
    assert "weather" in shown and TASK.tool_name not in shown


def test_a_conversation_with_a_tool_s_reply_goes_on(serve, chat):
    script = Script(chat, ["</reason>It rains."])
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]  # fmt: skip
    status, body = serve(script, lambda served: served.post(messages=said, tools=[TOOL]))
    assert status == 200 and message(body)["content"] == "It rains." and body["choices"][0]["finish_reason"] == "stop"
    shown = chat.tokenizer.decode(script.requests[0].prompt_ids)
    assert "Be brief." in shown and "<tool_response>\nrain\n</tool_response>" in shown


def test_an_episode_that_meets_the_turn_limit_has_no_answer(serve, chat):
    turns = [TURNS[0]] * ROLLOUT.max_turns
    status, body = serve(Script(chat, turns), lambda served: served.post())
    assert status == 200 and body["choices"][0]["finish_reason"] == "length" and message(body)["content"] == ""
    assert body["choices"][0]["episode"]["stop_reason"] == "turns"


async def settled(served):
    """The endpoint once nothing is in flight: a stream has reached its client a little before it is counted."""
    for _ in range(500):
        if not served.counts.in_flight:
            break
        await asyncio.sleep(0.01)
    return served


async def fetch(served, method, path, **more):
    async with served.http.request(method, served.url + path, **more) as response:
        return response.status, await response.json(), response.headers


def test_every_refusal_has_openai_s_form(serve, chat):
    json_type, path = {"Content-Type": "application/json"}, "/v1/chat/completions"

    async def use(served):
        long = {"model": NAME, "messages": [{"role": "user", "content": "x" * 5000}]}
        return {
            "route": await fetch(served, "GET", "/v1/engines"),
            "method": await fetch(served, "GET", path),
            "model": await fetch(served, "GET", "/v1/models/gpt"),
            "json": await fetch(served, "POST", path, data=b"{", headers=json_type),
            "nan": await fetch(served, "POST", path, data=b'{"temperature": NaN}', headers=json_type),
            "deep": await fetch(served, "POST", path, data=b"[" * 200_000, headers=json_type),
            "tools": await fetch(served, "POST", path, data=DEEP_TOOLS, headers=json_type),
            "type": await fetch(served, "POST", path, data=b"{}", headers={"Content-Type": "text/plain"}),
            "large": await fetch(served, "POST", path, data=io.BytesIO(b" " * (9 * 2**20)), headers=json_type),
            "other": await fetch(served, "POST", path, json={**long, "model": "gpt"}),
            "long": await fetch(served, "POST", path, json=long),
            "huge": (*(await served.post("x" * 900_000)), None),
            "budget": (*(await served.post(max_tokens=1001)), None),
            "min_p": (*(await served.post(min_p=0.2)), None),
        }

    found = serve(Script(chat, TURNS), use)
    statuses = {what: status for what, (status, _, _) in found.items()}
    assert statuses == {
        "route": 404, "method": 405, "model": 404, "json": 400, "nan": 400, "deep": 400, "tools": 400, "type": 415,
        "large": 413, "other": 404, "long": 400, "huge": 400, "budget": 400, "min_p": 400,
    }  # fmt: skip
    for _, body, _ in found.values():
        assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    assert found["other"][1]["error"]["code"] == "model_not_found" and NAME in found["other"][1]["error"]["message"]
    assert found["long"][1]["error"]["code"] == found["huge"][1]["error"]["code"] == "context_length_exceeded"
    assert "tokens, the context" in found["long"][1]["error"]["message"]
    assert "characters, the context" in found["huge"][1]["error"]["message"]
    assert found["budget"][1]["error"]["param"] == "max_tokens" and "1000" in found["budget"][1]["error"]["message"]
    assert found["min_p"][1]["error"]["param"] == "min_p"
    assert found["method"][2]["Allow"] == "POST"
    assert found["tools"][1]["error"]["param"] == "tools" and "100 levels" in found["tools"][1]["error"]["message"]


def test_a_fault_of_the_engine_is_a_5xx_and_never_an_answer(serve, chat):
    async def use(served):
        return await served.post(), await served.post(stream=True), served.counts.faults

    at_once, streamed, faults = serve(Script(chat, [EngineError("the device is gone")]), use)
    for status, body in (at_once, streamed):
        assert status == 503 and body["error"]["type"] == "server_error" and "engine" in body["error"]["message"]
    assert faults == 2


def test_a_turn_that_outlasts_its_deadline_is_a_504(serve, chat):
    hurried = dataclasses.replace(ROLLOUT, deadline_s=0.2)
    status, body = serve(Script(chat, [30.0]), lambda served: served.post(), rollout=hurried)
    assert status == 504 and "0.2 s" in body["error"]["message"]


def test_a_fault_in_the_middle_of_a_stream_ends_it_with_an_error_and_without_done(serve, chat):
    async def use(served):
        events = await served.stream()
        return events, dataclasses.asdict((await settled(served)).counts)

    events, counts = serve(Script(chat, [TURNS[0], EngineError("the device is gone")]), use)
    assert counts == {"served": 0, "refused": 0, "faults": 1, "choices": 0, "in_flight": 0}
    assert events[-1]["error"]["type"] == "server_error" and "[DONE]" not in events
    assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])


def test_what_was_told_to_the_end_is_counted_as_served(serve, chat):
    async def use(served):
        await served.post(n=2)
        assert (await served.stream())[-1] == "[DONE]"
        return dataclasses.asdict((await settled(served)).counts)

    counts = serve(Script(chat, TURNS), use)
    assert counts == {"served": 2, "refused": 0, "faults": 0, "choices": 3, "in_flight": 0}


def test_a_call_that_the_sandbox_cannot_take_is_a_fault_of_the_server(serve, chat):
    async def use(served):
        first = await served.post()
        await served.sandbox.close()
        return first, await served.post()

    (status, _), (broken, body) = serve(Script(chat, TURNS), use)
    assert status == 200 and broken in (500, 503)
    assert body["error"]["type"] == "server_error" and "waited for tool" in body["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_takes_its_generation_with_it(serve, tmp_path, stream):
    async def use(served):
        for _ in range(50):  # gibberish may end by itself before all of it was seen to run
            asked = asyncio.create_task(served.post(max_tokens=1000, stream=stream, n=3))
            while not asked.done() and (await served.pool.load()).running < 3:
                await asyncio.sleep(0.001)
            if not asked.done():
                break
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
        for _ in range(500):
            load = await served.pool.load()
            if load.running == load.waiting == served.counts.in_flight == 0:
                return True
            await asyncio.sleep(0.01)
        return False

    assert serve(sampling(tmp_path / "w"), use)


def test_beyond_what_may_be_in_flight_a_request_is_told_to_come_again(serve, chat):
    async def use(served):
        waits = asyncio.create_task(served.post())
        while not served.counts.in_flight:
            await asyncio.sleep(0.01)
        async with served.http.post(
            f"{served.url}/v1/chat/completions", json={"model": NAME, "messages": [{"role": "user", "content": "q"}]}
        ) as response:
            refused = response.status, await response.json(), response.headers["Retry-After"]
        return refused, await waits, await served.post()

    (status, body, after), (first, _), (last, _) = serve(Script(chat, [1.0]), use, most_choices=1)
    assert status == 429 and body["error"]["code"] == "rate_limit_exceeded" and int(after) >= 1
    assert first == last == 200


def test_models_and_health_are_told(serve, chat):
    script = Script(chat, TURNS)

    async def use(served):
        await served.post()
        models = await fetch(served, "GET", "/v1/models")
        one = await fetch(served, "GET", f"/v1/models/{NAME}")
        healthy = await fetch(served, "GET", "/health")
        await served.pool.close()
        served.pool._balancer.take_down(0)
        return models, one, healthy, await fetch(served, "GET", "/health")

    models, one, healthy, ill = serve(script, use)
    assert models[1]["data"] == [one[1]] and one[1]["id"] == NAME and one[1]["max_model_len"] == 4000
    assert healthy[0] == 200 and healthy[1]["served"] == 1 and healthy[1]["in_flight"] == 0
    assert ill[0] == 503


def test_a_slow_reader_gets_everything(serve, tmp_path):
    async def use(served):
        body = {"model": NAME, "messages": [{"role": "user", "content": "q"}], "stream": True, "max_tokens": 200}
        timeout = aiohttp.ClientTimeout(total=120)
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body, timeout=timeout) as response:
            text = b""
            async for part in response.content.iter_chunked(512):
                text += part
                await asyncio.sleep(0.01)
        return text

    assert serve(sampling(tmp_path / "w"), use).endswith(b"data: [DONE]\n\n")


class Flood(front.Front):
    """Tells an answer without end, of three choices."""

    def _prepare(self, body):
        return types.SimpleNamespace(asked=types.SimpleNamespace(n=3, stream=True))

    def _flush_timeline(self):
        """There is none."""

    async def _tell_all(self, work, events):
        while True:
            events.put_nowait({"told": "x" * 100_000})
            await asyncio.sleep(0.001)


def test_a_client_that_never_reads_is_dropped_and_gives_its_places_back():
    async def use():
        opened: Any = types.SimpleNamespace(engine=None)
        flood = Flood(opened, dataclasses.replace(ROLLOUT, deadline_s=0.3), Endpoint(), NAME)
        runner = web.AppRunner(flood.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: 2\r\n\r\n{}")
            while not flood.counts.in_flight:
                await asyncio.sleep(0.01)
            held = flood.counts.in_flight
            for _ in range(1000):
                if not flood.counts.in_flight:
                    break
                await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**20):  # what the network still held, and no more than that
                    pass
            writer.close()
            return held, flood.counts
        finally:
            await runner.cleanup()

    held, counts = asyncio.run(asyncio.wait_for(use(), timeout=60))
    assert held == 3 and (counts.in_flight, counts.served, counts.choices) == (0, 0, 0)
