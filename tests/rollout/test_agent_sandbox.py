"""Episodes and groups against the real sandbox: real processes run the code, real processes grade the answers."""

import asyncio
import contextlib
import json
import os
import re

import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.data import files
from rstar2_jax.rollout import agent, engine, groups, pool
from rstar2_jax.tools import offer, protocol, python
from rstar2_jax.types import FinishReason, Prompt, StopReason, Verdict
from rstar2_sandbox import client as sandbox_client
from rstar2_sandbox import jail, local, metrics

pytestmark = pytest.mark.e2e

TOOL = "execute_python_code_with_standard_io"
ROLLOUT = settings.Rollout(
    prompts_per_step=2,
    group_size=2,
    oversample=4,
    max_prompt_tokens=200,
    max_response_tokens=3000,
    max_turns=10,
    max_calls_per_turn=4,
    max_reply_tokens=200,
    deadline_s=60.0,
)
LIMITS = settings.Sandbox(run_limit_s=1.0)


class Script:
    """An engine that plays given turns; which of several scripts is played follows from the request's seed."""

    caps = engine.Caps(name="script", vocab_size=10_000, max_context_tokens=8192, kv_tokens=100_000)
    weights_version = 0

    def __init__(self, tokenizer, *scripts):
        self.tokenizer, self.scripts = tokenizer, scripts

    async def ready(self, limit_s):
        """There is always room."""

    async def generate(self, request):
        _, sample, turn = re.fullmatch(r"(.*)/(\d+)/(\d+)-[0-9a-f]{8}", request.rid).groups()
        script = self.scripts[int(sample) % len(self.scripts)]
        ids = self.tokenizer.encode(script[int(turn)] + "<|im_end|>")
        return engine.Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )


@pytest.fixture(scope="module")
def sandbox():
    with local.start_local(slots=2) as running:
        yield running


@pytest.fixture(scope="module")
def chat():
    return files.load_chat(settings.Task(source="box", tokenizer="box", template="box"))


def call(code, **more):
    body = json.dumps({"name": TOOL, "arguments": {"code": code, **more}})
    return f"<tool_call>\n{body}\n</tool_call>"


def with_sandbox(sandbox, use):
    """What `use(client)` gives, with a client of its own."""

    async def inside():
        async with sandbox_client.Client(sandbox.redis_url, run="agent-test") as client:
            return await use(client)

    return asyncio.run(inside())


def test_each_kind_of_call_comes_back_with_its_status_and_in_its_place(sandbox, chat):
    script = [
        "a</reason>" + call("print(6*7)") + call("print(input()[::-1])", input="abc\n"),
        "b</reason>" + call("1/0") + call("while True: pass") + call("x = 1"),
        "c</reason>" + call("print('</tool_call>')") + "<tool_call>{</tool_call>",
        "d</reason>\n<answer>\\boxed{42}</answer>",
    ]

    async def use(client):
        registry = protocol.Registry([python.PythonTool(client, TOOL, LIMITS)])
        prompt = Prompt(id="p", question="6*7", answer="42", source="s")
        return await agent.run_episode(
            Script(chat.tokenizer, script), chat, registry, prompt, sample_index=0, seed=1, settings=ROLLOUT
        )

    trajectory = with_sandbox(sandbox, use)
    assert trajectory.stop_reason is StopReason.ANSWERED
    statuses = [[result.status.value for result in turn.results] for turn in trajectory.turns]
    assert statuses[0] == ["ok", "ok"]
    assert statuses[1][0] == "error" and statuses[1][1] in ("timeout_wall", "timeout_cpu") and statuses[1][2] == "ok"
    assert statuses[2] == ["ok", "parse_error"]
    first, second, third = (chat.tokenizer.decode(t.token_ids[~t.mask].tolist()) for t in trajectory.turns[:3])
    assert first.index("42") < first.index("cba")
    assert "ZeroDivisionError" in second and "Timed out" in second and "nothing was printed" in second
    assert "</tool_call>" in third and "not understood" in third


def test_a_step_of_groups_is_sampled_executed_and_graded_and_gives_the_same_again(sandbox, chat):
    right = ["a</reason>" + call("print(6*7)"), "b</reason>\n<answer>\\boxed{42}</answer>"]
    wrong = ["c</reason>" + call("1/0"), "d</reason>\n<answer>\\boxed{41}</answer>"]

    def draw(offset, count):
        return [Prompt(id=f"p{offset + i}", question="6*7", answer="42", source="s") for i in range(count)]

    async def use(client):
        sampler = groups.Sampler(
            engine=pool.Pool([Script(chat.tokenizer, right, wrong)], settings.Fleet(probe_s=0)),
            chat=chat,
            tools=protocol.Registry([python.PythonTool(client, TOOL, LIMITS)]),
            grader=client,
            rollout=ROLLOUT,
            roc=settings.Roc(),
            seed=3,
        )
        return [await groups.collect(sampler, draw, step=step) for step in (0, 0)]

    one, again = with_sandbox(sandbox, use)
    for collection in (one, again):
        assert not collection.faults and collection.unscored == 0
        for group in collection.groups:
            assert [t.verdict for t in group.trajectories] == [Verdict.CORRECT, Verdict.WRONG] * 2
            assert group.p_err == (0.0, 1.0) * 2 and group.p_format == (0.0,) * 4
            assert [t.answer for t in group.trajectories] == ["42", "41"] * 2
    ids = [[t.turns[0].token_ids.tolist() for g in c.groups for t in g.trajectories] for c in (one, again)]
    assert ids[0] == ids[1]


def test_each_trajectory_has_a_session_of_its_own_that_ends_with_it(sandbox, chat):
    task = settings.Task(source="box", tokenizer="box", template="box", tools=("session", "sql"))
    query = json.dumps({"name": "run_sql_script", "arguments": {"script": "select 6 * 7;"}})

    def script(value):
        return [
            "a</reason>" + call(f"x = {value}") + f"<tool_call>\n{query}\n</tool_call>",
            "b</reason>" + call("print(globals().get('x', 'nothing'))"),
            "c</reason>\n<answer>\\boxed{42}</answer>",
        ]

    async def use(client):
        registry = offer.registry(task, client, LIMITS)
        await offer.self_test(task, registry)
        prompt = Prompt(id="p", question="6*7", answer="42", source="s")
        scripted = Script(chat.tokenizer, script(1), script(2))
        episodes = [
            await asyncio.gather(
                *(
                    agent.run_episode(scripted, chat, registry, prompt, sample_index=n, seed=n, settings=ROLLOUT)
                    for n in (0, 1)
                )
            )
            for _ in range(2)
        ]
        node = next(iter((await metrics.look(client._redis)).nodes))
        await asyncio.sleep(1.5)  # a node reports once a second
        return [t for both in episodes for t in both], (await metrics.look(client._redis)).nodes[node]["sessions"]

    trajectories, live = with_sandbox(sandbox, use)
    replies = [chat.tokenizer.decode(t.turns[1].token_ids[~t.turns[1].mask].tolist()) for t in trajectories]
    assert [re.findall("[12]|nothing", reply) for reply in replies] == [["1"], ["2"]] * 2
    assert all(t.turns[0].results[1].stdout.endswith("42\n") for t in trajectories) and live == 0


def test_a_tool_that_the_nodes_do_not_have_is_refused_before_any_episode(sandbox):
    task = settings.Task(source="box", tokenizer="box", tools=("python", "octave"))

    async def use(client):
        await offer.self_test(task, offer.registry(task, client, settings.Sandbox(run_limit_s=20.0)))

    installed = os.access(jail.OCTAVE[0], os.X_OK)
    refused = pytest.raises(RuntimeError, match="'octave'.*install it")
    with contextlib.nullcontext() if installed else refused:
        with_sandbox(sandbox, use)
