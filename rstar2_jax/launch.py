"""Starts one run: python -m rstar2_jax.launch --gin_file=stage1.gin [--gin_file=...] [--gin_bindings=...] [flags]

  --gin_file      a gin file (repeatable, in order): looked up as given, then in ./gin/, then in the package
  --gin_bindings  one more binding (repeatable, last wins); the safe form for every shell is
                  --gin_bindings='settings.Run.init_from="runs/sft"'   (`settings.` may be left out)
  --workdir       the same as binding settings.Run.workdir
  --seed          the same as binding settings.Run.seed
  --steps         the same as binding settings.Run.steps
  --dry_run       parse, check, build the settings, print what would run and the plan of the learner (compiled for
                  virtual devices: tens of seconds for a large mesh), and stop: no device, no folder
  --roles         check as well, print for a shell which processes the run has (roles.py), and stop: what launch/ asks

Exit codes: 0 done; 2 the configuration or the command line is wrong (one line says where and what to write); 1 the run
raised; any other code is the RUN function's own.

The order is: command line, files, names, types, settings (no JAX so far, so that mistakes show at once), then the lock
on the workdir, the other processes, the RUN function's module, what is used, the record in the workdir, the run. gin
and absl.flags are used here and in the gin_* modules alone. Deliberately not here: signals (training and fine-tuning
end after their step, with a checkpoint; the other runs start again from what they saved) and allocator settings (they
must be in the environment before Python starts: see launch/).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from rstar2_jax import gin_source, gin_strict, roles, run_record
from rstar2_jax.io import lock

BAD_CONFIGURATION = 2
SHADOWED = {"workdir": "settings.Run.workdir", "seed": "settings.Run.seed", "steps": "settings.Run.steps"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        argv: program name and arguments; None takes those of the process.
    """
    argv = list(sys.argv if argv is None else argv)
    try:
        parsed = parse_flags(argv)
        if parsed.help:
            print(__doc__)
            return 0
        prepare_environment(parsed.dry_run or parsed.roles)
        resolved = gin_strict.resolve(parsed.gin_file, shadow_bindings(parsed))
        function, arguments = gin_strict.build(resolved)
        for warning in resolved.warnings:
            _warn(warning)
        if parsed.roles:
            print("\n".join(roles.facts(arguments)))
            return 0
        if parsed.dry_run:
            print(resolved.text)
            print(f"would run {resolved.run.module}.{resolved.run.name}")
            print("\n".join(run_record.plan_lines(arguments, os.environ)))
            print("\n".join(roles.lines(arguments, argv[1:])))
            return 0
        with _workdir(arguments, os.environ):
            rank = join_processes(os.environ, resolved.text)
            if "run" not in arguments or rank:  # of several processes the first keeps the record
                return _stop(function(**arguments))
            record = run_record.RunRecord(arguments["run"].workdir, resolved, arguments, argv)
            differences = record.start()
            for line in differences:
                _warn(f"this workdir was configured otherwise before: {line}")
            return _recorded(record, function, arguments)
    except (gin_source.ConfigError, lock.LockedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _workdir(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """The run's folder kept to it; of several processes the first keeps it, before the others meet it."""
    follows = bool(environment.get("JAX_COORDINATOR_ADDRESS")) and environment.get("JAX_PROCESS_ID") != "0"
    if "run" not in arguments or follows:
        return contextlib.nullcontext()
    return lock.hold(arguments["run"].workdir, _warn)


def _recorded(record: run_record.RunRecord, function: Callable[..., object], arguments: Mapping[str, Any]) -> int:
    """Run, and note how it ended."""
    outcome = "killed"
    try:
        code = _stop(function(**arguments))
        outcome = f"exit code {code}"
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        record.end(outcome)
        if outcome == "ValueError":  # what a RUN function raises before it has done anything
            record.refuse()
    return code


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """The flags of one command line.

    Raises:
        ConfigError: an unknown flag, a value of the wrong kind, no --gin_file, or a word left over.
    """
    values = flags.FlagValues()
    flags.DEFINE_multi_string("gin_file", [], "gin file", flag_values=values)
    flags.DEFINE_multi_string("gin_bindings", [], "binding", flag_values=values)
    flags.DEFINE_string("workdir", None, "settings.Run.workdir", flag_values=values)
    flags.DEFINE_integer("seed", None, "settings.Run.seed", flag_values=values)
    flags.DEFINE_integer("steps", None, "settings.Run.steps", flag_values=values)
    flags.DEFINE_boolean("dry_run", False, "print and stop", flag_values=values)
    flags.DEFINE_boolean("roles", False, "print the processes and stop", flag_values=values)
    flags.DEFINE_boolean("help", False, "print the usage", short_name="h", flag_values=values)
    try:
        left = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        known = [name for name in values if len(name) > 1]
        raise gin_source.ConfigError(
            f"unknown flag --{error.flagname}{gin_source.nearest(error.flagname, known)}"
        ) from error
    except flags.Error as error:
        raise gin_source.ConfigError(str(error)) from error
    if left:
        hint = f": write --gin_bindings='{left[0]}'" if "=" in left[0] else ": every argument is a --flag=value"
        if left[0].endswith(".gin"):
            hint = f": write --gin_file={left[0]}"
        raise gin_source.ConfigError(f"leftover argument {left[0]!r}{hint}")
    if not values.help and not values.gin_file:
        raise gin_source.ConfigError("no --gin_file: name one, as in --gin_file=stage1.gin")
    return values


def shadow_bindings(parsed: flags.FlagValues) -> list[tuple[str, str]]:
    """(binding, flag) for --gin_bindings, then for the flags that stand for one field; a relative --workdir is taken
    from here, so that the record holds a folder that does not depend on the working directory."""
    pairs = [(text, f"--gin_bindings={text!r}") for text in parsed.gin_bindings]
    for name, field in SHADOWED.items():
        value = getattr(parsed, name)
        if value is not None:
            bound = os.path.abspath(value) if name == "workdir" and value else value
            pairs.append((f"{field}={bound!r}", f"--{name}={value}"))
    return pairs


def prepare_environment(dry_run: bool) -> None:
    """Sets what JAX reads at import; a value that is already there stays.

    Compiled programs are kept between runs. A dry run stays on the CPU backend: abstract shapes need no accelerator.
    """
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "rstar2_jax" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"


def join_processes(environment: Mapping[str, str], text: str = "", wait_s: float = 300) -> int:
    """Join the other processes of a run over several hosts; returns this one's number, 0 where it is alone.

    Args:
        environment: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say so.
        text: the resolved configuration, which must be the same in all of them, as the versions of the code must be.
        wait_s: longest wait for process 0.

    Raises:
        ConfigError: the address without the two numbers, numbers that do not fit, no such host, nobody there, or a
            process that was started otherwise.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return 0
    told = [environment.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    if not all(text.isdecimal() for text in told) or not int(told[1]) < int(told[0]):
        raise gin_source.ConfigError(
            f"JAX_COORDINATOR_ADDRESS is set, but JAX_NUM_PROCESSES = {told[0]!r} and JAX_PROCESS_ID = {told[1]!r}: "
            "set them to the number of processes and to 0, 1, ... in each"
        )
    count, rank = map(int, told)
    _check_meeting_point(address, rank, wait_s)
    import jax  # here, so that configuration errors and --help never wait for it

    jax.distributed.initialize(address, count, rank)
    from rstar2_jax import processes

    try:
        code = [f"git {run_record.git_hash()}", *(f"{name} {found}" for name, found in run_record.versions().items())]
        processes.check_alike("\n".join([text, *code]))
    except ValueError as error:
        raise gin_source.ConfigError(str(error)) from error
    return rank


def _check_meeting_point(address: str, rank: int, wait_s: float) -> None:
    """ConfigError unless process 0 can listen at the address and each other one reaches it in time: JAX itself would
    end the process with a stack trace."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise gin_source.ConfigError(f"JAX_COORDINATOR_ADDRESS = {address!r}: write host:port of process 0")
    give_up = time.monotonic() + wait_s
    while True:
        try:
            if rank:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            else:
                socket.create_server(("", int(port))).close()
            return
        except OSError as fault:  # also a name that a cluster publishes only once its host is up
            if rank == 0 or time.monotonic() > give_up:
                does = "be reached" if rank else "be listened at"
                raise gin_source.ConfigError(
                    f"JAX_COORDINATOR_ADDRESS = {address!r} cannot {does} by process {rank} ({fault}): start process 0 "
                    f"on that host within {wait_s:g} s of the others, on a port that is free there and open to them"
                ) from fault
            time.sleep(0.2)


def _stop(code: object) -> int:
    if type(code) is not int:
        raise TypeError(f"a RUN function returns its exit code as int, got {code!r}")
    return code


if __name__ == "__main__":
    sys.exit(main())
