"""The chat protocol that a task names, read from disk: its tokenizer and its template.

Deliberately not here: what the protocol does with them (chat.py, pure).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_jax import settings
from rstar2_jax.data import chat as chats
from rstar2_jax.data import tokenizer as tokenizers

_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def load_tokenizer(task: settings.Task) -> tokenizers.Tokenizer:
    """The tokenizer that a task names: `box`, or a folder.

    Raises:
        ValueError: no tokenizer there.
    """
    return tokenizers.Tokenizer.box() if task.tokenizer == "box" else tokenizers.Tokenizer.load(task.tokenizer)


def check_vocabulary(tokenizer: tokenizers.Tokenizer, model: settings.Model) -> None:
    """Hold a tokenizer against the model that is to read its ids.

    Raises:
        ValueError: the tokenizer has ids that the model's embedding has not.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but Model.vocab_size = {model.vocab_size}: "
            f"give the model at least {tokenizer.vocab_size}, or take the tokenizer that it was trained with"
        )


def load_chat(task: settings.Task, tools: Sequence[Mapping[str, Any]] = ()) -> chats.Chat:
    """The checked protocol of a task: tokenizer, template and the schemas of the tools on offer.

    A template that ships with a checkpoint has no wording of ours, so system prompt and instruction are given with it.

    Raises:
        ValueError: tokenizer or template is missing, or the template is not append-only.
    """
    tokenizer = load_tokenizer(task)
    text = read_template(task.template)
    if task.template in built_in_templates():
        chat = chats.Chat(tokenizer, text, tools)
    else:
        system, instruction = chats.wording(read_template("rstar2"))
        chat = chats.Chat(tokenizer, text, tools, system=system, instruction=instruction + "\n\n{Question}")
    chat.check()
    return chat


def built_in_templates() -> list[str]:
    """Names of the templates that come with the package."""
    return sorted(path.stem for path in _TEMPLATES.glob("*.jinja"))


def read_template(name: str) -> str:
    """The text of a template: a built-in name, a jinja file, or a folder of a checkpoint that ships one.

    Raises:
        ValueError: nothing of the kind, with the names that there are.
    """
    if name in built_in_templates():
        return (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    path = pathlib.Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    shipped = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(shipped, list):
        shipped = next((item["template"] for item in shipped if item.get("name") == "default"), None)
    if isinstance(shipped, str):
        return shipped
    known = ", ".join(built_in_templates())
    raise ValueError(f"template {name!r}: neither one of {known}, nor a jinja file, nor a folder that ships a template")
