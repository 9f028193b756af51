"""Limits of a process."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

from rstar2_jax.io import limits


def test_open_files_are_raised_to_what_the_process_may_have():
    code = (
        "import resource\n"
        "from rstar2_jax.io import limits\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 4096) if hard > 0 else 4096))\n"
        "found = limits.raise_open_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (found, found) and found > 64, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_that_comes_of_too_many_open_files_is_known_behind_others_and_says_what_to_do():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    outer = RuntimeError("while connecting")
    outer.__cause__ = ConnectionError("no connection")
    outer.__cause__.__context__ = OSError(errno.EMFILE, "Too many open files")
    said = limits.met_open_files(outer)
    assert said is not None and f"RLIMIT_NOFILE = {soft}" in said and "ulimit -Hn" in said
    machine = limits.met_open_files(OSError(errno.ENFILE, "Too many open files in system"))
    assert machine is not None and "fs.file-max" in machine
    assert limits.met_open_files(OSError(errno.ECONNREFUSED, "refused")) is None
