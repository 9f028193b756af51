"""Steps of reinforcement learning whose rollouts a real SGLang server on two ranks samples, and which outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys

import jax
import pytest

from rstar2_jax import begin, settings
from rstar2_jax.data import files, prompts
from rstar2_jax.learner import batch, objective, update
from rstar2_jax.learner import step as learning
from rstar2_jax.model import hf
from rstar2_jax.reward import outcome
from rstar2_jax.rollout import groups, jax_engine, pool, sglang
from rstar2_jax.tools import cluster, protocol, python
from rstar2_jax.types import StopReason
from rstar2_jax.weights import publish
from tests.rollout import engines

pytestmark = pytest.mark.sglang
MODEL = settings.Model(
    family="qwen3",
    vocab_size=320,
    d_model=64,
    d_mlp=128,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=32,
    rope_theta=100.0,
    max_positions=512,
)
TASK = settings.Task(source="box", tokenizer="box", template="box")
ROLLOUT = settings.Rollout(
    prompts_per_step=3,
    group_size=4,
    oversample=8,
    max_prompt_tokens=32,
    max_response_tokens=128,
    max_turns=4,
    max_reply_tokens=48,
    engine_slots=16,
    prefill_chunk_tokens=16,
    deadline_s=400.0,
)
ROC = settings.Roc(reject_equal=False)
LEARNER = settings.Learner(optimizer=settings.Optimizer(lr=1e-3, warmup_steps=1), microbatch_rows=4, row_tokens=160)
SFT_STEPS = 320  # of 400, three quarters of the answers are right; of 160, one in forty


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Parameters that make tool calls and answer some problems."""
    workdir = tmp_path_factory.mktemp("sft") / "run"
    sizes = {n: getattr(MODEL, n) for n in ("d_model", "d_mlp", "layers", "heads", "kv_heads", "head_dim")}
    bindings = [f"Model.{name}={value}" for name, value in sizes.items()]
    bindings += ["Demonstrations.tool_share=0.9", "Optimizer.lr=4e-3"]
    line = [sys.executable, "-m", "rstar2_jax.launch", f"--workdir={workdir}", f"--steps={SFT_STEPS}"]
    line += [f"--gin_file={name}" for name in ("sft.gin", "model/box.gin", "scale/box.gin")]
    line += [f"--gin_bindings={text}" for text in bindings]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": f"{engines.REPOSITORY}:{engines.REPOSITORY / 'sandbox'}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=engines.START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return begin.load_params(str(workdir), MODEL, 0)


@pytest.fixture(scope="module")
def server(taught, real_servers, tmp_path_factory):
    real_servers.stop()
    folder = tmp_path_factory.mktemp("model") / "taught"
    hf.save_folder(taught, MODEL, folder)
    with engines.real_server(folder, ranks=2, extra=["--load-format=dummy"]) as (url, process, _):
        yield url, process


@contextlib.asynccontextmanager
async def sampler_over(replicas):
    """What a step collects its groups with."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(cluster.connect("step", settings.Sandbox(slots=2, run_limit_s=5.0)))
        tools = protocol.Registry([python.PythonTool(client, TASK.tool_name, settings.Sandbox())])
        await outcome.self_test(client)
        shared = pool.Pool(replicas, settings.Fleet(probe_s=1.0, progress_s=60.0))
        stack.push_async_callback(shared.close)
        chat = files.load_chat(TASK, [python.schema(TASK.tool_name)])
        yield groups.Sampler(engine=shared, chat=chat, tools=tools, grader=client, rollout=ROLLOUT, roc=ROC, seed=0)


def draw(step, offset, count):
    return prompts.make_source(TASK).batch(0, step * ROLLOUT.prompts_per_step + offset, count)


def trainer():
    return update.Learner(MODEL, LEARNER, objective.grpo(LEARNER.loss), 2, ROLLOUT.temperature)


def learned(teacher, state, collected, step):
    """The state after one step on what was collected, and its metrics."""
    key = jax.random.fold_in(jax.random.key(0), step)
    chosen = batch.select(collected.groups, key, ROLLOUT, ROC, LEARNER.loss)
    work = batch.minibatches(batch.rows(collected.groups, chosen), LEARNER)
    assert work, "no group has a gradient"
    return learning.learn(teacher, state, work, LEARNER.loss)


def episodes(collected):
    return [trajectory for group in collected.groups for trajectory in group.trajectories]


def versions(collected):
    """Versions behind the sampled ids of all episodes."""
    turns = [turn for trajectory in episodes(collected) for turn in trajectory.turns]
    return {int(v) for turn in turns for v in turn.weights_versions[turn.mask]}


def test_a_step_runs_on_the_real_server_and_the_next_one_on_its_new_weights(server, taught, tmp_path):
    url, _ = server
    store = str(tmp_path)

    async def run():
        teacher = trainer()
        state = teacher.create(jax.tree.map(lambda leaf: leaf.copy(), taught))
        publish.publish(state.params, MODEL, store, 0)
        engine = await sglang.connect(url, MODEL, name="real", deadlines=engines.DEADLINES)
        async with sampler_over([engine]) as sampler:
            await sampler.engine.update_weights(store, 0)
            first = await groups.collect(sampler, functools.partial(draw, 0), step=0)
            state, told = learned(teacher, state, first, 0)
            publish.publish(state.params, MODEL, store, 1)
            await sampler.engine.update_weights(store, 1)
            await sampler.engine.verify(store, 1)
            second = await groups.collect(sampler, functools.partial(draw, 1), step=1)
            return first, told, second, learned(teacher, state, second, 1)[1]

    first, told, second, told_again = asyncio.run(asyncio.wait_for(run(), engines.START_S))
    assert versions(first) == {0} and versions(second) == {1}
    calls = [call for t in episodes(first) for turn in t.turns for call in turn.calls]
    assert calls and first.unscored == second.unscored == 0
    gaps = [told["mismatch/logprob_gap_max"], told_again["mismatch/logprob_gap_max"]]
    print(f"{len(episodes(first))} episodes, {len(calls)} tool calls; largest |delta log-probability| {max(gaps):.2e}")
    assert max(gaps) < 1e-4 and told["learner/skipped_steps"] == 0


def test_a_server_that_is_killed_in_the_middle_of_a_rollout_loses_no_episode(server, taught, tmp_path):
    url, process = server
    store = str(tmp_path)
    publish.publish(taught, MODEL, store, 0)

    async def run():
        real = await sglang.connect(url, MODEL, name="real", deadlines=engines.DEADLINES)
        spare = jax_engine.JaxEngine(MODEL, slots=8, context_tokens=160, prefill_chunk_tokens=16, name="spare")
        async with sampler_over([real, spare]) as sampler:
            await sampler.engine.update_weights(store, 0)
            step = asyncio.ensure_future(groups.collect(sampler, functools.partial(draw, 0), step=0))
            while (await real.load()).running == 0:
                assert not step.done(), "the step was over before the server could be killed"
                await asyncio.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            collected = await step
            return collected, sampler.engine.up

    collected, up = asyncio.run(asyncio.wait_for(run(), engines.START_S))
    assert up == ["spare"]
    done = episodes(collected)
    assert len(done) == ROLLOUT.prompts_per_step * ROLLOUT.oversample
    assert not [t for t in done if t.stop_reason is StopReason.LOST] and versions(collected) == {0}
