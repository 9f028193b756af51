"""kill -9 at bad moments: nobody waits forever, nothing is answered wrongly, nothing is left running."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rstar2_sandbox import client, local
from rstar2_sandbox.protocol import Execution, Status, Verdict

pytestmark = pytest.mark.slow

# Image, keeper and program, and the second image that is being warmed.
ONE_AT_WORK = 4


@pytest.fixture(scope="module")
def victim():
    with local.start_local(slots=2) as running:
        yield running


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, limit_s=15.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["worker_pid", "redis_pid"])
def test_calls_in_flight_survive_a_killed_part_and_nothing_is_answered_twice(victim, name):
    async def session():
        async with client.Client(victim.redis_url, run=name) as caller:
            await caller.execute(Execution(code="1"))
            programs = [f"import time\ntime.sleep(0.2)\nprint({n})" for n in range(24)]
            runs = [
                asyncio.create_task(caller.execute(Execution(code=code, key=f"k{n}")))
                for n, code in enumerate(programs)
            ]
            grades = [
                asyncio.create_task(caller.verify(text=rf"<answer>\boxed{{{n}}}</answer>", gold="3")) for n in range(24)
            ]
            await asyncio.sleep(0.6)
            os.kill(getattr(victim, name), signal.SIGKILL)
            return await asyncio.gather(*runs), await asyncio.gather(*grades)

    before = getattr(victim, name)
    runs, grades = asyncio.run(session())
    assert [outcome.stdout for outcome in runs] == [f"{n}\n" for n in range(24)]
    assert {outcome.status for outcome in runs} == {Status.OK}
    assert [found.verdict for found in grades] == [Verdict.CORRECT if n == 3 else Verdict.WRONG for n in range(24)]
    assert getattr(victim, name) != before


def test_a_call_that_kills_every_node_ends_as_infra_and_takes_no_neighbour_with_it(victim):
    """The node is killed from here each time the call runs: what a defect of the node would do."""

    async def session():
        async with client.Client(victim.redis_url, run="poison", retries=0) as caller:
            poison = asyncio.create_task(caller.execute(Execution(code="import time\ntime.sleep(4)", key="poison")))
            await asyncio.sleep(0.1)
            others = [asyncio.create_task(caller.execute(Execution(code=f"print({n})"))) for n in range(8)]
            while not poison.done():
                await asyncio.sleep(0.5)
                if len(descendants(victim.worker_pid)) >= ONE_AT_WORK:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim.worker_pid, signal.SIGKILL)
            return await poison, await asyncio.gather(*others)

    poison, others = asyncio.run(session())
    assert poison.status is Status.INFRA
    assert "3 deliveries" in poison.detail
    assert [outcome.stdout for outcome in others] == [f"{n}\n" for n in range(8)]


def descendants(root):
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more


def test_nothing_is_left_when_the_process_that_uses_the_sandbox_is_killed(tmp_path):
    script = f"""
import json, os, sys, time
from rstar2_sandbox import local, client
from rstar2_sandbox.protocol import Execution
import asyncio
running = local.start_local(slots=1)
async def session():
    async with client.Client(running.redis_url) as caller:
        task = asyncio.create_task(caller.execute(Execution(code="import os, time\\nos.fork()\\ntime.sleep(60)")))
        await asyncio.sleep(1)
        open({str(tmp_path / "pids")!r}, "w").write(json.dumps(
            [running.supervisor_pid, running.worker_pid, running.redis_pid, running._folder]))
        await task
asyncio.run(session())
"""
    user = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": "sandbox"})
    wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("]"), 60)
    *pids, folder = json.loads((tmp_path / "pids").read_text())
    everything = {*pids, *descendants(pids[0])}
    assert len(everything) >= 6
    user.kill()
    user.wait()
    wait_until(lambda: not any(map(is_running, everything)))
    wait_until(lambda: not os.path.exists(folder))


def test_nothing_is_left_when_the_supervisor_itself_is_killed():
    with local.start_local(slots=1) as running:
        everything = {running.supervisor_pid, *descendants(running.supervisor_pid)}
        os.kill(running.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, everything)))


def test_a_killed_interpreter_or_keeper_costs_at_most_a_retry(victim):
    async def session():
        async with client.Client(victim.redis_url, run="parts") as caller:
            await caller.execute(Execution(code="1"))
            outcomes = []
            for _ in range(3):
                task = asyncio.create_task(caller.execute(Execution(code="import time\ntime.sleep(0.3)\nprint('ok')")))
                await asyncio.sleep(0.1)
                for pid in descendants(victim.worker_pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                outcomes.append(await task)
            return outcomes, await caller.execute(Execution(code="print('whole again')"))

    outcomes, after = asyncio.run(session())
    assert after.stdout == "whole again\n"
    for outcome in outcomes:
        # A kill that hits the program itself looks like any other: the kernel's word is all there is.
        assert outcome.status in (Status.OK, Status.KILLED)
