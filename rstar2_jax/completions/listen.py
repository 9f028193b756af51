"""An episode told while it is sampled: a seat that passes on what its engine says.

Ids come from the engine's thread as they are sampled, where the engine can (Request.on_ids); else a turn is told as a
whole when it ends. Replies of tools are read off the context of the next turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from rstar2_jax.completions import reply
from rstar2_jax.data import chat as chats
from rstar2_jax.rollout import agent
from rstar2_jax.rollout.engine import Caps, Generation, Request


class Listener:
    """A seat around another one (agent.Seat), for one episode.

    Args:
        seat: where the episode is sampled.
        tell: receives pieces, in the event loop, in the order of the text.
    """

    def __init__(
        self,
        seat: agent.Seat,
        chat: chats.Chat,
        narrator: reply.Narrator,
        tell: Callable[[list[reply.Piece]], None],
    ) -> None:
        self._seat, self._chat, self._narrator, self._tell = seat, chat, narrator, tell
        self._known = 0  # ids of the context that are told, or were never to be
        self._growing = _Text(chat)
        self._attempt = 0
        self._text = ""

    @property
    def caps(self) -> Caps:
        """Of the engine behind it."""
        return self._seat.caps

    async def ready(self, limit_s: float) -> None:
        """Return when there is room for the episode."""
        await self._seat.ready(limit_s)

    async def generate(self, request: Request) -> Generation | None:
        """Sample one turn, telling it on the way; a turn that is asked again is told on from where it was."""
        context = len(request.prompt_ids)
        if self._known and context > self._known:
            appended = self._chat.tokenizer.decode(request.prompt_ids[self._known :])
            self._tell(self._narrator.replied(self._text, appended))
            self._growing = _Text(self._chat)
        self._known = context
        self._attempt += 1
        attempt, loop = self._attempt, asyncio.get_running_loop()

        def came(place: int, ids: list[int]) -> None:
            loop.call_soon_threadsafe(grew, place, ids)

        def grew(place: int, ids: list[int]) -> None:
            if attempt == self._attempt and self._growing.grow(place, ids):
                self._tell(self._narrator.wrote(self._growing.so_far))

        try:
            generation = await self._seat.generate(dataclasses.replace(request, on_ids=came))
        finally:
            self._attempt += 1  # whatever this attempt still says, its generation says too
        if generation is not None:
            self._text = reply.sampled_text(self._chat, generation.token_ids.tolist())
            self._known = context + len(generation.token_ids)
        return generation


class _Text:
    """The text of growing ids. Ids are decoded a few at a time, with those before them for the sake of tokenizers whose
    ids read differently at the start; a character that is not whole yet is waited for."""

    def __init__(self, chat: chats.Chat) -> None:
        self._chat, self._ids = chat, list[int]()
        self._shown = self._before = 0
        self.so_far = ""

    def grow(self, place: int, ids: Sequence[int]) -> bool:
        """Whether there is more text now."""
        fresh = place + len(ids) - len(self._ids)
        if fresh <= 0:
            return False  # a turn that is sampled again, with the same seed
        self._ids += ids[-fresh:]
        if self._ids[-1] in self._chat.stop_ids:
            return False
        decode = self._chat.tokenizer.decode
        shown, now = decode(self._ids[self._before : self._shown]), decode(self._ids[self._before :])
        if len(now) <= len(shown) or now.endswith("\ufffd"):
            return False
        self.so_far += now[len(shown) :]
        self._before, self._shown = self._shown, len(self._ids)
        return True
