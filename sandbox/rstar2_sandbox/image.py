"""A warm interpreter: imports a set of modules once, uses them, then forks a slot keeper on request.

Started as `python -s -P image.py FD KIND`, with a clean environment, by the executor. Single-threaded. It never runs a
program. The keeper's own status travels over the slot's control socket: one line of JSON, then the binary protocol.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rstar2_sandbox import forker

KINDS = {
    "bare": (
        "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools",
        "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "sys", "time",
        "typing",
    ),
    "math": ("numpy", "sympy", "mpmath"),
    # Of its own: its many libraries cost every child of this interpreter three times the fork of the one above.
    "science": ("numpy", "sympy", "mpmath", "scipy", "scipy.optimize", "scipy.linalg", "scipy.special",
                "scipy.integrate", "scipy.interpolate", "scipy.stats"),
    "grade": ("math_verify",),
    "sql": ("sqlite3",),
}  # fmt: skip


@contextlib.contextmanager
def _keeping_bytecode() -> Iterator[None]:
    """Programs leave no bytecode behind, but what is imported here before any of them runs is kept: where the packages
    were installed without it, each start would compile SymPy again, which takes five times what its import takes."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@_keeping_bytecode()
def warm(kind: str) -> None:
    """Import the modules of a kind and go once through their usual paths. Raises ImportError when one is missing."""
    for name in (*KINDS["bare"], *KINDS[kind]):
        importlib.import_module(name)
    if kind in ("math", "science"):
        sympy, numpy = sys.modules["sympy"], sys.modules["numpy"]
        x = sympy.Symbol("x")
        sympy.solve(x**2 - 3 * x + 2, x)
        str(sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2))
        sympy.factorint(2**31 + 11)
        sympy.integrate(x**2, x)
        numpy.linalg.det(numpy.eye(3))
        numpy.random.default_rng(0).integers(10)
        numpy.random.seed(0)
    if kind == "sql":
        from rstar2_sandbox import sql_child

        sql_child.warm()
    if kind == "grade":
        from rstar2_sandbox import grade_child

        grade_child.warm()


def settle(library: forker.Forker | None) -> None:
    """Make this process cheap to fork: garbage gone, what stays out of the collector's sight, huge pages."""
    from rstar2_sandbox import forker

    gc.collect()
    gc.freeze()
    gc.disable()
    if library is not None:
        library.trim()
        library.collapse(forker.writable_ranges())


def main(control_fd: int, kind: str, compiled: bool) -> None:
    """Warm up, say so, and build keepers until the executor is gone.

    Args:
        compiled: use the part in C where there is one.
    """
    from rstar2_sandbox import forker, linux

    library = forker.load() if compiled else None
    if library is not None:
        library.gather_arenas()
    for name in ("GLIBC_TUNABLES", "LD_BIND_NOW"):
        os.environ.pop(name, None)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        warm(kind)
    except ImportError as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    rehearse()
    settle(library)
    try:
        control.send(json.dumps({"compiled": library is not None}).encode())
    except OSError:
        return  # the executor was closed meanwhile
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        request = json.loads(message)
        slot = socket.socket(fileno=fds[0])
        control.send(json.dumps({"pid": _fork_keeper(control, slot, request, library)}).encode())
        slot.close()
        _reap()


def rehearse() -> None:
    """Run small programs as a child will, so that the interpreter has adapted its code before it is copied: what it
    writes there now, no child has to write into pages of its own."""
    from rstar2_sandbox import jail_child

    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for program in (
            b"x = [n * n for n in range(9)]\nprint(sum(x))\n",
            b"def f(n):\n  return n\nf(1)",
            b"1 / 0",
        ) * 20:
            namespace: dict[str, object] = {"__name__": "__main__"}
            jail_child.guard(lambda source=program, space=namespace: jail_child.execute(source, space, "<tool>"))


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_keeper(
    control: socket.socket, slot: socket.socket, request: dict[str, Any], library: forker.Forker | None
) -> int:
    """Fork the builder, which forks the keeper; return the keeper's pid on this host, or 0 when it failed."""
    from rstar2_sandbox import jail

    ours, theirs = socket.socketpair()
    builder = os.fork()
    if builder == 0:
        control.close()
        ours.close()
        _build(theirs, slot, request, library)
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


def _build(
    sync: socket.socket, slot: socket.socket, request: dict[str, Any], library: forker.Forker | None
) -> NoReturn:
    from rstar2_sandbox import jail

    try:
        held = jail.leave_host(sync) if request["tier"] == jail.NAMESPACES else {}
        pid = os.fork()
        if pid == 0:
            if sync.recv(1) == b"g":
                sync.close()
                _keep(slot, request, held, library)
            os._exit(1)
        sync.sendall(str(pid).encode())
    except OSError as error:
        slot.send(json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(0)


def _keep(
    slot: socket.socket, request: dict[str, Any], held: dict[str, int], library: forker.Forker | None
) -> NoReturn:
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
        loop = keeper.Keeper(slot, tier, child_uid, folders, keep, library)
        holds = [tier, *(["uid"] if child_uid is not None and tier != jail.UID else []), *jail.lock(tier, folders)]
        slot.send(json.dumps({"tier": "+".join(holds)}).encode())
        loop.serve()
    except (OSError, ValueError) as error:
        slot.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import rstar2_sandbox.forker
    import rstar2_sandbox.grade_child
    import rstar2_sandbox.jail
    import rstar2_sandbox.keeper
    import rstar2_sandbox.linux
    import rstar2_sandbox.session_child  # noqa: F401

    del sys.path[0]
    main(int(sys.argv[1]), sys.argv[2], compiled=sys.argv[3] == "compiled")
