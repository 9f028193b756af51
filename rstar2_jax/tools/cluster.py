"""The connection to the sandbox cluster, or to a private one on this machine, for as long as a run needs it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from rstar2_jax import settings
from rstar2_sandbox import client as sandbox_client
from rstar2_sandbox import local
from rstar2_sandbox.client import Client

__all__ = ["Client", "connect", "disagreements", "name_of"]


def disagreements(client: Client) -> int:
    """Verdicts so far in which the exact rules and the library decided differently (the rules win)."""
    return client.statistics.get(sandbox_client.DISAGREE, 0)


def name_of(workdir: Path) -> str:
    """What a run is called in a cluster that others use too: its folder's name, and a digest of user and whole path, so
    that the runs of two folders of one name share neither results nor an end. The same after a restart."""
    digest = hashlib.blake2b(f"{os.getuid()}:{workdir.resolve()}".encode(), digest_size=6).hexdigest()
    return f"{workdir.name[:100]}-{digest}"


@contextlib.asynccontextmanager
async def connect(run_name: str, sandbox: settings.Sandbox) -> AsyncIterator[Client]:
    """A client of the cluster at sandbox.redis_url, where whatever an earlier process of this run left, waiting or
    running, is ended first: nobody waits for it. For an empty address, of a private one that lives as long as the
    block: its own Redis and one worker node, restarted when they die, ended with this process however it ends.

    Args:
        run_name: namespace of the run's calls in the cluster, unique there: see name_of.

    Raises:
        RuntimeError: the private sandbox could not start; says what is missing.
        ConnectionError: the cluster's Redis does not answer.
    """
    with contextlib.ExitStack() as stack:
        address = sandbox.redis_url
        if not address:
            start = functools.partial(local.start_local, slots=sandbox.slots, session_slots=sandbox.session_slots)
            private = await asyncio.to_thread(start)
            address = stack.enter_context(private).redis_url
        async with Client(address, run=run_name, queue_limit_s=sandbox.queue_limit_s) as client:
            if sandbox.redis_url:
                await client.advance_epoch()
            yield client
