"""The Python tool sends what the model wrote, checks what it was given, and maps every status by its value."""

import asyncio

import pytest

from rstar2_jax import settings
from rstar2_jax.tools import offer, protocol, python
from rstar2_jax.types import CallStatus, ToolCall
from rstar2_sandbox import protocol as sandbox_protocol

NAME = "execute_python_code_with_standard_io"


class Recorder:
    """An executor that keeps what it was sent and answers with a given outcome."""

    def __init__(self, outcome=None):
        self.outcome = outcome or sandbox_protocol.Outcome(status=sandbox_protocol.Status.OK)
        self.sent = []

    async def execute(self, execution):
        self.sent.append(execution)
        return self.outcome


def run(executor, key="k", **arguments):
    tool = python.PythonTool(executor, NAME, settings.Sandbox(run_limit_s=3.0, memory_bytes=2**28))
    return asyncio.run(tool.run(ToolCall(name=NAME, arguments=arguments), key=key))


def test_code_input_key_and_limits_reach_the_sandbox():
    executor = Recorder()
    run(executor, key="turn/0", code="print(input())", input="7\n")
    (execution,) = executor.sent
    assert (execution.code, execution.stdin, execution.key) == ("print(input())", "7\n", "turn/0")
    assert execution.limits.wall_s == 3.0 and execution.limits.memory_bytes == 2**28
    assert execution.limits.queue_s == 120.0 and execution.limits.output_bytes == 64 * 2**10


def test_input_is_optional_and_empty_without_it():
    executor = Recorder()
    run(executor, code="print(1)")
    assert executor.sent[0].stdin == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "'code' is missing"),
        ({"input": "1"}, "'code' is missing"),
        ({"code": 1}, "'code' must be a string, not a number"),
        ({"code": None}, "'code' must be a string, not null"),
        ({"code": ["print(1)"]}, "'code' must be a string, not a list"),
        ({"code": "1", "input": 2.5}, "'input' must be a string, not a number"),
        ({"code": "1", "input": {}}, "'input' must be a string, not an object"),
        ({"code": "1", "input": True}, "'input' must be a string, not a boolean"),
        ({"code": "1", "timeout": 3}, "no argument 'timeout'"),
        ({"code": "#" * (sandbox_protocol.MAX_CODE_BYTES + 1)}, "the limit is"),
    ],
)
def test_arguments_that_do_not_suit_are_told_to_the_model_and_nothing_runs(arguments, says):
    executor = Recorder()
    result = run(executor, **arguments)
    assert result.status is CallStatus.PARSE_ERROR and result.status.is_bad
    assert says in result.stderr and executor.sent == []


@pytest.mark.parametrize("status", list(sandbox_protocol.Status))
def test_every_status_of_the_sandbox_has_its_counterpart(status):
    outcome = sandbox_protocol.Outcome(status=status, stdout="o", stderr="e", queue_s=0.5, run_s=0.25)
    result = run(Recorder(outcome), code="1")
    assert result.status.value == status.value
    assert (result.stdout, result.stderr, result.queue_s, result.run_s) == ("o", "e", 0.5, 0.25)


def test_the_detail_of_a_fault_is_kept_where_the_program_wrote_nothing():
    outcome = sandbox_protocol.Outcome(status=sandbox_protocol.Status.INFRA, detail="node lost")
    assert run(Recorder(outcome), code="1").stderr == "node lost"


def test_the_schema_names_the_tool_and_its_arguments():
    tool = python.PythonTool(Recorder(), NAME, settings.Sandbox())
    function = tool.schema["function"]
    assert tool.schema["type"] == "function" and function["name"] == tool.name == NAME
    assert set(function["parameters"]["properties"]) == {"code", "input"}
    assert function["parameters"]["required"] == ["code"]


def test_the_registry_finds_tools_by_name_and_answers_what_no_tool_can():
    registry = protocol.Registry([python.PythonTool(Recorder(), name, settings.Sandbox()) for name in ("a", "b")])
    assert registry.names == ("a", "b")
    assert [schema["function"]["name"] for schema in registry.schemas] == ["a", "b"]

    def result(call):
        return asyncio.run(registry.run(call, key="k"))

    assert result(ToolCall(name="b", arguments={"code": "1"})).status is CallStatus.OK
    broken = result(ToolCall(name="a", arguments={}, error="no JSON"))
    assert broken.status is CallStatus.PARSE_ERROR and broken.stderr == "no JSON"
    unknown = result(ToolCall(name="c", arguments={}))
    assert unknown.status is CallStatus.UNKNOWN_TOOL and "'c'" in unknown.stderr and "a, b" in unknown.stderr


def test_a_model_without_tools_that_calls_one_hears_that_there_are_none():
    async def answer():
        task = settings.Task(source="box", tokenizer="box", tools=())
        registry = offer.registry(task, Recorder(), settings.Sandbox())
        await offer.self_test(task, registry)
        async with registry.episode("e") as own:
            return await own.run(ToolCall(name="c", arguments={}), key="k")

    result = asyncio.run(answer())
    assert result.status is CallStatus.UNKNOWN_TOOL and result.stderr == "there is no tool named 'c'; there are none"


def test_a_registry_with_a_name_twice_is_refused():
    tool = python.PythonTool(Recorder(), "a", settings.Sandbox())
    with pytest.raises(ValueError, match="'a' is given 2 times"):
        protocol.Registry([tool, tool])
