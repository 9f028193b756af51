"""A trained model in the terminal: a question a line, its turns and tool calls shown as they went.

An empty line forgets the conversation so far; end of input (Ctrl-D) leaves. A question whose episode a fault of ours
ended is forgotten by itself.

Deliberately not here: the protocol (data/chat.py) and the endpoint for programs (endpoint.py).
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rstar2_jax import ask, settings
from rstar2_jax.completions import reply
from rstar2_jax.data import chat as chats
from rstar2_jax.data import conversation
from rstar2_jax.report import console
from rstar2_jax.rollout import agent, replies
from rstar2_jax.types import Prompt, StopReason, Trajectory

_MOST_REPLY_TOKENS = 512


def chat(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
) -> int:
    """Answer lines of standard input by the model of `run.init_from` until they end. Returns 0.

    Raises:
        ValueError: no weights to ask.
    """
    if not run.init_from:
        raise ValueError("Run.init_from is empty: name the run or the Hugging Face folder to talk to")
    return asyncio.run(_chat(run, model, task, rollout, sandbox))


async def _chat(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
) -> int:
    with console.Console(0, f"{Path(run.workdir).name}: {run.init_from}") as screen:
        async with ask.open_room(run, model, task, rollout, sandbox, screen) as room:
            terminal, asked = Console(soft_wrap=True), 0
            terminal.print("[dim]A question a line; an empty line forgets what was said; Ctrl-D leaves.[/dim]")
            messages: list[dict[str, str]] = []
            while True:
                terminal.print("[bold]> [/bold]", end="")
                line = await _read_line()
                if not line:
                    return 0
                if not line.strip():
                    messages = []
                    continue
                messages.append({"role": "user", "content": line.strip()})
                try:
                    found = await _answer(room, messages, agent.episode_seed(run.seed, 0, "chat", asked))
                except ValueError as error:
                    terminal.print(f"[red]{escape(str(error))}[/red]")
                    messages.pop()
                    continue
                asked += 1
                _show(terminal, found, room.tier.chat)
                if found.stop_reason is StopReason.LOST:  # its last turn is no answer to go on from
                    messages.pop()
                    continue
                said = room.tier.chat.forced + reply.sampled_text(room.tier.chat, found.turns[-1].sampled_ids.tolist())
                messages.append({"role": "assistant", "content": said})


async def _read_line() -> str:
    """The next line of standard input, "" at its end.

    Its thread is one that nobody waits for, and it holds no lock: whoever interrupts the terminal would else be asked
    for one more line before the process ends.
    """
    line = replies.Reply()

    def read() -> None:
        with io.FileIO(sys.stdin.fileno(), closefd=False) as raw:
            line.resolve(raw.readline().decode(errors="replace"))

    threading.Thread(target=read, daemon=True).start()
    return await line.future


async def _answer(room: ask.Room, messages: Sequence[Mapping[str, str]], seed: int) -> Trajectory:
    """The episode that goes on from the messages.

    Raises:
        ValueError: they are too long, or the template cannot show them.
    """
    sampler = room.sampler
    protocol = conversation.Conversation(room.tier.chat, messages)
    length = len(protocol.prompt_ids(""))
    prompt = Prompt(id=f"chat/{seed}", question=messages[-1]["content"], answer="", source="chat")
    budget = sampler.rollout.max_response_tokens
    async with sampler.engine.seat(prompt.id, family=prompt.id, prompt_tokens=length, budget_tokens=budget) as seat:
        return await agent.run_episode(
            seat, protocol, sampler.tools, prompt, sample_index=0, seed=seed, settings=sampler.rollout
        )


def _show(terminal: Console, found: Trajectory, chat: chats.Chat) -> None:
    """The turns of an episode: what the model wrote, each call with its status and its reply, and how it ended."""
    for number, turn in enumerate(found.turns, start=1):
        terminal.print(f"[dim]turn {number}:[/dim] {escape(chat.tokenizer.decode(turn.sampled_ids.tolist()))}")
        for call, result in zip(turn.calls, turn.results, strict=True):
            answer = chats.tool_reply_text(result, call, chat.tokenizer, _MOST_REPLY_TOKENS)
            name = call.name or "a call that cannot be read"
            terminal.print(f"[cyan]{escape(name)}: {result.status.value}, {result.run_s:.2f} s[/cyan]")
            terminal.print(f"[yellow]{escape(answer)}[/yellow]")
    terminal.print(f"[dim]{found.stop_reason.value}, {found.num_sampled_tokens} tokens[/dim]")
