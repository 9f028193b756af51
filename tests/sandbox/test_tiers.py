"""The weaker tiers, and what they still hold."""

import asyncio
import os
import subprocess
import sys

import pytest

from rstar2_sandbox import executor, jail, seccomp
from rstar2_sandbox.protocol import Execution, Limits, Status

SYSTEM_PYTHON = "/usr/bin/python3"

REFUSED = [
    "open('/etc/shadow').read()",
    "open('/proc/1/environ').read()",
    "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    "open('/tmp/rstar2-stray', 'w')",
    "open('/dev/shm/rstar2-stray', 'w')",
    "import socket\nsocket.socket(socket.AF_UNIX)",
    "import os\nos.kill(os.getppid(), 9)",
    "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "x = bytearray(2 * 2**30)",
]
STRAY = """
import os, time
open('left', 'w').close()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print('parent')
"""


def usable(python):
    """True when another user could run this interpreter."""
    done = subprocess.run([python, "-P", "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    return done.stdout == b"True\n"


async def check(settings):
    """Every claim of a tier without namespaces, in one executor; returns what failed."""
    pool = executor.Executor(1, settings)
    failed = []
    try:
        await pool.start()
        slot = pool.slots[0]

        async def run(code):
            return await slot.run(Execution(code=code, limits=Limits(wall_s=3)))

        if (await run("print(1)")).stdout != "1\n":
            failed.append("print(1)")
        for code in REFUSED:
            outcome = await run(code)
            if outcome.status not in (Status.ERROR, Status.OOM):
                failed.append(f"{code}: {outcome}")
        if (await run("while True: pass")).status is not Status.TIMEOUT_WALL:
            failed.append("endless loop")
        outcome = await run(STRAY)
        if (outcome.status, outcome.stdout) != (Status.OK, "parent\n"):
            failed.append(f"stray: {outcome}")
        outcome = await run("import os\nprint(os.listdir('.'))")
        if outcome.stdout != "[]\n":
            failed.append(f"left over: {outcome}")
        return pool.tier, failed
    finally:
        pool.close()


def sleepers():
    found = subprocess.run(["ps", "-eo", "uid,pid,etimes,args"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "image.py" in line and str(os.getpid()) not in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each slot a user id of its own")
def test_the_tier_without_namespaces_holds_with_own_user_ids():
    if not usable(SYSTEM_PYTHON):
        pytest.skip(f"{SYSTEM_PYTHON} is not there or too old, and this interpreter may lie in a closed home folder")
    tier, failed = asyncio.run(check(executor.Settings(isolation="uid", python=SYSTEM_PYTHON)))
    assert tier.startswith("uid+landlock")
    assert failed == []


SCRIPT = """
import asyncio, os, sys, tempfile
tempfile.tempdir = sys.argv[2]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import test_tiers
from rstar2_sandbox import executor
print(asyncio.run(test_tiers.check(executor.Settings(isolation=sys.argv[1]))))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="drops from root to an ordinary user")
@pytest.mark.parametrize("tier", ["plain", "namespaces"])
def test_an_ordinary_user_gets_a_jail_too(tier, tmp_path_factory):
    if not usable(SYSTEM_PYTHON):
        pytest.skip(f"no {SYSTEM_PYTHON} of 3.11 or later")
    pytest.skip("needs pytest in the system interpreter")


def test_root_is_never_offered_the_tier_that_would_run_programs_as_root():
    offered = executor.Settings().tiers
    assert offered[0] == jail.NAMESPACES
    assert (jail.PLAIN in offered) == (os.geteuid() != 0)
    assert (jail.UID in offered) == (os.geteuid() == 0)
    assert executor.Settings(min_isolation="namespaces").tiers == (jail.NAMESPACES,)
    with pytest.raises(ValueError, match="isolation"):
        executor.Settings(isolation="strong")


def test_a_filter_exists_for_the_machines_it_was_written_for():
    for machine in ("x86_64", "aarch64"):
        strict, open_ = (seccomp.program(machine, unix_sockets=choice) for choice in (False, True))
        assert len(strict) % 8 == 0
        assert strict != open_
    assert seccomp.program("riscv64", unix_sockets=True) is None


def test_the_doctor_says_what_it_found():
    done = subprocess.run(
        [sys.executable, "-m", "rstar2_sandbox", "doctor", "--slots", "1"],
        env=os.environ | {"PYTHONPATH": "sandbox"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for word in ("redis-server", "isolation", "calls/s in one slot", "grading rules"):
        assert word in done.stdout
