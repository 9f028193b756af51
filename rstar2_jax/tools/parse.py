"""Tool calls read from the text that the model sampled in one turn.

A call is `<tool_call>`, one JSON object with `name` and `arguments`, `</tool_call>`, with white space between them.
The JSON decoder finds where the object ends, so code that contains `</tool_call>` stays whole. A call that cannot be
read is a ToolCall with `error` set: a sentence for the model. No input raises.

Deliberately not here: whether the named tool exists and whether its arguments suit it (protocol.py and the tool),
repair of malformed JSON (the model is told instead), and any distinction by place: a call inside `<reason>` is a call.

Source: format of ALGORITHM section "Agent loop" (Hermes); the boundary by decoder instead of by pattern is ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from rstar2_jax.types import ToolCall

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"

_TAG = re.compile(r"</?tool_call>")
_SPACE = re.compile(r"[ \t\r\n]*")
_MAX_DIGITS = 1000  # Python refuses 4300 by default, but a library may have lifted that limit in this process
_MAX_DEPTH = 32
_MAX_CALLS = 128  # far above any limit on calls per turn; keeps the time linear in the text
_TOO_DEEP = f"the JSON is nested more than {_MAX_DEPTH} levels deep"
_EXPECTED = 'one JSON object {"name": ..., "arguments": {...}}'


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, above the limit of {_MAX_DIGITS}")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is out of range")
    return value


def _parse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant)


def parse(text: str) -> tuple[ToolCall, ...]:
    """Calls of one turn in the order of the text; a malformed one carries `error` and empty `arguments`.

    After a malformed call, reading goes on behind the next end tag, or at the next start tag if that comes first. A
    turn with more than 128 calls ends with one malformed call that stands for all the rest.

    Args:
        text: what the model sampled in the turn, decoded, without its end token.

    >>> parse('<tool_call>{"name": "f", "arguments": {"code": "1"}}</tool_call>')
    (ToolCall(name='f', arguments={'code': '1'}, error=None),)
    """
    calls = []
    start = text.find(OPEN_TAG)
    while start >= 0:
        if len(calls) == _MAX_CALLS:
            calls.append(_failed("", f"there are more than {_MAX_CALLS} calls in one turn; the rest was not read"))
            break
        call, resume = _read_call(text, start + len(OPEN_TAG))
        calls.append(call)
        start = text.find(OPEN_TAG, resume)
    return tuple(calls)


def repeat_share(calls: Sequence[ToolCall]) -> float:
    """Share of calls, after the first, that equal an earlier one: 1 for a policy that repeats one call for ever.

    0 when there are fewer than two calls.
    """
    if len(calls) < 2:
        return 0.0
    seen = {json.dumps([call.name, dict(call.arguments), call.error], sort_keys=True) for call in calls}
    return (len(calls) - len(seen)) / (len(calls) - 1)


def _read_call(text: str, begin: int) -> tuple[ToolCall, int]:
    """The call whose start tag ends at `begin`, and the offset at which to go on."""
    begin = _skip_space(text, begin)
    if begin == len(text) or text.startswith(CLOSE_TAG, begin):
        return _failed("", f"nothing stands after {OPEN_TAG}; write {_EXPECTED} there"), begin
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        line, column = _line_and_column(text, begin, error.pos)
        message = f"the JSON cannot be read: {error.msg} (line {line}, column {column})"
        return _failed("", message), _resume(text, max(begin, error.pos))
    except ValueError as error:
        return _failed("", f"the JSON cannot be read: {error}"), _resume(text, begin)
    except RecursionError:
        return _failed("", _TOO_DEEP), _resume(text, begin)
    call = _check_call(value)
    end = _skip_space(text, end)
    if text.startswith(CLOSE_TAG, end):
        return call, end + len(CLOSE_TAG)
    if call.error is None:
        call = _failed(call.name, f"{CLOSE_TAG} is missing right after the JSON object")
    return call, _resume(text, end)


def _check_call(value: Any) -> ToolCall:
    """The call that a decoded JSON value stands for."""
    if is_deep(value, _MAX_DEPTH):
        return _failed("", _TOO_DEEP)
    if isinstance(value, list):
        return _failed("", f"a list stands inside {OPEN_TAG}; write one {OPEN_TAG} for each call, with {_EXPECTED}")
    if not isinstance(value, dict):
        return _failed("", f"a {_kind(value)} stands inside {OPEN_TAG}; write {_EXPECTED}")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return _failed("", "a string holds half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    keys = ", ".join(repr(key[:40]) for key in list(value)[:5]) or "none"
    if "name" not in value:
        return _failed("", f"the key 'name' is missing (found: {keys}); write {_EXPECTED}")
    name = value["name"]
    if not isinstance(name, str) or not name:
        return _failed("", "'name' must be a string that names a tool")
    if "arguments" not in value:
        return _failed(name, f"the key 'arguments' is missing (found: {keys}); write {_EXPECTED}")
    arguments = value["arguments"]
    if isinstance(arguments, str):
        return _failed(name, "'arguments' is a string; write the JSON object itself, without quotes around it")
    if not isinstance(arguments, dict):
        return _failed(name, f"'arguments' is a {_kind(arguments)}; it must be a JSON object")
    return ToolCall(name=name, arguments=arguments)


def _failed(name: str, error: str) -> ToolCall:
    return ToolCall(name=name, arguments={}, error=error)


def _skip_space(text: str, begin: int) -> int:
    match = _SPACE.match(text, begin)
    return match.end() if match else begin


def _resume(text: str, begin: int) -> int:
    """Where to go on after a malformed call: behind the next end tag, or at the next start tag."""
    match = _TAG.search(text, begin)
    if match is None:
        return len(text)
    return match.end() if match.group() == CLOSE_TAG else match.start()


def _line_and_column(text: str, begin: int, position: int) -> tuple[int, int]:
    """1-based place of `position`, counted from the start of the call's own JSON."""
    last_break = text.rfind("\n", begin, position)
    return text.count("\n", begin, position) + 1, position - max(last_break, begin - 1)


def is_deep(value: Any, limit: int) -> bool:
    """True when a JSON value holds something below more than `limit` containers; without recursion, level by level.

    >>> is_deep([[1]], 2), is_deep([[1]], 1)
    (False, True)
    """
    level = [value]
    for _ in range(limit + 1):
        level = [item for parent in level for item in _items(parent)]
        if not level:
            return False
    return True


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", type(None): "null"}
    return kinds.get(type(value), "value")
