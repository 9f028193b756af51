"""The console on a real pseudo terminal and in a log file: columns, bars, widths, and what is left on the screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest

from rstar2_jax.report import console

_METRICS = {
    "rollout/reward_mean": 0.6124,
    "rollout/live_groups_frac": 0.75,
    "rollout/tool_rate": 0.941,
    "rollout/call_error_rate_correct": None,
    "rollout/response_tokens_mean": 84.21,
    "learner/loss": 1e-9,
    "learner/entropy_mean": 0.5212,
    "learner/grad_norm": 0.4234,
    "learner/lr": 3e-4,
    "mismatch/logprob_gap_mean": 1.24e-6,
    "time/publish_s": 0.2,
    "time/rollout_s": 8.12,
    "time/train_s": 3.2,
    "time/step_s": 11.6,
}
_HEADER = ["step", "reward", "live", "tool", "err+", "len", "entr", "grad", "gap", "sec"]


class _Now:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def _plain(steps, total=60, metrics=_METRICS, **options):
    file = io.StringIO()
    with console.Console(total, "a run", file=file, **options) as shown:
        for step in steps:
            shown.step(step, metrics)
    return file.getvalue().splitlines()


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_a_log_file_gets_one_plain_line_a_step_under_its_header():
    lines = _plain([0])
    header, row = (line for line in lines if line.startswith(("step", "   0")))
    assert header.split()[:10] == _HEADER
    expected = ["0", "0.612", "75%", "94%", "-", "84.21", "0.521", "0.423", "1.2e-6", "11.6"]
    assert row.split()[:10] == expected
    assert row.endswith("rollout 8.1 train 3.2")
    for title, cell in zip(_HEADER, expected, strict=True):  # every number ends under its header
        assert re.search(rf"(^|\s){re.escape(cell)}$", row[: header.index(title) + len(title)])
    assert "\x1b" not in "".join(lines) and all(len(line) <= 80 for line in lines)


def test_the_header_comes_again_every_20_rows():
    lines = _plain(range(45))
    assert [line.split()[0] for line in lines if line.startswith("step")] == ["step"] * 3
    headers = [index for index, line in enumerate(lines) if line.startswith("step")]
    assert [b - a for a, b in zip(headers, headers[1:], strict=False)] == [21, 21]


def test_many_short_steps_can_show_some_rows_and_always_the_last():
    rows = [line.split()[0] for line in _plain(range(25), total=25, row_every=10) if line.startswith("  ")]
    assert rows == ["0", "10", "20", "24"]


def test_a_step_without_rollouts_shows_loss_and_rate_of_learning():
    lines = _plain([3], metrics={"learner/loss": 2.345678, "learner/grad_norm": np.float32(1.5), "learner/lr": 5e-6})
    assert lines[1].split()[:5] == ["step", "loss", "grad", "lr", "sec"]
    assert lines[2].split() == ["3", "2.346", "1.500", "5.0e-6", "0.0"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_rows_fit_the_width(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line for line in _plain([0, 1]) if line.startswith(("step", "   "))]
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    assert ("publish 0.2" in lines[1]) == (width == 200)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.5, "0.500"),
        (84.21, "84.21"),
        (99.999, "100.0"),
        (1234.5, "1234"),
        (9999.9, "10000"),
        (12345.6, "1e4"),
        (-0.25, "-0.25"),
        (-1e-9, "-1e-9"),
        (3e15, "3e15"),
    ],
)
def test_a_cell_shows_what_fits_into_five_characters(value, text):
    assert console._decimals(value, 5) == text


def test_a_long_wait_says_every_half_minute_how_far_it_is():
    now, file = _Now(), io.StringIO()
    shown = console.Console(10, "a run", file=file, now=now)
    for done in range(1, 101):
        now.s += 1
        shown.progress("rollouts", done, 200)
    shown.close()
    said = [line.strip() for line in file.getvalue().splitlines() if "rollouts" in line]
    assert said == [
        "rollouts 30/200, 1.0/s, 2:50 left",
        "rollouts 60/200, 1.0/s, 2:20 left",
        "rollouts 90/200, 1.0/s, 1:50 left",
    ]


def test_rate_and_time_left_follow_the_latest_updates_and_count_down_in_between():
    bar = console._Bar("rollouts", 0, 100, 0.0)
    assert bar.rate() is None and bar.left_s(5.0) is None
    for done in range(1, 11):
        bar.update(done, 100, 10.0 * done)
    assert bar.rate() == pytest.approx(0.1) and bar.rate_text() == "10.0 s each"
    assert bar.left_s(100.0) == pytest.approx(900) and bar.left_s(130.0) == pytest.approx(870)
    for done in range(11, 40):
        bar.update(done, 100, 100.0 + (done - 10))
    assert bar.rate() == pytest.approx(1.0)


def test_an_alarm_is_said_when_it_begins_and_when_a_count_grows():
    file = io.StringIO()
    with console.Console(10, "a run", file=file) as shown:
        for step, (live, skipped) in enumerate([(0.1, 0), (0.15, 1), (0.5, 1), (0.1, 2)]):
            shown.step(step, {**_METRICS, "rollout/live_groups_frac": live, "learner/skipped_steps": skipped})
    said = [line[:23] for line in file.getvalue().splitlines() if line.startswith("!")]
    assert said == [
        "! step 0: only 10% of t",
        "! step 1: updates skipp",
        "! step 3: only 10% of t",
        "! step 3: updates skipp",
    ]


def test_a_continued_run_measures_its_rate_from_where_it_continues():
    now, file = _Now(), io.StringIO()
    shown = console.Console(100, "a run", start_step=90, file=file, now=now)
    now.s = 10.0
    shown.step(90, _METRICS)
    assert shown._steps.rate() == pytest.approx(0.1)
    now.s = 12.0
    shown.close()
    shown.close()
    assert file.getvalue().splitlines()[-1] == "91/100 steps, 0:12 since the start"


_RUN = """
import sys, time
from rstar2_jax.report import console
with console.Console(3, "box stage1") as shown:
    shown.stage("training")
    for step in range(3):
        for done in range(9):
            shown.progress("rollouts", done, 8)
            time.sleep(0.03)
        print("a line of somebody else")
        shown.step(step, METRICS)
    if len(sys.argv) > 1:
        raise SystemError("a fault")
"""


def _terminal(width, *arguments, **env):
    """Bytes that a run sends to a terminal of this width, and its exit code."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "CI")}
    clean |= {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    command = [sys.executable, "-W", "error", "-c", _RUN.replace("METRICS", repr(_METRICS)), *arguments]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=clean)
    os.close(follower)
    data = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not chunk:
            break
        data += chunk
    os.close(leader)
    return data.decode(), process.wait()


def _screen(text, width):
    """Lines that a terminal shows after `text`, for the few control sequences that are used; checks the width."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.|\n|\r", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
                assert row >= 0
            elif token == "\x1b[2K":
                lines[row] = ""
            else:
                assert token[-1] == "m" or token in ("\x1b[?25l", "\x1b[?25h"), repr(token)
        else:
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
            column += 1
            assert column <= width, lines[row]
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_bars_while_working_and_keeps_the_rows(width):
    text, code = _terminal(width)
    assert code == 0, text
    assert re.search(r"rollouts.*[1-8]/8.*\d/s.*left", text) and re.search(r"steps.*[12]/3.*(each|/s).*left", text)
    assert "last step, seconds: " in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
    lines = [line for line in _screen(text, width) if line]
    assert lines[:2] == ["box stage1", "training"]
    assert [line.split()[0] for line in lines if line.startswith("   ")] == ["0", "1", "2"]
    assert lines.count("a line of somebody else") == 3
    assert re.fullmatch(r"3/3 steps, 0:0\d since the start", lines[-1])
    assert not any("rollouts" in line or "last step" in line for line in lines)  # the region is gone
    assert sum(line.startswith("step ") for line in lines) == 1


def test_each_redraw_is_one_piece_so_that_nothing_flickers():
    text, _ = _terminal(80)
    for erased in re.split(r"(?:\x1b\[1A\x1b\[2K)+", text)[1:]:
        assert erased.strip()  # what was erased is drawn again before anything else happens
    assert "\x1b[2J" not in text and "\x1b[H" not in text


def test_colours_are_off_with_no_color_and_in_a_dumb_terminal_nothing_moves():
    text, _ = _terminal(80, NO_COLOR="1")
    assert "\x1b[2m" in text and not re.search(r"\x1b\[[0-9;]*3[0-8]", text)
    text, code = _terminal(80, TERM="dumb")
    assert code == 0 and "\x1b" not in text and len(text.splitlines()) == 13


def test_a_fault_gives_the_terminal_back_and_stays_readable():
    text, code = _terminal(80, "fail")
    assert code == 1
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert _screen(text, 80)[-2:] == ["SystemError: a fault", ""]


def test_work_without_steps_ends_with_its_time_and_counts_no_step():
    out = io.StringIO()
    with console.Console(0, "eval", file=out) as screen:
        screen.progress("gcd", 3, 8)
    assert "steps" not in out.getvalue() and "since the start" in out.getvalue()
