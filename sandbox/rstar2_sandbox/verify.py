"""Strict grading of a final assistant turn. Pure and bounded: string code and exact fractions, no eval, no time-outs.

The answer is what stands in the last \\boxed{} (or \\fbox{}) inside the last closed <answer> block. Integers are
compared exactly after their typography is made plain; percent signs, degree signs, units in words, a leading "x =" and
a trailing congruence do not change them. Other expressions are compared as exact fractions where that decides; where it
does not, a library may be asked, in a process that can be killed, and one that gives no answer means: not equal.

Deliberately not here: the library itself (grade_child), processes and limits (executor).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from fractions import Fraction

from rstar2_sandbox import exact, vectors
from rstar2_sandbox.protocol import Verdict, Verification

RULES_VERSION = "2"
MAX_ANSWER_CHARS = 20_000
MAX_ASK_CHARS = 500
MAX_DRESSED_CHARS = 300
MAX_NESTING = 4
MAX_MEMBERS = 5

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s{}$\\<>]+")
_MINUS = dict.fromkeys(map(ord, "−–—﹣-"), "-")
_DIGITS = {ord("０") + digit: str(digit) for digit in range(10)}
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u3000"), " ")
_THIN_SPACES = dict.fromkeys(map(ord, "\u200a\u202f"), "\u2009")
_SIGNS = {ord("＋"): "+", ord("，"): ",", ord("％"): "%"}
_PLAIN = str.maketrans({**_MINUS, **_DIGITS, **_SPACES, **_THIN_SPACES, **_SIGNS})
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|quad|qquad|bigl?|bigr?|Bigl?|Bigr?|limits|!)(?![A-Za-z])|\\[()\[\]]|\$"
)
_THIN = re.compile(r"\\,")
_SPACE = re.compile(r"\\[;: ]|~")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°)\s*$")
_PERCENT = re.compile(r"\s*(?:\\%|%)\s*$")
_CONGRUENCE = re.compile(r"\s*(?:\\pmod\s*(?:\{[^{}]*\}|\d+)|\(\s*(?:mod|\\bmod|\\mod)\s*[^()]*\))\s*$")
_LABEL = re.compile(r"^[A-Za-z\\][A-Za-z\\_{}() +\-]*(?:=|\\equiv(?![A-Za-z]))\s*")
_SAID = re.compile(r"^[A-Za-z][A-Za-z ,']*:\s*")
_CURRENCY = re.compile(r"^([+-]?)\s*[€£]\s*")
_GROUPED = re.compile(r"[+-]?\s*[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:\u2009[0-9]{3})+)(?:\.0*)?")
_INTEGER = re.compile(r"([+-]?)\s*([0-9]+)(?:\.0*)?")
_UNIT = re.compile(r"(?<=[\d\s)])\s*([A-Za-z]{2,}[A-Za-z./ ]*)(?:\^\s*\{?\s*[23]\s*\}?)?\s*\.?$")
_ORDINAL = re.compile(r"(?<=\d)\s*(?:st|nd|rd|th)$")
_NOT_UNITS = frozenset(
    "and or to mod modulo plus minus times over factorial squared cubed base is not pi infinity "
    "kilo mega giga milli micro nano mil mln mn bn tn".split()
)
# Words that multiply or divide the number before them, in the singular, the plural, and as parts (thousandths).
_SCALE = re.compile(
    r"(?:half|halves|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|nin(?:th|eth)|tenth|eleventh|twelfth|dozen|"
    r"score|gross|lakh|crore|ten|twent[iy]|hundred|thousand|[mbtr]illi(?:on|ard)|quadrillion|quintillion|googol)"
    r"(?:s|e?ths?)?|\w*(?:illion|thousand|hundred|teen|tie)ths?)",
    re.IGNORECASE,
)
# Relations that are not equality: what stands before one is no label.
_UNEQUAL = re.compile(
    r"\\(?:not|neq?|[ln]?[lg]eq?(?:q|slant)?|[lg]t|approx|sim(?:eq)?|propto|n(?:equiv|cong))(?![A-Za-z])"
    r"|[≠≈<>!]\s*=|[≠≈<>≤≥]"
)
_ASKABLE = re.compile(r"[\d\s+\-*/^!.(){}\[\]|]*")
_FUNCTIONS = re.compile(
    r"\\(?:[dtc]?frac|sqrt|binom|cdot|times|div|pi|log|ln|[lr]floor|[lr]ceil|sin|cos|tan|exp)(?![A-Za-z])"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What the pure rules found: the answer, their decision (None: open), why, and what to ask the library."""

    answer: str | None
    exact: bool | None
    reason: str
    ask: tuple[str, str] | None = None


def extract(text: str) -> str | None:
    """The text in the last box inside the last closed <answer> block; None when there is no such box.

    >>> extract(r"<answer>\\boxed{3}, no: \\boxed{5}</answer>")
    '5'
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return last_box(text[start + len("<answer>") : end]) if start >= 0 else None


def last_box(text: str) -> str | None:
    """Content of the last box; None without a box, or when the last one is not closed. A box in a box is unwrapped."""
    for _ in range(MAX_NESTING):
        content = _outer_box(text)
        if content is None or not _BOX.match(content):
            return content
        text = content
    return None


def _outer_box(text: str) -> str | None:
    content, at = None, 0
    while match := _BOX.search(text, at):
        at = match.end()
        if text[at : at + 1] == "{":
            end = _closing_brace(text, at)
            if end < 0:
                return None
            content, at = text[at + 1 : end].strip(), end + 1
        else:
            bare = _BARE.match(text, at)
            content = bare.group().rstrip(".,;:") if bare else None
    return content


def _closing_brace(text: str, opening: int) -> int:
    """Index of the brace that closes the one at `opening`; escaped braces do not count; -1 when there is none."""
    depth, at = 0, opening
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def canonical(text: str) -> str:
    """The same expression in plain typography: no layout commands, ASCII signs, words without their command.

    >>> canonical(r"\\left( 1{,}234 \\right)\\,\\text{ cm}")
    '( 1,234 )\u2009  cm'
    """
    text = text[:MAX_ANSWER_CHARS].translate(_PLAIN)
    for _ in range(3):
        text = _WORDS.sub(r" \1 ", text)
    text = _LAYOUT.sub("", text.replace(r"\$", "").replace("{,}", ","))
    text = _SPACE.sub(" ", _THIN.sub("\u2009", text)).strip()
    for _ in range(MAX_NESTING):
        if not text.startswith("{") or _closing_brace(text, 0) != len(text) - 1:
            break
        text = text[1:-1].strip()
    return text.rstrip(".").strip() if not text.endswith("..") else text


def integer(text: str) -> str | None:
    """Digits of a plain integer (sign, no leading zeros), or None. Of any length: no conversion takes place.

    >>> integer(r"1{,}234"), integer(r"12\\text{ cm}"), integer("17.5"), integer("-0")
    ('1234', '12', None, '0')
    """
    text = canonical(text)
    match = _INTEGER.fullmatch(text)
    if match is None and len(text) <= MAX_DRESSED_CHARS:
        text = _bare_number(text)
        if _GROUPED.fullmatch(text):
            text = re.sub(r"[,\u2009]", "", text)
        match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match.group(2).lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def _bare_number(text: str) -> str:
    """Without the label before and the unit, degree, percent or congruence after it."""
    if _UNEQUAL.search(text):
        return text
    text = _SAID.sub("", _LABEL.sub("", text))
    text = _CURRENCY.sub(r"\1", text)
    for pattern in (_CONGRUENCE, _DEGREE, _PERCENT, _ORDINAL):
        text = pattern.sub("", text)
    unit = _UNIT.search(text)
    if unit and not any(
        word in _NOT_UNITS or _SCALE.fullmatch(word) for word in re.split(r"[ ./]+", unit.group(1).lower())
    ):
        text = text[: unit.start()]
    return text.strip()


def examine(text: str, gold: str) -> Examined:
    """Apply the pure rules to the sampled text of a final turn."""
    answer = extract(text)
    if answer is None:
        return Examined(answer=None, exact=False, reason="no boxed answer")
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return Examined(answer=answer[:200], exact=False, reason="empty or oversized answer")
    wanted, given = integer(gold), integer(answer)
    if wanted is not None and given is not None:
        return Examined(answer=answer, exact=wanted == given, reason="integer")
    if wanted is not None:
        return _expression(answer, canonical(gold), integer_gold=True)
    return _expression(answer, canonical(gold), integer_gold=False)


def _expression(answer: str, gold: str, integer_gold: bool) -> Examined:
    plain = canonical(answer)
    if not integer_gold and _squeeze(plain) == _squeeze(gold):
        return Examined(answer=answer, exact=True, reason="same expression")
    wanted, given = _value(gold), _value(plain)
    ask = (gold, plain) if _may_ask(gold, plain, integer_gold) else None
    if wanted is not None and given is not None:
        return Examined(answer=answer, exact=wanted == given, reason="exact value", ask=ask)
    if ask is None:
        return Examined(answer=answer, exact=False, reason="not the gold's kind of value")
    return Examined(answer=answer, exact=None, reason="left to the library", ask=ask)


def _value(text: str) -> Fraction | None:
    """Exact value; of a chain of equalities, that of its members, which must agree; a leading label is dropped."""
    if len(text) > exact.MAX_CHARS or _UNEQUAL.search(text):
        return None
    members = [_bare_number(member.strip()) for member in text.split("=", MAX_MEMBERS)]
    if len(members) > 1 and exact.value(members[0]) is None and _LABEL.match(text):
        members = members[1:]
    values = [exact.value(_ungroup(member)) for member in members]
    if any(value is None for value in values) or len(set(values)) != 1:
        return None
    return values[0]


def _ungroup(text: str) -> str:
    grouped = re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)
    return text.replace(",", "") if grouped else text


def _may_ask(gold: str, answer: str, integer_gold: bool) -> bool:
    """The library is asked about short expressions only; about equations never (it takes any two of them for equal)."""
    if max(len(gold), len(answer)) > MAX_ASK_CHARS or "=" in gold or "=" in answer:
        return False
    if not integer_gold:
        return True
    return _ASKABLE.fullmatch(_FUNCTIONS.sub("", answer)) is not None


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


def conclude(
    examined: Examined, library: bool | None, note: str = "", run_s: float = 0.0, rules: str = ""
) -> Verification:
    """The verdict: the exact rules first; the library only where they left it open; silence means wrong.

    Args:
        rules: version of the rules and of the library that was there to be asked; empty: the rules alone.
    """
    if examined.exact is not None:
        right, reason = examined.exact, examined.reason
    else:
        right, reason = bool(library), examined.reason
    return Verification(
        verdict=Verdict.CORRECT if right else Verdict.WRONG,
        answer=examined.answer,
        reason=f"{reason}; library: {note}" if note else reason,
        exact=examined.exact,
        library=library,
        rules=rules or RULES,
        run_s=run_s,
    )


def judge(text: str, gold: str) -> Verification:
    """The verdict of the pure rules alone, as a node without the library gives it."""
    return conclude(examine(text, gold), None)


RULES = f"{RULES_VERSION}-" + hashlib.sha256(json.dumps(vectors.VECTORS).encode()).hexdigest()[:12]
