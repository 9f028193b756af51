"""Hugging Face names and shapes of the decoder's parameters, both ways, and folders of safetensors.

The mapping itself is pure. load_folder and save_folder are the only two functions of the model room that touch files;
they stand here because a folder is nothing but this mapping written down.

Deliberately not here: rope scaling, sliding windows, biases that the family does not have and mixtures of experts;
a config.json that asks for one of them is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from rstar2_jax.model import decoder
from rstar2_jax.settings import Model

Dtype = Literal["float32", "bfloat16"]

SHARD_BYTES = 5 * 10**9  # a single file up to here, as the hub's own tools do
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_TOP = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.o_proj",
    "attn/q_norm": "self_attn.q_norm",
    "attn/k_norm": "self_attn.k_norm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids that config.json and generation_config.json name; None or an empty tuple where the tokenizer has none."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


def _path(entries: Sequence[Any]) -> str:
    return "/".join(entry.key for entry in entries)


def hf_name(path: str) -> str:
    """The Hugging Face name of a parameter path.

    >>> hf_name("layers_3/attn/q/kernel")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if path in _TOP:
        return _TOP[path]
    layer, _, rest = path.partition("/")
    module, _, leaf = rest.rpartition("/")
    return f"model.layers.{layer.removeprefix('layers_')}.{_LAYER[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def hf_shapes(settings: Model) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face name of a model with its shape ([out, in] for projections): the whole list, no more."""
    leaves = jax.tree_util.tree_leaves_with_path(decoder.abstract_params(settings))
    return {hf_name(_path(path)): leaf.shape[::-1] if path[-1].key == "kernel" else leaf.shape for path, leaf in leaves}


def to_hf(params: decoder.Params, settings: Model) -> dict[str, np.ndarray]:
    """Arrays under their Hugging Face names, projections turned to [out, in]; a tied head is not repeated.

    Raises:
        ValueError: the parameters are not those of `settings` (a name or a shape differs).
    """
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        arrays[hf_name(_path(path))] = np.ascontiguousarray(array.T) if path[-1].key == "kernel" else array
    check_shapes({name: array.shape for name, array in arrays.items()}, settings)
    return arrays


def check_shapes(shapes: Mapping[str, tuple[int, ...]], settings: Model) -> None:
    """Return when names and shapes are exactly those of the model; else raise ValueError that names what differs."""
    expected = hf_shapes(settings)
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or extra:
        raise ValueError(
            f"{len(shapes)} tensors where a {settings.family} model of {settings.layers} layers has {len(expected)}; "
            f"missing {missing[:4]}, unexpected {extra[:4]}: the weights and the model settings do not belong together"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shapes[name]}, the model settings say {shape}: use the model's sizes")


def from_hf(
    get: Callable[[str], Any] | Mapping[str, Any], settings: Model, *, dtype: Any = jnp.float32, where: Any = None
) -> decoder.Params:
    """Parameters from arrays under Hugging Face names, read one at a time.

    Args:
        get: gives the array of a name, or something with a shape that is read where it is sliced; KeyError where there
            is none.
        dtype: dtype of the parameters (masters are float32).
        where: tree of shardings like the parameters; each device is given its own part of a tensor and no more, so
            that the host never holds two of them. None puts everything on the first device.

    Raises:
        ValueError: a tensor is missing or has another shape than the settings say.
    """
    read = get.__getitem__ if isinstance(get, Mapping) else get

    def leaf(path, spec, place):
        name, turned = hf_name(_path(path)), path[-1].key == "kernel"
        shape = spec.shape[::-1] if turned else spec.shape
        try:
            array = read(name)
        except KeyError:
            raise ValueError(
                f"tensor {name} {shape} is missing: the checkpoint is incomplete or of another model"
            ) from None
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, the model settings say {shape}")

        def part(index):
            return array[index[::-1]].T if turned else array[index]

        if place is None:
            return jnp.asarray(part((slice(None),) * len(shape)), dtype)
        return jax.make_array_from_callback(spec.shape, place, lambda index: part(index).astype(dtype))

    abstract = decoder.abstract_params(settings)
    return jax.tree_util.tree_map_with_path(leaf, abstract, where or jax.tree.map(lambda _: None, abstract))


def _rope_theta(config: Mapping[str, Any]) -> float:
    """rope_theta of either spelling (flat, or inside rope_parameters); scaled kinds are refused."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type = {kind!r} is not supported: only 'default' (plain rotary positions) is")
    return float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))


def settings_from_config(config: Mapping[str, Any]) -> Model:
    """Model settings of a config.json; compute_dtype stays float32 whatever dtype the weights are stored in.

    Raises:
        ValueError: another architecture, or a feature that this decoder does not have; a size is missing.
    """
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ValueError(f"model_type = {family!r} is not supported: use one of {', '.join(_ARCHITECTURES)}")
    refused = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for key, wanted in refused.items():
        if config.get(key, wanted) not in (wanted, None):
            raise ValueError(f"config {key} = {config[key]!r} is not supported for {family}: it must be {wanted!r}")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return Model(
        family=family,
        vocab_size=config["vocab_size"],
        d_model=width,
        d_mlp=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else width // heads),
        rope_theta=_rope_theta(config),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_positions=config.get("max_position_embeddings", 2048 if family == "llama" else 32768),
    )


def config_from_settings(settings: Model, ids: SpecialIds, *, dtype: Dtype = "float32") -> dict[str, Any]:
    """The config.json of a model, in the spelling of transformers 4 (rope_theta) and of 5 (rope_parameters)."""
    config = {
        "architectures": [_ARCHITECTURES[settings.family]],
        "model_type": settings.family,
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.d_model,
        "intermediate_size": settings.d_mlp,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": settings.max_positions,
        "rms_norm_eps": settings.rms_eps,
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": settings.tie_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    } | id_fields(ids)
    if settings.family != "qwen2":
        config["attention_bias"] = False
    if settings.family == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    return config


def id_fields(ids: SpecialIds) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id as config files spell them: one end id alone, several in a list."""
    eos: Any = ids.eos[0] if len(ids.eos) == 1 else list(ids.eos) or None
    return {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """config.json of a folder. Raises ValueError where there is none."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no Hugging Face folder: it holds no config.json")
    return json.loads(path.read_text(encoding="utf-8"))


class _Stored:
    """A tensor of an opened safetensors file that is read where it is sliced."""

    def __init__(self, opened: Any, name: str) -> None:
        self._slice = opened.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._slice[index]


def load_folder(folder: str | os.PathLike, where: Any = None) -> tuple[decoder.Params, Model]:
    """(float32 parameters, settings) of a folder with config.json and safetensors, in one file or in indexed shards.

    Args:
        where: tree of shardings like the parameters (see from_hf); None for the first device.

    Raises:
        ValueError: no weights; a tensor missing, unexpected or of another shape; a tied head that differs from the
            embedding.
    """
    root = pathlib.Path(folder)
    settings = settings_from_config(read_config(root))
    index = root / INDEX_NAME
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif (root / SINGLE_NAME).is_file():
        with safetensors.safe_open(root / SINGLE_NAME, framework="numpy") as single:
            files = dict.fromkeys(single.keys(), SINGLE_NAME)
    else:
        raise ValueError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}: convert its weights to safetensors")
    opened = {name: safetensors.safe_open(root / name, framework="numpy") for name in sorted(set(files.values()))}
    known = hf_shapes(settings)
    extra = sorted(name for name in files if name not in known and not name.endswith("rotary_emb.inv_freq"))
    if extra == ["lm_head.weight"] and settings.tie_embeddings:
        head, table = (opened[files[n]].get_tensor(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if not np.array_equal(head, table):
            raise ValueError(
                "lm_head.weight differs from the embedding though tie_word_embeddings is true: set it false"
            )
    elif extra:
        raise ValueError(f"{folder} holds tensors that a {settings.family} model has not: {extra[:4]}")
    return from_hf(lambda name: _Stored(opened[files[name]], name), settings, where=where), settings


def _shards(arrays: Mapping[str, np.ndarray], limit: int) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for name in sorted(arrays):
        if used and used + arrays[name].nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = arrays[name]
        used += arrays[name].nbytes
    return shards


def save_folder(
    params: decoder.Params,
    settings: Model,
    folder: str | os.PathLike,
    *,
    dtype: Dtype = "float32",
    ids: SpecialIds = SpecialIds(),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write safetensors, generation_config.json and (last, so that it marks a complete folder) config.json.

    Args:
        dtype: dtype of the stored weights.
        ids: special ids of the tokenizer that belongs to the weights.
        shard_bytes: largest file; more weights are split and indexed.

    Raises:
        ValueError: the parameters are not those of `settings`, or the dtype is unknown.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype = {dtype!r}: export as 'float32' or 'bfloat16'")
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    arrays = {name: array.astype(jnp.dtype(dtype)) for name, array in to_hf(params, settings).items()}
    shards = _shards(arrays, shard_bytes)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        safetensors.numpy.save_file(shard, root / f"{name}.partial", metadata={"format": "pt"})
        (root / f"{name}.partial").chmod(0o644)  # the library makes files that only their owner can read
        os.replace(root / f"{name}.partial", root / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(array.nbytes for array in arrays.values())
        write_json(root / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(root / "generation_config.json", {"do_sample": True, "temperature": 1.0} | id_fields(ids))
    write_json(root / "config.json", config_from_settings(settings, ids, dtype=dtype))


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a JSON file in one step, so that no reader ever sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
