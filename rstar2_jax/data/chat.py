"""The chat protocol as ids: prompt, tool turns and end tokens, all derived from one template by rendering.

An episode is a list of ids that only grows: prompt_ids, then for each turn the sampled ids followed by reply_ids. An
assistant turn is never rendered again, so the trained ids are the sampled ones. What stands between the turns is found
once, by rendering a conversation with markers in the places of question, assistant text and replies; `check` then holds
a conversation with thoughts and tool calls against the template's own rendering of it.

Text of foreign origin (questions, tool output) that spells a special token is encoded letter by letter, so that output
which says `<|im_end|>` ends nothing.

Deliberately not here: files (files.py), parsing of calls (tools/parse.py), and any clock: a template that asks for the
date renders without it.

Source: rStar2-Agent, prompt template and multi-turn rollout format; the wording is ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from rstar2_jax import types
from rstar2_jax.data import tokenizer as tokenizers

_QUESTION = "QZQuestionQZ"
_CONTENT = "QZContentQZ"
_REPLY = "QZReply{}QZ"
_NOTICES = {
    types.CallStatus.TIMEOUT_WALL: "[Timed out: the run was stopped at its time limit.]",
    types.CallStatus.TIMEOUT_CPU: "[Timed out: the run was stopped at its time limit.]",
    types.CallStatus.OOM: "[Out of memory: the run was stopped at its memory limit.]",
    types.CallStatus.OUTPUT_LIMIT: "[Too much output: the run was stopped at its output limit.]",
    types.CallStatus.KILLED: "[Killed: the run was ended by a signal.]",
    types.CallStatus.REJECTED: "[Not executed: the tool was not available.]",
    types.CallStatus.INFRA: "[Not executed: the tool was not available.]",
}
_USUAL_CHARS = 8  # of one id in ordinary text; more is tried where that is not enough to fill a budget
NO_OUTPUT = "[No output: nothing was printed.]"


class Chat:
    """A tokenizer with a template and the schemas of the tools on offer.

    Attributes:
        tokenizer: the tokenizer.
        template_text: the template as text, for export.
        forced: text of the assistant turn that stands in the context already when sampling starts (`<reason>`).
        thought_end: text that closes an empty thought after the forced prefix, for demonstrations without reasoning.
        end_text: the end token of an assistant turn.
        end_ids: its id; appended with mask False when the model gave none.
        stop_ids: all ids at which the engine ends a turn.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template_text: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        system: str = "",
        instruction: str = "{Question}",
    ) -> None:
        """Derive the fixed parts of the protocol.

        Args:
            tools: JSON schemas, one a tool, as the template receives them.
            system: a system message, for templates that do not bring their own.
            instruction: text of the user turn with {Question} in it, likewise.

        Raises:
            ValueError: the template does not compile, or does not have the shape of an append-only protocol.
        """
        if instruction.count("{Question}") != 1:
            raise ValueError(f"instruction {instruction!r}: must hold {{Question}} exactly once")
        self.tokenizer = tokenizer
        self.template_text = template_text
        self._tools = [dict(tool) for tool in tools]
        self._system = [{"role": "system", "content": system}] if system else []
        self._instruction = instruction
        self._template = compile_template(template_text)
        self._prompt_parts = self._split(self._render([self._user(_QUESTION)], True), [_QUESTION])
        self.forced = self._forced_text()
        tag = re.fullmatch(r"\s*<(\w+)>\s*", self.forced)
        self.thought_end = f"</{tag.group(1)}>\n" if tag else "<reason></reason>\n"
        self.end_text = self._end_token()
        end = tokenizer.encode(self.end_text)
        if len(end) != 1:
            raise ValueError(f"the template ends assistant turns with {self.end_text!r}: {len(end)} ids, must be one")
        self.end_ids = (end[0],)
        self.stop_ids = tuple(dict.fromkeys((end[0], *tokenizer.eos_ids)))
        self._reply_parts: dict[int, list[str]] = {}

    def prompt_ids(self, question: str) -> list[int]:
        """Ids of everything before the first sampled id: system and user turns, then the forced assistant prefix."""
        before, after = self._prompt_parts
        return self._encode([before, question, after])

    def reply_ids(self, replies: Sequence[str]) -> list[int]:
        """Ids between the end token of an assistant turn and the first sampled id of the next one.

        They start with what follows the end token in the template (a newline) and end with the forced prefix.

        Args:
            replies: texts of the tool replies, in call order, at least one.
        """
        return self._encode(self._reply_pieces(list(replies)))

    def prompt_text(self, question: str) -> str:
        """The text of `prompt_ids`."""
        return question.join(self._prompt_parts)

    def reply_text(self, replies: Sequence[str]) -> str:
        """The text of `reply_ids`."""
        return "".join(self._reply_pieces(list(replies)))

    def render_talk(
        self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]], *, ongoing: bool
    ) -> str:
        """The template's text of a conversation with tools of its own and without our instruction (it sees `plain`).

        Args:
            ongoing: end with the forced prefix of the assistant's next turn.
        """
        return self._apply([dict(m) for m in messages], ongoing, tools=[dict(t) for t in tools] or None, plain=True)

    def check(self) -> None:
        """Hold a conversation of three turns, grown by appending, against the template's rendering of the whole.

        Raises:
            ValueError: "template not append-only", with the place where the two part, or text that the tokenizer does
                not give back.
        """
        for thought in self._thoughts():
            question = "What is 6*7?"
            text, messages = self.prompt_text(question), [self._user(question)]
            for number, replies in enumerate((["42"], ["first", "second"])):
                call = json.dumps({"name": "python", "arguments": {"code": f"print({number})"}})
                content = f"{thought.format(number)}<tool_call>\n{call}\n</tool_call>"
                text += content.removeprefix(self.forced) + self.end_text + self.reply_text(replies)
                messages.append({"role": "assistant", "content": content})
                messages.extend({"role": "tool", "content": reply} for reply in replies)
                must_start_with(self._render(messages, True), text)
        for ids, text in (
            (self.prompt_ids(question), self.prompt_text(question)),
            (self.reply_ids(["42"]), self.reply_text(["42"])),
        ):
            if self.tokenizer.decode(ids) != text:
                raise ValueError(f"tokenizer does not give text back: {text!r} became {self.tokenizer.decode(ids)!r}")

    def _user(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self._instruction.replace("{Question}", question)}

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self._apply([*self._system, *messages], add_generation_prompt, tools=self._tools or None)

    def _apply(self, messages: list[dict[str, str]], ongoing: bool, **context: Any) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=ongoing, **context, **self.tokenizer.special
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template failed on a conversation of {len(messages)} messages: {error}") from error

    def _split(self, text: str, markers: list[str]) -> list[str]:
        parts = re.split("|".join(map(re.escape, markers)), text)
        if len(parts) != len(markers) + 1 or [m for m in re.findall("QZ[A-Za-z0-9]+QZ", text)] != markers:
            raise ValueError(f"template not append-only: it must show each of {markers} once, in order; got {text!r}")
        return parts

    def _tool_round(self, replies: int) -> list[str]:
        markers = [_REPLY.format(i) for i in range(replies)]
        tools = [{"role": "tool", "content": marker} for marker in markers]
        messages = [self._user("q"), {"role": "assistant", "content": _CONTENT}, *tools]
        return self._split(self._render(messages, True), [_CONTENT, *markers])

    def _forced_text(self) -> str:
        user = [self._user("q")]
        bare, full = self._render(user, False), self._render(user, True)
        before = self._tool_round(1)[0]
        must_start_with(full, bare)
        must_start_with(before, bare)
        if not full.startswith(before):
            must_start_with(before, full)
        return full[len(before) :]

    def _end_token(self) -> str:
        after = self._tool_round(1)[1]
        tokens = [self.tokenizer.decode([i]) for i in self.tokenizer.eos_ids]
        special = [t for t in tokens if t and after.startswith(t)]
        if not special:
            raise ValueError(f"the template ends an assistant turn with {after[:40]!r}; the end tokens are {tokens}")
        return special[0]

    def _reply_pieces(self, replies: list[str]) -> list[str]:
        if not replies:
            raise ValueError("a tool turn needs at least one reply")
        if len(replies) not in self._reply_parts:
            parts = self._tool_round(len(replies))[1:]
            parts[0] = parts[0].removeprefix(self.end_text)
            self._reply_parts[len(replies)] = parts
        parts = self._reply_parts[len(replies)]
        pieces = [parts[0]]
        for reply, part in zip(replies, parts[1:], strict=True):
            pieces.extend((reply, part))
        return pieces

    def _encode(self, pieces: list[str]) -> list[int]:
        """Ids of pieces that alternate between template text (even) and foreign text (odd)."""
        if not any(self.tokenizer.mentions_special(piece) for piece in pieces[1::2]):
            return self.tokenizer.encode("".join(pieces))
        return [i for n, piece in enumerate(pieces) for i in self.tokenizer.encode(piece, plain=n % 2 == 1)]

    def _thoughts(self) -> list[str]:
        if self.forced:
            return [self.forced + "thought {}" + self.thought_end]
        return ["<reason>thought {}</reason>\n", "<think>\nthought {}\n</think>\n\n"]


def compile_template(text: str) -> jinja2.Template:
    """A chat template, compiled as the Hugging Face libraries do, in a sandbox that can change nothing.

    Raises:
        ValueError: a syntax error, with its line.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error


def wording(template_text: str) -> tuple[str, str]:
    """(system prompt, user instruction) that a template of ours sets, for use with templates that have none."""
    names = compile_template(template_text).make_module({"messages": [{"role": "user", "content": ""}]})
    return str(getattr(names, "system_prompt", "")), str(getattr(names, "user_instruction", ""))


def tool_reply_text(
    result: types.ToolResult, call: types.ToolCall, tokenizer: tokenizers.Tokenizer, max_tokens: int
) -> str:
    """What the model reads of one call: its output, a notice when there was none, its error, or why it did not run.

    Nothing in it varies from run to run beyond what the code itself printed. A longer text keeps its head and its tail
    around a marker that counts the characters left out; the last line (the error itself) is kept before anything else.

    Args:
        result: status and captured output.
        call: the call as parsed; its name and parse error are shown where they matter.
        max_tokens: limit on the reply's own ids, above 0.
    """
    text = _reply_body(result, call).encode("utf-8", "backslashreplace").decode("utf-8")
    return _fit(text, tokenizer, max_tokens)


def _reply_body(result: types.ToolResult, call: types.ToolCall) -> str:
    status = result.status
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    if status is types.CallStatus.PARSE_ERROR:
        return f"[Call not understood: {call.error or stderr or 'no reason is known'}]"
    if status is types.CallStatus.UNKNOWN_TOOL:
        return f"[Unknown tool: {stderr or repr(call.name)}]"
    if status is types.CallStatus.NOT_EXECUTED:
        return f"[Not executed: {stderr or 'too many calls in one turn'}]"
    if status in (types.CallStatus.REJECTED, types.CallStatus.INFRA):
        return _NOTICES[status]
    if status is types.CallStatus.OK:
        return _lines(stdout, stderr) or NO_OUTPUT
    trace = _without_echo(stderr, str(call.arguments.get("code", "")))
    if status is types.CallStatus.ERROR:
        return _lines(stdout, trace or "[Error: the run ended with a non-zero exit status.]")
    return _lines(stdout, trace, _NOTICES[status])


def _without_echo(trace: str, code: str) -> str:
    """A traceback without its caret marks (they differ between Python versions) and, where the program is one line,
    without the source line, which the model has just written."""
    kept: list[str] = []
    below_frame = 0
    for line in trace.split("\n"):
        is_source = below_frame == 1 and line.startswith("    ")
        is_marks = below_frame == 2 and re.fullmatch(r" +[~^]+[ ~^]*", line) is not None
        below_frame = 1 if re.match(r'  File "<tool>", line \d+', line) else below_frame + 1 if is_source else 0
        if not is_marks and not (is_source and "\n" not in code.rstrip("\n")):
            kept.append(line)
    return "\n".join(kept)


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _fit(text: str, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> str:
    if max_tokens <= 0:
        raise ValueError(f"max_tokens = {max_tokens}: a reply needs at least one token")
    start = text[: _USUAL_CHARS * max_tokens]
    if _count(start, tokenizer) <= 2 * max_tokens and len(text) <= max_tokens * tokenizer.max_token_chars:
        if _count(text, tokenizer) <= max_tokens:
            return text
    room = max_tokens - _count(_marker(len(text)), tokenizer)
    if room <= 0:
        return _end_part(text, tokenizer, max_tokens)
    last_line = _count(text[-_USUAL_CHARS * max_tokens :].rpartition("\n")[2], tokenizer)
    tail = _end_part(text, tokenizer, max((room + 1) // 2, last_line if last_line <= room else 0))
    head_room = max(0, room - _count(tail, tokenizer))
    head = _start_part(text[: len(text) - len(tail)], tokenizer, head_room)
    while True:
        reply = head + _marker(len(text) - len(head) - len(tail)) + tail
        if _count(reply, tokenizer) <= max_tokens:
            return reply
        head, tail = (head[:-1], tail) if head else (head, tail[1:])


def _marker(characters: int) -> str:
    return f"\n[... {characters} characters left out ...]\n"


def _count(text: str, tokenizer: tokenizers.Tokenizer) -> int:
    return len(tokenizer.encode(text, plain=tokenizer.mentions_special(text)))


def _start_part(text: str, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> str:
    for reach in (_USUAL_CHARS, tokenizer.max_token_chars):
        part = text[: reach * max_tokens]
        spans = tokenizer.spans(part)
        if len(spans) > max_tokens:
            part = part[: spans[max_tokens][0]]
            break
    while _count(part, tokenizer) > max_tokens:
        part = part[:-1]
    return part


def _end_part(text: str, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> str:
    for reach in (_USUAL_CHARS, tokenizer.max_token_chars):
        part = text[-reach * max_tokens :]
        spans = tokenizer.spans(part)
        if len(spans) > max_tokens:
            part = part[spans[-max_tokens][0] :]
            break
    while _count(part, tokenizer) > max_tokens:
        part = part[1:]
    return part


def must_start_with(rendered: str, grown: str) -> None:
    """Refuse a rendering that does not start with the context that grew by appending.

    Raises:
        ValueError: "template not append-only", with the place where the two part.
    """
    if rendered.startswith(grown):
        return
    pairs = zip(rendered, grown, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rendered), len(grown)))
    there, ours = rendered[max(0, at - 30) : at + 30], grown[max(0, at - 30) : at + 30]
    raise ValueError(
        f"template not append-only: at character {at} it renders {there!r} where the growing context has {ours!r}; "
        "use a template that leaves earlier assistant turns as they were sampled"
    )


class _GenerationTag(jinja2.ext.Extension):
    """Accepts the `{% generation %}` blocks of templates that mark assistant text, without effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
