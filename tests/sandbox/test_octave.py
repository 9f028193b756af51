"""GNU Octave in the jail, where this machine has it (`make test-octave` installs it)."""

import os

import pytest

from rstar2_sandbox import jail
from rstar2_sandbox.protocol import Execution, Limits, Status

pytestmark = pytest.mark.skipif(not os.access(jail.OCTAVE[0], os.X_OK), reason="no GNU Octave here: make test-octave")


@pytest.fixture(scope="module")
def octave(bench):
    def run(code, stdin="", wall_s=20.0):
        execution = Execution(code=code, stdin=stdin, language="octave", limits=Limits(wall_s=wall_s))
        return bench.runner.run(bench.slot.run(execution))

    return run


def test_a_program_prints_shows_values_and_reads_its_input(octave):
    assert octave("disp(6 * 7)").stdout == "42\n"
    assert octave("A = [1 2; 3 4]; B = A * A\nx = det(A);").stdout == "B =\n\n    7   10\n   15   22\n\n"
    assert octave("x = input(''); printf('%d\\n', x + 1)", stdin="41\n").stdout == "42\n"
    assert octave("function y = f(x)\n y = x ^ 2;\nend\ndisp(f(12))").stdout == "144\n"


def test_a_failure_is_an_error_with_its_line(octave):
    outcome = octave("x = 1;\nerror('no luck')")
    assert outcome.status is Status.ERROR and "no luck" in outcome.stderr and "line 2" in outcome.stderr
    assert octave("x = (1").status is Status.ERROR


def test_random_numbers_follow_from_the_text(octave):
    code = "printf('%.15g ', rand(), randn(), rande(), randi(1000), randperm(5))"
    assert octave(code).stdout == octave(code).stdout != octave(code + ";").stdout


def test_limits_hold_and_the_next_call_is_clean(octave):
    assert octave("while true\nend", wall_s=2.0).status is Status.TIMEOUT_WALL
    assert octave("x = ones(1e5, 1e5);").status in (Status.ERROR, Status.OOM)
    assert octave("f = fopen('left', 'w'); fputs(f, 'x'); fclose(f);").status is Status.OK
    assert octave("disp(exist('left', 'file'))").stdout == "0\n"


def test_the_host_is_out_of_reach(octave):
    assert octave("disp(fopen('/etc/passwd'))").stdout == "-1\n"
    assert octave("[code, text] = system('cat /etc/hostname'); disp(code > 0)").stdout == "1\n"
    routes = octave("[code, text] = system('grep -vc Iface /proc/net/route'); disp(strtrim(text))").stdout
    assert not routes.strip() or int(routes) == 0
