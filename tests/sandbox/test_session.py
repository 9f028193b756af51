"""Sessions keep what cells define, in one process, until a limit or their caller ends them; and SQL and Octave."""

import asyncio
import os
import time

import pytest
import redis

from rstar2_jax import settings
from rstar2_jax.tools import protocol, script
from rstar2_jax.tools import session as session_tool
from rstar2_jax.types import CallStatus, ToolCall
from rstar2_sandbox import client, jail, session, slot, sql_child
from rstar2_sandbox.protocol import Execution, Limits, Status


def talk(sandbox, conversation, run="sessions"):
    async def opened():
        async with client.Client(sandbox.redis_url, run=run) as caller:
            return await conversation(caller)

    return asyncio.run(opened())


def cells(sandbox, *codes, name, limits=None):
    """Outcomes of cells of one session, one after another."""

    async def conversation(caller):
        outcomes = [
            await caller.execute(Execution(code=code, session=name, limits=limits or Limits(wall_s=15)))
            for code in codes
        ]
        await caller.end_session(name)
        return outcomes

    return talk(sandbox, conversation)


def test_what_a_cell_defines_the_next_one_sees_in_the_same_process(sandbox):
    first, second, third = cells(
        sandbox, "import os\nx = [1]\nprint(os.getpid())", "x.append(2)\nprint(os.getpid())", "x", name="same"
    )
    assert first.stdout == second.stdout and third.stdout == "[1, 2]\n"
    assert {first.status, second.status, third.status} == {Status.OK}
    assert first.at and first.at == third.at


def test_an_error_ends_a_cell_and_not_the_session_and_shows_the_cells_own_lines(sandbox):
    outcomes = cells(
        sandbox, "def f():\n    return 1 / 0\nx = 3", "f()", "print(x)", "import sys\nsys.exit(4)", "x", name="e"
    )
    assert [outcome.status for outcome in outcomes] == [
        Status.OK, Status.ERROR, Status.OK, Status.ERROR, Status.OK,
    ]  # fmt: skip
    assert '"<cell 2>", line 1' in outcomes[1].stderr and '"<cell 1>", line 2' in outcomes[1].stderr
    assert "return 1 / 0" in outcomes[1].stderr
    assert outcomes[3].exit_code == 4 and outcomes[4].stdout == "3\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", Status.TIMEOUT_WALL),
        ("import os\nos._exit(3)", Status.ERROR),
        ("import ctypes\nctypes.string_at(0)", Status.KILLED),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", Status.OUTPUT_LIMIT),
        ("import os\nos.close(3)\nimport time\ntime.sleep(9)", Status.KILLED),
    ],
)
def test_a_cell_that_ends_its_process_says_so_and_the_next_starts_afresh(sandbox, code, status):
    before, ended, after = cells(
        sandbox, "x = 1", code, "print('x' in globals())", name="ends", limits=Limits(wall_s=1)
    )
    assert before.status is Status.OK and ended.status is status
    assert session.ENDED in ended.stderr and ended.at == ""
    assert after.stdout == "False\n"


def test_sessions_do_not_see_each_other_and_leave_their_slot_clean(sandbox):
    async def conversation(caller):
        async def one(name):
            code = f"import os\nname = {name!r}\nopen('mine', 'w').write(name)\nprint(os.listdir('.'))"
            first = await caller.execute(Execution(code=code, session=name))
            second = await caller.execute(Execution(code="name, open('mine').read()", session=name))
            return first.stdout, second.stdout

        seen = await asyncio.gather(one("a"), one("b"))
        await asyncio.gather(caller.end_session("a"), caller.end_session("b"))
        after = await caller.execute(Execution(code="import os\nprint(os.listdir('.'))", session="c"))
        await caller.end_session("c")
        return seen, after.stdout

    seen, after = talk(sandbox, conversation)
    assert seen == [("['mine']\n", "('a', 'a')\n"), ("['mine']\n", "('b', 'b')\n")]
    assert after == "[]\n"


def test_more_sessions_than_slots_wait_until_one_ends_or_their_deadline(sandbox):
    async def conversation(caller):
        held = [await caller.execute(Execution(code="1", session=f"held{n}")) for n in range(2)]
        late = asyncio.create_task(caller.execute(Execution(code="1", session="late", deadline_s=0.8)))
        waits = asyncio.create_task(caller.execute(Execution(code="2", session="waits")))
        await asyncio.sleep(1.0)
        for number in range(2):
            await caller.end_session(f"held{number}")
        outcomes = held, await late, await waits
        await caller.end_session("waits")
        return outcomes

    held, late, waits = talk(sandbox, conversation)
    assert {outcome.status for outcome in held} == {Status.OK}
    assert late.status is Status.INFRA
    assert waits.stdout == "2\n"


def test_a_session_sleeps_between_its_cells(bench):
    async def scene():
        sessions = session.Session(bench.slot, Limits(wall_s=5))
        await sessions.open()
        code = "import threading, time\ncount = 0\ndef go():\n  global count\n"
        code += "  while True: count += 1; time.sleep(0.001)\n"
        await sessions.run(code + "threading.Thread(target=go, daemon=True).start()", Limits(wall_s=5))
        await asyncio.sleep(0.05)
        first = await sessions.run("print(count)", Limits(wall_s=5))
        await asyncio.sleep(1.0)
        second = await sessions.run("print(count)", Limits(wall_s=5))
        await sessions.close()
        return int(first.stdout), int(second.stdout)

    first, second = bench.runner.run(scene())
    assert second - first < 300
    assert bench.run("print('clean')").stdout == "clean\n"


def test_the_tools_of_a_trajectory_share_one_registry_with_a_schema_each(sandbox):
    limits = settings.Sandbox(run_limit_s=3.0)
    languages = (("sql", script.SQL), ("octave", script.OCTAVE))

    async def conversation(caller):
        async with session_tool.SessionTool(caller, "notebook", limits, session="trajectory-1") as notebook:
            tools = [notebook, *(script.ScriptTool(caller, name, limits, language) for name, language in languages)]
            registry = protocol.Registry(tools)
            calls = [
                ToolCall(name="notebook", arguments={"code": "x = 20"}),
                ToolCall(name="notebook", arguments={"code": "x + 3"}),
                ToolCall(name="sql", arguments={"script": "select 2 + 2 as four;"}),
                ToolCall(name="sql", arguments={"script": "select x"}),
                ToolCall(name="sql", arguments={"query": "select 1"}),
                ToolCall(name="octave", arguments={"code": "disp(6 * 7)"}),
            ]
            results = await asyncio.gather(*(registry.run(call, key=f"k{n}") for n, call in enumerate(calls)))
            return registry.schemas, results

    schemas, results = talk(sandbox, conversation)
    for schema in schemas:
        assert schema["type"] == "function" and schema["function"]["parameters"]["required"]
    assert [result.stdout for result in results[:3]] == ["", "23\n", "four\n4\n"]
    assert results[3].status is CallStatus.ERROR and "no such column" in results[3].stderr
    assert results[4].status is CallStatus.PARSE_ERROR and "'script'" in results[4].stderr
    if os.access(jail.OCTAVE[0], os.X_OK):
        assert results[5].stdout.strip() == "42"
    else:
        assert results[5].status is CallStatus.REJECTED and results[5].stderr == slot.NO_OCTAVE


def test_sql_reads_and_writes_nothing_but_its_own_memory(bench):
    def run(script, **fields):
        execution = Execution(code=script, language="sql", limits=Limits(wall_s=3), **fields)
        return bench.runner.run(bench.slot.run(execution))

    assert run("create table t(a, b); insert into t values (1, null), ('x;y', 2.5); select * from t").stdout == (
        "a|b\n1|NULL\nx;y|2.5\n"
    )
    assert run("select * from t").status is Status.ERROR
    assert run("attach '/etc/passwd' as p; select * from p.sqlite_master").status is Status.ERROR
    assert run("select load_extension('x')").status is Status.ERROR
    endless = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r"
    assert run(endless).status is Status.TIMEOUT_WALL
    assert len(run("with recursive r(n) as (select 1 union all select n + 1 from r) select n from r").stdout) < 100_000


def test_statements_end_where_sqlite_sees_their_end():
    script = "create trigger g after insert on t begin select 1; select 2; end; select ';' -- ;\n; select 3"
    assert [part.split()[0] for part in sql_child.statements(script)] == ["create", "select", "select"]


def test_a_cell_for_a_node_that_died_is_a_fault_of_ours(sandbox):
    async def conversation(caller):
        caller._sessions["orphan"] = "no-such-node:1-0"
        return await caller.execute(Execution(code="1", session="orphan", limits=Limits(queue_s=60)))

    outcome = talk(sandbox, conversation)
    assert (outcome.status, outcome.detail) == (Status.INFRA, client.NODE_GONE)
    with redis.Redis.from_url(sandbox.redis_url) as server:
        server.delete("rstar2:calls:at:no-such-node:1-0")


def test_a_keeper_that_was_killed_between_two_sessions_is_replaced(bench):
    async def scene():
        outcomes = []
        for _ in range(2):
            opened = session.Session(bench.slot, Limits(wall_s=5))
            await opened.open()
            outcomes.append(await opened.run("6 * 7", Limits(wall_s=15)))
            await opened.close()
            for owner in bench.slot._keepers.values():
                owner.kill()
            await asyncio.sleep(0.05)
        return outcomes

    before = len(os.listdir("/proc/self/fd"))
    assert [outcome.stdout for outcome in bench.runner.run(scene())] == ["42\n"] * 2
    assert bench.run("print('clean')").stdout == "clean\n"
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the keeper of the other kind, which may be new


def test_a_cell_that_floods_its_control_socket_does_not_hold_up_the_node(bench):
    async def scene():
        opened = session.Session(bench.slot, Limits(wall_s=5))
        await opened.open()
        flood = "import os\nfor _ in range(4): os.fork()\nwhile True: os.write(3, b'no answer')"
        cell = asyncio.create_task(opened.run(flood, Limits(wall_s=1.5)))
        longest, last = 0.0, time.monotonic()
        while not cell.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await opened.close()
        return longest, await cell

    longest, outcome = bench.runner.run(scene())
    assert outcome.status is Status.KILLED and session.ENDED in outcome.stderr, outcome.stderr
    assert longest < 1.0


def test_a_session_that_is_ended_in_the_middle_of_a_cell_is_no_fault_of_ours(bench):
    async def scene():
        opened = session.Session(bench.slot, Limits(wall_s=5))
        await opened.open()
        cell = asyncio.create_task(opened.run("import time\ntime.sleep(4)", Limits(wall_s=5)))
        await asyncio.sleep(0.2)
        await opened.close()
        return await cell

    outcome = bench.runner.run(scene())
    assert outcome.status is Status.KILLED and session.ENDED in outcome.stderr, outcome.stderr
