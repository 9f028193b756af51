"""The rollout tier of a run, opened as a whole: sandbox, tools, chat protocol, engines, checked before any work."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from rstar2_jax import settings
from rstar2_jax.data import chat as chats
from rstar2_jax.data import files
from rstar2_jax.io import limits, timeline
from rstar2_jax.reward import outcome
from rstar2_jax.rollout import fleet, groups, jax_engine, pool, sglang
from rstar2_jax.rollout.engine import Request, RolloutEngine, Sampling
from rstar2_jax.tools import cluster, offer, protocol
from rstar2_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """What episodes run with: engine, chat protocol, tools, grader, the digest of the rules that it grades by, and the
    timeline that generation, tools and grading are counted in."""

    engine: pool.Pool
    chat: chats.Chat
    tools: protocol.Registry
    grader: cluster.Client
    rules: str
    timeline: timeline.Timeline

    async def warm_up(self, question: str, settings: settings.Rollout) -> None:
        """Compile every engine's programs on a prompt of the run, asked twice at once, so that no episode's deadline
        counts the compilation. To be called once the engines have weights."""
        limits = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=2,
            stop_ids=self.chat.stop_ids,
        )
        ids = self.chat.prompt_ids(question)
        requests = [Request(rid=f"warm-up/{n}", prompt_ids=ids, seed=n, sampling=limits) for n in range(2)]
        await self.engine.warm_up(requests)

    def sampler(self, rollout: settings.Rollout, roc: settings.Roc, seed: int) -> groups.Sampler:
        """What makes groups of graded episodes with these parts."""
        parts = {"engine": self.engine, "chat": self.chat, "tools": self.tools, "grader": self.grader}
        grading = functools.partial(self.timeline.span, "grade")
        return groups.Sampler(**parts, rollout=rollout, roc=roc, seed=seed, grading=grading)

    def disagreements(self) -> int:
        """Verdicts so far in which the grader's exact rules and its library decided differently."""
        return cluster.disagreements(self.grader)

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Length of a prompt as the model sees it, in tokens."""
        return len(self.chat.prompt_ids(prompt.question))


@contextlib.asynccontextmanager
async def open_tier(
    workdir: Path,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    *,
    report: Callable[[str], None],
) -> AsyncIterator[Tier]:
    """A working tier, closed again on every exit; the engine has no weights yet.

    Args:
        workdir: of the run, whose name its calls carry in the sandbox.
        report: receives one line for each part that is ready.

    Raises:
        ValueError: template not append-only, vocabulary or context too large for the model.
        RuntimeError: the sandbox could not start, a tool or the grader failed its self-test, or an engine is silent.
    """
    chat = files.load_chat(task, offer.schemas(task))
    files.check_vocabulary(chat.tokenizer, model)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(cluster.connect(cluster.name_of(workdir), sandbox))
        watch = timeline.Timeline(workdir)
        stack.callback(_end, watch, report)
        tools = offer.registry(task, client, sandbox, functools.partial(watch.span, "tool"))
        await offer.self_test(task, tools)
        digest = await outcome.self_test(client)
        report(f"sandbox ready, grader self-test passed (rules {digest})")
        found = await _open_engines(stack, workdir, model, rollout, report)
        engines = pool.Pool(found, rollout.fleet, report=report, span=functools.partial(watch.span, "generate"))
        stack.push_async_callback(engines.close)
        yield Tier(engine=engines, chat=chat, tools=tools, grader=client, rules=digest, timeline=watch)


def _end(watch: timeline.Timeline, report: Callable[[str], None]) -> None:
    """Write the end of the timeline; a disk that takes no more costs no run its result."""
    try:
        watch.close()
    except OSError as error:
        report(f"! the end of the timeline was not written: {error}")


async def _open_engines(
    stack: contextlib.AsyncExitStack,
    workdir: Path,
    model: settings.Model,
    rollout: settings.Rollout,
    report: Callable[[str], None],
) -> Sequence[RolloutEngine]:
    """The engines that the fleet names: servers elsewhere, processes of our own, or one inside this process."""
    context_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    sizes = {
        "slots": rollout.engine_slots,
        "context_tokens": context_tokens,
        "prefill_chunk_tokens": rollout.prefill_chunk_tokens,
    }
    if rollout.fleet.engines or rollout.fleet.replicas:
        limits.raise_open_files()
    if rollout.fleet.engines:
        return await _connect(rollout.fleet.addresses, model, context_tokens)
    if not rollout.fleet.replicas:
        return [jax_engine.JaxEngine(model, **sizes, name="embedded")]
    plan = fleet.Plan(folder=workdir / "engines", model=model, **sizes)
    opened = fleet.open_replicas(plan, rollout.fleet.replicas, report)
    engines, _ = await stack.enter_async_context(opened)
    report(f"{len(engines)} engine processes ready")
    return engines


async def _connect(urls: Sequence[str], model: settings.Model, context_tokens: int) -> list[sglang.SglangEngine]:
    """Every server, or none: a run that starts without one of its engines was set up wrongly."""
    connecting = (sglang.connect(url, model, context_tokens=context_tokens) for url in urls)
    found = await asyncio.gather(*connecting, return_exceptions=True)
    engines = [engine for engine in found if isinstance(engine, sglang.SglangEngine)]
    for error in found:
        if isinstance(error, BaseException):
            await asyncio.gather(*(engine.close() for engine in engines))
            raise error
    return engines
