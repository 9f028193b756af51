"""The contract of a tool and the registry that finds one by name.

A tool answers every call with a ToolResult; what the model did wrong is a status, never an exception. An exception out
of `run` is a fault of ours, which the agent loop turns into status `infra`.

Deliberately not here: the wording and the token budget of replies (data/chat), and limits on calls per turn (rollout).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rstar2_jax.types import CallStatus, ToolCall, ToolResult


class Tool(Protocol):
    """One tool. `run` is called many times at once from one event loop."""

    @property
    def name(self) -> str:
        """Name under which the model calls it."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema in the OpenAI and Hermes form: type, function.name, .description, .parameters."""
        ...

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """What the call gave.

        Args:
            call: a call that parsed and that names this tool; its arguments are still unchecked.
            key: identifies this execution, so that a repeated submission is not executed twice.
        """
        ...


@runtime_checkable
class Stateful(Tool, Protocol):
    """A tool that keeps something between the calls of one trajectory."""

    def begin(self, episode: str) -> contextlib.AbstractAsyncContextManager[Tool]:
        """The tool as one trajectory has it, from its first call to its end.

        Args:
            episode: name of the trajectory, unique in the run.
        """
        ...


class Registry:
    """Tools by name, or none; every call gets a result, also one that did not parse or that names no tool.

    Args:
        span: entered while a tool runs.

    Raises:
        ValueError: two tools of one name.
    """

    def __init__(
        self, tools: Sequence[Tool], span: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ) -> None:
        names = [tool.name for tool in tools]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"tool name {doubled[0]!r} is given {names.count(doubled[0])} times: names must differ")
        self._tools = dict(zip(names, tools, strict=True))
        self._span = span

    @contextlib.asynccontextmanager
    async def episode(self, name: str) -> AsyncIterator[Registry]:
        """The tools as one trajectory has them; what a tool kept for it ends with the block."""
        async with contextlib.AsyncExitStack() as stack:
            own = [
                await stack.enter_async_context(tool.begin(name)) if isinstance(tool, Stateful) else tool
                for tool in self._tools.values()
            ]
            yield Registry(own, self._span)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order given."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Schemas of the tools, in the order given: what the system turn shows."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call: of its tool, or PARSE_ERROR or UNKNOWN_TOOL with the reason in `stderr`."""
        if call.error is not None:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            known = f"the tools are: {', '.join(self._tools)}" if self._tools else "there are none"
            return ToolResult(
                status=CallStatus.UNKNOWN_TOOL, stderr=f"there is no tool named {call.name[:80]!r}; {known}"
            )
        with self._span():
            return await tool.run(call, key=key)


def function_schema(
    name: str, description: str, arguments: Mapping[str, str], required: Sequence[str]
) -> dict[str, Any]:
    """Function schema of a tool whose arguments are texts.

    Args:
        arguments: what each is for, by name.
        required: names of those that must be given.
    """
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "description": text} for name, text in arguments.items()},
                "required": list(required),
            },
        },
    }


def wrong_arguments(arguments: Mapping[str, Any], *, required: Sequence[str], optional: Sequence[str] = ()) -> str:
    """What is wrong with a call's arguments, in a sentence for the model; empty when nothing is. All are texts.

    >>> wrong_arguments({"code": 1}, required=("code",))
    "the argument 'code' must be a string, not a number"
    """
    known = [*required, *optional]
    unknown = [name for name in arguments if name not in known]
    if unknown:
        wanted = " and ".join(map(repr, required)) + "".join(f" and, optionally, {name!r}" for name in optional)
        verb = "arguments are" if len(known) > 1 else "only argument is"
        return f"there is no argument {unknown[0][:40]!r}; the {verb} {wanted}"
    for name in required:
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name in known:
        if name in arguments and not isinstance(arguments[name], str):
            return f"the argument {name!r} must be a string, not {_kind(arguments[name])}"
    return ""


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
