"""Demonstrations that teach the protocol, not the reasoning: direct answers, tool calls, failing calls that are mended.

A demonstration is built by the same appends as an episode of the agent loop (prompt_ids, assistant ids, reply_ids), so
the model is fine-tuned on the very contexts that it will meet. Trained are the assistant's ids and its end token; the
forced prefix, the prompt and the replies are not.

A failing first call makes one mistake of a fixed kind, chosen so that its error reads the same on every Python that the
sandbox may run; the reply shown is the one that the sandbox gives (a test runs each kind for real).

Direct demonstrations state the right answer without a way to it: the model learns to guess, which leaves room for RL.

Source: rStar2-Agent, non-reasoning SFT, at the scale of a box; shares are settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np

from rstar2_jax import settings, types
from rstar2_jax.data import chat as chats
from rstar2_jax.data import prompts, talks, worked

MISTAKES = ("wrong_name", "missing_parenthesis", "division_by_zero", "wrong_arity")
"""The kinds of failing first calls."""

_MAX_REPLY_TOKENS = 512
_MAX_SKIPPED = 1000
_TRACE = 'Traceback (most recent call last):\n  File "<tool>", line 1, in <module>\n'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a demonstration shows: with the tool or without, a mistake first or none, one answer block or two."""

    tool: bool
    mistake: str | None
    doubled: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A program as the assistant sends it, and what the sandbox answers."""

    code: str
    result: types.ToolResult


def demonstrations(task: settings.Task, mix: settings.Demonstrations, chat: chats.Chat, seed: int) -> list[talks.Demo]:
    """A shuffled list of mix.count demonstrations, a pure function of the seed; shares are exact up to rounding.

    Problems come from the task's training side. A generated task gives equal parts of every stage up to its difficulty,
    so that the model has copied numbers of every length that it meets later.

    Raises:
        ValueError: the source knows no code for its problems, so that no tool demonstration can be made.
    """
    problems, skipped = _problems(task, seed), []
    demos = []
    for kind in kinds(mix, seed):
        row = skipped.pop() if skipped and not kind.tool else next(problems)
        while kind.tool and row.expression is None:
            skipped.append(row)
            if len(skipped) > _MAX_SKIPPED:
                raise ValueError(f"source {task.source!r} gives no code for its problems: set tool_share = 0")
            row = next(problems)
        calls = [mistaken_call(kind.mistake, row)] if kind.mistake else []
        if kind.tool:
            calls.append(working_call(row))
        demos.append(build(chat, row.prompt, calls, task.tool_name, doubled=kind.doubled))
    return demos


def fitting(demos: Sequence[talks.Demo], row_tokens: int, max_positions: int) -> list[talks.Demo]:
    """The demonstrations that fit into a row of row_tokens tokens and into the model's positions.

    Raises:
        ValueError: none does.
    """
    kept = [demo for demo in demos if len(demo.token_ids) <= min(row_tokens, max_positions)]
    if not kept:
        shortest = min(len(demo.token_ids) for demo in demos)
        name = "Learner.row_tokens" if row_tokens <= max_positions else "Model.max_positions"
        raise ValueError(
            f"all {len(demos)} demonstrations are longer than {name} = {min(row_tokens, max_positions)}: the shortest "
            f"has {shortest} tokens; raise it to that"
        )
    return kept


def kinds(mix: settings.Demonstrations, seed: int) -> list[Kind]:
    """The kinds of mix.count demonstrations in a random order; mistakes in equal parts, doubled answers over all."""
    tools = round(mix.count * mix.tool_share)
    failing = round(tools * mix.failing_share)
    rng = np.random.default_rng([seed, 0])
    doubled = rng.permutation(mix.count) < round(mix.count * mix.doubled_answer_share)
    listed = [
        Kind(
            tool=i < tools,
            mistake=MISTAKES[i % len(MISTAKES)] if i < failing else None,
            doubled=bool(doubled[i]),
        )
        for i in range(mix.count)
    ]
    return [listed[int(i)] for i in rng.permutation(mix.count)]


def working_call(row: worked.Solved) -> Call:
    """The program that prints the value of a solved problem, with its output."""
    result = types.ToolResult(status=types.CallStatus.OK, stdout=f"{row.value}\n")
    return Call(code=f"{row.setup}print({row.expression})", result=result)


def mistaken_call(mistake: str, row: worked.Solved) -> Call:
    """The program of a solved problem with one mistake in it, and the error that the sandbox gives for it.

    Raises:
        ValueError: no such kind of mistake.
    """
    setup, expression = row.setup, row.expression
    if mistake == "wrong_name":
        code, error = f"{setup}print(solve({expression}))", "NameError: name 'solve' is not defined"
    elif mistake == "division_by_zero":
        code, error = f"{setup}print({expression}/0)", "ZeroDivisionError: division by zero"
    elif mistake == "wrong_arity":
        code, error = f"{setup}print(pow({expression}))", "TypeError: pow() missing required argument 'exp' (pos 2)"
    elif mistake == "missing_parenthesis":
        code, error = f"{setup}print({expression}", "SyntaxError: '(' was never closed"
    else:
        raise ValueError(f"mistake {mistake!r}: must be one of {', '.join(MISTAKES)}")
    trace = '  File "<tool>", line 1\n' if mistake == "missing_parenthesis" else _TRACE
    return Call(code=code, result=types.ToolResult(status=types.CallStatus.ERROR, stderr=f"{trace}{error}\n"))


def build(
    chat: chats.Chat, prompt: types.Prompt, calls: Sequence[Call], tool_name: str, *, doubled: bool = False
) -> talks.Demo:
    """The episode in which the assistant makes these calls, one a turn, and then states the prompt's answer."""
    ids = chat.prompt_ids(prompt.question)
    mask = [False] * len(ids)

    def append(more: Sequence[int], trained: bool) -> None:
        ids.extend(more)
        mask.extend([trained] * len(more))

    def say(text: str) -> None:
        append([*chat.tokenizer.encode(chat.thought_end + text), *chat.end_ids], True)

    for call in calls:
        arguments = {"name": tool_name, "arguments": {"code": call.code}}
        say(f"<tool_call>\n{json.dumps(arguments, ensure_ascii=False)}\n</tool_call>")
        parsed = types.ToolCall(name=tool_name, arguments=arguments["arguments"])
        append(chat.reply_ids([chats.tool_reply_text(call.result, parsed, chat.tokenizer, _MAX_REPLY_TOKENS)]), False)
    answer = f"<answer>\\boxed{{{prompt.answer}}}</answer>"
    say(f"{answer}\n{answer}" if doubled else answer)
    return talks.Demo(token_ids=np.asarray(ids, np.int32), mask=np.asarray(mask, bool))


def _problems(task: settings.Task, seed: int) -> Iterator[worked.Solved]:
    """Problems without end: of a generated task one of each stage up to its difficulty in turn."""
    stages = range(1, task.difficulty + 1) if task.source in prompts.GENERATED else (task.difficulty,)
    each = [prompts.make_source(dataclasses.replace(task, difficulty=stage)) for stage in stages]
    own_seed = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
    cursor = 0
    while True:
        for source in each:
            yield source.solved(own_seed, cursor, 1)[0]
        cursor += 1
