"""The rollout tier of one process, opened as a whole: sandbox, tools, chat protocol, engine, checked before any work.

Deliberately not here: engines on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from rstar2_jax import settings
from rstar2_jax.data import chat as chats
from rstar2_jax.data import files
from rstar2_jax.reward import outcome
from rstar2_jax.rollout import jax_engine, pool
from rstar2_jax.rollout.engine import Request, Sampling
from rstar2_jax.tools import cluster, protocol, python
from rstar2_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """What episodes run with: engine, chat protocol, tools, grader, and the digest of the rules that it grades by."""

    engine: pool.Pool
    chat: chats.Chat
    tools: protocol.Registry
    grader: cluster.Client
    rules: str

    async def warm_up(self, question: str, settings: settings.Rollout) -> None:
        """Compile the engine's programs on a prompt of the run, asked twice at once, so that no episode's deadline
        counts the compilation. To be called once the engine has weights."""
        limits = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=2,
            stop_ids=self.chat.stop_ids,
        )
        ids = self.chat.prompt_ids(question)
        requests = [Request(rid=f"warm-up/{n}", prompt_ids=ids, seed=n, sampling=limits) for n in range(2)]
        await asyncio.gather(*(self.engine.generate(request) for request in requests))

    def disagreements(self) -> int:
        """Verdicts so far in which the grader's exact rules and its library decided differently."""
        return cluster.disagreements(self.grader)

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Length of a prompt as the model sees it, in tokens."""
        return len(self.chat.prompt_ids(prompt.question))


@contextlib.asynccontextmanager
async def open_tier(
    name: str,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    *,
    report: Callable[[str], None],
) -> AsyncIterator[Tier]:
    """A working tier, closed again on every exit; the engine has no weights yet.

    Args:
        name: of the run, under which its calls are known in the sandbox.
        report: receives one line for each part that is ready.

    Raises:
        ValueError: template not append-only, vocabulary or context too large for the model.
        RuntimeError: the sandbox could not start, or the grader's self-test failed.
    """
    chat = files.load_chat(task, [python.schema(task.tool_name)])
    files.check_vocabulary(chat.tokenizer, model)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(cluster.connect(name, sandbox))
        tools = protocol.Registry([python.PythonTool(client, task.tool_name, sandbox)])
        digest = await outcome.self_test(client)
        report(f"sandbox ready, grader self-test passed (rules {digest})")
        engine = jax_engine.JaxEngine(
            model,
            slots=rollout.engine_slots,
            context_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
            prefill_chunk_tokens=rollout.prefill_chunk_tokens,
        )
        engines = pool.Pool([engine], report=report)
        stack.push_async_callback(engines.close)
        yield Tier(engine=engines, chat=chat, tools=tools, grader=client, rules=digest)
