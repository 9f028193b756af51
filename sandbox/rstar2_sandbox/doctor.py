"""Says what this machine offers: isolation and why not more, Redis, warm interpreters, calls a second, their cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from rstar2_sandbox import client, executor, jail, local, master, verify
from rstar2_sandbox.images import GRADE, MATH, SlotError
from rstar2_sandbox.protocol import Execution, Status

CALLS = 100
PROGRAMS = {
    "print(1)": "print(1)",
    "maths image, print(1)": "import sympy\nprint(1)",
    "sympy.factorint(2**61 - 1)": "import sympy\nprint(sympy.factorint(2**61 - 1))",
}


async def report(slots: int, settings: executor.Settings, queue_calls: int = 0) -> int:
    """Print the report; the exit code is 1 when a node could not run here.

    Args:
        slots, settings: of the node.
        queue_calls: calls sent through a private Redis and node as well; 0 leaves that part out.
    """
    healthy = True
    try:
        print(f"redis-server   {master.find_redis_server()}")
    except FileNotFoundError as error:
        print(f"redis-server   none: {error}")
    pool = executor.Executor(slots, settings)
    try:
        await pool.start()
        print(f"isolation      {pool.tier}")
        print(f"part in C      {'in use' if pool.compiled else 'not there (python -m rstar2_sandbox build)'}")
        print(f"GNU Octave     {jail.OCTAVE[0] if os.access(jail.OCTAVE[0], os.X_OK) else 'none'}")
        await _measure(pool)
    except SlotError as error:
        print(f"isolation      none: {error}")
        healthy = False
    finally:
        pool.close()
    for tier, reason in pool.refused.items():
        print(f"refused        {tier}: {reason}")
    print(f"grading rules  {verify.RULES}+{pool.library or 'none'}")
    if healthy and queue_calls:
        with local.start_local(slots=slots) as running:
            for name, code in PROGRAMS.items():
                await _measure_queue(running, name, code, queue_calls)
    return 0 if healthy else 1


async def _measure(pool: executor.Executor) -> None:
    for kind in (MATH, GRADE):
        try:
            await pool.warm(kind)
        except SlotError as error:
            print(f"{kind:14} {error}")
    for name, code in PROGRAMS.items():
        started = time.process_time()
        try:
            rate, child_ms = await executor.measure_rate(pool.slots[0], code, CALLS)
        except SlotError as error:
            print(f"{name:28} {error}")
            continue
        own_ms = 1000 * (time.process_time() - started) / CALLS
        print(f"{name:28} {rate:6.0f} calls/s in one slot; CPU per call: child {child_ms:.2f} ms, node {own_ms:.2f} ms")


async def _measure_queue(running: local.Local, name: str, code: str, calls: int) -> None:
    """CPU of everything that takes part, from the client to the children, for calls that are sent all at once."""
    async with client.Client(running.redis_url, run="doctor") as caller:
        # Have every interpreter warm first, the graders' included: that is paid once, not by a call.
        await caller.verify(text=r"<answer>\boxed{\sqrt{4}}</answer>", gold="2")
        await asyncio.gather(*(caller.execute(Execution(code=f"import sympy\n{code}")) for _ in range(20)))
        before, own, started = _cpu_s(running.supervisor_pid), time.process_time(), time.monotonic()
        outcomes = await asyncio.gather(*(caller.execute(Execution(code=code)) for _ in range(calls)))
        wall_s, own = time.monotonic() - started, time.process_time() - own
        spent = _cpu_s(running.supervisor_pid) - before + own
    failed = [outcome for outcome in outcomes if outcome.status is not Status.OK]
    if failed:
        print(f"{name:28} through the queue: not measured: {len(failed)} of {calls} calls ended as {failed[0].status}")
        return
    print(
        f"{name:28} {calls / wall_s:6.0f} calls/s through the queue; CPU per call: {1000 * spent / calls:.2f} ms in all"
    )


def _cpu_s(root: int) -> float:
    """CPU seconds of a process and of all that it started, those that ended included."""
    rows = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            rows[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    members = {root}
    while more := {pid for pid, (parent, _) in rows.items() if parent in members} - members:
        members |= more
    return sum(rows[pid][1] for pid in members if pid in rows) / os.sysconf("SC_CLK_TCK")
