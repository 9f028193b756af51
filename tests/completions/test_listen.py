"""An episode told while it is sampled: turns that are asked again, ids that end inside a character."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rstar2_jax.completions import listen, reply
from rstar2_jax.rollout.engine import Generation, Request, Sampling
from rstar2_jax.types import FinishReason

LIMITS = Sampling(max_new_tokens=100, stop_ids=())


class Seat:
    """Says what it is told to say: parts of a turn, and whether the turn ends well or its place is lost."""

    caps = None

    def __init__(self, chat, plays):
        self.chat, self.plays = chat, list(plays)

    async def ready(self, limit_s):
        """There is always room."""

    async def generate(self, request):
        ids, said, size = self.plays.pop(0)
        for start in range(0, said, size):
            request.on_ids(start, ids[start : min(start + size, said)])
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        if said < len(ids):
            return None
        array = np.asarray(ids, np.int32)
        return Generation(
            token_ids=array, logprobs=np.zeros(len(ids)), weights_versions=array, finish_reason=FinishReason.STOP
        )


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_turn_whose_place_was_lost_is_told_once(chat, size):
    turns = ["Räumlich 数学.</reason>\n<tool_call>{}</tool_call>", "Gut 😀.</reason>\n<answer>ä</answer>"]
    ids = [[*chat.tokenizer.encode(turn), *chat.end_ids] for turn in turns]
    replies = chat.reply_ids(["42"])
    narrator, told = reply.Narrator("<reason>", split=True), []
    first, second = ids
    heard = [(first, 7), (first, len(first)), (second, 0), (second, 12), (second, len(second))]
    plays = [(*one, size) for one in heard]
    listener = listen.Listener(Seat(chat, plays), chat, narrator, told.extend)

    async def play():
        context = chat.prompt_ids("q")
        for turn in (0, 1):
            generation = None
            while generation is None:
                request = Request(rid="r", prompt_ids=context, seed=0, sampling=LIMITS)
                generation = await listener.generate(request)
            context = [*context, *ids[turn], *replies]

    asyncio.run(play())
    early = len(told)
    told += narrator.ended(turns[1], answers=True)
    content, reasoning = ("".join(p.text for p in told if p.field == f) for f in (reply.CONTENT, reply.REASONING))
    assert content == "<answer>ä</answer>"
    assert reasoning == ("Räumlich 数学.\n<tool_call>{}</tool_call>\n<tool_response>\n42\n</tool_response>\nGut 😀.")
    assert early > (2 if size == 50 else 5) and "\ufffd" not in reasoning
