"""Which tools a run offers to its model: by the settings of its task, as schemas for the system turn and as a registry.

Deliberately not here: the tools themselves (python, session, script) and the limits of a call (settings.Sandbox).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rstar2_jax import settings
from rstar2_jax.tools import protocol, python, script, session
from rstar2_jax.types import CallStatus, ToolCall
from rstar2_sandbox.client import Client

_NAMES = {"octave": "run_octave_program", "sql": "run_sql_script"}
_PROBES = {
    "python": {"code": "print(4)"},
    "session": {"code": "print(4)"},
    "octave": {"code": "disp(4)"},
    "sql": {"script": "select 4;"},
}


def _name(kind: str, task: settings.Task) -> str:
    return _NAMES.get(kind, task.tool_name)


def schemas(task: settings.Task) -> list[dict[str, Any]]:
    """Function schemas of the task's tools, in its order: what the system turn shows."""
    made = {"python": python.schema, "session": session.schema}
    languages = {"octave": script.OCTAVE, "sql": script.SQL}
    return [
        made[kind](_name(kind, task)) if kind in made else script.schema(_name(kind, task), languages[kind])
        for kind in task.tools
    ]


def registry(
    task: settings.Task,
    client: Client,
    sandbox: settings.Sandbox,
    span: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> protocol.Registry:
    """The task's tools over a connection that the caller closes.

    Args:
        span: entered while a tool runs.
    """
    makers: dict[str, Callable[[str], protocol.Tool]] = {
        "python": lambda name: python.PythonTool(client, name, sandbox),
        "session": lambda name: session.SessionTool(client, name, sandbox),
        "octave": lambda name: script.ScriptTool(client, name, sandbox, script.OCTAVE),
        "sql": lambda name: script.ScriptTool(client, name, sandbox, script.SQL),
    }
    return protocol.Registry([makers[kind](_name(kind, task)) for kind in task.tools], span)


async def self_test(task: settings.Task, tools: protocol.Registry) -> None:
    """Call each tool once, so that one that this cluster cannot run costs no episode.

    Raises:
        RuntimeError: a tool did not do what it must; says which, and what it answered.
    """
    async with tools.episode("self-test") as own:
        for kind in task.tools:
            name = _name(kind, task)
            result = await own.run(ToolCall(name=name, arguments=_PROBES[kind]), key="")
            if result.status is not CallStatus.OK or "4" not in result.stdout:
                raise RuntimeError(
                    f"tool {kind!r} (Task.tools) does not work in this sandbox: {result.status.value}, "
                    f"{result.stderr.strip() or result.stdout!r}"
                )
