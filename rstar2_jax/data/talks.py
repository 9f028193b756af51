"""Conversations to imitate: their messages, what makes one usable, and their ids with the assistant's spans as mask.

A conversation is rendered once, as a whole, by the template. Trained are the characters from the end of each assistant
turn's forced prefix to its end token, both found by position in that rendering, never by rendering a message alone. The
text is cut at exactly these places before it becomes ids, since at inference the context ends there as well: a token
that reached over such a place would be one that the policy never samples.

An assistant turn has an empty thought (the mixture teaches formats, not reasoning), then either text with calls, or an
answer inside <answer> </answer>.

Pure. Deliberately not here: where conversations come from (talk_sets.py), demonstrations made by us (sft_mix.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rstar2_jax.data import chat as chats
from rstar2_jax.data import tables

_ANSWER, _ANSWER_END = "<answer>", "</answer>"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message. `calls` are (name, arguments) pairs of an assistant; a tool message answers one of them."""

    role: Literal["user", "assistant", "tool"]
    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Talk:
    """A conversation with its origin.

    Args:
        system: the set's own system text; empty where it has none.
        tools: function schemas on offer, as the template receives them.
        messages: user first, assistant last.
    """

    id: str
    source: str
    licence: str
    system: str
    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demo:
    """One demonstration: token_ids i32[n] and mask bool[n], True on the assistant's own ids and end tokens."""

    token_ids: np.ndarray
    mask: np.ndarray


def usable(talk: Talk) -> Talk:
    """The conversation without what follows its last assistant turn.

    Raises:
        BadRowError: no assistant turn, turns out of order, an empty turn, a call of a function that is not on offer.
    """
    last = max((i for i, m in enumerate(talk.messages) if m.role == "assistant"), default=-1)
    messages = talk.messages[: last + 1]
    if not messages:
        raise tables.BadRowError("no assistant turn")
    before = "nothing"
    offered = {tool["function"]["name"] for tool in talk.tools}
    for message in messages:
        allowed = {"nothing": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("assistant", "tool")}
        follows = ("tool",) if before == "calls" else allowed[before]
        if message.role not in follows:
            raise tables.BadRowError(f"{message.role} after {before}")
        if not message.text.strip() and not message.calls and message.role != "tool":
            raise tables.BadRowError(f"empty {message.role} turn")
        if unknown := [name for name, _ in message.calls if name not in offered]:
            del unknown  # its name would make a reason of its own for each row
            raise tables.BadRowError("calls a function that is not on offer")
        before = "calls" if message.calls else message.role
    return dataclasses.replace(talk, messages=messages)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the assistant writes it.

    >>> call_text("add", {"a": 1})
    '<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>'
    """
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def assistant_text(message: Message, chat: chats.Chat) -> str:
    """What the assistant's turn holds after its forced prefix."""
    text = message.text.strip()
    if message.calls:
        parts = [text] if text else []
        parts += [call_text(name, arguments) for name, arguments in message.calls]
        return chat.thought_end + "\n".join(parts)
    return f"{chat.thought_end}{_ANSWER}{text}{_ANSWER_END}"


def render(talk: Talk, chat: chats.Chat) -> Demo:
    """The ids of a usable conversation and which of them are trained.

    Raises:
        BadRowError: a text spells a special token, which would make structure of it.
        ValueError: the template is not append-only.
    """
    foreign = [talk.system, *(m.text for m in talk.messages), json.dumps([dict(t) for t in talk.tools])]
    foreign += [call_text(name, arguments) for m in talk.messages for name, arguments in m.calls]
    if any(chat.tokenizer.mentions_special(text) for text in foreign):
        raise tables.BadRowError("spells a special token")
    messages = [{"role": "system", "content": talk.system}] if talk.system else []
    starts = []
    for message in talk.messages:
        if message.role != "assistant":
            messages.append({"role": message.role, "content": message.text})
            continue
        starts.append(chat.render_talk(messages, talk.tools, ongoing=True))
        messages.append({"role": "assistant", "content": chat.forced.lstrip() + assistant_text(message, chat)})
    whole = chat.render_talk(messages, talk.tools, ongoing=False)
    return _ids(chat, whole, _spans(chat, whole, starts))


def _spans(chat: chats.Chat, whole: str, starts: Sequence[str]) -> list[tuple[int, int]]:
    """Characters that each assistant turn says, its end token included; each start is the context before it."""
    spans = []
    for start in starts:
        chats.must_start_with(whole, start)
        end = whole.find(chat.end_text, len(start))
        if end < 0:
            raise ValueError(f"the template gives an assistant turn no end token {chat.end_text!r}")
        spans.append((len(start), end + len(chat.end_text)))
    return spans


def _ids(chat: chats.Chat, whole: str, spans: Sequence[tuple[int, int]]) -> Demo:
    ids: list[int] = []
    mask: list[bool] = []
    at = 0
    for start, end in [*spans, (len(whole), len(whole))]:
        for text, trained in ((whole[at:start], False), (whole[start:end], True)):
            piece = chat.tokenizer.encode(text)
            ids.extend(piece)
            mask.extend([trained] * len(piece))
        at = end
    return Demo(token_ids=np.asarray(ids, np.int32), mask=np.asarray(mask, bool))
