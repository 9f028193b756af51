"""One run at a time in a workdir, and none that a dead one keeps out."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from rstar2_jax import launch
from rstar2_jax.io import lock

HOLDS = textwrap.dedent("""
    import sys, time
    from rstar2_jax.io import lock
    with lock.hold(sys.argv[1], print):
        print("held", flush=True)
        time.sleep(60)
""")


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder `run`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    line = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_second_run_in_a_workdir_is_refused_with_the_process_that_has_it(tmp_path, holder, capsys, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.6)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    flags = ["--gin_file=eval.gin", f"--workdir={tmp_path / 'run'}", "--gin_bindings=Run.init_from='nowhere'"]
    assert launch.main(["launch", *flags]) == 2
    said = capsys.readouterr().err
    warning, error = said.splitlines()
    assert warning.endswith("waiting 0.6 s for its end") and error.startswith("error: ")
    assert f"is in use by process {holder.pid} on " in error and "another --workdir" in error
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_run_that_ends_meanwhile_is_waited_for(tmp_path, holder):
    threading.Timer(1.0, holder.kill).start()
    told: list[str] = []
    with lock.hold(tmp_path / "run", told.append):
        assert len(told) == 1 and f"process {os.getpid()} on " in (tmp_path / "run" / ".lock").read_text()


def test_a_killed_run_keeps_nobody_out(tmp_path, holder):
    holder.kill()
    holder.wait()
    with lock.hold(tmp_path / "run", print):
        assert f"process {os.getpid()} on " in (tmp_path / "run" / ".lock").read_text()


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    told: list[str] = []
    with lock.hold(tmp_path, told.append):
        assert len(told) == 1 and "cannot be locked (No locks available)" in told[0]
