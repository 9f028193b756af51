"""Says what this machine offers: isolation and why not more, Redis, warm interpreters, calls a second, their cost."""

from __future__ import annotations

import time

from rstar2_sandbox import executor, master, verify
from rstar2_sandbox.images import GRADE, MATH, SlotError

CALLS = 100
PROGRAMS = {
    "print(1)": "print(1)",
    "maths image, print(1)": "import sympy\nprint(1)",
    "sympy.factorint(2**61 - 1)": "import sympy\nprint(sympy.factorint(2**61 - 1))",
}


async def report(slots: int, settings: executor.Settings) -> int:
    """Print the report; the exit code is 1 when a node could not run here."""
    healthy = True
    try:
        print(f"redis-server   {master.find_redis_server()}")
    except FileNotFoundError as error:
        print(f"redis-server   none: {error}")
    pool = executor.Executor(slots, settings)
    try:
        await pool.start()
        print(f"isolation      {pool.tier}")
        await _measure(pool)
    except SlotError as error:
        print(f"isolation      none: {error}")
        healthy = False
    finally:
        pool.close()
    for tier, reason in pool.refused.items():
        print(f"refused        {tier}: {reason}")
    print(f"grading rules  {verify.RULES}")
    return 0 if healthy else 1


async def _measure(pool: executor.Executor) -> None:
    for kind in (MATH, GRADE):
        try:
            await pool.warm(kind)
        except SlotError as error:
            print(f"{kind:14} {error}")
    for name, code in PROGRAMS.items():
        started = time.process_time()
        rate, child_ms = await executor.measure_rate(pool.slots[0], code, CALLS)
        own_ms = 1000 * (time.process_time() - started) / CALLS
        print(f"{name:28} {rate:6.0f} calls/s in one slot; CPU per call: child {child_ms:.2f} ms, node {own_ms:.2f} ms")
