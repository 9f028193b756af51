"""One HTTP call to an engine's server: JSON there, JSON back; whatever goes wrong on the way is an EngineError.

Deliberately not here: what the JSON says (sglang_wire.py), and when to call (sglang.py).
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from rstar2_jax.io import limits
from rstar2_jax.rollout import sglang_wire as wire
from rstar2_jax.rollout.engine import EngineError, LimitError


def open_session() -> aiohttp.ClientSession:
    """What calls are made with; to be closed."""
    # A connection for each request: one that is kept may be closed by the server just as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Any,
    *,
    timeout: aiohttp.ClientTimeout,
    name: str,
    what: str,
) -> Any:
    """The JSON that the server answers, None for an answer that is none.

    Args:
        name: of the engine; what: is asked of it, for errors.

    Raises:
        RefusedError: it answered, and what it said is no.
        LimitError: this process cannot open a connection.
        EngineError: any other fault.
    """
    try:
        async with session.request(method, url, json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                raise wire.RefusedError(f"{name} refused {what}: {response.status}, {wire.refusal(text)}")
            kind = response.content_type
    except TimeoutError as error:
        raise EngineError(f"{name}: waited {timeout.total:g} s for {what}") from error
    except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
        if ours := limits.met_open_files(error):
            raise LimitError(f"{what} did not reach {name}: {ours}") from error
        raise EngineError(f"{name} failed in {what}: {error!r}") from error
    if kind != "application/json":
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{name} answered {what} with broken JSON: {text[:200]!r}") from error
    if isinstance(value, dict) and value.get("success") is False:
        raise wire.RefusedError(f"{name} refused {what}: {value.get('message')}")
    return value
