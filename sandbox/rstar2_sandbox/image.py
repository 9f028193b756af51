"""A warm interpreter: imports a set of modules once, uses them, then forks a slot keeper on request.

Started as `python -s -P image.py FD KIND`, with a clean environment, by the executor. Single-threaded. It never runs a
program. The keeper's own status travels over the slot's control socket: one line of JSON, then the binary protocol.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

KINDS = {
    "bare": (
        "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools",
        "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "sys", "time",
        "typing",
    ),
    "math": ("numpy", "sympy", "mpmath"),
    "grade": ("math_verify",),
}  # fmt: skip


def warm(kind: str) -> None:
    """Import the modules of a kind and go once through their usual paths. Raises ImportError when one is missing."""
    for name in KINDS["bare"]:
        importlib.import_module(name)
    for name in KINDS[kind]:
        importlib.import_module(name)
    if kind == "math":
        sympy, numpy = sys.modules["sympy"], sys.modules["numpy"]
        x = sympy.Symbol("x")
        sympy.solve(x**2 - 3 * x + 2, x)
        str(sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2))
        sympy.factorint(2**31 + 11)
        sympy.integrate(x**2, x)
        numpy.linalg.det(numpy.eye(3))
        numpy.random.default_rng(0).integers(10)
    if kind == "grade":
        from rstar2_sandbox import grade_child

        grade_child.warm()


def main(control_fd: int, kind: str) -> None:
    """Warm up, say so, and build keepers until the executor is gone."""
    from rstar2_sandbox import linux

    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        warm(kind)
    except ImportError as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(b"{}")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        request = json.loads(message)
        slot = socket.socket(fileno=fds[0])
        control.send(json.dumps({"pid": _fork_keeper(control, slot, request)}).encode())
        slot.close()
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_keeper(control: socket.socket, slot: socket.socket, request: dict[str, Any]) -> int:
    """Fork the builder, which forks the keeper; return the keeper's pid on this host, or 0 when it failed."""
    from rstar2_sandbox import jail

    ours, theirs = socket.socketpair()
    builder = os.fork()
    if builder == 0:
        control.close()
        ours.close()
        _build(theirs, slot, request)
    theirs.close()
    ours.settimeout(10)
    pid = 0
    try:
        if request["tier"] == jail.NAMESPACES and ours.recv(1) == b"u":
            jail.write_id_maps(builder, request["keeper_uid"], request["child_uid"])
            ours.sendall(b"m")
        pid = int(ours.recv(32) or b"0")
    except OSError as error:
        slot.send(json.dumps({"error": f"cannot build the jail: {error}"}).encode())
    os.waitpid(builder, 0)
    # From here on this process is the keeper's parent, so that its death signal means what it should.
    with contextlib.suppress(OSError):
        ours.sendall(b"g")
    ours.close()
    return pid


def _build(sync: socket.socket, slot: socket.socket, request: dict[str, Any]) -> NoReturn:
    from rstar2_sandbox import jail

    try:
        held = jail.leave_host(sync) if request["tier"] == jail.NAMESPACES else {}
        pid = os.fork()
        if pid == 0:
            if sync.recv(1) == b"g":
                sync.close()
                _keep(slot, request, held)
            os._exit(1)
        sync.sendall(str(pid).encode())
    except OSError as error:
        slot.send(json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(0)


def _keep(slot: socket.socket, request: dict[str, Any], held: dict[str, int]) -> NoReturn:
    from rstar2_sandbox import jail, keeper, linux

    tier = request["tier"]
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if tier == jail.NAMESPACES:
            jail.build_root(held, request["tmp_bytes"], request["tmp_inodes"])
            folders, keep = ["/box", "/tmp"], frozenset(os.listdir("/tmp"))
            child_uid = jail.INNER_UID if request["own_uid"] else None
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
            folders, keep = [request["folder"]], frozenset()
            child_uid = request["child_uid"] if tier == jail.UID else None
            if child_uid is not None:
                os.setgroups([])
        os.environ["HOME"] = os.environ["TMPDIR"] = folders[-1]
        os.umask(0o022)
        loop = keeper.Keeper(slot, tier, child_uid, folders, keep)
        holds = [tier, *(["uid"] if child_uid is not None and tier != jail.UID else []), *jail.lock(tier, folders)]
        slot.send(json.dumps({"tier": "+".join(holds)}).encode())
        loop.serve()
    except (OSError, ValueError) as error:
        slot.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import rstar2_sandbox.grade_child
    import rstar2_sandbox.jail
    import rstar2_sandbox.keeper
    import rstar2_sandbox.linux  # noqa: F401

    del sys.path[0]
    main(int(sys.argv[1]), sys.argv[2])
