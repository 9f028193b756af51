"""Publish parameters as a committed version of the weight store.

Order: tensors into a temporary folder, the manifest last, then one rename: the transaction. A trainer killed at any
point leaves either a whole version or a temporary folder that the next start removes.

Every process of the trainer calls `publish` and writes the shards that lie on its own devices, each into a database of
its own; the first process gathers the checksums and commits. No process ever holds a parameter whole that it does not
hold anyway: shards are turned to Hugging Face's orientation and rounded on their device, then written chunk by chunk,
with about BATCH_BYTES waiting for each of two commits.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from rstar2_jax.model import hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import manifest as manifests

BATCH_BYTES = 256 * 2**20
OTHERS_S = 900.0  # limit on the wait for other processes of the trainer
_POLL_S = 0.05
_THREADS = max(2, min(8, os.cpu_count() or 1))  # copies and checksums, which release the interpreter
_PART = "part-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A parameter as it will be stored, and the shards of it that this process writes: (place in it, its values)."""

    name: str
    entry: manifests.Entry
    turned: bool
    shards: tuple[tuple[manifests.Box, Any], ...]

    def chunks(self) -> Iterator[list[tuple[int, manifests.Box, np.ndarray]]]:
        """(index, place in the tensor, values) of the chunks of each shard of this process, fetched one by one."""
        for place, values in self.shards:
            split = _fetched(values, self.turned, self.entry)
            shape = split.shape[: len(place)]
            inside = zip(self.entry.covering(place), np.ndindex(*shape), strict=True)
            yield [(index, self.entry.box(index), split[at]) for index, at in inside]


_Part = dict[str, dict[int, int]]  # tensor -> chunk -> checksum


def publish(
    params: Any,
    model: Model,
    root: str | pathlib.Path,
    version: int,
    *,
    dtype: str = "float32",
    keep: int = 2,
    in_use: Collection[int] = (),
) -> manifests.Manifest:
    """Commit params as `version` and return its manifest; the same content again is a no-op.

    Args:
        params: the decoder's tree, on devices (sharded over any processes) or on the host.
        root: folder of the store, the same for every process; made when missing.
        version: the optimizer step that made the weights, 0 or more.
        dtype: `float32` or `bfloat16`, as stored.
        keep: newest versions that stay; older ones are deleted.
        in_use: older versions that stay as well (those that an engine still reports).

    Raises:
        ValueError: the version is committed with other content (see `prepare`), or dtype or keep is not usable.
        TimeoutError: another process did not write its part; names it.
    """
    if dtype not in manifests.DTYPES:
        raise ValueError(f"dtype = {dtype!r}: weights are published as {' or '.join(manifests.DTYPES)}")
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the version that is published must stay")
    tensors = _tensors(params, model, dtype)
    committed = manifests.committed_versions(root)
    folder = manifests.version_folder(root, version)
    if version in committed:
        return _same(folder, tensors)
    parent = max((v for v in committed if v < version), default=-1)
    process, processes = jax.process_index(), jax.process_count()
    temporary = folder.parent / f"{manifests.WRITING}{folder.name}-{os.getpid() if processes == 1 else 'all'}"
    if processes == 1 and temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True, exist_ok=True)
    part = _write(temporary, tensors, process)
    if process:
        _leave_part(temporary, process, part)
        _wait(lambda: (folder / manifests.FILE).is_file(), f"process 0 to commit {folder}")
        return manifests.read(folder)
    parts = {0: part} | {n: _other_part(temporary, n) for n in range(1, processes)}
    new = manifests.Manifest(version=version, parent=parent, tensors=_entries(tensors, parts))
    manifests.write(temporary, new)
    temporary.rename(folder)
    for old in [v for v in sorted({*committed, version})[:-keep] if v not in in_use and v != version]:
        _delete(manifests.version_folder(root, old))
    return new


def prepare(root: str | pathlib.Path, newest: int) -> list[int]:
    """Make the store ready for a trainer that starts at step `newest`; returns the versions that were removed.

    Leftovers of a killed trainer go, and so do versions above `newest`: they belong to steps that will be done again.
    For a fresh run `newest` is -1.
    """
    folder = pathlib.Path(root)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in list(folder.iterdir()):
        if entry.name.startswith((manifests.WRITING, manifests.DELETING)):
            shutil.rmtree(entry)
    removed = [version for version in manifests.committed_versions(folder) if version > newest]
    for version in removed:
        _delete(manifests.version_folder(folder, version))
    return removed


def _tensors(params: Any, model: Model, dtype: str) -> list[_Tensor]:
    """Every parameter with its shards here. Raises ValueError where they are not those of the model."""
    tensors, itemsize = [], 2 if dtype == "bfloat16" else 4
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = hf.hf_name("/".join(entry.key for entry in path))
        turned = path[-1].key == "kernel"
        held, shards = _shards(leaf, turned)
        shape = tuple(leaf.shape)[::-1] if turned else tuple(leaf.shape)
        chunks = manifests.chunk_shape(shape, itemsize, manifests.cut_axis(name), held)
        entry = manifests.Entry(shape=shape, dtype=dtype, chunks=chunks, checksums=())
        tensors.append(_Tensor(name=name, entry=entry, turned=turned, shards=shards))
    hf.check_shapes({tensor.name: tensor.entry.shape for tensor in tensors}, model)
    return tensors


def _shards(leaf: Any, turned: bool) -> tuple[tuple[int, ...], tuple[tuple[manifests.Box, Any], ...]]:
    """(shape of a shard, those that this process writes), in the store's orientation; each is one process's alone."""
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        shape = array.shape[::-1] if turned else array.shape
        return shape, ((manifests.whole(shape), array),)
    flip = -1 if turned else 1
    mine = []
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            box = [slice(*index.indices(n)[:2]) for index, n in zip(shard.index, leaf.shape, strict=True)]
            mine.append((tuple(box[::flip]), shard.data))
    return tuple(leaf.sharding.shard_shape(leaf.shape)[::flip]), tuple(mine)


def _fetched(values: Any, turned: bool, entry: manifests.Entry) -> np.ndarray:
    """A shard on the host, turned, rounded and cut into chunks (grid's axes, then a chunk's), where it lies."""
    if not isinstance(values, jax.Array):
        return _stored_form(np.asarray(values), turned, entry.dtype, entry.chunks)
    if turned or values.dtype.name != entry.dtype or math.prod(entry.grid[1:]) > 1:
        return np.asarray(_on_device(values, turned, entry.dtype, entry.chunks))
    return _stored_form(np.asarray(values), turned, entry.dtype, entry.chunks)


def _stored_form(values: Any, turned: bool, dtype: str, chunks: tuple[int, ...]) -> Any:
    # One reshape and one transposition: two in a row would each take its time.
    axes = range(len(chunks))
    held = chunks[::-1] if turned else chunks
    split = values.reshape([n for size, chunk in zip(values.shape, held, strict=True) for n in (size // chunk, chunk)])
    order = axes[::-1] if turned else axes
    turned_split = split.transpose([2 * axis for axis in order] + [2 * axis + 1 for axis in order])
    return turned_split.astype(jnp.dtype(dtype), copy=False)


_on_device = jax.jit(_stored_form, static_argnums=(1, 2, 3))


def _proved(
    tensors: list[_Tensor], checksum: Callable[[np.ndarray], int] = manifests.checksum
) -> Iterator[tuple[_Tensor, int, manifests.Box, np.ndarray, int]]:
    """(tensor, chunk, place, contiguous values, checksum) of every chunk of this process.

    A shard is proved while the next one is fetched: here, since memory that other threads take stays theirs.
    """

    def made(values: np.ndarray) -> tuple[np.ndarray, int]:
        values = np.ascontiguousarray(values)
        return values, checksum(values)

    ahead: collections.deque[Any] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for tensor in tensors:
            for shard in tensor.chunks():
                before = len(ahead)
                ahead.extend((tensor, index, box, threads.submit(made, values)) for index, box, values in shard)
                for _ in range(before):
                    *head, future = ahead.popleft()
                    yield (*head, *future.result())
        while ahead:
            *head, future = ahead.popleft()
            yield (*head, *future.result())


def _write(folder: pathlib.Path, tensors: list[_Tensor], writer: int) -> _Part:
    """Write the chunks of this process; returns their checksums."""
    # One context: OCDBT merges writes only within one. Nothing is synced: a version that a power cut tears fails its
    # checksums.
    context = ts.Context({"file_io_sync": False})
    mine = [tensor for tensor in tensors if tensor.shards]
    specs = {tensor.name: manifests.array_spec(folder, tensor.name, tensor.entry, writer) for tensor in mine}
    part: _Part = {tensor.name: {} for tensor in mine}
    commits: collections.deque[Any] = collections.deque()
    with ts.Transaction() as metadata:
        _opened(specs, create=True, open=False, context=context, transaction=metadata)
    arrays = _opened(specs, open=True, context=context)
    transaction, writes, waiting = ts.Transaction(), [], 0
    for tensor, index, box, values, checksum in _proved(mine):
        part[tensor.name][index] = checksum
        array = arrays[tensor.name].with_transaction(transaction)
        writes.append(array[box].write(values, can_reference_source_data_indefinitely=True))
        waiting += values.nbytes
        if waiting >= BATCH_BYTES:
            commits.append(_commit(transaction, writes))
            if len(commits) > 1:
                commits.popleft().result()
            transaction, writes, waiting = ts.Transaction(), [], 0
    commits.append(_commit(transaction, writes))
    for commit in commits:
        commit.result()
    return part


def _opened(specs: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The arrays of all tensors."""
    opening = {name: ts.open(spec, **how) for name, spec in specs.items()}
    return {name: array.result() for name, array in opening.items()}


def _commit(transaction: ts.Transaction, writes: list[Any]) -> Any:
    # A write whose future is dropped is cancelled without a word: every one is waited for before the commit.
    for write in writes:
        write.copy.result()
    return transaction.commit_async()


def _entries(tensors: list[_Tensor], parts: dict[int, _Part]) -> dict[str, manifests.Entry]:
    """Entries with the checksum and the writer of every chunk. Raises ValueError where nobody wrote one."""
    entries = {}
    for tensor in tensors:
        written = {i: (found, n) for n, part in parts.items() for i, found in part.get(tensor.name, {}).items()}
        count = int(np.prod(tensor.entry.grid, dtype=np.int64))
        if len(written) != count:
            raise ValueError(f"{tensor.name}: {len(written)} of its {count} chunks were written by any process")
        checksums, writers = zip(*(written[i] for i in range(count)), strict=True)
        single = set(writers) == {0}
        entries[tensor.name] = dataclasses.replace(tensor.entry, checksums=checksums, writers=() if single else writers)
    return entries


def _same(folder: pathlib.Path, tensors: list[_Tensor]) -> manifests.Manifest:
    """The manifest of a committed version that holds these tensors. Raises ValueError where it holds others."""
    found = manifests.read(folder)
    layouts = {tensor.name: (tensor.entry.shape, tensor.entry.dtype, tensor.entry.chunks) for tensor in tensors}
    differs = {name: (entry.shape, entry.dtype, entry.chunks) for name, entry in found.tensors.items()} != layouts
    if differs or any(
        found.tensors[t.name].checksums[i] != made for t, i, _, _, made in _proved(tensors, found.checksum)
    ):
        raise ValueError(
            f"{folder} is committed with other weights (digest {found.digest[:12]}): call prepare(root, "
            f"newest={found.version - 1}) when a run restarts from an older step"
        )
    return found


def _leave_part(folder: pathlib.Path, process: int, part: _Part) -> None:
    """Tell the first process what this one wrote, in one step."""
    path = folder / f"{_PART}{process}.json"
    path.with_suffix(".partial").write_text(json.dumps(part))
    path.with_suffix(".partial").rename(path)


def _other_part(folder: pathlib.Path, process: int) -> _Part:
    path = folder / f"{_PART}{process}.json"
    _wait(path.is_file, f"process {process} to write its shards into {folder}")
    part = json.loads(path.read_text())
    path.unlink()
    return {name: {int(index): found for index, found in chunks.items()} for name, chunks in part.items()}


def _wait(holds: Any, what: str) -> None:
    end = time.monotonic() + OTHERS_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {OTHERS_S:g} s for {what}")
        time.sleep(_POLL_S)


def _delete(folder: pathlib.Path) -> None:
    """Take a version away in one step for readers, then remove its files."""
    away = folder.parent / f"{manifests.DELETING}{folder.name}-{os.getpid()}"
    if away.exists():
        shutil.rmtree(away)
    folder.rename(away)
    # Each file waits for what of it is on its way to the disk: better at the same time.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(os.unlink, (path for path in away.rglob("*") if path.is_file())))
    shutil.rmtree(away)
