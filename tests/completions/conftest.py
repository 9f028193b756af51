"""A tier for the endpoint: the real sandbox and its tools, around an engine that plays turns or one that samples."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import numpy as np
import pytest

from rstar2_jax import endpoint, settings
from rstar2_jax.data import files
from rstar2_jax.io import timeline
from rstar2_jax.rollout import engine, pool, tier
from rstar2_jax.tools import offer
from rstar2_jax.types import FinishReason
from rstar2_sandbox import client as sandbox_client
from rstar2_sandbox import local

NAME = "tiny"
TASK = settings.Task(source="box", tokenizer="box", template="rstar2")
ROLLOUT = settings.Rollout(
    prompts_per_step=1, group_size=1, oversample=1, max_prompt_tokens=3000, max_response_tokens=1000, max_turns=4,
    max_reply_tokens=100, deadline_s=60.0,
)  # fmt: skip


class Script:
    """An engine that plays given turns, a few ids at a time; a turn may be an error to raise, or seconds to wait."""

    caps = engine.Caps(name="script", vocab_size=10_000, max_context_tokens=4000, kv_tokens=100_000)
    weights_version = 0

    def __init__(self, chat, turns):
        self.chat, self.turns, self.requests, self.living = chat, turns, [], True

    async def generate(self, request):
        self.requests.append(request)
        step = self.turns[int(request.rid.rpartition("/")[2].partition("-")[0])]
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = "too late"
        ids = [*self.chat.tokenizer.encode(step), *self.chat.end_ids]
        for start in range(0, len(ids), 3):
            if request.on_ids is not None:
                request.on_ids(start, ids[start : start + 3])
            await asyncio.sleep(0)
        return engine.Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )

    async def alive(self):
        return self.living

    async def close(self):
        self.living = False


@dataclasses.dataclass
class Served:
    """A running endpoint and a client of it."""

    url: str
    counts: object
    http: aiohttp.ClientSession
    pool: pool.Pool
    sandbox: sandbox_client.Client

    async def post(self, content="6*7?", **fields):
        """(status, body) of a completion."""
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], **fields}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def stream(self, content="6*7?", **fields):
        """Events of a streamed completion; the last is "[DONE]" where the stream ended well."""
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], "stream": True, **fields}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def sandbox():
    with local.start_local(slots=2) as running:
        yield running


@pytest.fixture(scope="session")
def chat():
    return files.load_chat(TASK, offer.schemas(TASK))


@pytest.fixture
def serve(sandbox, chat, tmp_path):
    """serve(engine, use, **settings): what `use(served)` gives while the engine is behind the endpoint."""

    def run(made, use, *, rollout=ROLLOUT, **limits):
        async def inside():
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(sandbox_client.Client(sandbox.redis_url, run="endpoint-test"))
                engines = pool.Pool([await made() if callable(made) else made], settings.Fleet(probe_s=0))
                stack.push_async_callback(engines.close)
                opened = tier.Tier(
                    engine=engines,
                    chat=chat,
                    tools=offer.registry(TASK, client, settings.Sandbox(run_limit_s=2.0)),
                    grader=client,
                    rules="",
                    timeline=timeline.Timeline(tmp_path),
                )
                where = settings.Endpoint(port=0, **limits)
                url, counts = await stack.enter_async_context(endpoint.served(opened, rollout, where, NAME))
                http = await stack.enter_async_context(aiohttp.ClientSession())
                return await use(Served(url, counts, http, engines, client))

        return asyncio.run(asyncio.wait_for(inside(), timeout=300))

    return run
