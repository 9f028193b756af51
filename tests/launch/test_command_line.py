"""The command line as a shell sees it: exit codes, one line on stderr, and the record in the workdir."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys

import pytest

from rstar2_jax import gin_source, launch

REPOSITORY = pathlib.Path(launch.__file__).resolve().parents[1]

RUNS = '''
"""A RUN function that shows what it was given."""
import json, os, sys, threading
from rstar2_jax import settings

SEEN = {}

def go(*, run: settings.Run, learner: settings.Learner, code: int = 0) -> int:
    """Prints the learning rate as a thread sees it, and returns `code`."""
    shown = []
    thread = threading.Thread(target=lambda: shown.append(learner.optimizer.lr))
    thread.start()
    thread.join()
    record = os.path.join(run.workdir, "resolved.json")
    at_start = json.load(open(record))["arguments"]["learner"]["optimizer"]["lr"]
    print("lr", shown[0], "recorded at start", at_start, "cache", bool(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    print("jax imported:", "jax" in sys.modules)
    if code == 99:
        raise RuntimeError("as asked")
    return code
'''

STAGE = """
from __gin__ import dynamic_registration
from rstar2_jax import settings
import cli_runs
RUN = @cli_runs.go
cli_runs.go:
    run = @settings.Run()
    learner = @settings.Learner()
settings.Run:
    workdir = {workdir!r}
    steps = 300
settings.Learner:
    optimizer = @settings.Optimizer()
    row_tokens = 128
settings.Optimizer.lr = 1e-6
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the RUN function of these tests and a stage file."""
    (tmp_path / "cli_runs.py").write_text(RUNS)
    (tmp_path / "stage.gin").write_text(STAGE.format(workdir=str(tmp_path / "run")))
    return tmp_path


def command(place, *arguments, cwd="/", package=REPOSITORY):
    """Runs `python -m rstar2_jax.launch` in `cwd`, with the checkout and the RUN module on the path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"PYTHONPATH": f"{package}{os.pathsep}{place}", "XDG_CACHE_HOME": str(place / "cache")}
    line = [sys.executable, "-m", "rstar2_jax.launch", *arguments]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def refused(done, *words):
    """True when the command ended with the configuration's exit code and one line that holds `words`."""
    assert done.returncode == launch.BAD_CONFIGURATION, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.stderr
    return True


def test_a_run_is_recorded_at_start_and_at_end_and_repeats_from_its_record(place):
    first = command(place, f"--gin_file={place}/stage.gin", "--seed=7")
    assert first.returncode == 0, first.stderr
    assert "lr 1e-06 recorded at start 1e-06 cache True" in first.stdout
    text = (place / "run" / "resolved.gin").read_text()
    record = json.loads((place / "run" / "resolved.json").read_text())
    assert record["outcome"] == "exit code 0" and record["started"] <= record["ended"]
    assert record["arguments"]["run"]["seed"] == 7
    assert record["origins"]["settings.Run.seed"] == "--seed=7"
    assert record["origins"]["settings.Optimizer.lr"] == f"{place}/stage.gin:15"
    assert record["versions"]["gin-config"] == "0.5.0" and record["cpus"] >= 1
    assert record["dtype"]["parameters"] == "float32"
    if (REPOSITORY / ".git").exists():
        assert len(record["git"].removesuffix("+dirty")) == 40

    again = command(place, f"--gin_file={place}/run/resolved.gin")
    assert again.returncode == 0 and again.stdout == first.stdout and again.stderr == ""
    assert (place / "run" / "resolved.gin").read_text() == text
    assert json.loads((place / "run" / "resolved.json").read_text())["arguments"] == record["arguments"]


def test_configuration_mistakes_and_help_never_wait_for_jax(place):
    done = command(place, f"--gin_file={place}/stage.gin")
    assert "jax imported: False" in done.stdout


def test_the_exit_code_of_the_run_function_passes_through(place):
    done = command(place, f"--gin_file={place}/stage.gin", "--gin_bindings=cli_runs.go.code=75")
    assert done.returncode == 75
    assert json.loads((place / "run" / "resolved.json").read_text())["outcome"] == "exit code 75"


def test_a_run_that_raises_is_recorded_and_shows_its_traceback(place):
    done = command(place, f"--gin_file={place}/stage.gin", "--gin_bindings=cli_runs.go.code=99")
    assert done.returncode == 1 and "RuntimeError: as asked" in done.stderr
    assert json.loads((place / "run" / "resolved.json").read_text())["outcome"] == "RuntimeError"


def test_a_workdir_that_was_configured_otherwise_is_named(place):
    command(place, f"--gin_file={place}/stage.gin")
    done = command(place, f"--gin_file={place}/stage.gin", "--steps=301")
    assert done.returncode == 0
    assert done.stderr == ("warning: this workdir was configured otherwise before: settings.Run.steps: 300 -> 301\n")


def test_flags_are_bindings_and_a_relative_workdir_is_taken_from_here(place):
    done = command(place, "--gin_file=stage.gin", "--workdir=elsewhere", "--steps=5", cwd=place)
    assert done.returncode == 0
    text = (place / "elsewhere" / "resolved.gin").read_text()
    assert f"workdir = '{place}/elsewhere'" in text and "steps = 5" in text


def test_a_dry_run_prints_the_configuration_and_makes_no_folder(place):
    done = command(place, f"--gin_file={place}/stage.gin", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "lr = 1e-06" in done.stdout and "would run cli_runs.go" in done.stdout and "jax imported" not in done.stdout
    assert not (place / "run").exists()


def test_help_shows_the_flags(place):
    done = command(place, "--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in ("--gin_file", "--gin_bindings", "--workdir", "--seed", "--steps"))


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--gin_bindings=settings.Run.init_from=runs/sft", "--gin_bindings='settings.Run.init_from=\"runs/sft\"'"),
        ("--gin_bindings=settings.Learner.mesh=(1, 1", "cannot read"),
        ("--gin_bindings=settings.Roc.reject_equal=false", "write settings.Roc.reject_equal=False"),
        ("--gin_bindings=settings.Run.steps=60*5", "gin does no arithmetic"),
        ("Run.steps=5", "leftover argument 'Run.steps=5': write --gin_bindings='Run.steps=5'"),
        ("more.gin", "leftover argument 'more.gin': write --gin_file=more.gin"),
        ("--step=5", "unknown flag --step; nearest known name: steps"),
        ("--steps=five", "steps"),
        ("--steps=5.0", "steps"),
        ("--gin_file=stag.gin", "no gin file 'stag.gin'"),
        ("--gin_bindings=settings.Run.seeds=3", "nearest known name: seed"),
        ("--gin_bindings=evla/settings.Run.seed=3", "nothing enters the scope 'evla'"),
        ("--seed=-1", "--seed=-1: Run.seed = -1: must be in [0, 2**31)"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_one_line_and_exit_code_two(place, argument, words):
    assert refused(command(place, f"--gin_file={place}/stage.gin", argument), words)
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gin_bindings=settings.Optimizer.lr=5e-6"],
        ["--gin_bindings", "settings.Optimizer.lr = 5e-6"],
        ["--gin_bindings=Optimizer.lr=1.0", "--gin_bindings=Optimizer.lr=5e-6"],
        ["--gin_bindings=Learner.mesh=(1, 1, 1)", "--gin_bindings=Optimizer.lr=5e-6"],
    ],
)
def test_every_safe_form_of_a_binding_works_and_the_last_wins(place, arguments):
    done = command(place, f"--gin_file={place}/stage.gin", *arguments)
    assert done.returncode == 0 and "lr 5e-06" in done.stdout, done.stderr


def test_no_gin_file_is_an_error(place):
    assert refused(command(place), "no --gin_file")


def test_a_missing_gin_config_is_said_in_one_line(place):
    """A folder named gin/ on the path makes the bare import succeed; the message must not be about an attribute."""
    code = "import sys; sys.modules['gin'] = type(sys)('gin'); import rstar2_jax.gin_source"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "ImportError: gin-config is not installed: pip install gin-config"


def test_a_run_function_that_returns_no_exit_code_is_an_error(place):
    (place / "cli_runs.py").write_text(RUNS.replace("return code", "return None"))
    done = command(place, f"--gin_file={place}/stage.gin")
    assert done.returncode == 1 and "returns its exit code as int, got None" in done.stderr


@pytest.mark.long  # it plans what tests/learner/test_plan.py plans
def test_the_commands_that_readme_shows_parse():
    repository = pathlib.Path(__file__).parents[2]
    text = (repository / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [line.strip() for line in text.splitlines() if "rstar2_jax.launch" in line and "--dry_run" in line]
    complete = [line for line in shown if "[" not in line]
    assert len(complete) == 1
    line = [sys.executable, *shlex.split(complete[0])[1:]]
    done = subprocess.run(line, capture_output=True, text=True, cwd=repository)
    assert done.returncode == 0 and "would run rstar2_jax.train.train" in done.stdout, done.stderr


def test_a_folder_that_holds_another_kind_of_run_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "resolved.json").write_text('{"run": "rstar2_jax.train.train"}')
    flags = ["--gin_file=eval.gin", f"--workdir={tmp_path}", "--gin_bindings=Run.init_from='nowhere'"]
    assert launch.main(["launch", *flags]) == 2
    assert "holds a run of rstar2_jax.train.train" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "resolved.json"]


def test_a_workdir_that_is_a_file_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert launch.main(["launch", "--gin_file=eval.gin", f"--workdir={tmp_path / 'file'}"]) == 2
    assert "cannot be used: File exists" in capsys.readouterr().err


def joining(address, count="2", rank="1"):
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": rank}


@pytest.mark.parametrize(
    "told, words",
    [
        ({"JAX_COORDINATOR_ADDRESS": "node-0:8476"}, "JAX_NUM_PROCESSES = '' and JAX_PROCESS_ID = ''"),
        (joining("node-0:8476", count="two"), "JAX_NUM_PROCESSES = 'two'"),
        (joining("node-0:8476", rank="-1"), "JAX_PROCESS_ID = '-1'"),
        (joining("node-0:8476", rank="2"), "to the number of processes and to 0, 1, ... in each"),
        (joining("node-0"), "JAX_COORDINATOR_ADDRESS = 'node-0': write host:port of process 0"),
        (joining(":8476"), "write host:port of process 0"),
        (joining("node-0:https"), "write host:port of process 0"),
        (joining("node-0:84760"), "write host:port of process 0"),
        (joining("no-such-host.invalid:8476"), "cannot be reached by process 1"),
        (joining("127.0.0.1:9"), "cannot be reached by process 1"),
    ],
)
def test_processes_that_cannot_be_joined_are_told_why(told, words):
    with pytest.raises(gin_source.ConfigError) as caught:
        launch.join_processes(told, wait_s=0.5)
    assert words in str(caught.value)


def test_a_coordinator_s_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(gin_source.ConfigError, match="cannot be listened at by process 0 .*a port that is free"):
            launch.join_processes(joining(address, rank="0"))


def test_a_process_alone_joins_nobody():
    assert launch.join_processes({}) == 0
