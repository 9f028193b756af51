"""Weights of our store inside an SGLang server: its plug-in (entry point group `sglang.srt.plugins`, 0.5.11 on).

A model path `tensorstore:FOLDER` names a committed version; any other path is none of ours. The order of an update:

1. plan: manifest and all arrays are opened and held against the model's config; then SGLang's own loaders run over
   placeholders that note which slices this rank takes and where they would go. Nothing is written.
2. stage: those slices, no others, are read into host memory, each chunk held to its checksum. The memory stays for
   the next update, since fresh pages cost more than the reading.
3. vote: the ranks tell each other whether all of them have come so far; one failure fails all, since an update that
   only some ranks make is a mixture.
4. load: SGLang's loaders run again, over the staged slices. Nothing is left that could fail.

A failure in 1 to 3 raises before a weight is touched: the server answers 400 and goes on with its old weights.
Two actions of /weights_checker are ours: one runs 1 and 2 ahead of an update, while the server still generates; the
other runs 1 to 3 and then compares instead of writing.

This module runs inside the server and imports neither JAX nor, until it is used, torch or sglang. Deliberately not
here: quantised weights, mixtures of experts, drafts and loaders that compute with what they load are refused by name.
"""

# torch and sglang are there where this runs, and nowhere else.
# pyright: reportMissingImports=false
from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rstar2_jax.weights import chunks
from rstar2_jax.weights import manifest as manifests

SCHEME = "tensorstore:"
VERIFY = "rstar2-verify:"
PREFETCH = "rstar2-prefetch:"
NOT_YET = "still reading"
PROBE = "rstar2-probe"
_HELD, _SPARE = "rstar2_prefetched", "rstar2_spare"  # attributes of the model: what was read ahead, memory not in use
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_LOG = logging.getLogger(__name__)


class LoadError(RuntimeError):
    """A version cannot be loaded into this model; the weights in use are untouched."""


def register() -> None:
    """Hook the server's loader and its checker; called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_LOADER}._get_weights_iterator", _weights_iterator, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}.Source.init_new", _remember_model, HookType.AROUND)
    HookRegistry.register(_CHECKER, _check, HookType.AROUND)


def _remember_model(original: Callable[..., Any], cls: Any, model_config: Any, model: Any) -> Any:
    """A source of weights that knows the model it is for."""
    source = original(cls, model_config, model)
    source.rstar2_model = model
    return source


def _weights_iterator(original: Callable[..., Any], loader: Any, source: Any, **rest: Any) -> Any:
    """(name, tensor) of every weight: from the store where the path is ours, else as SGLang finds them."""
    path = str(source.model_or_path)
    if not path.startswith(SCHEME):
        return original(loader, source, **rest)
    return _loaded(path.removeprefix(SCHEME), source.rstar2_model)


def _loaded(folder: str, model: Any) -> Iterator[tuple[str, Any]]:
    start = time.monotonic()
    version = _staged(folder, model)
    _LOG.info(
        "rstar2: version %d staged: %d bytes read of %d in the store, waited %.3f s for them",
        version.manifest.version,
        version.reader.bytes_read,
        version.total_bytes,
        time.monotonic() - start,
    )
    return version.loading(model, version.write)


def _check(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """What the checker answers; to an action of ours, nothing where all is well, and an error that says what is not."""
    if action == PROBE:
        return None
    if not action.startswith((PREFETCH, VERIFY)):
        return original(checker, action, *args, **kwargs)
    # Older checkers hold the runner instead of a way to the model.
    model = checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model
    if action.startswith(PREFETCH):
        return _prefetch(action.removeprefix(PREFETCH), model)
    version = _staged(action.removeprefix(VERIFY), model)
    differing: list[str] = []

    def compare() -> None:
        model.load_weights(version.loading(model, functools.partial(version.compare, differing)))
        if differing:
            others = f"{differing[0]} and {len(differing) - 1} more"
            raise LoadError(f"{others} differ from version {version.manifest.version}")

    _together(compare)
    return None


def _prefetch(folder: str, model: Any) -> None:
    """Begin to read a version, or raise while it is being read; return once it lies in host memory on all ranks."""

    def begin() -> None:
        reading = (_prefetched(folder, model) or _begun(folder, model)).reading
        if not reading.done():
            raise LoadError(f"{NOT_YET}: {folder}")
        reading.result()

    try:
        _together(begin)
    except LoadError as error:
        if NOT_YET not in str(error):
            _let_go(model)
        raise


def _let_go(model: Any) -> None:
    """Give up the version that was read ahead; its memory stays for the next one."""
    if hasattr(model, _HELD):
        getattr(model, _HELD).leave(model)
        delattr(model, _HELD)


def _prefetched(folder: str, model: Any) -> _Version | None:
    """The version that was read ahead, if it is the one in this folder, unchanged."""
    version = getattr(model, _HELD, None)
    with contextlib.suppress(ValueError, OSError):  # what is no longer there is opened anew, which says why not
        if version is not None and version.folder == folder and manifests.read(version.path) == version.manifest:
            return version
    return None


def _staged(folder: str, model: Any) -> _Version:
    """A version whose slices for this rank lie in host memory; all ranks have theirs, or all raise."""

    def stage() -> _Version:
        version = _prefetched(folder, model) or _begun(folder, model)
        version.reading.result()
        return version

    try:
        version = _together(stage)
    except LoadError:
        _let_go(model)
        raise
    delattr(model, _HELD)
    return version


def _begun(folder: str, model: Any) -> _Version:
    """A version that is being read, in place of any other that was."""
    _let_go(model)
    version = _Version(folder, model)
    version.plan(model)
    version.begin(model)
    setattr(model, _HELD, version)
    return version


class _Version:
    """An open version that suits a model."""

    def __init__(self, folder: str, model: Any) -> None:
        path = pathlib.Path(folder)
        try:
            self.manifest = manifests.read(path)
        except (ValueError, OSError) as error:
            raise LoadError(f"no committed version: {error}") from error
        if f"{self.manifest.version:010d}" != path.name:
            raise LoadError(f"{folder}: its manifest says version {self.manifest.version}")
        _check_fits(self.manifest, model)
        self.folder, self.path = folder, path
        self.reader = chunks.Reader(path, self.manifest)
        self.total_bytes = sum(e.itemsize * math.prod(e.shape) for e in self.manifest.tensors.values())
        self.reading: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._wanted: dict[Any, tuple[str, manifests.Box]] = {}
        self._staged: dict[Any, np.ndarray] = {}

    def tensors(self, taken: Callable[..., None]) -> Iterator[tuple[str, Any]]:
        """(name, placeholder) of every tensor; `taken(destination, name, box)` runs when a loader copies out of one."""
        placeholder = _placeholder_class()
        for name, entry in self.manifest.tensors.items():
            yield name, placeholder.of(name, entry, manifests.whole(entry.shape), taken)

    def plan(self, model: Any) -> None:
        """Note which boxes the model's own loaders take, and hold them against where they would go."""
        touched: set[int] = set()

        def note(destination: Any, name: str, box: manifests.Box) -> None:
            if tuple(destination.shape) != tuple(s.stop - s.start for s in box):
                raise LoadError(f"{name} {_ranges(box)} is to go into {tuple(destination.shape)}")
            stored, held = self.manifest.tensors[name].dtype, str(destination.dtype).removeprefix("torch.")
            if held != stored:
                raise LoadError(
                    f"{name} is {stored} in the store, the server computes in {held}: publish with dtype={held!r}"
                )
            self._wanted[name, _ranges(box)] = name, box
            touched.add(destination.untyped_storage().data_ptr())

        model.load_weights(self.tensors(note))
        parameters = [(name, p) for name, p in model.named_parameters() if p.numel()]
        missed = [name for name, p in parameters if p.untyped_storage().data_ptr() not in touched]
        if missed:
            raise LoadError(f"version {self.manifest.version} has nothing for {missed[:3]} ({len(missed)} in all)")

    def begin(self, model: Any) -> None:
        """Start to read what was planned; `reading` is done when it lies in host memory: the model's spare one."""
        self._memory = getattr(model, _SPARE, None) or chunks.Memory()
        setattr(model, _SPARE, None)
        self._memory.keep(self._wanted.values())

        def read() -> None:
            for name, box, array in self.reader.read(self._wanted.values(), self._memory):
                self._staged[name, _ranges(box)] = array

        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rstar2-prefetch")
        self.reading = thread.submit(read)
        thread.shutdown(wait=False)

    def loading(self, model: Any, taken: Callable[..., None]) -> Iterator[tuple[str, Any]]:
        """`tensors` of a staged version, with which the model is done at the end."""
        try:
            yield from self.tensors(taken)
        finally:
            self.leave(model)

    def leave(self, model: Any) -> None:
        """Be done with this version: its memory is the model's spare one, unless a thread still reads into it."""
        if self.reading.done():
            setattr(model, _SPARE, self._memory)

    def write(self, destination: Any, name: str, box: manifests.Box) -> None:
        """Copy a staged box to where it goes."""
        destination.copy_(_as_tensor(self._staged[name, _ranges(box)]))

    def compare(self, differing: list[str], destination: Any, name: str, box: manifests.Box) -> None:
        """Note a box that is not, bit for bit, what stands where it goes."""
        import torch

        wanted = _as_tensor(self._staged[name, _ranges(box)])
        integers = {2: torch.int16, 4: torch.int32}[wanted.element_size()]  # bits: -0 is not 0, NaN is itself
        held = destination.detach().to("cpu").contiguous()
        if not torch.equal(held.view(integers), wanted.view(integers)):
            differing.append(f"{name} {_ranges(box)}")


def _together(work: Callable[[], Any]) -> Any:
    """What `work` returns, once it has succeeded on every tensor-parallel rank; else an error on every one."""
    import torch
    from sglang.srt.distributed import get_tp_group

    result, fault = None, ""
    try:
        result = work()
    except Exception as error:  # whatever it is: the other ranks wait for this one's vote
        fault = f"{type(error).__name__}: {error}"
    group = get_tp_group()
    faults: list[str] = [fault]
    if group.world_size > 1:
        faults = [""] * group.world_size
        torch.distributed.all_gather_object(faults, fault, group=group.cpu_group)
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]
    if bad:
        raise LoadError("; ".join(dict.fromkeys(bad)))
    return result


def _ranges(box: manifests.Box) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)


def _as_tensor(array: np.ndarray) -> Any:
    """A torch tensor on the bytes of an array; numpy's bfloat16 is not one that torch knows."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _check_fits(manifest: manifests.Manifest, model: Any) -> None:
    """Raise LoadError unless a version holds exactly the tensors that the server's model has, in their shapes."""
    expected, found = expected_shapes(model.config), manifest.tensors
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise LoadError(
            f"version {manifest.version} does not hold this model: missing {missing[:3]} ({len(missing)} in all), "
            f"unknown {extra[:3]} ({len(extra)} in all)"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise LoadError(f"version {manifest.version}: {name} is {found[name].shape}, the server needs {shape}")
        if found[name].dtype not in manifests.DTYPES:
            raise LoadError(f"version {manifest.version}: {name} has dtype {found[name].dtype}")


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face name with its shape, out of a config of the llama, qwen2 or qwen3 family.

    Raises:
        LoadError: another family.
    """
    family = config.model_type
    if family not in ("llama", "qwen2", "qwen3"):
        raise LoadError(f"model_type = {family!r}: weights of this store are of llama, qwen2 or qwen3")
    d, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or d // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (heads * head_dim, d),
        "self_attn.k_proj.weight": (kv_heads * head_dim, d),
        "self_attn.v_proj.weight": (kv_heads * head_dim, d),
        "self_attn.o_proj.weight": (d, heads * head_dim),
        "mlp.gate_proj.weight": (ffn, d),
        "mlp.up_proj.weight": (ffn, d),
        "mlp.down_proj.weight": (d, ffn),
    }
    if family == "qwen2":
        widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        layer |= {f"self_attn.{kind}_proj.bias": (width,) for kind, width in widths.items()}
    if family == "qwen3":
        layer |= {f"self_attn.{kind}_norm.weight": (head_dim,) for kind in "qk"}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@functools.cache
def _placeholder_class() -> Any:
    """A tensor without values that knows which box of which stored tensor it stands for.

    Loaders may look at its shape, narrow it and copy it into a parameter; anything else is refused.
    """
    import torch

    aten = torch.ops.aten
    same = {aten.detach.default, aten.alias.default}

    class Placeholder(torch.Tensor):
        """Stands for a box of a stored tensor."""

        @classmethod
        def of(cls, name: str, entry: manifests.Entry, box: manifests.Box, taken: Callable[..., None]) -> Any:
            """A placeholder of the box's shape."""
            made = torch.Tensor._make_wrapper_subclass(
                cls, tuple(s.stop - s.start for s in box), dtype=getattr(torch, entry.dtype), device="cpu"
            )
            made.rstar2 = name, entry, box, taken
            return made

        @classmethod
        def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is aten.copy_.default and not isinstance(args[0], cls):
                name, _, box, taken = args[1].rstar2
                taken(args[0], name, box)
                return args[0]
            if op in same:
                return cls.of(*args[0].rstar2)
            if op is aten.slice.Tensor:
                return args[0].narrowed(*args[1:])
            if op is aten.narrow.default:  # so it arrives in inference mode, where torch takes nothing apart
                _, axis, start, length = args
                return args[0].narrowed(axis, start, start + length)
            raise LoadError(f"the server's loader computes {op} of a stored tensor, which is more than to copy it")

        def narrowed(self, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
            """The placeholder of a part along one axis."""
            name, entry, box, taken = self.rstar2
            if step != 1:
                raise LoadError(f"the server's loader takes every {step}th row of {name}")
            offset, length = box[axis].start, box[axis].stop - box[axis].start
            first, last, _ = slice(start, stop).indices(length)
            part = list(box)
            part[axis] = slice(offset + first, offset + max(first, last))
            return self.of(name, entry, tuple(part), taken)

    return Placeholder
