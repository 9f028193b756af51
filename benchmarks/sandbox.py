"""What a call of the sandbox costs beside what it must cost: CPU milliseconds on one core, everything that takes part.

    python benchmarks/sandbox.py [--json] [--rounds 5] [--calls 200] [--code_judge CHECKOUT] [--load SECONDS] [--burst
    N]

Each round measures every variant once, in turn, on one core; medians over the rounds, and ratios to R1 (benchmarks/
sandbox_floor.py). "queue" has 64 calls outstanding: client, Redis, node, keeper and child together. With --load, the
promises under load follow (see rstar2_sandbox.bench), on all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from rstar2_sandbox import bench, build, client, executor, images, local
from rstar2_sandbox.images import SlotError
from rstar2_sandbox.protocol import Execution, Limits

PROGRAMS = {
    "bare": "print(1)",
    "math": "import sympy\nprint(1)",
    "factor": "import sympy\nprint(sympy.factorint(2**61 - 1))",
}
KIND = {"bare": "bare", "math": "math", "factor": "math"}
LIMITS = Limits(wall_s=10.0)
OUTSTANDING = 64


def tree(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive_cpu_s(pids: set[int]) -> float:
    """CPU seconds of living processes, all threads, without their children: exact, from the scheduler."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    total += int(file.read().split()[0])
    return total / 1e9


class Floor:
    """A process of sandbox_floor.py."""

    def __init__(self, which: str, kind: str) -> None:
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_floor.py")
        tuned = {"GLIBC_TUNABLES": images.TUNABLES} if which == "R1" else {}
        self._process = subprocess.Popen(
            [sys.executable, script, which, kind],
            env=images.ENVIRONMENT | tuned | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self, code: str, calls: int) -> float:
        """CPU seconds of a call."""
        assert self._process.stdin and self._process.stderr
        self._process.stdin.write(json.dumps([code, calls]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stderr.readline())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Direct:
    """Our slots without the queue."""

    def __init__(self, runner: asyncio.Runner, **settings: Any) -> None:
        self._runner = runner
        self._pool = executor.Executor(1, executor.Settings(**settings))
        runner.run(self._pool.start())

    def measure(self, code: str, calls: int) -> float:
        """CPU seconds of a call: driver, keeper and child."""
        return self._runner.run(self._measure(code, calls))

    async def _measure(self, code: str, calls: int) -> float:
        slot, execution = self._pool.slots[0], Execution(code=code, limits=LIMITS)
        for _ in range(3):
            await slot.run(execution)
        pids = tree(os.getpid()) - {os.getpid()}
        before, own, spent = alive_cpu_s(pids), time.process_time(), 0.0
        for _ in range(calls):
            outcome = await slot.run(execution)
            assert outcome.stdout, outcome
            spent += outcome.cpu_s
        return (spent + alive_cpu_s(pids) - before + time.process_time() - own) / calls

    def close(self) -> None:
        """End it."""
        self._pool.close()


class Queue:
    """A private cluster with one slot, 64 calls outstanding."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._local = local.start_local(slots=1)
        self.redis_ms: list[float] = []

    def measure(self, code: str, calls: int) -> float:
        """CPU seconds of a call: client, Redis, node, keeper and child."""
        return self._runner.run(self._measure(code, calls))

    async def _measure(self, code: str, calls: int) -> float:
        async with client.Client(self._local.redis_url, run="benchmark") as caller:
            left, spent = calls, 0.0

            async def keep_going() -> None:
                nonlocal left, spent
                while left > 0:
                    left -= 1
                    outcome = await caller.execute(Execution(code=code, limits=LIMITS))
                    assert outcome.stdout, outcome
                    spent += outcome.cpu_s

            await asyncio.gather(*(caller.execute(Execution(code=code, limits=LIMITS)) for _ in range(8)))
            pids = tree(self._local.supervisor_pid)
            redis = {self._local.redis_pid}
            before, redis_before, own = alive_cpu_s(pids), alive_cpu_s(redis), time.process_time()
            await asyncio.gather(*(keep_going() for _ in range(OUTSTANDING)))
            self.redis_ms.append(1000 * (alive_cpu_s(redis) - redis_before) / calls)
            return (spent + alive_cpu_s(pids) - before + time.process_time() - own) / calls

    def close(self) -> None:
        """End it."""
        self._local.close()


class Subprocess:
    """What most people write: one `python -c` a call."""

    def measure(self, code: str, calls: int) -> float:
        """CPU seconds of a call."""
        calls = max(3, calls // 20)
        before = os.times()
        for _ in range(calls):
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        after = os.times()
        return (sum(after[:4]) - sum(before[:4])) / calls

    def close(self) -> None:
        """Nothing to end."""


class CodeJudge:
    """The authors' service from a checkout with its own environment: its Redis, one worker, its HTTP front end."""

    def __init__(self, checkout: str) -> None:
        self._redis = local.start_local(slots=1)
        url = self._redis.redis_url
        python = os.path.join(checkout, ".venv", "bin", "python")
        python = python if os.path.exists(python) else sys.executable
        environment = os.environ | {"REDIS_URI": url, "MAX_WORKERS": "1", "RUN_WORKERS": "0"}
        command = [python, "-m", "uvicorn", "app.main:app", "--port", "18088"]
        self._processes = [
            subprocess.Popen(part, cwd=checkout, env=environment, start_new_session=True)
            for part in (command, [python, "run_workers.py"])
        ]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen("http://127.0.0.1:18088/ping", timeout=2).close()
                return
            time.sleep(0.2)
        raise SystemExit(f"code-judge in {checkout} does not answer: see its messages above")

    def measure(self, code: str, calls: int) -> float:
        """CPU seconds of a call: front end, Redis, worker and child."""
        calls = max(8, calls // 10)
        body = {"type": "batch", "submissions": [{"type": "python", "solution": code}] * calls}
        request = urllib.request.Request(
            "http://127.0.0.1:18088/run/long-batch",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        before = self._spent()
        with urllib.request.urlopen(request, timeout=600) as answer:
            results = json.load(answer)["results"]
        assert all(result["success"] for result in results), results[:2]
        return (self._spent() - before) / calls

    def _spent(self) -> float:
        total = 0.0
        for process in self._processes:
            for pid in tree(process.pid):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                    total += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
        return total / os.sysconf("SC_CLK_TCK") + alive_cpu_s({self._redis.redis_pid})

    def close(self) -> None:
        """End it."""
        for process in self._processes:
            for pid in sorted(tree(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()
        self._redis.close()


@contextlib.contextmanager
def variants(runner: asyncio.Runner, checkout: str) -> Iterator[dict[str, Any]]:
    """Everything that is measured, started before the first round and ended after the last."""
    weaker = "uid" if os.geteuid() == 0 else "plain"
    with contextlib.ExitStack() as stack:
        made: dict[str, Any] = {}
        for which in ("R0", "R1"):
            floors = {kind: stack.enter_context(contextlib.closing(Floor(which, kind))) for kind in ("bare", "math")}
            made[which] = floors
        for name, settings in (
            ("ours", {}),
            ("ours, Python only", {"compiled": False}),
            (f"ours, tier {weaker}", {"isolation": weaker}),
        ):
            try:
                made[name] = stack.enter_context(contextlib.closing(Direct(runner, **settings)))
            except SlotError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
        made["queue"] = stack.enter_context(contextlib.closing(Queue(runner)))
        made["subprocess"] = stack.enter_context(contextlib.closing(Subprocess()))
        if checkout:
            made["code-judge"] = stack.enter_context(contextlib.closing(CodeJudge(checkout)))
        yield made


def cost(rounds: int, calls: int, checkout: str) -> dict[str, Any]:
    """Medians in CPU milliseconds by variant and program, ratios to R1 of the same round, and Redis's part."""
    found: dict[str, dict[str, list[float]]] = {}
    with asyncio.Runner() as runner, variants(runner, checkout) as made:
        for _ in range(rounds):
            for program, code in PROGRAMS.items():
                for name, variant in made.items():
                    chosen = variant[KIND[program]] if isinstance(variant, dict) else variant
                    spent = 1000 * chosen.measure(code, calls)
                    found.setdefault(name, {}).setdefault(program, []).append(spent)
        redis_ms = statistics.median(made["queue"].redis_ms)
    ratios = {
        name: {
            program: statistics.median(a / b for a, b in zip(times, found["R1"][program], strict=True))
            for program, times in programs.items()
        }
        for name, programs in found.items()
    }
    medians = {name: {p: statistics.median(t) for p, t in programs.items()} for name, programs in found.items()}
    return {"cpu_ms": medians, "ratio_to_R1": ratios, "redis_ms": redis_ms, "rounds": rounds, "calls": calls}


def show(result: dict[str, Any]) -> None:
    """The figures as a table."""
    print(f"{'CPU ms a call (x R1)':24}" + "".join(f"{program:>18}" for program in PROGRAMS))
    for name, programs in result["cpu_ms"].items():
        cells = (f"{programs[p]:.2f} ({result['ratio_to_R1'][name][p]:.2f})" for p in PROGRAMS)
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"Redis's part of a call through the queue: {result['redis_ms']:.3f} ms")


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="calls of one variant in one round")
    parser.add_argument("--code_judge", default="", help="path of a checkout of code-judge")
    parser.add_argument("--load", type=float, default=0.0, help="seconds of each part under load; 0 leaves it out")
    parser.add_argument("--burst", type=int, default=0, help="calls submitted at once, after the load")
    arguments = parser.parse_args()
    with contextlib.suppress(OSError):
        build.build()
    cores = os.sched_getaffinity(0)
    code = 0
    if arguments.rounds:
        os.sched_setaffinity(0, {max(cores)})
        result = cost(arguments.rounds, arguments.calls, arguments.code_judge)
        print(json.dumps(result), flush=True) if arguments.json else show(result)
        os.sched_setaffinity(0, cores)
    if arguments.load:
        with local.start_local(slots=OUTSTANDING) as running:
            code = asyncio.run(bench.report(running.redis_url, arguments.load, arguments.burst))
            with open(f"/proc/{running.worker_pid}/status") as file:
                peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
            print(json.dumps({"what": "node", "peak_mib": int(peak) / 1024}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
