"""Compiles the optional part in C (forker.c) in place: `python -m rstar2_sandbox build`. An installation does so by
itself where a compiler is found."""

from __future__ import annotations

import os
import shutil
import subprocess

from rstar2_sandbox.forker import FOLDER, find


def build() -> str:
    """Compile it unless that was done; return its path. Raises OSError that says what is missing."""
    source, target = os.path.join(FOLDER, "forker.c"), find() or os.path.join(FOLDER, "_forker.so")
    if os.path.exists(target) and os.path.getmtime(target) >= os.path.getmtime(source):
        return target
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError(
            "no C compiler was found (Debian: apt-get install gcc libc6-dev); it works without, too"
        )
    made = f"{target}.{os.getpid()}"
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, source], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{compiler} cannot compile forker.c: {done.stderr.strip()[-400:]}")
    os.replace(made, target)
    return target
