"""The Octave tool: MATLAB-style programs run by GNU Octave in the sandbox, on nodes that have it.

A node without it answers REJECTED and says what is missing: a fault of ours, never the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rstar2_jax import settings
from rstar2_jax.tools import protocol, python
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol as wire

DESCRIPTION = (
    "Run a program in GNU Octave (MATLAB syntax) and read what it prints. Each run starts afresh and keeps nothing of "
    "the last."
)


class OctaveTool:
    """Runs Octave in the sandbox.

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
        arguments = {
            "code": "The program. Use disp or printf for every value that you want to see.",
            "input": "Text for the program's standard input; optional.",
        }
        return protocol.function_schema(self._name, DESCRIPTION, arguments, ["code"])

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call; arguments that do not suit give PARSE_ERROR with the reason, and nothing is run."""
        wrong = protocol.wrong_arguments(call.arguments, required=("code",), optional=("input",))
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        return await python.answer(
            self._client,
            lambda: wire.Execution(
                code=call.arguments["code"],
                stdin=call.arguments.get("input", ""),
                language=wire.OCTAVE,
                key=key,
                limits=self._limits,
            ),
        )
