"""The Python tool: code and standard input go to the sandbox cluster, typed status and output come back.

Deliberately not here: execution of any kind (the cluster's nodes do it), the wording of replies (data/chat), and state
between calls: every call starts afresh.

Source: rStar2-Agent paper, Python environment as a tool with standard input and output; the description's wording is
ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rstar2_jax import settings
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol

_ARGUMENTS = ("code", "input")


class Executor(Protocol):
    """What the tool needs of the sandbox client (rstar2_sandbox.client.Client has it)."""

    async def execute(self, execution: protocol.Execution) -> protocol.Outcome:
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
        self._limits = protocol.Limits(
            wall_s=sandbox.run_limit_s,
            queue_s=sandbox.queue_limit_s,
            memory_bytes=sandbox.memory_bytes,
            output_bytes=sandbox.output_bytes,
        )

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
        wrong = _check_arguments(call.arguments)
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        try:
            execution = protocol.Execution(
                code=call.arguments["code"], stdin=call.arguments.get("input", ""), key=key, limits=self._limits
            )
        except ValueError as error:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=str(error))
        outcome = await self._client.execute(execution)
        return ToolResult(
            status=CallStatus(outcome.status.value),
            stdout=outcome.stdout,
            stderr=outcome.stderr or outcome.detail,
            queue_s=outcome.queue_s,
            run_s=outcome.run_s,
        )


def _check_arguments(arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, in a sentence for the model; empty when nothing is."""
    unknown = [name for name in arguments if name not in _ARGUMENTS]
    if unknown:
        return f"there is no argument {unknown[0][:40]!r}; the arguments are 'code' and, optionally, 'input'"
    if "code" not in arguments:
        return "the argument 'code' is missing"
    for name in _ARGUMENTS:
        if name in arguments and not isinstance(arguments[name], str):
            return f"the argument {name!r} must be a string, not {_kind(arguments[name])}"
    return ""


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
