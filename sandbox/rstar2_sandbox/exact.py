"""Exact value of a small LaTeX arithmetic expression, as a fraction. Pure and bounded: no eval, no floats, no clock.

Understands + - * / ^ ! parentheses, \\frac and its kin, mixed numbers (2\\frac{2}{3} is 8/3), decimals. Everything
else, and everything above the bounds, is None: not decided here.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 400
MAX_BITS = 100_000
MAX_FACTORIAL = 3_000
MAX_DEPTH = 40

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\\(?:[dtc]?frac|cdot|times|div))|(.))", re.DOTALL)
_OPERATORS = {"\\cdot": "*", "\\times": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/"}


class _UndecidedError(ValueError):
    """The expression is not of the kind understood here, or above a bound."""


def value(text: str) -> Fraction | None:
    """The exact value of an expression, or None when it is not plain arithmetic within the bounds.

    >>> value(r"2\\frac{2}{3}"), value("10^2"), value(r"\\sqrt{4}")
    (Fraction(8, 3), Fraction(100, 1), None)
    """
    if len(text) > MAX_CHARS:
        return None
    try:
        parser = _Parser(text)
        result = parser.sum(0)
        parser.expect_end()
    except (_UndecidedError, ZeroDivisionError):
        return None
    return result


def _is_number(token: str) -> bool:
    return len(token) > 0 and (token[0] in "0123456789" or (token[0] == "." and len(token) > 1))


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise _UndecidedError("too large")
    return number


class _Parser:
    """Recursive descent over the tokens; `at` is the next one."""

    def __init__(self, text: str) -> None:
        self.tokens = [self._token(match) for match in _TOKEN.finditer(text.strip())]
        self.at = 0

    @staticmethod
    def _token(match: re.Match[str]) -> str:
        token = match.group(1) or match.group(2) or match.group(3)
        return _OPERATORS.get(token, token)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise _UndecidedError(f"expected {wanted}")
        self.at += 1

    def expect_end(self) -> None:
        if self.at != len(self.tokens):
            raise _UndecidedError("more than one expression")

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _UndecidedError("too deep")
        total = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = self.peek()
            self.at += 1
            term = self.product(depth)
            total = _bounded(total + term if sign == "+" else total - term)
        return total

    def product(self, depth: int) -> Fraction:
        total = self.signed(depth)
        while True:
            operator = self.peek()
            if operator in ("*", "/"):
                self.at += 1
                factor = self.signed(depth)
                total = _bounded(total * factor if operator == "*" else total / factor)
            elif operator == "(":
                total = _bounded(total * self.power(depth))
            else:
                return total

    def signed(self, depth: int) -> Fraction:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.peek() == "-" else sign
            self.at += 1
        return sign * self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.factorial(depth)
        if self.peek() != "^":
            return base
        self.at += 1
        exponent = self.argument(depth)
        if exponent.denominator != 1 or self.peek() == "^":
            raise _UndecidedError("not an integer power")
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > MAX_BITS:
            raise _UndecidedError("too large")
        return base ** int(exponent)

    def factorial(self, depth: int) -> Fraction:
        base = self.atom(depth)
        while self.peek() == "!":
            self.at += 1
            if base.denominator != 1 or not 0 <= base <= MAX_FACTORIAL:
                raise _UndecidedError("not a factorial within the bound")
            product = 1
            for factor in range(2, int(base) + 1):
                product *= factor
            base = Fraction(product)
        return base

    def atom(self, depth: int) -> Fraction:
        token = self.peek()
        if _is_number(token):
            return self.number(depth)
        if token.endswith("frac"):
            return self.fraction(depth)
        closing = {"(": ")", "{": "}", "[": "]"}.get(token)
        if closing is None:
            raise _UndecidedError(f"not arithmetic: {token!r}")
        self.at += 1
        inner = self.sum(depth + 1)
        self.take(closing)
        return inner

    def number(self, depth: int) -> Fraction:
        token = self.peek()
        self.at += 1
        whole = Fraction(token)
        following = self.peek()
        if following.endswith("frac") and "." not in token:
            part = self.fraction(depth)
            if 0 <= part < 1:
                return whole + part
            raise _UndecidedError("a number before a fraction above 1")
        if _is_number(following) and "." not in token:
            # "2 2/3": only a proper fraction may follow a whole number.
            upper, slash, lower = (self.tokens[self.at : self.at + 3] + ["", "", ""])[:3]
            proper = _is_number(upper + lower) and "." not in upper + lower and slash == "/"
            if proper and upper and lower and 0 < int(upper) < int(lower):
                self.at += 3
                return whole + Fraction(int(upper), int(lower))
            raise _UndecidedError("two numbers side by side")
        return whole

    def fraction(self, depth: int) -> Fraction:
        self.at += 1
        upper = self.argument(depth)
        lower = self.argument(depth)
        return _bounded(upper / lower)

    def argument(self, depth: int) -> Fraction:
        """What TeX takes as an argument: a group, or one character (so \\frac12 is a half)."""
        token = self.peek()
        if token == "{":
            self.at += 1
            inner = self.sum(depth + 1)
            self.take("}")
            return inner
        if _is_number(token) and token[0] != ".":
            self.tokens[self.at : self.at + 1] = list(token)
            self.at += 1
            return Fraction(int(token[0]))
        raise _UndecidedError("no argument")
