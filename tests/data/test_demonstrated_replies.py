"""The replies in demonstrations are those of the real sandbox, call for call."""

from __future__ import annotations

import asyncio

import pytest

from rstar2_jax import settings, types
from rstar2_jax.data import box_problems, prompts, sft_mix
from rstar2_jax.data import chat as chats
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.tools import python as python_tool
from rstar2_sandbox import client as sandbox_client
from rstar2_sandbox import local as sandbox_local

BOX = tokenizers.Tokenizer.box()
NAME = "execute_python_code_with_standard_io"


def demonstrated_calls() -> list[sft_mix.Call]:
    calls = []
    for stage in (1, 3):
        families = (*box_problems.TRAINED, "digit_sum", "divisor_sum_mod")
        task = settings.Task(source="box", tokenizer="box", difficulty=stage, families=families)
        for row in prompts.make_source(task).solved(0, 0, len(families)):
            calls.append(sft_mix.working_call(row))
            calls.extend(sft_mix.mistaken_call(mistake, row) for mistake in sft_mix.MISTAKES)
    return calls


async def run_all(redis_url: str, calls: list[types.ToolCall]) -> list[types.ToolResult]:
    async with sandbox_client.Client(redis_url, run="demonstrated") as client:
        tool = python_tool.PythonTool(client, NAME, settings.Sandbox())
        return list(await asyncio.gather(*(tool.run(call, key=f"demo-{i}") for i, call in enumerate(calls))))


@pytest.mark.e2e
def test_every_demonstrated_reply_is_what_the_sandbox_gives():
    shown = demonstrated_calls()
    calls = [types.ToolCall(name=NAME, arguments={"code": call.code}) for call in shown]
    with sandbox_local.start_local(slots=2) as local:
        results = asyncio.run(run_all(local.redis_url, calls))
    for expected, call, result in zip(shown, calls, results, strict=True):
        assert result.status == expected.result.status, (call, result)
        texts = [chats.tool_reply_text(r, call, BOX, 512) for r in (expected.result, result)]
        assert texts[0] == texts[1]
