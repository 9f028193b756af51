"""The hostile corpus in the tier with namespaces and in the one without: the wanted outcome, a clean slot after each
case, and nothing left behind. The cases of a tier run once, over several slots; each is then a test of its own."""

import asyncio
import os
import socket
import tempfile

import pytest

from rstar2_sandbox import executor
from rstar2_sandbox.protocol import Execution, Limits, Status
from tests.sandbox import corpus

SLOTS = 4
# The tests' own interpreter may lie where another user cannot read.
READABLE = "/usr/bin/python3"
AFTER = """
import builtins, collections, json, math, os
print(os.listdir('.'), math.pi > 3.1, callable(len), json.dumps([1]), collections.OrderedDict(a=1)['a'])
"""
CLEAN = "[] True True [1] 1\n"


def uids_at_work(pool):
    """Programs of the pool's children that still run, by the user ids that only they have."""
    children = {pool._uid_base + 2 * index + 1 for index in range(SLOTS)}
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid in children:
                with open(f"/proc/{name}/stat") as file:
                    found.append(file.read()[:60])
        except OSError:
            continue
    return found


async def run_all(settings):
    """Outcome of each case and of the call after it; then what is left of processes, descriptors and files."""
    pool = executor.Executor(SLOTS, settings)
    todo = list(corpus.CASES.items())
    found = {}

    async def work(slot, port):
        while todo:
            name, case = todo.pop()
            code = case.code.replace("PORT", str(port))
            outcome = await slot.run(Execution(code=code, stdin=case.stdin, limits=case.limits))
            found[name] = outcome, await slot.run(Execution(code=AFTER, limits=Limits(wall_s=10)))

    try:
        await pool.start()
        for slot in pool.slots:
            await slot.run(Execution(code="print(1)"))
        before = len(os.listdir("/proc/self/fd"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            await asyncio.gather(*(work(slot, port) for slot in pool.slots))
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        left = {"processes": uids_at_work(pool) if os.geteuid() == 0 else []}
        for slot in pool.slots:  # a slot whose keeper was rebuilt must have it again before descriptors are counted
            await slot.run(Execution(code="print(1)"))
        left["descriptors"] = len(os.listdir("/proc/self/fd")) - before
        left["files"] = [name for name in os.listdir("/var/tmp") if name.startswith("rstar2-stray")]
        folder = tempfile.gettempdir()
        for name in os.listdir(folder):
            if name.startswith(f"rstar2-slot-{os.geteuid()}-{pool._uid_base}-"):
                left["files"] += os.listdir(os.path.join(folder, name))
        return pool.tier, found, left
    finally:
        pool.close()


def results_of(tier):
    if tier == "uid" and os.geteuid() != 0:
        pytest.skip("only root can give each slot a user id of its own")
    if tier == "uid" and not os.access(READABLE, os.X_OK):
        pytest.skip(f"no {READABLE}")
    python = READABLE if tier == "uid" else ""
    return asyncio.run(run_all(executor.Settings(isolation=tier, python=python)))


@pytest.fixture(scope="module", params=["namespaces", "uid"])
def results(request):
    return results_of(request.param)


def test_there_are_enough_cases():
    assert len(corpus.CASES) >= 60


@pytest.mark.parametrize("name", corpus.CASES)
def test_a_hostile_program_gets_what_it_earned(results, name):
    tier, found, _ = results
    case, (outcome, after) = corpus.CASES[name], found[name]
    assert after.status is Status.OK and after.stdout == CLEAN, after
    if case.namespaces_only and not tier.startswith("namespaces"):
        assert outcome.status in corpus.BOUNDED
        return
    assert outcome.status in case.statuses, outcome
    assert case.stdout is None or outcome.stdout == case.stdout
    assert case.stderr is None or case.stderr in outcome.stderr
    assert len(outcome.stdout) + len(outcome.stderr) < 200_000
    assert outcome.status is not Status.ERROR or outcome.stderr.strip() or outcome.exit_code


def test_nothing_is_left_behind(results):
    left = results[2]
    # Fewer than before is no leak: what an earlier test forgot may be collected meanwhile.
    assert left["descriptors"] <= 0 and left | {"descriptors": 0} == {"processes": [], "descriptors": 0, "files": []}
