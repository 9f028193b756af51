"""What a client is told: an episode's text as pieces of a message, and the JSON around them.

A Narrator turns the text of the turns, as it comes, into pieces (field, text). What is streamed and what is answered at
once come from the same pieces, and their sum does not depend on how the text was cut up on its way.

Split, the answer is `content` and everything before it is `reasoning_content`: thoughts, tool calls and their replies.
The answer of a turn without calls begins behind the first `</reason>` (or the tag that the template forces), or at
`<answer>` where that comes first. In full, `content` is all of the text, tags included.

Pure. Deliberately not here: sampling, HTTP.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rstar2_jax.data import chat as chats
from rstar2_jax.tools import parse
from rstar2_jax.types import StopReason, ToolCall, Trajectory, Turn

CONTENT, REASONING = "content", "reasoning_content"
_ANSWER = "<answer>"
_OPEN = ("<reason>", "<think>")
_REPLY_OPEN, _REPLY_CLOSE = "<tool_response>", "</tool_response>"


class Piece(NamedTuple):
    """A part of a message: which field it goes on with, and the text."""

    field: str
    text: str


class Narrator:
    """Pieces of one episode's message.

    Args:
        opened: text that the template puts before each turn (`<reason>`); empty where the turn starts by itself.
        split: thoughts apart from the answer; else all in one text.
        stop: texts that end the answer.
        single: the first turn is the last, so that its answer need not wait for the end of the turn: what stands
            before a call is told as it comes.
    """

    def __init__(self, opened: str, *, split: bool, stop: Sequence[str] = (), single: bool = False) -> None:
        self._opened, self.split, self._single, self._cut = opened, split, single, Cut(stop)
        self._begin()

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self._cut.met

    def thought_ids(self, chat: chats.Chat, ids: Sequence[int]) -> int:
        """How many ids of the last turn stand before its answer; 0 where thoughts are not told apart."""
        if not self.split:
            return 0
        if self._rest_at is None:
            return len(ids)
        lengths = range(len(ids) + 1)
        return bisect.bisect_left(lengths, self._rest_at, key=lambda count: len(chat.tokenizer.decode(ids[:count])))

    def wrote(self, text: str) -> list[Piece]:
        """What can be told now that the turn reads `text` so far; each text begins with the one before."""
        return self._tell(text, final=False)

    def replied(self, text: str, appended: str) -> list[Piece]:
        """What remains to be told of a turn that made calls, and their replies.

        Args:
            text: of the whole turn.
            appended: what the loop appended to it.
        """
        told = self._tell(text, final=True)
        start, end = appended.find(_REPLY_OPEN), appended.rfind(_REPLY_CLOSE)
        replies = appended[start : end + len(_REPLY_CLOSE)] if 0 <= start < end else appended.strip()
        rest = "" if self._rest_at is None else text[self._rest_at :]
        if self.split:
            told.append(Piece(REASONING, f"{rest}\n{replies}\n"))
        else:
            told.append(Piece(CONTENT, self._cut.feed(f"\n{replies}\n")))
        self._begin()
        return _joined(told)

    def ended(self, text: str, *, answers: bool, calls_apart: bool = False) -> list[Piece]:
        """What remains to be told of the last turn.

        Args:
            text: of the whole turn.
            answers: its rest is an answer; False where it made calls that nobody answered.
            calls_apart: its calls are told elsewhere, so that the text ends before them.
        """
        told = self._tell(text, final=True)
        rest = self._rest(text)
        if calls_apart:
            rest, answers = rest.partition(parse.OPEN_TAG)[0].rstrip(), True
        rest = rest[self._shown :]
        if answers:
            told.append(Piece(CONTENT, self._cut.feed(rest, final=True)))
        else:
            told.append(Piece(REASONING, rest))
            told.append(Piece(CONTENT, self._cut.feed("", final=True)))
        return _joined(told)

    def _begin(self) -> None:
        self._told, self._rest_at, self._ends = 0, None, self._ends_of(self._opened)
        self._begun, self._shown = False, 0

    def _ends_of(self, opened: str) -> tuple[str, ...]:
        """Texts at which the thought ends; none where it has not begun."""
        tag = re.fullmatch(r"\s*<(\w+)>\s*", opened)
        return (f"</{tag[1]}>", _ANSWER) if tag else ()

    def _tell(self, text: str, *, final: bool) -> list[Piece]:
        if not self.split:
            fresh = text[self._told :] if self._begun else self._opened + text
            self._told, self._begun = len(text), True
            return _joined([Piece(CONTENT, self._cut.feed(fresh))])
        if not self._ends and self._rest_at is None:
            self._look_for_thought(text, final)
        if not self._ends or self._rest_at is not None:
            return self._answer(text)
        found = [(at, mark) for mark in self._ends if (at := text.find(mark, self._told)) >= 0]
        if found:
            at, mark = min(found)
            self._rest_at = at if mark == _ANSWER else at + len(mark)
        else:
            at = len(text) - (0 if final else _overlap(text[self._told :], self._ends))
        piece = Piece(REASONING, text[self._told : at])
        self._told = max(self._told, at)
        return _joined([piece]) + self._answer(text)

    def _rest(self, text: str) -> str:
        """What follows the thought, without white space at its start."""
        if self._rest_at is None:
            return ""
        rest = text[self._rest_at :]
        self._rest_at += len(rest) - len(rest.lstrip())
        return rest.lstrip()

    def _answer(self, text: str) -> list[Piece]:
        """What can be told of the answer of a single turn: no call, nothing that may become one, no white space that
        may turn out to be its end."""
        if not self._single:
            return []
        rest = self._rest(text)
        shown = rest.partition(parse.OPEN_TAG)[0]
        if shown == rest:
            shown = rest[: len(rest) - _overlap(rest, (parse.OPEN_TAG,))]
        fresh = shown.rstrip()[self._shown :]
        self._shown += len(fresh)
        return _joined([Piece(CONTENT, self._cut.feed(fresh))])

    def _look_for_thought(self, text: str, final: bool) -> None:
        """Whether a turn that starts by itself opens with a thought."""
        head = text.lstrip()
        for opened in _OPEN:
            if head.startswith(opened):
                self._ends, self._told = self._ends_of(opened), len(text) - len(head) + len(opened)
                return
        if final or (head and not any(opened.startswith(head) for opened in _OPEN)):
            self._rest_at = 0


class Cut:
    """Lets text through up to the stop text that is complete first, and holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.met = tuple(stop), "", False

    def feed(self, text: str, *, final: bool = False) -> str:
        """What may be told now."""
        if self.met:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.met, self._held = True, ""
            return text[: min(ends)[1]]
        held = 0 if final else _overlap(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text that is the beginning of a mark, the whole mark excepted."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    sizes = range(min(len(text), longest), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.text]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One finished answer.

    Args:
        content, reasoning: the texts of the message.
        calls: of the client's own tools, to be run by the client.
        finish_reason: `stop`, `length` or `tool_calls`.
        sampled_tokens, reasoning_tokens: ids that the model sampled, and those of them before the answer.
        seed, stop_reason, turns: of the episode.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    sampled_tokens: int
    reasoning_tokens: int
    seed: int
    stop_reason: StopReason
    turns: int


def turn_text(chat: chats.Chat, turn: Turn) -> str:
    """What the model wrote in a turn, without its end token."""
    return sampled_text(chat, turn.sampled_ids.tolist())


def sampled_text(chat: chats.Chat, ids: Sequence[int]) -> str:
    """The text of sampled ids, without an end token."""
    return chat.tokenizer.decode(ids[:-1] if ids and ids[-1] in chat.stop_ids else ids)


def narrate(narrator: Narrator, chat: chats.Chat, trajectory: Trajectory) -> list[Piece]:
    """The pieces of all turns but the last."""
    told = []
    for turn in trajectory.turns[:-1]:
        told += narrator.replied(turn_text(chat, turn), chat.tokenizer.decode(turn.token_ids[~turn.mask].tolist()))
    return told


def finish(
    narrator: Narrator, chat: chats.Chat, trajectory: Trajectory, *, clients_tools: bool
) -> tuple[list[Piece], Choice]:
    """The last pieces of a finished episode, and its choice without the texts of the pieces told before.

    Args:
        clients_tools: calls of the last turn are the client's to run.
    """
    last = trajectory.turns[-1]
    text = turn_text(chat, last)
    calls = tuple(call for call in last.calls if call.error is None) if clients_tools else ()
    # A truncated turn is not parsed, so that the text itself says whether it was about to call.
    cut_short = trajectory.stop_reason is StopReason.LENGTH
    answers = parse.OPEN_TAG not in text or (clients_tools and not cut_short)
    told = narrator.ended(text, answers=answers, calls_apart=bool(calls))
    earlier = sum(len(turn.sampled_ids) for turn in trajectory.turns[:-1]) if narrator.split else 0
    ended = trajectory.stop_reason is StopReason.ANSWERED or narrator.stopped or (clients_tools and not cut_short)
    return told, Choice(
        content="",
        reasoning="",
        calls=calls,
        finish_reason="tool_calls" if calls else "stop" if ended else "length",
        sampled_tokens=trajectory.num_sampled_tokens,
        reasoning_tokens=earlier + narrator.thought_ids(chat, last.sampled_ids.tolist()),
        seed=trajectory.seed,
        stop_reason=trajectory.stop_reason,
        turns=len(trajectory.turns),
    )


def with_texts(choice: Choice, pieces: Sequence[Piece]) -> Choice:
    """The choice with the texts that all of its pieces make."""
    texts = {field: "".join(piece.text for piece in pieces if piece.field == field) for field in (CONTENT, REASONING)}
    return dataclasses.replace(choice, content=texts[CONTENT], reasoning=texts[REASONING])


def completion(rid: str, created: int, model: str, prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer that is given at once."""
    return {
        "id": rid,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    CONTENT: None if choice.calls and not choice.content else choice.content,
                    **({REASONING: choice.reasoning} if choice.reasoning else {}),
                    **({"tool_calls": tool_calls(rid, index, choice)} if choice.calls else {}),
                },
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "episode": episode(choice),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(prompt_tokens, choices),
    }


def chunk(rid: str, created: int, model: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One event of a stream."""
    return {"id": rid, "object": "chat.completion.chunk", "created": created, "model": model, "choices": list(choices)}


def delta(index: int, said: dict[str, Any], choice: Choice | None = None) -> dict[str, Any]:
    """A choice's part of an event; with the finished choice where it is the last one."""
    end = {} if choice is None else {"episode": episode(choice)}
    return {"index": index, "delta": said, "finish_reason": choice and choice.finish_reason, **end}


def episode(choice: Choice) -> dict[str, Any]:
    """What OpenAI's form has no word for: the seed that gives this choice again, why it ended, its assistant turns."""
    return {"seed": choice.seed, "stop_reason": choice.stop_reason.value, "turns": choice.turns}


def tool_calls(rid: str, index: int, choice: Choice) -> list[dict[str, Any]]:
    """Calls for the client to run."""
    return [
        {
            "index": number,
            "id": "call_" + hashlib.blake2b(f"{rid}/{index}/{number}".encode(), digest_size=9).hexdigest(),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for number, call in enumerate(choice.calls)
    ]


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts: the prompt once, and what the model sampled in all choices; tool replies are in neither."""
    sampled = sum(choice.sampled_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
