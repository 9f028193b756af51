"""Checks every claim of a tier without namespaces (and some of the others) and prints tier and failures as JSON.

    python check_tier.py SANDBOX_FOLDER TIER [UID]

A program of its own, run on an interpreter that every user can read, as root or as the given user.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile

REFUSED = [
    "open('/etc/shadow').read()",
    "open('/proc/1/environ').read()",
    "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    "open('/var/tmp/rstar2-stray', 'w')",
    "import os\nopen('/dev/shm/../../var/tmp/rstar2-stray', 'w')",
    "import socket\nsocket.socket(socket.AF_INET)",
    "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 0) if os.getppid() != 1 else 1 / 0",
    "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nif os.getppid() == 1: 1 / 0",
    "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "import os\nos.sched_setaffinity(os.getppid(), {0})",
    "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "x = bytearray(2 * 2**30)",
]
STRAY = """
import os, time
open('left', 'w').close()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(77)
    os._exit(0)
print('parent')
"""


def parents():
    """Parent of each process: {pid: pid}."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            found[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
    return found


def strays():
    """Processes of any user that still sleep in the stray program: below this one, or left to init.

    Others that run at the same time have jails too, whose programs may sleep.
    """
    parent, found = parents(), 0
    for pid in parent:
        above, at = [], pid
        while at := parent.get(at, 0):
            above.append(at)
        if os.getpid() not in above and above != [1]:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as wait, open(f"/proc/{pid}/cmdline") as line:
            found += "nanosleep" in wait.read() and "image.py" in line.read()
    return found


async def check(settings):
    """Tier and list of failed claims of one executor."""
    from rstar2_sandbox import executor
    from rstar2_sandbox.protocol import Execution, Limits, Status

    pool = executor.Executor(1, settings)
    failed = []

    async def expect(what, code, statuses, stdout=None):
        outcome = await pool.slots[0].run(Execution(code=code, limits=Limits(wall_s=3)))
        if outcome.status not in statuses or (stdout is not None and outcome.stdout != stdout):
            failed.append(f"{what}: {outcome}")

    try:
        await pool.start()
        await expect("print", "print(1)", [Status.OK], "1\n")
        for code in REFUSED:
            await expect(code, code, [Status.ERROR, Status.OOM])
        await expect("loop", "while True: pass", [Status.TIMEOUT_WALL])
        await expect("stray", STRAY, [Status.OK], "parent\n")
        if strays():
            failed.append("a stray process lives on")
        await expect("left over", "import os\nprint(os.listdir('.'))", [Status.OK], "[]\n")
        return pool.tier, failed
    finally:
        pool.close()


def main():
    """See the module's docstring."""
    folder, tier, *user = sys.argv[1:]
    sys.path.insert(0, folder)
    from rstar2_sandbox import executor

    if user:
        os.setgroups([])
        os.setgid(int(user[0]))
        os.setuid(int(user[0]))
    with tempfile.TemporaryDirectory() as private:
        tempfile.tempdir = private
        os.chmod(private, 0o711)
        print(json.dumps(asyncio.run(check(executor.Settings(isolation=tier)))))


if __name__ == "__main__":
    main()
