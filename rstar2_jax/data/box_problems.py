"""Integer-answer problems that a model of a third of a million parameters can learn to solve with its tool.

Each family draws a problem of a stage (1, 2, 3: bigger numbers) from a random generator and knows its answer and the
code that finds it. The tool is the point: the numbers are too big to guess, the code is a copy of the question.

A problem belongs to evaluation or to training by a hash of its content (operands that commute are sorted first), so no
problem is ever on both sides, whatever the seeds.

Source: the families of the project's own small study; the answers are checked by brute force in the tests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable

import numpy as np

from rstar2_jax.data import sources


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem with what a demonstration of it needs.

    Args:
        key: content of the problem, equal for two problems that are the same up to the order of operands.
        answer: the integer asked for.
        setup: statements that the code needs first (may be empty).
        expression: Python expression that the tool evaluates.
        value: what the expression gives; equals the answer, except where a last step is left to the model.
    """

    family: str
    question: str
    key: str
    answer: int
    setup: str = ""
    expression: str
    value: int

    @property
    def code(self) -> str:
        """The program that prints the value."""
        return f"{self.setup}print({self.expression})"

    @property
    def is_held_out(self) -> bool:
        """True when the problem is for evaluation only."""
        return hashlib.sha256(f"{self.family} {self.key}".encode()).digest()[0] % sources.EVAL_SHARE == 0


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


_FACTOR = {1: (10, 99), 2: (50, 299), 3: (100, 999)}
_MODULUS = {1: (11, 99), 2: (50, 299), 3: (100, 999)}
_SMALL = {1: (10, 49), 2: (20, 99), 3: (50, 299)}
_COMMON = {1: (2, 12), 2: (3, 20), 3: (5, 30)}
_MULTIPLE = {1: (2, 8), 2: (3, 15), 3: (5, 33)}
_DIVIDED = {1: (10, 199), 2: (50, 499), 3: (200, 999)}
_BASE = {1: (2, 39), 2: (10, 99), 3: (50, 299)}
_EXPONENT = {1: (3, 29), 2: (10, 99), 3: (20, 199)}


def _product_mod(rng: np.random.Generator, stage: int) -> Problem:
    a, b, m = _between(rng, _FACTOR[stage]), _between(rng, _FACTOR[stage]), _between(rng, _MODULUS[stage])
    value = a * b % m
    return Problem(
        family="product_mod",
        question=f"{a}*{b} mod {m}",
        key=f"{min(a, b)} {max(a, b)} {m}",
        answer=value,
        expression=f"{a}*{b}%{m}",
        value=value,
    )


def _gcd(rng: np.random.Generator, stage: int) -> Problem:
    common = _between(rng, _COMMON[stage])
    a, b = common * _between(rng, _MULTIPLE[stage]), common * _between(rng, _MULTIPLE[stage])
    value = math.gcd(a, b)
    return Problem(
        family="gcd",
        question=f"gcd({a},{b})",
        key=f"{min(a, b)} {max(a, b)}",
        answer=value,
        setup="import math;",
        expression=f"math.gcd({a},{b})",
        value=value,
    )


def _divisor_sum(rng: np.random.Generator, stage: int) -> Problem:
    n = _between(rng, _DIVIDED[stage])
    value = sum(d for d in range(1, n + 1) if n % d == 0)
    return Problem(
        family="divisor_sum",
        question=f"divisor sum of {n}",
        key=str(n),
        answer=value,
        expression=f"sum(d for d in range(1,{n}+1) if {n}%d==0)",
        value=value,
    )


def _power_mod(rng: np.random.Generator, stage: int) -> Problem:
    a, b = _between(rng, _BASE[stage]), _between(rng, _EXPONENT[stage])
    value = pow(a, b, 1000)
    return Problem(
        family="power_mod",
        question=f"{a}^{b} mod 1000",
        key=f"{a} {b}",
        answer=value,
        expression=f"pow({a},{b},1000)",
        value=value,
    )


def _digit_sum(rng: np.random.Generator, stage: int) -> Problem:
    inner = _product_mod(rng, stage)
    return dataclasses.replace(
        inner,
        family="digit_sum",
        question=f"digit sum of {inner.question}",
        answer=sum(int(digit) for digit in str(inner.value)),
    )


def _divisor_sum_mod(rng: np.random.Generator, stage: int) -> Problem:
    inner = _product_mod(rng, stage)
    rest = inner.expression
    value = sum(d for d in range(1, inner.value + 1) if inner.value % d == 0)
    return dataclasses.replace(
        inner,
        family="divisor_sum_mod",
        question=f"divisor sum of {inner.question}",
        answer=value,
        expression=f"sum(d for d in range(1,{rest}+1) if {rest}%d==0)",
        value=value,
    )


def _lcm(rng: np.random.Generator, stage: int) -> Problem:
    a, b = _between(rng, _SMALL[stage]), _between(rng, _SMALL[stage])
    value = math.lcm(a, b)
    return Problem(
        family="lcm",
        question=f"lcm({a},{b})",
        key=f"{min(a, b)} {max(a, b)}",
        answer=value,
        setup="import math;",
        expression=f"math.lcm({a},{b})",
        value=value,
    )


def _sum_product_mod(rng: np.random.Generator, stage: int) -> Problem:
    a, b, c = (_between(rng, _SMALL[stage]) for _ in range(3))
    m = _between(rng, _MODULUS[stage])
    value = (a + b) * c % m
    return Problem(
        family="sum_product_mod",
        question=f"({a}+{b})*{c} mod {m}",
        key=f"{min(a, b)} {max(a, b)} {c} {m}",
        answer=value,
        expression=f"({a}+{b})*{c}%{m}",
        value=value,
    )


def _triple_product_mod(rng: np.random.Generator, stage: int) -> Problem:
    a, b, c = (_between(rng, _SMALL[stage]) for _ in range(3))
    m = _between(rng, _MODULUS[stage])
    value = a * b * c % m
    return Problem(
        family="triple_product_mod",
        question=f"{a}*{b}*{c} mod {m}",
        key=" ".join(map(str, (*sorted((a, b, c)), m))),
        answer=value,
        expression=f"{a}*{b}*{c}%{m}",
        value=value,
    )


TRAINED = ("product_mod", "gcd", "divisor_sum", "power_mod")
"""Families of a training run that names none."""

HELD_OUT = ("lcm", "sum_product_mod", "triple_product_mod")
"""Families for evaluation only: training on them is refused."""

_DRAW: dict[str, Callable[[np.random.Generator, int], Problem]] = {
    "product_mod": _product_mod,
    "gcd": _gcd,
    "divisor_sum": _divisor_sum,
    "power_mod": _power_mod,
    "digit_sum": _digit_sum,
    "lcm": _lcm,
    "sum_product_mod": _sum_product_mod,
    "triple_product_mod": _triple_product_mod,
    "divisor_sum_mod": _divisor_sum_mod,
}

FAMILIES = tuple(_DRAW)
"""All families; their places are part of what draws a problem. `digit_sum` and `divisor_sum_mod` are trained only when
named: the last step of the first is left to the model, so that it keeps failures in the data where every other family
saturates; the second needs the longest program."""


def draw(family: str, stage: int, entropy: tuple[int, ...], *, held_out: bool) -> Problem:
    """The problem that (family, stage, entropy) names on one side of the split: a pure function.

    Args:
        stage: 1, 2 or 3.
        entropy: numbers from 0 up that name this problem (seed, index, ...).
        held_out: evaluation side (True) or training side (False).
    """
    rng = np.random.default_rng([*entropy, FAMILIES.index(family), stage, int(held_out)])
    while True:
        problem = _DRAW[family](rng, stage)
        if problem.is_held_out == held_out:
            return problem
