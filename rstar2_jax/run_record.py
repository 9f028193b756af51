"""What a run was: its resolved configuration and its surroundings, written at start and at end.

`resolved.gin` starts the same run again; `resolved.json` says where each value came from and what stood around it.

Deliberately not here: metrics and results, which the RUN functions write.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_jax import gin_source, gin_strict

PACKAGES = ("rstar2-jax", "rstar2-sandbox", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore",
            "numpy", "gin-config", "tokenizers", "redis")  # fmt: skip
ENVIRONMENT_PREFIXES = ("JAX_", "XLA_", "OMP_", "MALLOC_", "GLIBC_", "TF_CPP_")
NAMES = ("resolved.gin", "resolved.json")
HEADER = """\
# Resolved configuration: every argument and every field that this run sees, defaults included.
# The same run again: python -m rstar2_jax.launch --gin_file=THIS_FILE   (--workdir=ELSEWHERE for a fresh copy)
"""


def versions() -> dict[str, str]:
    """Version of Python and of each package that the numbers depend on; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_hash() -> str:
    """Commit of the checkout that the package runs from, with `+dirty` when files differ; empty for a wheel."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(gin_source.PACKAGE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", "launch.py"):  # a wheel installed inside somebody else's checkout
            return ""
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def surroundings(argv: Sequence[str]) -> dict[str, Any]:
    """Everything outside the configuration that a run's bits can depend on, as a JSON value."""
    return {
        "command": list(argv),
        "cwd": os.getcwd(),
        "git": git_hash(),
        "versions": versions(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT_PREFIXES)},
    }


def plain(value: Any) -> Any:
    """A settings value as a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value


class RunRecord:
    """The two files in the workdir: `start` writes both, `end` completes the JSON one."""

    def __init__(self, workdir: str, resolved: gin_strict.Resolved, arguments: Mapping[str, Any], argv: Sequence[str]):
        self.folder = pathlib.Path(workdir)
        self.resolved = resolved
        self._kept: dict[str, bytes] = {}
        model = arguments.get("model")
        self.fields: dict[str, Any] = {
            "run": f"{resolved.run.module}.{resolved.run.name}",
            "arguments": plain(arguments),
            "dtype": {"parameters": "float32", "compute": getattr(model, "compute_dtype", None)},
            "origins": resolved.origins,
            "idle": list(resolved.idle),
            "warnings": list(resolved.warnings),
            **surroundings(argv),
        }

    def start(self) -> list[str]:
        """Writes the record; returns the lines in which a run already recorded there was configured otherwise.

        Raises:
            ConfigError: the folder holds a run of another RUN function, whose files this one would overwrite.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise gin_source.ConfigError(f"workdir {self.folder} cannot be made: {error.strerror}") from error
        self._check_same_kind()
        self._kept = {name: (self.folder / name).read_bytes() for name in NAMES if (self.folder / name).exists()}
        path = self.folder / "resolved.gin"
        text = HEADER + self.resolved.text
        before = path.read_text(encoding="utf-8") if path.exists() else text
        self._write("resolved.gin", text)
        self.fields["started"] = _now()
        self._write("resolved.json", json.dumps(self.fields, indent=1) + "\n")
        return _differences(before, text)

    def refuse(self) -> None:
        """Puts back what stood there before: the run was refused, so the record of the one in the folder stays true."""
        for name, content in self._kept.items():
            (self.folder / name).write_bytes(content)

    def _check_same_kind(self) -> None:
        path = self.folder / "resolved.json"
        before = json.loads(path.read_text(encoding="utf-8")).get("run") if path.exists() else self.fields["run"]
        if before != self.fields["run"]:
            raise gin_source.ConfigError(
                f"{self.folder} holds a run of {before}, this one is {self.fields['run']}: give it another --workdir"
            )

    def end(self, outcome: str) -> None:
        """Adds how the run ended: `exit code N`, or the exception's name."""
        self.fields |= {"ended": _now(), "outcome": outcome}
        self._write("resolved.gin", HEADER + self.resolved.text)
        self._write("resolved.json", json.dumps(self.fields, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / name)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _flat(text: str) -> dict[str, str]:
    flat, owner = {}, ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")) and line.endswith(":"):
            owner = line[:-1]
        elif line.startswith("    "):
            name, _, value = line.strip().partition(" = ")
            flat[f"{owner}.{name}"] = value
    return flat


def _differences(before: str, after: str) -> list[str]:
    old, new = _flat(before), _flat(after)
    return [f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in sorted({*old, *new})
            if old.get(key) != new.get(key)]  # fmt: skip


def plan_lines(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """The plan of a run that takes a model: sizes, and for a learner what its compiled programs need.

    Args:
        arguments: of the RUN function.
        environment: for the process that compiles.
    """
    model, learner, rollout = (arguments.get(name) for name in ("model", "learner", "rollout"))
    if model is None:
        return []
    import jax  # here, so that configuration errors and --help never wait for it

    from rstar2_jax.learner import forecast, plan
    from rstar2_jax.model import decoder

    leaves = jax.tree.leaves(decoder.abstract_params(model))
    count = sum(leaf.size for leaf in leaves)
    lines = [f"parameters: {count:,} in {len(leaves)} arrays, {4 * count / 1e9:.2f} GB as float32"]
    if learner is not None:
        try:
            lines += forecast.lines(plan.in_child(model, learner, environment), model, learner)
        except plan.PlanError as error:
            lines.append(f"learner: {error}")
    if rollout is not None:
        lines += forecast.rollout_lines(model, rollout, learner)
    return lines
