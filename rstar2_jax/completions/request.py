"""What a client may ask of the endpoint: the body of POST /v1/chat/completions, read and checked.

Every field of OpenAI's request, and those that SGLang and vLLM add, is in one of four lists: honoured (a field of
Asked), a label without influence, accepted at its neutral value only, or unknown. What cannot be honoured is refused by
name with a remedy, since an answer that was sampled otherwise than asked is a wrong measurement.

`n` samples of a seed differ from each other; the first is that of the seed itself. A temperature below 1e-6 is greedy,
as in SGLang: logits divided by far less overflow. `stop` ends the text of the answer; thoughts and tool calls are not
searched for it.

Pure. Deliberately not here: HTTP (front.py) and sampling.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from rstar2_jax import settings
from rstar2_jax.tools import parse

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_NESTED = 100  # Python gives up near 1,000, and not at the same depth in reading and in writing
_LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store", "rid"})
_SAMPLED_BY = "this engine samples by temperature, top_k and top_p"
# Values that change nothing, and what to do about the others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_p": ((0,), f"{_SAMPLED_BY}: send 0 or leave it out"),
    "repetition_penalty": ((1,), f"{_SAMPLED_BY}: send 1 or leave it out"),
    "presence_penalty": ((0,), f"{_SAMPLED_BY}: send 0 or leave it out"),
    "frequency_penalty": ((0,), f"{_SAMPLED_BY}: send 0 or leave it out"),
    "logit_bias": (({},), f"{_SAMPLED_BY}: send {{}} or leave it out"),
    "min_tokens": ((0,), "an answer may end at any token: send 0 or leave it out"),
    "ignore_eos": ((False,), "an answer ends where the model ends it: send false or leave it out"),
    "logprobs": ((False,), "log-probabilities are not part of an answer here: send false or leave it out"),
    "top_logprobs": ((0,), "log-probabilities are not part of an answer here: leave it out"),
    "echo": ((False,), "send false or leave it out"),
    "response_format": (({"type": "text"},), "the form of an answer cannot be enforced: ask for it in the prompt"),
    "reasoning_effort": ((), "there is one way of thinking: leave it out, or switch it off by chat_template_kwargs"),
    "parallel_tool_calls": ((True,), "a model may make several calls in a turn: send true or leave it out"),
    "modalities": ((["text"],), 'only ["text"] is produced: leave it out'),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "continue_final_message": ((False,), "the model begins its own turn: send false or leave it out"),
    "add_generation_prompt": ((True,), "the model begins its own turn: send true or leave it out"),
    "skip_special_tokens": ((True,), "send true or leave it out"),
}
_HONOURED = frozenset(
    "model messages n seed temperature top_p top_k max_tokens max_completion_tokens stop stream stream_options "
    "tools tool_choice chat_template_kwargs separate_reasoning".split()
)
_THINKS = ("thinking", "enable_thinking")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class RefusedError(Exception):
    """A request that is not served, as OpenAI's error object says it: message, the field it is about, code, status."""

    def __init__(self, message: str, field: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.field, self.code, self.status = message, field, code, status


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request as it is served.

    Args:
        messages: role (system, user, assistant, tool) and text of each.
        seed: of the first choice; None draws one.
        temperature, top_p, top_k: None takes those of the run; temperature is never 0 here (greedy is top_k = 1).
        max_tokens: most ids after the prompt, tool replies included; None takes what the run allows.
        stop: texts that end an answer.
        usage_in_stream: the last chunk of a stream counts tokens.
        tools: function schemas of the client, whose calls the client runs; None offers the run's own tools, an empty
            tuple none.
        thinks: False closes the model's thought before it begins.
        split: thoughts apart from the answer, or all in one text; None as the run is set.
    """

    model: str
    messages: tuple[dict[str, str], ...]
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    tools: tuple[dict[str, Any], ...] | None = None
    thinks: bool = True
    split: bool | None = None


def read(body: Any) -> Asked:
    """The request that a decoded JSON body stands for.

    Raises:
        RefusedError: names the field, its value and what to send.
    """
    if not isinstance(body, dict):
        raise RefusedError("the body must be one JSON object")
    said = {name: value for name, value in body.items() if value is not None}
    for name, value in said.items():
        _refuse_deep(name[:80], value)
        if name in _NEUTRAL:
            _must_be_neutral(name, value)
        elif name not in _HONOURED and name not in _LABELS:
            raise RefusedError(f"unknown field {name[:80]!r}: leave it out", name[:80], code="unknown_parameter")
    temperature, top_k = _number(said, "temperature", 0, 1e4), _top_k(said)
    if temperature is not None and temperature < settings.LEAST_TEMPERATURE:
        temperature, top_k = None, 1
    return Asked(
        model=_text(said, "model"),
        messages=_messages(said.get("messages")),
        n=_whole(said, "n", 1, MOST_CHOICES) or 1,
        seed=_whole(said, "seed", -(2**63), 2**63 - 1),
        temperature=temperature,
        top_p=_number(said, "top_p", 0, 1, above=True),
        top_k=top_k,
        max_tokens=_max_tokens(said),
        stop=_stop(said.get("stop", [])),
        stream=_flag(said, "stream", False),
        usage_in_stream=_usage_in_stream(said),
        tools=_tools(said),
        thinks=_thinks(said.get("chat_template_kwargs", {})),
        split=_flag(said, "separate_reasoning", None),
    )


def _refuse_deep(place: str, value: Any) -> None:
    if parse.is_deep(value, MOST_NESTED):
        message = f"{place} is nested more than {MOST_NESTED} levels deep: send it flatter"
        raise RefusedError(message, place, code="invalid_value")


def _must_be_neutral(name: str, value: Any) -> None:
    neutral, remedy = _NEUTRAL[name]
    if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral):
        shown = json.dumps(value)[:80]
        raise RefusedError(f"{name} = {shown} cannot be honoured: {remedy}", name, code="unsupported_value")


def _wrong(name: str, value: Any, rule: str) -> RefusedError:
    return RefusedError(f"{name} = {json.dumps(value)[:80]}: must be {rule}", name, code="invalid_value")


def _text(said: Mapping[str, Any], name: str) -> str:
    if not isinstance(said.get(name), str):
        raise _wrong(name, said.get(name), "a text")
    return said[name]


def _flag(said: Mapping[str, Any], name: str, default: Any) -> Any:
    value = said.get(name, default)
    if value is not default and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _number(said: Mapping[str, Any], name: str, low: float, high: float, *, above: bool = False) -> float | None:
    value = said.get(name)
    if value is None:
        return None
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not right or not low <= value <= high or (above and value == low):
        raise _wrong(name, value, f"a number in {'(' if above else '['}{low:g}, {high:g}]")
    return float(value)


def _whole(said: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return value


def _top_k(said: Mapping[str, Any]) -> int | None:
    top_k = _whole(said, "top_k", -1, 2**31 - 1)
    return -1 if top_k == 0 else top_k  # both say that there is no limit


def _max_tokens(said: Mapping[str, Any]) -> int | None:
    limits = [_whole(said, name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    return next((limit for limit in limits if limit is not None), None)


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > MOST_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise _wrong("stop", stop, f"a text or a list of at most {MOST_STOPS} texts, none of them empty")
    return tuple(texts)


def _usage_in_stream(said: Mapping[str, Any]) -> bool:
    options = said.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", options, '{"include_usage": true or false}')
    return _flag(options, "include_usage", False)


def _thinks(variables: Any) -> bool:
    if not isinstance(variables, dict):
        raise _wrong("chat_template_kwargs", variables, "an object")
    for name, value in variables.items():
        place = f"chat_template_kwargs.{name[:60]}"
        if name not in _THINKS:
            raise RefusedError(
                f"{place} cannot be honoured: the template here is fixed but for {' and '.join(_THINKS)}; leave it out",
                place,
                code="unsupported_value",
            )
        if not isinstance(value, bool):
            raise _wrong(place, value, "true or false")
    return all(variables.values())


def _tools(said: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools, choice = said.get("tools"), said.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        remedy = 'a call cannot be enforced: send "auto" or "none"'
        raise RefusedError(f"tool_choice = {json.dumps(choice)[:80]} cannot be honoured: {remedy}", "tool_choice",
                           code="unsupported_value")  # fmt: skip
    if tools is not None and not (isinstance(tools, list) and all(map(_is_function, tools))):
        raise _wrong("tools", tools, 'a list of {"type": "function", "function": {"name": ..., ...}}')
    if choice == "none":
        return ()
    return tuple(tools) if tools else None


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _messages(messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least one message")
    read_ones = [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]
    roles = [message["role"] for message in read_ones]
    if "system" in roles[1:]:
        raise RefusedError("messages: a system message can stand only first", f"messages[{roles.index('system', 1)}]")
    for number, role in enumerate(roles):
        if role == "tool" and (number == 0 or roles[number - 1] not in ("assistant", "tool")):
            place = f"messages[{number}]"
            raise RefusedError(f"{place}: a tool message must follow the assistant message that called it", place)
    if roles[-1] not in ("user", "tool") or "user" not in roles:
        raise RefusedError(
            f"messages end with a message of {roles[-1]!r}: the last one must be that of the user or of a tool, and "
            "a user must have spoken",
            "messages",
        )
    return tuple(read_ones)


def _message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RefusedError(f"{place}: must be an object with a role among {', '.join(_ROLES)}", place)
    role = message["role"]
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise RefusedError(f"{place}: only an assistant message has tool_calls", f"{place}.tool_calls")
    if message.get("content") is None and not (role == "assistant" and calls):
        raise RefusedError(f"{place}.content is missing", f"{place}.content")
    text = _content(f"{place}.content", message.get("content") or "")
    if calls:
        text += "".join(_call(f"{place}.tool_calls", call) for call in calls)
    return {"role": "system" if role == "developer" else role, "content": text}


def _content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return _checked(place, content)
    if not isinstance(content, list):
        raise _wrong(place, content, "a text or a list of parts of type text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RefusedError(f"{place}: only parts of type text can be read by this model", place)
    return _checked(place, "".join(part["text"] for part in content))


def _checked(place: str, text: str) -> str:
    """A text that has a UTF-8 form. JSON can spell halves of surrogate pairs, which have none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(f"{place}: holds half of a surrogate pair, which is not a character", place) from None
    return text


def _call(place: str, call: Any) -> str:
    """A call of an earlier assistant turn as the model wrote it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f'{place}: each must be {{"function": {{"name": ..., "arguments": "JSON text"}}}}', place)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        raise RefusedError(f"{place}: arguments must be JSON in a text", place) from None
    _refuse_deep(place, arguments)
    body = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return _checked(place, f"\n<tool_call>\n{body}\n</tool_call>")
