"""The keeper's loop in C and the one in Python do the same; what cannot be compiled is left out."""

import asyncio
import os
import shutil
import subprocess

import pytest

from rstar2_sandbox import build, executor, forker
from rstar2_sandbox.protocol import Execution, Limits

PROGRAMS = [
    Execution(code="print(input())", stdin="7"),
    Execution(code="1/0"),
    Execution(code="import sys; sys.exit(3)"),
    Execution(code="import os\nos.abort()"),
    Execution(code="while True: pass", limits=Limits(wall_s=0.3)),
    Execution(code="while True: pass", limits=Limits(wall_s=9, cpu_s=1)),
    Execution(code="x = bytearray(900 * 2**20)"),
    Execution(code="import os, time\nfor _ in range(100):\n  if os.fork() == 0: time.sleep(60)"),
    Execution(code="import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\nprint('done')"),
    Execution(code="import os\nprint(sorted(os.listdir('/proc/self/fd')), os.getcwd(), os.getuid() == os.geteuid())"),
    Execution(
        code="import resource as r\nprint([r.getrlimit(n) for n in (r.RLIMIT_FSIZE, r.RLIMIT_NPROC, r.RLIMIT_CPU)])"
    ),
    Execution(code="open('left', 'w').close()\nimport os\nos.mkdir('d')"),
    Execution(code="import os\nprint(os.listdir('.'))"),
    Execution(code="import random\nprint(random.random())"),
    Execution(code="import os\nprint(os.getpid() == os.getsid(0), os.environ.get('GLIBC_TUNABLES'))"),
    Execution(code="select 1 + 1", language="sql"),
]


@pytest.fixture(scope="module")
def library():
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler")
    return forker.Forker(build.build())


async def outcomes(compiled):
    pool = executor.Executor(1, executor.Settings(compiled=compiled))
    try:
        await pool.start()
        assert pool.compiled is compiled
        return [await pool.slots[0].run(program) for program in PROGRAMS]
    finally:
        pool.close()


def test_both_loops_do_the_same(library):
    ours, plain = (asyncio.run(outcomes(compiled)) for compiled in (True, False))
    for program, one, other in zip(PROGRAMS, ours, plain, strict=True):
        same = ("status", "stdout", "stderr", "exit_code", "signal", "tier", "detail")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same], program.code


def test_what_was_compiled_for_another_machine_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(forker, "FOLDER", str(tmp_path))
    assert forker.find() == "" and forker.load() is None
    (tmp_path / "_forker.so").write_bytes(b"\x7fELF of another kind")
    assert forker.find() and forker.load() is None


def test_what_was_compiled_from_an_earlier_source_is_left_out(library, tmp_path, monkeypatch):
    sources = "int rstar2_collapse;", "int rstar2_collapse; int rstar2_version(void) { return 1; }"
    for number, source in enumerate(sources):
        path = tmp_path / f"_forker{number}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, check=True)
        with pytest.raises((OSError, AttributeError)):
            forker.Forker(str(path))
    monkeypatch.setattr(forker, "FOLDER", str(tmp_path))
    assert forker.load() is None


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FOLDER", str(tmp_path))
    monkeypatch.setattr(build, "find", lambda: "")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    (tmp_path / "forker.c").write_text("")
    with pytest.raises(FileNotFoundError, match="apt-get install gcc"):
        build.build()


def test_huge_pages_hold_a_range_that_was_written(library):
    import mmap

    with mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block[:] = b"x" * len(block)
        start = min(start for start, end in forker.writable_ranges() if end - start >= len(block))
        assert library.collapse([(start, start + len(block))]) >= 0
        assert block[0] == ord("x") and block[-1] == ord("x")
    assert os.path.exists(forker.find())
