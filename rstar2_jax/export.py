"""A finished run as a Hugging Face folder: safetensors, config, tokenizer, chat template, generation config.

What is written is read back with our own loader and must give the trained logits; the same reference (prompts, logits,
greedy ids) is left in export_check.npz, so that launch/check_export.py can hold transformers to it wherever torch is.

Deliberately not here: other formats, quantisation, upload.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rstar2_jax import begin, settings
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.io import clock
from rstar2_jax.model import decoder, hf

REPORT_FILE = "export.json"
REFERENCE_FILE = "export_check.npz"
MAX_DELTA_LOGIT = 1e-4  # what reloading may change at most; it reaches 0 with our own loader
GREEDY_TOKENS = 24

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_TEXTS = (
    "What is 17 * 23 mod 7?",
    "The capital of France is",
    "gcd(84, 36) =",
    "def fibonacci(n):",
    "Let x + y = 10 and x - y = 4. Then x =",
    "Sort the numbers 9, 2, 7, 5:",
    "Once upon a time there was",
    "Compute the divisor sum of 60.",
    "A train leaves at 9:15 and arrives at 11:40. How long does it take?",
    "print(sum(range(10)))",
    "Question: 3^5 mod 11\nAnswer:",
    "The first five prime numbers are",
    "How many minutes are there in a day?",
    "If a rectangle has sides 7 and 12, its area is",
    "digit sum of 98765",
    "Explain why the square root of 2 is irrational.",
)


class ExportError(RuntimeError):
    """The written folder does not hold what was trained; says what differs and by how much."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What reading the folder back gave.

    Args:
        tensors: tensors of the model; names and shapes were compared with the settings' full list.
        max_delta_logit: largest difference to the logits of the trained weights in the exported dtype.
        rounding_delta_logit: largest difference to the logits of the trained float32 weights.
        same_top1: share of prompts whose most probable next id is that of the trained float32 weights.
    """

    tensors: int
    max_delta_logit: float
    rounding_delta_logit: float
    same_top1: float


def export(*, run: settings.Run, model: settings.Model, dtype: str) -> int:
    """Write `run.init_from` (a run's newest checkpoint, or a Hugging Face folder) into `run.workdir`. Returns 0.

    Args:
        run: workdir and init_from are used.
        model: sizes of the weights.
        dtype: `float32` or `bfloat16`, of the written weights.

    Raises:
        ValueError: nothing to export, or an unknown dtype.
        ExportError: the written folder does not give the trained logits.
    """
    if not run.init_from:
        raise ValueError("Run.init_from is empty: name the run or the Hugging Face folder to export")
    out = Path(run.workdir)
    if (out / REPORT_FILE).exists():
        print(f"{out / REPORT_FILE} is there already; delete it to export again")
        return 0
    watch = clock.Clock(out)
    with watch.phase("load"):
        tokenizer_folder = find_tokenizer(run.init_from)
        params = begin.load_params(run.init_from, model, run.seed)
    with watch.phase("write"):
        export_folder(params, model, tokenizer_folder, out, dtype)
    with watch.phase("check"):
        found = verify_export(out, params, model, dtype)
    watch.save()
    hf.write_json(out / REPORT_FILE, {"init_from": run.init_from, "dtype": dtype} | dataclasses.asdict(found))
    print(
        f"{out}: {found.tensors} tensors in {dtype}, max |delta logit| after reload {found.max_delta_logit:.1e}, "
        f"same next id on {found.same_top1:.0%} of {len(_TEXTS)} prompts"
    )
    return 0


def find_tokenizer(init_from: str) -> Path:
    """Folder with the tokenizer that belongs to the weights: kept beside a run's checkpoints, or the folder itself.

    Raises:
        ValueError: neither holds a tokenizer.json.
    """
    root = Path(init_from)
    for folder in (root / begin.TOKENIZER_FOLDER, root):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise ValueError(
        f"{init_from} holds no tokenizer.json, nor does its {begin.TOKENIZER_FOLDER}/: name a finished run"
    )


def export_folder(params: decoder.Params, model: settings.Model, tokenizer_folder: Path, out: Path, dtype: str) -> None:
    """Write weights, configs, tokenizer and chat template.

    Raises:
        ValueError: dtype unknown; the weights are not those of `model` (count, names and shapes are compared); the
            tokenizer has more ids than the model.
    """
    tokenizer = tokenizers.Tokenizer.load(str(tokenizer_folder))
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {tokenizer_folder} has {tokenizer.vocab_size} ids, the model {model.vocab_size}: they "
            f"do not belong together"
        )
    bos = tokenizer.token_to_id(tokenizer.special.get("bos_token", ""))
    ids = hf.SpecialIds(bos=bos, eos=tokenizer.eos_ids, pad=tokenizer.pad_id)
    out.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, out / name)
    hf.save_folder(params, model, out, dtype=dtype, ids=ids)  # type: ignore[arg-type]  # refused there when unknown


def verify_export(folder: Path, params: decoder.Params, model: settings.Model, dtype: str) -> Verification:
    """Read a written folder back, compare its logits with those of `params`, and leave the reference beside it.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape.
        ExportError: settings differ, or logits differ by more than MAX_DELTA_LOGIT from the weights in `dtype`.
    """
    loaded, found = hf.load_folder(folder)
    wanted = dataclasses.replace(model, compute_dtype="float32")
    if found != wanted:
        raise ExportError(f"{folder} reads back as {found}, trained was {wanted}")
    tokenizer = tokenizers.Tokenizer.load(str(folder))
    prompts = [tokenizer.encode(text) for text in _TEXTS]
    ids, logits = greedy(loaded, wanted, prompts, GREEDY_TOKENS)
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    same = next_logits(rounded, wanted, prompts)
    trained = same if dtype == "float32" else next_logits(params, wanted, prompts)
    result = Verification(
        tensors=len(jax.tree.leaves(loaded)),
        max_delta_logit=float(np.abs(logits - same).max()),
        rounding_delta_logit=float(np.abs(logits - trained).max()),
        same_top1=float(np.mean(logits.argmax(-1) == trained.argmax(-1))),
    )
    if not result.max_delta_logit <= MAX_DELTA_LOGIT:  # a NaN is a failure too
        raise ExportError(
            f"{folder}: logits after reload differ by {result.max_delta_logit:.2e} from the trained ones, allowed is "
            f"{MAX_DELTA_LOGIT:.0e}: do not use this folder"
        )
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = _padded(prompts)[0]
    np.savez(folder / REFERENCE_FILE, texts=_TEXTS, prompt_ids=padded, lengths=lengths, logits=logits, greedy_ids=ids)
    return result


def next_logits(params: decoder.Params, model: settings.Model, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """f32[n, V]: logits of the id that follows each prompt, by the same program that greedy starts with."""
    tokens, positions = _padded(prompts)
    return np.asarray(_start(model, tokens.shape[1] + GREEDY_TOKENS, params, tokens, positions)[0])


def greedy(
    params: decoder.Params, model: settings.Model, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids i32[n, new_tokens], logits f32[n, V] of the first of them): the most probable id each time, no stopping."""
    tokens, positions = _padded(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    logits, cache = _start(model, tokens.shape[1] + new_tokens, params, tokens, positions)
    ids = _continue(model, new_tokens, params, logits, lengths, cache)
    return np.asarray(ids), np.asarray(logits)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), width), np.int32)
    positions = np.full((len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    return tokens, positions


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(model: settings.Model, length: int, params: Any, tokens: Any, positions: Any) -> Any:
    """(logits after each prompt, cache)."""
    module, variables = decoder.Decoder(model), {"params": params}
    cache = decoder.init_cache(model, len(tokens), length)
    hidden, cache = module.apply(variables, tokens, positions, cache, method="extend")
    last = jnp.take_along_axis(hidden, jnp.argmax(positions, axis=1)[:, None, None], axis=1)[:, 0]
    return module.apply(variables, last, method="logits"), cache


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(model: settings.Model, new_tokens: int, params: Any, logits: Any, lengths: Any, cache: Any) -> Any:
    """i32[n, new_tokens]: the greedy ids from the first logits on."""
    module, variables = decoder.Decoder(model), {"params": params}

    def step(carry, offset):
        token, cache = carry
        hidden, cache = module.apply(variables, token[:, None], (lengths + offset)[:, None], cache, method="extend")
        logits: Any = module.apply(variables, hidden[:, 0], method="logits")
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), token

    start = (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache)
    return jax.lax.scan(step, start, jnp.arange(new_tokens))[1].T
