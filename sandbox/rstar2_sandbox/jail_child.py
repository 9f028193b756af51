"""What runs inside the jail: one program, the way a reader of its output expects it. Called once in a forked child.

The program sees a fresh __main__, standard input as a pipe, and tracebacks of its own frames only, under the name
"<tool>". A last bare expression is shown as its repr. Nothing it can see varies from run to run: the random module
starts from the program's own text.

Deliberately not here: limits and isolation (keeper), and any judgement of the result (the parent reads the kernel's).
"""

from __future__ import annotations

import ast
import atexit
import gc
import linecache
import os
import random
import sys
import threading
import traceback
import types
import zlib
from collections.abc import Callable

NAME = "<tool>"
EXIT_MEMORY = 86
_FUTURE_FLAGS = 0x1FF0000


def open_streams() -> None:
    """Replace the standard streams by fresh ones. Done once, by the keeper, while descriptors 0 to 2 are pipes: the
    objects remember what they were opened on, and building them in each child would cost it a third of its faults."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    # Line by line: what was printed before a kill must not be lost in a buffer.
    sys.stdout.reconfigure(line_buffering=True)
    sys.stderr.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def run(source: bytes) -> int:
    """Run a program to its end, its threads and exit handlers included; return the exit code for _exit."""
    streams = sys.stdout, sys.stderr
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.excepthook = _show
    threading.excepthook = lambda args: _show(args.exc_type, args.exc_value, args.exc_traceback)
    _seed(source)
    gc.enable()
    code = _guard(lambda: _execute(source, main.__dict__))
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        code = _guard(finish) or code
    for stream in streams:
        if not stream.closed:
            code = _guard(stream.flush, silent=True) or code
    return code


def _seed(source: bytes) -> None:
    seed = zlib.crc32(source)
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed)


def _execute(source: bytes, namespace: dict[str, object]) -> None:
    text = source.decode("utf-8", "surrogatepass")
    lines = text.splitlines(keepends=True)
    linecache.cache[NAME] = (len(text), None, lines, NAME)
    if _ends_with_print(lines):
        exec(compile(text, NAME, "exec", dont_inherit=True), namespace)  # noqa: S102
        return
    tree = ast.parse(text, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = compile(tree, NAME, "exec", dont_inherit=True)
    shown = None
    if last is not None:
        flags = body.co_flags & _FUTURE_FLAGS
        shown = compile(ast.Interactive([last]), NAME, "single", flags, dont_inherit=True)
    exec(body, namespace)  # noqa: S102
    if shown is not None:
        exec(shown, namespace)  # noqa: S102


def _ends_with_print(lines: list[str]) -> bool:
    """True when the last line is a print at the margin: then there is no value to show, and no tree to build."""
    ends = [line for line in lines[-2:] if line.strip()]
    return bool(ends) and ends[-1].startswith("print(") and not ends[0].rstrip().endswith("\\")


def _guard(action: Callable[[], object], silent: bool = False) -> int:
    """Run an action; show what it raises; return the exit code that this means."""
    try:
        action()
    except SystemExit as stop:
        return _exit_code(stop)
    except MemoryError as error:
        _show(type(error), error, error.__traceback__)
        return EXIT_MEMORY
    except BaseException as error:
        if not silent:
            _show(type(error), error, error.__traceback__)
        return 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _show(kind: type[BaseException], error: BaseException | None, trace: types.TracebackType | None) -> None:
    """Print an exception with the program's own frames."""
    try:
        report = traceback.TracebackException(kind, error, trace, compact=True)  # type: ignore[arg-type]
        _own_frames(report)
        text = "".join(report.format())
    except BaseException as failure:
        text = f"{kind.__name__} (its text cannot be shown: {type(failure).__name__})\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        os.write(2, text.encode("utf-8", "backslashreplace")) if _is_open(2) else None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _own_frames(report: traceback.TracebackException) -> None:
    todo, seen = [report], set()
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        own = [frame for frame in part.stack if frame.filename == NAME]
        part.stack = traceback.StackSummary.from_list(own) if own else None  # type: ignore[assignment]
        todo += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
