"""Tools for a second and a third language: one program in GNU Octave, one script on an SQLite database in memory.

A node without Octave answers REJECTED and says what is missing: a fault of ours, never the model's.

Deliberately not here: any database that outlives a call, and files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rstar2_jax import settings
from rstar2_jax.tools import protocol, python
from rstar2_jax.types import CallStatus, ToolCall, ToolResult
from rstar2_sandbox import protocol as wire


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """What a model is told of a language.

    Args:
        wire: its name in the sandbox's protocol.
        argument: that holds the program.
        stdin: True when the tool takes text for standard input, as argument `input`.
    """

    wire: str
    description: str
    argument: str
    about: str
    stdin: bool = False


OCTAVE = Language(
    wire=wire.OCTAVE,
    description=(
        "Run a program in GNU Octave (MATLAB syntax) and read what it prints. Each run starts afresh and keeps nothing "
        "of the last."
    ),
    argument="code",
    about="The program. Use disp or printf for every value that you want to see.",
    stdin=True,
)
SQL = Language(
    wire=wire.SQL,
    description=(
        "Run an SQL script on an empty SQLite database in memory and read the rows that its queries give. Create and "
        "fill the tables that you need in the same script: each run starts afresh."
    ),
    argument="script",
    about="SQL statements, each ended by a semicolon.",
)


def schema(name: str, language: Language) -> dict[str, Any]:
    """Function schema of a language's tool under a name."""
    arguments = {language.argument: language.about}
    if language.stdin:
        arguments["input"] = "Text for the program's standard input; optional."
    return protocol.function_schema(name, language.description, arguments, [language.argument])


class ScriptTool:
    """Runs programs of one language in the sandbox.

    Args:
        client: connection to the cluster; the caller closes it.
        name: name under which the tool is offered.
        sandbox: limits of one call.
        language: OCTAVE or SQL.
    """

    def __init__(self, client: python.Executor, name: str, sandbox: settings.Sandbox, language: Language) -> None:
        self._client = client
        self._name = name
        self._limits = python.limits_of(sandbox)
        self._language = language

    @property
    def name(self) -> str:
        """Name under which the model calls the tool."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Function schema under that name."""
        return schema(self._name, self._language)

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        """Result of one call; arguments that do not suit give PARSE_ERROR with the reason, and nothing is run."""
        language = self._language
        optional = ("input",) if language.stdin else ()
        wrong = protocol.wrong_arguments(call.arguments, required=(language.argument,), optional=optional)
        if wrong:
            return ToolResult(status=CallStatus.PARSE_ERROR, stderr=wrong)
        return await python.answer(
            self._client,
            lambda: wire.Execution(
                code=call.arguments[language.argument],
                stdin=call.arguments.get("input", ""),
                language=language.wire,
                key=key,
                limits=self._limits,
            ),
        )
