"""The stateful Python tool: what one call defines, the next call of the same trajectory sees.

The cluster keeps a forked process for each trajectory; nothing is ever run again. One tool object serves one
trajectory: the registry's `episode` begins it and ends it.

Deliberately not here: the process itself (rstar2_sandbox/session.py). A session whose node died is a fault of ours
(INFRA); one that a program ran into its limits starts afresh at the next call, and the model is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from rstar2_jax import settings
from rstar2_jax.tools import protocol, python
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol as wire

DESCRIPTION = (
    "Run Python and read what it prints. Variables, functions and imports stay from call to call. A run that exceeds "
    "its time or memory ends the session: then everything starts afresh."
)


class Sessions(python.Executor, Protocol):
    """What the tool needs of the sandbox client (rstar2_sandbox.client.Client has it)."""

    async def end_session(self, session: str) -> None:
        """Have a session end; one that does not live is no error."""
        ...


def schema(name: str) -> dict[str, Any]:
    """Function schema of the tool under a name."""
    arguments = {"code": "The program. A last bare expression is shown, as in a notebook."}
    return protocol.function_schema(name, DESCRIPTION, arguments, ["code"])


class SessionTool:
    """Runs cells of one trajectory's session; leave its `async with` block to have the session ended.

    Args:
        client: connection to the cluster; the caller closes it.
        name: name under which the tool is offered.
        sandbox: limits of one call.
        session: name of the session, unique inside the run: that of the trajectory.
    """

    def __init__(self, client: Sessions, name: str, sandbox: settings.Sandbox, session: str = "shared") -> None:
        self._client = client
        self._name = name
        self._sandbox = sandbox
        self._limits = python.limits_of(sandbox)
        self._session = session
        self._turn = asyncio.Lock()

    def begin(self, episode: str) -> SessionTool:
        """The same tool with a session of its own, for one trajectory."""
        return SessionTool(self._client, self._name, self._sandbox, session=episode)

    async def __aenter__(self) -> SessionTool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.end_session(self._session)

    @property
    def name(self) -> str:
        """Name under which the model calls the tool."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema under that name."""
        return schema(self._name)

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call; calls of one turn run one after another, in the order in which they came."""
        wrong = protocol.wrong_arguments(call.arguments, required=("code",))
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        async with self._turn:
            return await python.answer(
                self._client,
                lambda: wire.Execution(
                    code=call.arguments["code"], session=self._session, key=key, limits=self._limits
                ),
            )
