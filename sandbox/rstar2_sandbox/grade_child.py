"""The second opinion on an expression, asked of math-verify inside a jailed child that can be killed.

Gold first: the library's verdict is not symmetric. Its own time limits (SIGALRM) are off; the parent keeps the clock.
"""

from __future__ import annotations

import json
import logging
import sys


def warm() -> None:
    """Go once through parsing and comparing, so that forked children start warm."""
    logging.disable(logging.CRITICAL)
    equal(r"\frac{1}{2}", r"0.5")
    equal("42", r"\sqrt{1764}")
    # Unequal ones go much further through the library before it gives up.
    for answer in (r"\sqrt{5}", r"\frac{22}{7}", r"2\pi", r"\binom{5}{2}", r"(1, 2)", "2^{10}", r"\log 2"):
        equal("3", answer)


def equal(gold: str, answer: str) -> bool:
    """What the library says about two LaTeX expressions."""
    import math_verify

    first, second = (math_verify.parse(f"${text}$", parsing_timeout=0) for text in (gold, answer))
    return bool(math_verify.verify(first, second, timeout_seconds=0))


def run(source: bytes) -> int:
    """Read {gold, answer} and write the verdict to standard output; return the exit code."""
    request = json.loads(source)
    sys.stdout = open(1, "w", closefd=False)
    try:
        verdict = equal(request["gold"], request["answer"])
    except (ArithmeticError, AttributeError, MemoryError, RecursionError, TypeError, ValueError):
        return 1
    sys.stdout.write(json.dumps(verdict))
    sys.stdout.flush()
    return 0
