"""Worked solutions as code: the arithmetic in a written solution that gives its problem's answer.

Pure. Deliberately not here: running the code (it is shown in demonstrations, not trusted).
"""

from __future__ import annotations

import ast
import dataclasses
import fractions
import operator
import re

from rstar2_jax.types import Prompt

_NUMBER = r"\d+(?:\.\d+)?"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """A prompt with code that leads to its answer, where that is known (for demonstrations).

    Args:
        setup: statements that the code needs first.
        expression: Python expression to run; None when only the answer is known.
        value: what the expression prints.
        licence: under which the problem was published; empty where that is not known.
    """

    prompt: Prompt
    setup: str = ""
    expression: str | None = None
    value: str = ""
    licence: str = ""


def with_expression(prompt: Prompt, working: str) -> Solved:
    """The prompt with the computation in a worked solution that gives its answer, in numbers of the question alone.

    An intermediate result is replaced by its own computation; a solution that needs a number which the question does
    not name gives no expression, for a program that uses it would teach to invent numbers. (100 is free: percentages.)
    Units and currency signs are dropped; what remains must be plain arithmetic.
    """
    bare = re.sub(r"<<[^>]*>>|[$€£]|(?<=[\d)])\s*[A-Za-z]+(?:/[A-Za-z]+)?(?=\s*[-+*/=])", "", working)
    bare = re.sub(r"(?<=\d),(?=\d{3})", "", bare).replace(" x ", " * ").replace("×", "*")
    operand = rf"\(?{_NUMBER}\)?"
    found = re.findall(rf"({operand}(?:\s*[-+*/]\s*{operand})+)\s*=\s*(-?{_NUMBER})", bare)
    given = {"100", *re.findall(_NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", prompt.question))}
    known: dict[str, str] = {}
    for left, right in found:
        expression = re.sub(_NUMBER, lambda m: m[0] if m[0] in given else known.get(m[0], m[0]), left)
        expression = re.sub(r"\s+", "", expression)
        if _arithmetic_value(expression) is not None and given.issuperset(re.findall(_NUMBER, expression)):
            known[right] = f"({expression})"
    for right in (right for _, right in reversed(found) if right in known):
        expression = known[right][1:-1]
        answer = fractions.Fraction(prompt.answer)
        if fractions.Fraction(right) == answer == _arithmetic_value(expression):
            whole = re.fullmatch(r"[\d+*()-]+", expression) is not None
            code = expression if whole else f"round({expression})"
            return Solved(prompt=prompt, expression=code, value=prompt.answer)
    return Solved(prompt=prompt)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _arithmetic_value(expression: str) -> fractions.Fraction | None:
    """The exact value of a plain arithmetic expression, read from its syntax tree; None when it has none."""

    def value(node: ast.expr) -> fractions.Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return fractions.Fraction(str(node.value))
        raise ValueError(f"not plain arithmetic: {expression!r}")

    try:
        return value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
