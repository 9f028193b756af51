"""A whole conversation in the place of one question: what a client of the endpoint, or a person, has said so far.

The ids of a conversation of one user message are those of `Chat.prompt_ids`, so that a question asked over HTTP and one
asked in training are the same to the model.

Deliberately not here: which messages are allowed (completions/request.py), and thoughts of earlier assistant turns,
which a client does not send back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_jax.data import chat as chats

_MESSAGE = "QZMessage{}QZ"


class Conversation(chats.Chat):
    """A chat protocol whose prompt is a conversation, for one episode that goes on from it.

    A system message of the client takes the place of the template's own. Text of every message is foreign: special
    tokens in it are spelled letter by letter.
    """

    def __init__(
        self,
        chat: chats.Chat,
        messages: Sequence[Mapping[str, str]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinks: bool = True,
    ) -> None:
        """Args:
            chat: the protocol that the conversation is held in.
            messages: `role` (system, user, assistant or tool) and `content` of each.
            tools: schemas to show; None shows those of `chat`.
            thinks: False closes the thought before the model can write one, in this turn and in those after it.

        Raises:
            ValueError: the template cannot show this conversation.
        """
        if tools is None:
            vars(self).update(vars(chat))
        else:
            system = chat._system[0]["content"] if chat._system else ""
            super().__init__(chat.tokenizer, chat.template_text, tools, system=system, instruction=chat._instruction)
        if messages and messages[0]["role"] == "system":
            self._system = []
        markers = [_MESSAGE.format(number) for number in range(len(messages))]
        parts = self._split(self._render(self._shown(markers, messages), True), markers)
        pieces = [parts[0]]
        for message, part in zip(messages, parts[1:], strict=True):
            pieces += [message["content"], part]
        self._thoughtless = [] if thinks else self.tokenizer.encode(self.thought_end)
        self._opening = self._encode(pieces) + self._thoughtless

    def prompt_ids(self, question: str) -> list[int]:
        """Ids of the whole conversation up to the first sampled id, whatever the question is called."""
        return list(self._opening)

    def reply_ids(self, replies: Sequence[str]) -> list[int]:
        return super().reply_ids(replies) + self._thoughtless

    def _shown(self, markers: Sequence[str], messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The messages with markers in the place of their texts; the first question comes with its instruction."""
        shown, instructed = [], False
        for marker, message in zip(markers, messages, strict=True):
            content = marker
            if message["role"] == "user" and not instructed:
                content, instructed = self._instruction.replace("{Question}", marker), True
            shown.append({"role": message["role"], "content": content})
        return shown
