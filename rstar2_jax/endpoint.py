"""A finished run or a Hugging Face folder behind OpenAI's chat completions: the agent loop, its tools and its sandbox.

Any client of that interface asks the model as training does: it writes code, the sandbox runs it, the final text comes
back. Nothing is graded. While it serves, endpoint.json in the workdir says where: {"url", "model", "pid"}.

Not to be confused with rollout/serve.py, which puts one engine behind SGLang's HTTP for the trainer: ids, no text.
Deliberately not here: the protocol (completions/), several models at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from rstar2_jax import ask, settings
from rstar2_jax.completions import front
from rstar2_jax.report import console
from rstar2_jax.rollout import tier

ENDPOINT_FILE = "endpoint.json"
LONGEST_EXIT_S = 5.0  # for connections that are still open when the server ends


def endpoint(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    endpoint: settings.Endpoint,
) -> int:
    """Serve the model of `run.init_from` until SIGTERM or SIGINT. Returns 0.

    Raises:
        ValueError: no weights to serve.
        OSError: the port is taken.
    """
    if not run.init_from:
        raise ValueError("Run.init_from is empty: name the run or the Hugging Face folder to serve")
    return asyncio.run(_endpoint(run, model, task, rollout, sandbox, endpoint))


async def _endpoint(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    limits: settings.Endpoint,
) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    name, note = limits.model_name or Path(run.init_from).resolve().name, Path(run.workdir) / ENDPOINT_FILE
    with console.Console(0, f"{name} behind OpenAI's chat completions") as screen:
        async with (
            ask.open_room(run, model, task, rollout, sandbox, screen) as room,
            served(room.tier, rollout, limits, name) as (url, counts),
        ):
            note.write_text(json.dumps({"url": url, "model": name, "pid": os.getpid()}) + "\n")
            try:
                screen.note(f"{name} at {url}/v1 (loopback only)" if _is_loopback(limits.host) else _warning(name, url))
                await ended.wait()
            finally:
                note.unlink()
            screen.note(f"served {counts.served}, refused {counts.refused}, lost by faults of ours {counts.faults}")
    return 0


@contextlib.asynccontextmanager
async def served(
    opened: tier.Tier, rollout: settings.Rollout, limits: settings.Endpoint, name: str
) -> AsyncIterator[tuple[str, front.Counts]]:
    """(url, counts) of the tier behind HTTP for as long as this lasts; the tier itself is left open.

    Args:
        name: of the model, as clients must give it.
    """
    handlers = front.Front(opened, rollout, limits, name)
    runner = web.AppRunner(handlers.app(), handler_cancellation=True, access_log=None, shutdown_timeout=LONGEST_EXIT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, limits.host, limits.port).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", handlers.counts
    finally:
        await runner.cleanup()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _warning(name: str, url: str) -> str:
    return f"! {name} at {url}/v1, open to whoever reaches it: there is no authentication, and the model runs code"
