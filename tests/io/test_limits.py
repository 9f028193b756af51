"""Limits of a process."""

from __future__ import annotations

import subprocess
import sys


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
