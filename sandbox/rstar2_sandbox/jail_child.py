"""What runs inside the jail: one program, the way a reader of its output expects it. Called once in a forked child.

The program sees a fresh __main__, standard input as a pipe, and tracebacks of its own frames only, under the name
"<tool>". A last bare expression is shown as its repr. Nothing it can see varies from run to run: the random module
starts from the program's own text.

Deliberately not here: limits and isolation (keeper), and any judgement of the result (the parent reads the kernel's).
"""

from __future__ import annotations

import ast
import atexit
import linecache
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, TextIO

NAME = "<tool>"
NAMES = (NAME, "<cell ")
EXIT_MEMORY = 86
_FUTURE_FLAGS = 0x1FF0000
_REHEARSED = (b"import sys\nprint(sum(n * n for n in range(9)))\n", b"def f(n):\n  return n\nf(1)", b"1 / 0")
_MAIN = types.ModuleType("__main__")
_FLUSHES: list[tuple[TextIO, Callable[[], None]]] = []
_ACTIVE: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
_AT_THREADS_END: list[Callable[[], None]] = getattr(threading, "_threading_atexits", [])


class _Lines(list[str]):
    """The lines of a program, made when somebody asks for them: most programs end without an error."""

    __slots__ = ("text",)
    text: str

    def made(self) -> _Lines:
        """Itself, with the lines in it."""
        if self.text:
            text, self.text = self.text, ""
            self[:] = text.splitlines(keepends=True)
        return self

    def __len__(self) -> int:
        return list.__len__(self.made())

    def __getitem__(self, index: Any) -> Any:
        return list.__getitem__(self.made(), index)

    def __iter__(self) -> Iterator[str]:
        return list.__iter__(self.made())


_LINES = _Lines()


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
    atexit._clear()  # what the warm interpreter's own modules would do at its exit is no program's business


def run(source: bytes) -> int:
    """Run a program to its end, its threads and exit handlers included; return the exit code for _exit."""
    code = 0
    try:
        text = _LINES.text = source.decode("utf-8", "surrogatepass")
        if "random" in text:  # not of bytes: there "in" takes the word for a number first, and raises
            seed(source)
        if _ends_with_print(text):
            exec(compile(text, NAME, "exec", dont_inherit=True), _MAIN.__dict__)  # noqa: S102
        else:
            _execute(text, _MAIN.__dict__, NAME)
    except BaseException as error:
        code = _failed(error)
    return finish() or code


def prepare() -> None:
    """What every program finds: a fresh __main__, and hooks that show its exceptions. Done once, by the keeper, for the
    same reason as open_streams."""
    _MAIN.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = _MAIN
    sys.excepthook = _show
    threading.excepthook = lambda args: _show(args.exc_type, args.exc_value, args.exc_traceback)
    random.seed(0)
    _FLUSHES[:] = [(stream, stream.flush) for stream in (sys.stdout, sys.stderr)]
    _LINES.text = ""
    linecache.cache[NAME] = (0, None, _LINES, NAME)


def rehearse() -> None:
    """Run small programs in this process, the keeper, as a child will, once its streams lead nowhere: what they have
    the interpreter write and allocate then lies together and is written already, and a child has less to copy."""
    before = dict(_MAIN.__dict__)
    for program in _REHEARSED * 10:
        run(program)
    _MAIN.__dict__.clear()
    _MAIN.__dict__.update(before)
    _LINES.clear()
    _LINES.text = ""


def seed(source: bytes) -> None:
    """Have the global random generators start from the program's text; where it names none, they start from 0."""
    if b"random" not in source:
        return
    import hashlib

    number = int.from_bytes(hashlib.blake2b(source, digest_size=4).digest(), "big")
    random.seed(number)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(number)


def namespace() -> dict[str, object]:
    """Where the program's names live."""
    return _MAIN.__dict__


def finish() -> int:
    """Wait for the program's threads, run its exit handlers, flush; the exit code that this gives."""
    code = 0
    # Both walk through much of the interpreter, which a forked child pays for page by page: only where there is a need.
    if len(_ACTIVE) > 1 or _AT_THREADS_END:
        code = guard(threading._shutdown)  # type: ignore[attr-defined]
    if atexit._ncallbacks():
        code = guard(atexit._run_exitfuncs) or code
    for stream, flush in _FLUSHES:
        try:
            flush()
        except BaseException:  # the program's own doing: it closed the descriptor, say
            code = code if _is_closed(stream) else 1
    return code


def _is_closed(stream: TextIO) -> bool:
    try:
        return stream.closed
    except ValueError:  # without a buffer
        return False


def execute(source: bytes, namespace: dict[str, object], name: str) -> None:
    """Run a program in a namespace; a last bare expression is shown as its repr. Raises what the program raises.

    Args:
        name: what tracebacks call the program; it starts with one of NAMES.
    """
    text = source.decode("utf-8", "surrogatepass")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    _execute(text, namespace, name)


def _execute(text: str, namespace: dict[str, object], name: str) -> None:
    if _ends_with_print(text):
        exec(compile(text, name, "exec", dont_inherit=True), namespace)  # noqa: S102
        return
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = compile(tree, name, "exec", dont_inherit=True)
    shown = None
    if last is not None:
        flags = body.co_flags & _FUTURE_FLAGS
        shown = compile(ast.Interactive([last]), name, "single", flags, dont_inherit=True)
    exec(body, namespace)  # noqa: S102
    if shown is not None:
        exec(shown, namespace)  # noqa: S102


def _ends_with_print(text: str) -> bool:
    """True when the last line is a print at the margin: then there is no value to show, and no tree to build."""
    text = text.rstrip()
    start = text.rfind("\n") + 1
    return text.startswith("print(", start) and not text[:start].rstrip().endswith("\\")


def guard(action: Callable[[], object], silent: bool = False) -> int:
    """Run an action; show what it raises; return the exit code that this means."""
    try:
        action()
    except BaseException as error:
        return 1 if silent and not isinstance(error, SystemExit | MemoryError) else _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    """Show what a program raised; the exit code that it means."""
    if isinstance(error, SystemExit):
        return _exit_code(error)
    _show(type(error), error, error.__traceback__)
    return EXIT_MEMORY if isinstance(error, MemoryError) else 1


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
        own = [frame for frame in part.stack if frame.filename.startswith(NAMES)]
        part.stack = traceback.StackSummary.from_list(own) if own else None  # type: ignore[assignment]
        todo += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
