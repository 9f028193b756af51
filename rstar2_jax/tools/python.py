"""The Python tool: code and standard input go to the sandbox cluster, typed status and output come back.

Deliberately not here: execution of any kind (the cluster's nodes do it), the wording of replies (data/chat), and state
between calls (session.py): every call starts afresh.

Source: rStar2-Agent paper, Python environment as a tool with standard input and output; the description's wording is
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rstar2_jax import settings
from rstar2_jax.tools import protocol
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol as wire


class Executor(Protocol):
    """What the tool needs of the sandbox client (rstar2_sandbox.client.Client has it)."""

    async def execute(self, execution: wire.Execution) -> wire.Outcome:
        """Run one program; never raises for anything the program does."""
        ...


def schema(name: str) -> dict[str, Any]:
    """Function schema of the tool under a name, as the system turn shows it."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": (
                "Run a Python program and read what it prints. Each run starts afresh and keeps nothing of the last."
            ),
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "The program. Print every value that you want to see."},
                    "input": {"type": "string", "description": "Text for the program's standard input; optional."},
                },
                "required": ["code"],
            },
        },
    }


class PythonTool:
    """Runs Python in the sandbox.

    Args:
        client: connection to the cluster; the caller closes it.
        name: name under which the tool is offered.
        sandbox: limits of one call.
    """

    def __init__(self, client: Executor, name: str, sandbox: settings.Sandbox) -> None:
        self._client = client
        self._name = name
        self._limits = limits_of(sandbox)

    @property
    def name(self) -> str:
        """Name under which the model calls the tool."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema under that name."""
        return schema(self._name)

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call; arguments that do not suit give PARSE_ERROR with the reason, and nothing is run.

        Args:
            call: arguments `code` (text) and, optionally, `input` (text).
            key: idempotency key of the execution.
        """
        wrong = protocol.wrong_arguments(call.arguments, required=("code",), optional=("input",))
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        return await answer(
            self._client,
            lambda: wire.Execution(
                code=call.arguments["code"], stdin=call.arguments.get("input", ""), key=key, limits=self._limits
            ),
        )


def limits_of(sandbox: settings.Sandbox) -> wire.Limits:
    """Limits of one call, as the run's settings give them."""
    return wire.Limits(
        wall_s=sandbox.run_limit_s,
        queue_s=sandbox.queue_limit_s,
        memory_bytes=sandbox.memory_bytes,
        output_bytes=sandbox.output_bytes,
    )


async def answer(client: Executor, make: Callable[[], wire.Execution]) -> ToolResult:
    """Make an execution and run it; one that cannot be made (too long, say) is the model's fault: PARSE_ERROR."""
    try:
        execution = make()
    except ValueError as error:
        return ToolResult(status=CallStatus.PARSE_ERROR, stderr=str(error))
    outcome = await client.execute(execution)
    return ToolResult(
        status=CallStatus(outcome.status.value),
        stdout=outcome.stdout,
        stderr=outcome.stderr or outcome.detail,
        queue_s=outcome.queue_s,
        run_s=outcome.run_s,
    )
