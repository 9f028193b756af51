"""The weaker tiers, and what they still hold."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from rstar2_sandbox import executor, images, jail, seccomp

SYSTEM_PYTHON = "/usr/bin/python3"
HERE = pathlib.Path(__file__).parent
SANDBOX = HERE.parents[1] / "sandbox"
NOBODY = "65534"


def run_check(tier, *user):
    """Output of check_tier.py on the system's interpreter: the tests' own may lie in a closed home folder."""
    probe = subprocess.run([SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if probe.stdout != b"True\n":
        pytest.skip(f"no {SYSTEM_PYTHON} of 3.11 or later")
    done = subprocess.run(
        [SYSTEM_PYTHON, str(HERE / "check_tier.py"), str(SANDBOX), tier, *user],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each slot a user id of its own")
def test_without_namespaces_own_user_ids_landlock_and_filter_hold():
    tier, failed = run_check("uid")
    assert failed == []
    assert tier.startswith("uid+landlock")
    assert tier.endswith("+seccomp")


@pytest.mark.skipif(os.geteuid() != 0, reason="drops from root to an ordinary user")
@pytest.mark.parametrize("tier", ["plain", "namespaces"])
def test_an_ordinary_user_gets_a_jail_too(tier):
    found, failed = run_check(tier, NOBODY)
    assert failed == []
    assert found.startswith(tier)


def test_root_is_never_offered_the_tier_that_would_run_programs_as_root():
    offered = executor.Settings().tiers
    assert offered[0] == jail.NAMESPACES
    assert (jail.PLAIN in offered) == (os.geteuid() != 0)
    assert (jail.UID in offered) == (os.geteuid() == 0)
    assert executor.Settings(min_isolation="namespaces").tiers == (jail.NAMESPACES,)
    with pytest.raises(ValueError, match="isolation"):
        executor.Settings(isolation="strong")


def test_a_filter_exists_for_the_machines_it_was_written_for():
    for machine in ("x86_64", "aarch64"):
        strict, lenient = (seccomp.program(machine, unix_sockets=choice) for choice in (False, True))
        assert strict and lenient
        assert len(strict) % 8 == 0
        assert strict != lenient
    assert seccomp.program("riscv64", unix_sockets=True) is None


def test_the_doctor_says_what_it_found():
    done = subprocess.run(
        [sys.executable, "-m", "rstar2_sandbox", "doctor", "--slots", "1"],
        env=os.environ | {"PYTHONPATH": str(SANDBOX)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for word in ("redis-server", "isolation", "calls/s in one slot", "grading rules"):
        assert word in done.stdout


def test_a_program_that_does_not_run_here_is_not_measured(bench):
    with pytest.raises(executor.SlotError, match="not measured: error, ModuleNotFoundError"):
        bench.runner.run(executor.measure_rate(bench.slot, "import no_such_module", 2))


def test_what_an_image_imports_is_compiled_once_for_all_and_what_programs_import_is_not(tmp_path):
    """Packages may be installed without their bytecode; the environment of images forbids writing any."""
    program = "from rstar2_sandbox import image; image.warm('sql'); import wave"
    environment = {**images.ENVIRONMENT, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONPATH": str(SANDBOX)}
    subprocess.run([sys.executable, "-s", "-P", "-c", program], env=environment, check=True, timeout=60)
    kept = {path.name.split(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert {"statistics", "dbapi2", "sql_child"} <= kept and "wave" not in kept
