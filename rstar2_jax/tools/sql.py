"""The SQL tool: a script runs on a fresh SQLite database in memory, in the sandbox; the rows of its queries come back.

Deliberately not here: any database that outlives a call, and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rstar2_jax import settings
from rstar2_jax.tools import protocol, python
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol as wire

DESCRIPTION = (
    "Run an SQL script on an empty SQLite database in memory and read the rows that its queries give. Create and fill "
    "the tables that you need in the same script: each run starts afresh."
)


class SqlTool:
    """Runs SQL in the sandbox.

    Args:
        client: connection to the cluster; the caller closes it.
        name: name under which the tool is offered.
        sandbox: limits of one call.
    """

    def __init__(self, client: python.Executor, name: str, sandbox: settings.Sandbox) -> None:
        self._client = client
        self._name = name
        self._limits = python.limits_of(sandbox)

    @property
    def name(self) -> str:
        """Name under which the model calls the tool."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema under that name."""
        arguments = {"script": "SQL statements, each ended by a semicolon."}
        return protocol.function_schema(self._name, DESCRIPTION, arguments, ["script"])

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call; arguments that do not suit give PARSE_ERROR with the reason, and nothing is run."""
        wrong = protocol.wrong_arguments(call.arguments, required=("script",))
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        return await python.answer(
            self._client,
            lambda: wire.Execution(code=call.arguments["script"], language=wire.SQL, key=key, limits=self._limits),
        )
