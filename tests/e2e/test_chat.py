"""A model in the terminal, as a process of its own: calls shown, talks kept and forgotten, refusals survived."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.e2e import starts

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = "execute_python_code_with_standard_io"
QUESTIONS = [f"gcd({12 * n},{8 * n + 4})" for n in range(1, 9)]


def test_the_terminal_answers_line_by_line_and_shows_calls_and_how_it_ended(tmp_path, tmp_path_factory):
    files = ("chat.gin", "model/box.gin", "scale/box.gin")
    bindings = [
        *starts.SIZES,
        f"Run.init_from='{starts.fine_tuned(tmp_path_factory)}'",
        "Rollout.max_prompt_tokens=200",
    ]
    words = [sys.executable, "-m", "rstar2_jax.launch", *(f"--gin_file={name}" for name in files)]
    words += [f"--workdir={tmp_path / 'chat'}", *(f"--gin_bindings={binding}" for binding in bindings)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sandbox")])}
    # Talks of one question each, every one of which forgets the one before, then a question that is too long.
    lines = "\n\n".join(QUESTIONS) + "\n" + "gcd" * 200 + "\n"
    done = subprocess.run(words, input=lines, capture_output=True, timeout=300, env=env, cwd=ROOT, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout
    assert said.count("turn 1:") == len(QUESTIONS) and said.count(" tokens") >= len(QUESTIONS)
    assert "</reason>" in said and "max_prompt_tokens = 200" in said
    # A call, how it ended and how long it took, its reply, and the turn that reads it; the model is a poor programmer.
    assert re.search(rf"^{TOOL}: (ok|error), \d+\.\d\d s\n.+\n(.*\n)*?turn 2:", said, re.MULTILINE), said
