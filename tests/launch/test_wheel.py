"""The wheel carries the configurations and the templates, and runs from anywhere without the checkout."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from rstar2_jax import launch

REPOSITORY = pathlib.Path(launch.__file__).resolve().parents[1]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("rstar2_jax", "gin"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, source)
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(line, cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = (source / "dist").glob("rstar2_jax-*.whl")
    return built


def test_every_configuration_and_template_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (REPOSITORY / "gin").rglob("*.gin"):
        assert f"rstar2_jax/configs/{path.relative_to(REPOSITORY / 'gin')}" in names
    for path in (REPOSITORY / "rstar2_jax").rglob("*"):
        if path.suffix in (".py", ".jinja"):
            assert str(path.relative_to(REPOSITORY)) in names
    assert not any(name.startswith(("gin/", "tests/")) for name in names)


def test_an_installed_wheel_finds_stage_and_overlays_from_the_root_folder(wheel, tmp_path):
    target = tmp_path / "site"
    line = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(line, check=True, capture_output=True, timeout=300)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
    environment |= {"PYTHONPATH": f"{target}{os.pathsep}{REPOSITORY / 'sandbox'}", "XDG_CACHE_HOME": str(tmp_path)}
    files = ["--gin_file=stage2.gin", "--gin_file=scale/box.gin", "--gin_file=model/box.gin"]
    done = subprocess.run(
        [sys.executable, "-m", "rstar2_jax.launch", *files, f"--workdir={tmp_path / 'run'}", "--dry_run"],
        cwd="/", env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "would run rstar2_jax.train.train" in done.stdout and "difficulty = 2" in done.stdout
    assert done.stderr == "" and not (tmp_path / "run").exists()
