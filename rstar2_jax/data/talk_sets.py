"""The published sets of conversations of the non-reasoning mixture: hub name, columns, licence, what a row says.

Calls come in the notation of each set (a list in brackets, JSON, JSON inside JSON, a fenced program) and leave here as
name and arguments. What cannot be read as its set's own notation is a bad row.

Pure. Deliberately not here: reading (tables.py), shares and choice (mixture.py), ids (talks.py).

Source: rStar2-Agent paper, non-reasoning SFT; deviation: a Magicoder row ends with its call, as the set has no output.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rstar2_jax.data import tables, talks

_TYPES = {"dict": "object", "int": "integer", "float": "number", "list": "array", "tuple": "array", "bool": "boolean"}
_TYPES |= {"str": "string", "any": "string"}
_LITERALS = {"true": True, "false": False, "null": None}
_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_CALL = "<functioncall>"
_GLAIVE_END = "<|endoftext|>"
_PROGRAM = re.compile(r"```python\s*\n(.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TalkSet:
    """A published set of conversations.

    Args:
        hub: its name on the hub, `owner/name` or `owner/name:config`.
        licence: as its owners state it; a row's own licence goes before it.
        split: the split that is read.
        columns: those that are read, with the types that a value may have.
        convert: a row, known to fit the columns, and the Python tool's schema as (system, tools, messages); raises
            tables.BadRowError.
    """

    hub: str
    licence: str
    split: str = "train"
    columns: tables.Columns
    convert: Callable[[tables.Row, Mapping[str, Any]], Talk3]


Talk3 = tuple[str, Sequence[Mapping[str, Any]], Sequence[talks.Message]]


def talk(name: str, row: tables.Row, number: int, python_tool: Mapping[str, Any]) -> talks.Talk:
    """A row of a set as a usable conversation.

    Raises:
        BadRowError: why it is none.
    """
    known = TALK_SETS[name]
    tables.check(row, known.columns)
    system, tools, messages = known.convert(row, python_tool)
    own = row.get("license")
    return talks.usable(
        talks.Talk(
            id=f"{name}/{number}",
            source=name,
            licence=own if isinstance(own, str) and own else known.licence,
            system=system.strip(),
            tools=tuple(tools),
            messages=tuple(messages),
        )
    )


def bracket_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls in ToolACE's notation, `[Name of function(a="x", b=1), other()]`.

    Raises:
        BadRowError: the text is not of that form throughout.

    >>> bracket_calls('[Get Weather(city="Bonn, \\\\"old\\\\" town", days=[1, 2]), stop(now=true)]')
    [('Get Weather', {'city': 'Bonn, "old" town', 'days': [1, 2]}), ('stop', {'now': True})]
    """
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        raise tables.BadRowError("a call that is no list in brackets")
    at, calls, body = 0, [], body[1:-1]
    while True:
        open_at = body.find("(", at)
        if open_at < 0:
            raise tables.BadRowError("a call without arguments in parentheses")
        close = _closing(body, open_at)
        name = body[at:open_at].strip()
        if not name or re.search(r"[\[\]{}\"'=,]", name):
            raise tables.BadRowError("a call whose name is unreadable")
        calls.append((name, _keywords(body[open_at + 1 : close])))
        rest = body[close + 1 :].lstrip()
        if not rest:
            return calls
        if not rest.startswith(","):
            raise tables.BadRowError("text after a call")
        at = len(body) - len(rest) + 1


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes, strings skipped."""
    depth, quote, i = 0, "", at
    while i < len(text):
        char = text[i]
        if quote:
            i += char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise tables.BadRowError("a call that is not closed")


def _keywords(text: str) -> dict[str, Any]:
    """Keyword arguments as values."""
    try:
        tree = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise tables.BadRowError("a call with arguments without names")
        return {keyword.arg or "": _literal(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, tables.BadRowError):
            raise
        raise tables.BadRowError("a call whose arguments are unreadable") from error


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return _LITERALS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise tables.BadRowError("an argument that JSON cannot hold")
    return value


def _schema(tool: Any) -> dict[str, Any]:
    """A function schema in the form of the field: type names of JSON, under `function`."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise tables.BadRowError("a function without a name")
    parameters = inner.get("parameters") or inner.get("arguments") or {"type": "object", "properties": {}}
    described = {"name": inner["name"], "description": str(inner.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": _json_types(parameters)}}


def _json_types(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_types(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: _json_types(item) for key, item in value.items()}
    if isinstance(made.get("type"), str):
        made["type"] = _TYPES.get(made["type"], made["type"])
    return made


def _objects(text: str) -> Iterator[Any]:
    """JSON values that stand one after another in a text."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] not in "[{":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise tables.BadRowError("functions that are not JSON") from error
        yield value


def _call(value: Any) -> tuple[str, dict[str, Any]]:
    """A call given as JSON; its arguments may be JSON in a string."""
    try:
        call = json.loads(value) if isinstance(value, str) else value
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise tables.BadRowError("a call without name or arguments")
    except (json.JSONDecodeError, KeyError, AttributeError, RecursionError) as error:
        raise tables.BadRowError("a call that is not JSON") from error
    return call["name"], arguments


def _said(turn: Any, role_key: str, text_key: str) -> tuple[str, str]:
    if (
        not isinstance(turn, Mapping)
        or not isinstance(turn.get(role_key), str)
        or not isinstance(turn.get(text_key), str)
    ):
        raise tables.BadRowError("a turn without role or text")
    return turn[role_key], turn[text_key]


def _toolace(row: tables.Row, python_tool: Mapping[str, Any]) -> Talk3:
    del python_tool
    listed = re.search(r"\[\s*\{.*\}\s*\]", row["system"], re.DOTALL)
    tools = [_schema(tool) for found in _objects(listed[0]) for tool in found] if listed else []
    names = {tool["function"]["name"] for tool in tools}
    messages: list[talks.Message] = []
    for turn in row["conversations"]:
        role, text = _said(turn, "from", "value")
        if role == "assistant" and re.match(r"\s*\[\s*[^\[\]{}\"'(]+\(", text) and names:
            messages.append(talks.Message(role="assistant", text="", calls=tuple(bracket_calls(text))))
        elif role in ("user", "assistant"):
            messages.append(talks.Message(role=role, text=text))
        elif role == "tool":
            calls = len(messages[-1].calls) if messages else 0
            messages += [talks.Message(role="tool", text=reply) for reply in _split_replies(text, calls)]
        else:
            raise tables.BadRowError(f"a turn of role {role}")
    return "", tools, messages


def _split_replies(text: str, calls: int) -> list[str]:
    """One reply for each call, where the text is a JSON list of as many; else the text as it is."""
    try:
        listed = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return [text]
    if isinstance(listed, list) and len(listed) == calls and calls > 1:
        return [json.dumps(item, ensure_ascii=False) for item in listed]
    return [text]


def _apigen(row: tables.Row, python_tool: Mapping[str, Any]) -> Talk3:
    del python_tool
    listed = row["tools"] if isinstance(row["tools"], list) else [t for found in _objects(row["tools"]) for t in found]
    messages = []
    for turn in row["conversations"]:
        role, text = _said(turn, "from", "value")
        if role == "function_call":
            messages.append(talks.Message(role="assistant", text="", calls=(_call(text),)))
        elif role in ("human", "gpt", "observation"):
            kind = {"human": "user", "gpt": "assistant", "observation": "tool"}[role]
            messages.append(talks.Message(role=kind, text=text))  # pyright: ignore[reportArgumentType]
        else:
            raise tables.BadRowError(f"a turn of role {role}")
    return row["system"], [_schema(tool) for tool in listed], messages


def _glaive(row: tables.Row, python_tool: Mapping[str, Any]) -> Talk3:
    del python_tool
    tools = [_schema(tool) for tool in _objects(row["system"])]
    parts = _GLAIVE_TURN.split(row["chat"])
    if parts[0].strip() or len(parts) < 3:
        raise tables.BadRowError("a chat that does not start with a speaker")
    messages = []
    for who, text in zip(parts[1::2], parts[2::2], strict=True):
        text = text.replace(_GLAIVE_END, "").strip()
        if who == "ASSISTANT" and _GLAIVE_CALL in text:
            before, _, call = text.partition(_GLAIVE_CALL)
            messages.append(talks.Message(role="assistant", text=before, calls=(_glaive_call(call),)))
        else:
            kind = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}[who]
            messages.append(talks.Message(role=kind, text=text))  # pyright: ignore[reportArgumentType]
    return "", tools, messages


def _glaive_call(text: str) -> tuple[str, dict[str, Any]]:
    """`{"name": "f", "arguments": '{"a": 1}'}`: JSON but for the single quotes around the arguments."""
    match = re.fullmatch(r"""\{\s*"name":\s*("[^"]*")\s*,\s*"arguments":\s*'(.*)'\s*\}""", text.strip(), re.DOTALL)
    if match is None:
        return _call(text)
    return _call({"name": json.loads(match[1]), "arguments": match[2].replace("\\'", "'")})


def _magicoder(row: tables.Row, python_tool: Mapping[str, Any]) -> Talk3:
    if row["lang"] != "python":
        raise tables.BadRowError(f"lang is {row['lang']}")
    found = _PROGRAM.findall(row["solution"])
    if len(found) != 1:
        raise tables.BadRowError("not exactly one Python program")
    call = (python_tool["function"]["name"], {"code": found[0].rstrip()})
    messages = [
        talks.Message(role="user", text=row["problem"]),
        talks.Message(role="assistant", text="", calls=(call,)),
    ]
    return "", [python_tool], messages


def _chat(listed: Any, system: str = "") -> Talk3:
    messages = []
    for number, turn in enumerate(listed):
        role, text = _said(turn, "role", "content")
        if role == "system" and number == 0:
            system = text
        elif role in ("user", "assistant"):
            messages.append(talks.Message(role=role, text=text))
        else:
            raise tables.BadRowError(f"a turn of role {role}")
    return system, [], messages


def _nemotron(row: tables.Row, python_tool: Mapping[str, Any]) -> Talk3:
    del python_tool
    if row["reasoning"] != "off":
        raise tables.BadRowError(f"reasoning is {row['reasoning']}")
    asked = row["input"] if isinstance(row["input"], list) else [{"role": "user", "content": row["input"]}]
    return _chat([*asked, {"role": "assistant", "content": row["output"]}])


TALK_SETS: dict[str, TalkSet] = {
    "toolace": TalkSet(
        hub="Team-ACE/ToolACE",
        licence="apache-2.0",
        columns={"system": (str,), "conversations": (list,)},
        convert=_toolace,
    ),
    "apigen_mt": TalkSet(
        hub="Salesforce/APIGen-MT-5k",
        licence="cc-by-nc-4.0",
        columns={"conversations": (list,), "tools": (str, list), "system": (str,)},
        convert=_apigen,
    ),
    "glaive_v2": TalkSet(
        hub="glaiveai/glaive-function-calling-v2",
        licence="apache-2.0",
        columns={"system": (str,), "chat": (str,)},
        convert=_glaive,
    ),
    "magicoder": TalkSet(
        hub="ise-uiuc/Magicoder-OSS-Instruct-75K",
        licence="mit",
        columns={"lang": (str,), "problem": (str,), "solution": (str,)},
        convert=_magicoder,
    ),
    "tulu3": TalkSet(
        hub="allenai/tulu-3-sft-mixture",
        licence="odc-by",
        columns={"messages": (list,)},
        convert=lambda row, python_tool: _chat(row["messages"]),
    ),
    "nemotron_chat": TalkSet(
        hub="nvidia/Llama-Nemotron-Post-Training-Dataset:SFT",
        licence="cc-by-4.0",
        split="chat",
        columns={"input": (list, str), "output": (str,), "license": (str,), "reasoning": (str,)},
        convert=_nemotron,
    ),
}
"""Sets by the name that Demonstrations.mixture takes."""
