"""What a program sees of its surroundings, and what the model sees of the program."""

import pytest

from rstar2_sandbox.protocol import Limits, Status

SHOWN = [
    ("print(1)", "1\n"),
    ("1 + 1", "2\n"),
    ("x = 3\nx", "3\n"),
    ("'text'", "'text'\n"),
    ("None", ""),
    ("print(1)\n2", "1\n2\n"),
    ("print(\n1)", "1\n"),
    ("x = 5", ""),
    ("def f():\n    return 7\nf()", "7\n"),
    ("for i in range(2):\n    i", ""),
    ("", ""),
    ("# only a comment", ""),
    ("from __future__ import annotations\ndef f(x: Missing): ...\nprint(f.__annotations__)", "{'x': 'Missing'}\n"),
    ("from __future__ import annotations\ndef f(x: Missing): ...\nf.__annotations__", "{'x': 'Missing'}\n"),
    ("if __name__ == '__main__':\n    print('main')", "main\n"),
    ("import sympy\nsympy.factorint(12)", "{2: 2, 3: 1}\n"),
    ("import sys\nprint(sys.modules['__main__'].__dict__ is globals())", "True\n"),
    ("class A: pass\nimport pickle\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", "True\n"),
    ("def f():\n    return 1\nimport inspect\nprint(inspect.getsource(f), end='')", "def f():\n    return 1\n"),
    ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n"),
    ("import os\nprint('kept', flush=False)\nos._exit(0)", "kept\n"),
    ("print('∀x', '\\ud800')", "∀x \\ud800\n"),
    ("import os\nprint(os.getcwd(), os.listdir('.'))", "/box []\n"),
]


@pytest.mark.parametrize(("code", "stdout"), SHOWN)
def test_a_program_shows_what_it_prints_and_its_last_value(bench, code, stdout):
    outcome = bench.run(code, limits=Limits(wall_s=10))
    assert (outcome.status, outcome.stdout, outcome.stderr) == (Status.OK, stdout, "")


ERRORS = [
    (
        "def half(x):\n    return 1 / x\n\nhalf(0)",
        'Traceback (most recent call last):\n  File "<tool>", line 4, in <module>\n    half(0)\n'
        '  File "<tool>", line 2, in half\n    return 1 / x\n           ~~^~~\nZeroDivisionError: division by zero\n',
    ),
    ("x = (1,\n", "  File \"<tool>\", line 1\n    x = (1,\n        ^\nSyntaxError: '(' was never closed\n"),
    (
        "import json\njson.loads('{')",
        "Traceback (most recent call last):\n  File \"<tool>\", line 2, in <module>\n    json.loads('{')\n"
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n",
    ),
    (
        "input()",
        'Traceback (most recent call last):\n  File "<tool>", line 1, in <module>\n    input()\n'
        "EOFError: EOF when reading a line\n",
    ),
]


@pytest.mark.parametrize(("code", "stderr"), ERRORS)
def test_a_traceback_holds_the_programs_own_frames_with_their_lines(bench, code, stderr):
    outcome = bench.run(code)
    assert (outcome.status, outcome.exit_code) == (Status.ERROR, 1)
    assert outcome.stderr.replace(" " * 10 + "^" * 15 + "\n", "") == stderr


def test_chained_exceptions_and_threads_show_own_frames_only(bench):
    code = """
import threading
def work():
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("outer") from error
thread = threading.Thread(target=work)
thread.start()
thread.join()
work()
"""
    outcome = bench.run(code)
    assert outcome.status is Status.ERROR
    assert outcome.stderr.count("RuntimeError: outer") == 2
    assert "threading.py" not in outcome.stderr
    assert "rstar2_sandbox" not in outcome.stderr


def test_standard_input_is_a_pipe_that_ends(bench):
    code = "import sys\nprint(input(), sys.stdin.read().split(), sys.stdin.isatty())"
    assert bench.run(code, stdin="first\n2 3\n").stdout == "first ['2', '3'] False\n"


def test_a_large_standard_input_arrives_whole(bench):
    text = "0123456789" * 100_000
    assert bench.run("import sys\nprint(len(sys.stdin.read()))", stdin=text).stdout == "1000000\n"
    assert bench.run("print('did not read')", stdin=text).stdout == "did not read\n"


def test_the_same_program_gives_the_same_output_every_time(bench):
    code = """
import numpy, random, tempfile, os
print(random.random(), numpy.random.rand(), hash("text"), {"a", "b", "c"}, os.getcwd(), tempfile.gettempdir())
"""
    first, second = bench.run(code, limits=Limits(wall_s=20)), bench.run(code, limits=Limits(wall_s=20))
    assert first.status is Status.OK
    assert first.stdout == second.stdout


def test_long_output_keeps_head_and_tail_and_says_what_is_missing(bench):
    outcome = bench.run("print('∀' * 100_000)", limits=Limits(wall_s=5, output_bytes=1000))
    assert outcome.status is Status.OK
    head, marker, tail = outcome.stdout.partition("\n... [")
    missing, _, tail = tail.partition(" bytes left out] ...\n")
    assert marker
    assert set(head) == {"∀"}
    assert set(tail.rstrip("\n")) == {"∀"}
    assert len((head + tail).encode()) + int(missing) == 300_001
    assert len((head + tail).encode()) <= 1000


def test_output_before_a_time_out_is_kept(bench):
    outcome = bench.run("print('so far')\nwhile True: pass", limits=Limits(wall_s=0.5))
    assert (outcome.status, outcome.stdout) == (Status.TIMEOUT_WALL, "so far\n")


def test_numbers_of_a_call_come_with_it(bench):
    outcome = bench.run("import time\ntime.sleep(0.2)")
    assert 0.2 <= outcome.run_s < 1
    assert 0 < outcome.cpu_s < 0.2
    assert outcome.tier.startswith("namespaces") or outcome.tier.startswith("uid") or outcome.tier.startswith("plain")
