"""The physical floor that the sandbox is measured against: fork, run, capture, wait, and nothing else.

    python sandbox_floor.py R0|R1 bare|math

R0 forks with Python in a plain interpreter. R1 forks with the C library in an interpreter that is tuned as the
sandbox's are (one heap, gathered arenas, huge pages, frozen garbage collector). No jail, no limits, no queue. Reads
lines of JSON [code, calls] and answers each with the CPU seconds of a call, its children included.
"""

import ctypes
import gc
import json
import os
import resource
import sys


def cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def one(fork, code: bytes) -> bytes:
    """Run a program in a forked child and return what it printed."""
    outer, inner = os.pipe()
    errors, inner_errors = os.pipe()
    pid = fork()
    if pid == 0:
        os.dup2(inner, 1)
        os.dup2(inner_errors, 2)
        exec(compile(code, "<tool>", "exec"), {"__name__": "__main__"})  # noqa: S102
        sys.stdout.flush()
        os._exit(0)
    os.close(inner)
    os.close(inner_errors)
    parts = []
    while part := os.read(outer, 65536):
        parts.append(part)
    os.read(errors, 65536)
    os.close(outer)
    os.close(errors)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"a child of the floor ended with status {status}")
    return b"".join(parts)


def main() -> None:
    """Warm up as asked, then serve lines."""
    from rstar2_sandbox import forker, image

    which, kind = sys.argv[1:]
    fork = os.fork
    library = None
    if which == "R1":
        library = forker.load()
        if library is None:
            raise SystemExit("R1 needs the compiled part: python -m rstar2_sandbox build")
        library.gather_arenas()
        fork = ctypes.PyDLL(None).fork
    image.warm(kind)
    image.rehearse()
    if which == "R1":
        image.settle(library)
    else:
        gc.collect()
        gc.freeze()
    for line in sys.stdin:
        code, calls = json.loads(line)
        one(fork, code.encode())
        started = cpu_s()
        for _ in range(calls):
            one(fork, code.encode())
        print(json.dumps((cpu_s() - started) / calls), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
