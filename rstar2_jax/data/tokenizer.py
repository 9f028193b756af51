"""Text to ids and ids to text, over the `tokenizers` library; and the small vocabulary that is built in.

Sampled ids are the only truth: `decode` gives a view of them, and nothing in the project encodes such a view again.
`encode` is for text that the project writes itself (prompts, tool replies, demonstrations).

The built-in vocabulary is byte-level without merges: 256 ids for the bytes, so that every text encodes without loss,
then one id for each fixed piece of the protocol, so that an episode of the box task takes 20 to 110 ids.

Deliberately not here: chat structure (chat.py) and any dependency on transformers; a saved folder loads there.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"

_TOOL = "execute_python_code_with_standard_io"
# Each piece stands where a tiny model would otherwise spend many ids on letters that carry no choice.
_MARKUP = (
    "user\n",
    "assistant\n",
    "<reason>",
    "</reason>\n",
    "<answer>\\boxed{",
    "}</answer>",
    '<tool_call>\n{"name": "' + _TOOL + '", "arguments": {"code": "',
    '"}}\n</tool_call>',
    '", "input": "',
    "<tool_response>\n",
    "\n</tool_response>",
)
_CODE = (
    "import math;",
    "math.gcd(",
    "math.lcm(",
    "print(",
    "solve(",
    "pow(",
    "sum(",
    "range(",
    "str(",
    "int(",
    "map(",
    "d for d in ",
    " if ",
    "%d==0",
    "+1)",
    "/0",
    "))",
)
_PROBLEM = (" mod ", "gcd(", "lcm(", "digit sum of ", "divisor sum of ")
_REPLY = (
    "Traceback (most recent call last):\n",
    '  File "<tool>", line ',
    ", in <module>\n",
    "NameError: name '",
    "' is not defined",
    "SyntaxError: ",
    "'(' was never closed",
    "invalid syntax",
    "ZeroDivisionError: ",
    "division by zero",
    "integer modulo by zero",
    "TypeError: ",
    "ValueError: ",
    "AttributeError: ",
    "OverflowError: ",
    "pow() missing required argument 'exp' (pos 2)",
    "        ",
    "    ",
    "[No output: nothing was printed.]",
    "[Timed out: the run was stopped at its time limit.]",
    "[Call not understood: ",
    "[Out of memory: the run was stopped at its memory limit.]",
    "[Too much output: the run was stopped at its output limit.]",
    "[Killed: the run was ended by a signal.]",
    "[Not executed: ",
    "[Unknown tool: ",
    "\n[... ",
    " characters left out ...]\n",
)


class Tokenizer:
    """A tokenizer of one folder or the built-in one.

    Attributes:
        vocab_size: number of ids, added ones included; ids are 0 .. vocab_size - 1.
        max_token_chars: no id stands for more characters than this.
        eos_ids: ids that end a turn, the main one first.
        pad_id: id that fills rows. It may equal an end id: masks come from lengths, never from ids.
        special: texts of the named special tokens (`eos_token`, `pad_token`, `bos_token`, ...), for templates.
    """

    def __init__(self, definition: str, config: dict[str, Any], eos_tokens: Sequence[str | int]) -> None:
        """Args: definition is tokenizer.json as text, config the tokenizer_config.json, eos_tokens texts or ids."""
        self._config = dict(config)
        self._markup = _without_padding(definition)
        self._plain = _without_padding(definition)
        self._plain.encode_special_tokens = True
        self.special = {name: _token_text(value) for name, value in config.items() if _is_named_token(name, value)}
        added = self._markup.get_added_tokens_decoder().values()
        self._special_texts = tuple(token.content for token in added if token.special)
        vocabulary = self._markup.get_vocab(with_added_tokens=True)
        self.max_token_chars = max(map(len, vocabulary))
        self.vocab_size = 1 + max(vocabulary.values())
        ids = [token if isinstance(token, int) else self.token_to_id(token) for token in eos_tokens]
        self.eos_ids = tuple(dict.fromkeys(i for i in ids if i is not None))
        if not self.eos_ids:
            raise ValueError(f"no end token among {list(eos_tokens)!r} is in the vocabulary: name eos_token")
        pad = self.token_to_id(self.special.get("pad_token", ""))
        self.pad_id = self.eos_ids[0] if pad is None else pad

    @classmethod
    def load(cls, folder: str) -> Tokenizer:
        """The tokenizer of a folder that holds tokenizer.json and, for the end and pad tokens, its companions.

        End ids come from tokenizer_config.json, then from generation_config.json and config.json (a chat model often
        ends its turns with another token than the one that its tokenizer names).

        Raises:
            ValueError: tokenizer.json is missing, or no file names an end token.
        """
        root = pathlib.Path(folder)
        if not (root / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer {folder!r}: no tokenizer.json there; give such a folder, or 'box'")
        config = _read_json(root / "tokenizer_config.json")
        eos: list[str | int] = []
        if config.get("eos_token"):
            eos.append(_token_text(config["eos_token"]))
        for name in ("generation_config.json", "config.json"):
            value = _read_json(root / name).get("eos_token_id")
            eos.extend(value if isinstance(value, list) else [] if value is None else [value])
        return cls((root / "tokenizer.json").read_text(encoding="utf-8"), config, eos)

    @classmethod
    def box(cls) -> Tokenizer:
        """The built-in byte-level vocabulary of the box task."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        built = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.decoder = decoders.ByteLevel()
        built.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in (PAD, START, END)])
        pieces = (*_MARKUP, *_CODE, *_PROBLEM, *_REPLY)
        built.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in pieces])
        config = {"eos_token": END, "pad_token": PAD, "clean_up_tokenization_spaces": False}
        return cls(built.to_str(), {"tokenizer_class": "PreTrainedTokenizerFast", **config}, [END])

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """Ids of a text that the project wrote; no token is added at either end.

        Args:
            plain: spell special tokens that the text mentions letter by letter, for text of foreign origin (a question,
                a tool's output) that must not be able to end a turn.
        """
        return (self._plain if plain else self._markup).encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) in characters of each id of a foreign text; ids that share a character share its span."""
        return self._plain.encode(text, add_special_tokens=False).offsets

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Bytes that form no character show as U+FFFD."""
        return self._markup.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a whole token, or None."""
        return self._markup.token_to_id(token)

    def mentions_special(self, text: str) -> bool:
        """True when the text spells a special token, so that encoding it as markup would make structure of it."""
        return any(token in text for token in self._special_texts)

    @property
    def chat_template(self) -> str | None:
        """The template that tokenizer_config.json carries, if any (a separate file is read by files.py)."""
        template = self._config.get("chat_template")
        return template if isinstance(template, str) else None

    def save(self, folder: str, *, chat_template: str | None = None) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja so that transformers loads the folder."""
        root = pathlib.Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        (root / "tokenizer.json").write_text(self._markup.to_str(pretty=True), encoding="utf-8")
        config = dict(self._config)
        template = chat_template if chat_template is not None else config.pop("chat_template", None)
        config.pop("chat_template", None)
        if isinstance(template, str):
            config["chat_template"] = template
            (root / "chat_template.jinja").write_text(template, encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (root / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _without_padding(definition: str) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer.from_str(definition)
    built.no_padding()
    built.no_truncation()
    return built


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_named_token(name: str, value: object) -> bool:
    return name.endswith("_token") and isinstance(value, (str, dict))


def _token_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])
