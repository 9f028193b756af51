"""Reading of boxes of tensors out of a committed version: whole chunks, each held to its checksum, in bounded memory.

Both readers of the store use it: fetch.py for whole tensors, sglang_loader.py for the slices of one tensor-parallel
rank. Everything is opened before anything is read, so that an absent tensor or other metadata is known first.

A chunk is read block by block into the place where it is wanted, and each block is summed while a core's cache holds
it. Files are read and never mapped: on a network's file system a mapped file that its server forgets kills the process.

Deliberately not here: what a model needs of a version, and any import of JAX or torch.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import tensorstore as ts

from rstar2_jax.weights import manifest as manifests
from rstar2_jax.weights import places

WINDOW_BYTES = 256 * 2**20  # of tensors that are read ahead of the one that is handed out
_THREADS = max(2, min(8, os.cpu_count() or 1))  # reads and checksums, which release the interpreter


class StoreError(RuntimeError):
    """What the store holds is absent, torn or not what its manifest says."""


class Memory:
    """Arrays that outlive a reading: the next one fills them anew, which costs no fresh pages.

    Whoever reads into them must be the only one who still uses them.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], np.ndarray] = {}

    def array(self, name: str, box: manifests.Box, dtype: np.dtype) -> np.ndarray:
        """An array for a box, whatever it holds: the one that was given before, unless it is to be another."""
        key, shape = (name, str(box)), tuple(s.stop - s.start for s in box)
        array = self._arrays.get(key)
        if array is None or array.shape != shape or array.dtype != dtype:
            array = self._arrays[key] = np.empty(shape, dtype)
        return array

    def keep(self, wanted: Iterable[tuple[str, manifests.Box]]) -> None:
        """Let go of all arrays but those of these boxes."""
        keys = {(name, str(box)) for name, box in wanted}
        self._arrays = {key: array for key, array in self._arrays.items() if key in keys}


class Reader:
    """An open version.

    Args:
        folder: of the version.
        manifest: that was read from it.

    Raises:
        StoreError: a tensor is absent, or its metadata differ from the manifest's.
    """

    def __init__(self, folder: pathlib.Path, manifest: manifests.Manifest) -> None:
        self.manifest = manifest
        self.bytes_read = 0
        context = ts.Context()  # one reader's own: nothing cached outlives a deleted version
        opening, self._dtypes, writers = {}, {}, set()
        name = ""
        try:
            for name, entry in manifest.tensors.items():
                for writer in sorted(set(entry.writers) or {0}):
                    writers.add(writer)
                    spec = manifests.array_spec(folder, name, entry, writer)
                    opening[name, writer] = ts.open(spec, open=True, context=context)
            for (name, _), future in opening.items():
                self._dtypes[name] = future.result().dtype.numpy_dtype
            self._places = {writer: places.index(manifests.database(folder, writer)) for writer in writers}
        except (ValueError, OSError, RuntimeError) as error:
            raise StoreError(f"version {manifest.version}: tensor {name} cannot be opened: {error}") from error

    def read(
        self, wanted: Iterable[tuple[str, manifests.Box]], memory: Memory | None = None
    ) -> Iterator[tuple[str, manifests.Box, np.ndarray]]:
        """(name, box, array) of each box wanted, in that order; an array comes once all its chunks are proved.

        Args:
            memory: where the arrays come from; without it each is a new one.

        Raises:
            StoreError: a chunk cannot be read, or differs from its checksum.
        """
        pending: collections.deque[_Pending] = collections.deque()
        ahead = 0
        with contextlib.ExitStack() as stack:
            files = self._opened(stack)
            threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(_THREADS))
            try:
                for name, box in wanted:
                    array = (memory or Memory()).array(name, box, self._dtypes[name])
                    pending.append(self._start(threads, files, name, box, array))
                    ahead += pending[-1].nbytes
                    while ahead > WINDOW_BYTES and pending:
                        ahead -= pending[0].nbytes
                        yield self._finish(pending.popleft())
                while pending:
                    yield self._finish(pending.popleft())
            finally:
                for rest in pending:
                    for future in rest.futures:
                        future.cancel()

    def _opened(self, stack: contextlib.ExitStack) -> _Files:
        """Every file, open for as long as the stack is: none can go away in the middle."""
        files = _Files()
        for key, found in itertools.chain.from_iterable(index.items() for index in self._places.values()):
            if not isinstance(found, places.Place) or found.path in files.numbers:
                continue
            try:
                files.numbers[found.path] = os.open(found.path, os.O_RDONLY)
            except OSError as error:
                name = key.rpartition("/c")[0]
                raise StoreError(f"version {self.manifest.version}: tensor {name} cannot be read: {error}") from error
            stack.callback(os.close, files.numbers[found.path])
        return files

    def _start(
        self, threads: concurrent.futures.Executor, files: _Files, name: str, box: manifests.Box, array: np.ndarray
    ) -> _Pending:
        entry = self.manifest.tensors[name]
        futures = []
        for index in entry.covering(box):
            found = self._places[entry.writer(index)].get(entry.key(name, index))
            chunk = _Chunk(found, entry.chunks, entry.box(index), entry.checksums[index])
            futures.append(threads.submit(self._prove, files, chunk, box, array))
        nbytes = len(futures) * entry.itemsize * math.prod(entry.chunks)
        self.bytes_read += nbytes
        return _Pending(name, box, array, futures, nbytes)

    def _finish(self, pending: _Pending) -> tuple[str, manifests.Box, np.ndarray]:
        where = f"version {self.manifest.version}: tensor {pending.name}"
        for future in pending.futures:
            try:
                proved = future.result()
            except (ValueError, OSError) as error:
                raise StoreError(f"{where} cannot be read: {error}") from error
            if not proved:
                raise StoreError(f"{where} does not match its checksum")
        return pending.name, pending.box, pending.array

    def _prove(self, files: _Files, chunk: _Chunk, box: manifests.Box, into: np.ndarray) -> bool:
        """Put a chunk's share of a box where it belongs; False where the chunk differs from its checksum."""
        common = [slice(max(p.start, b.start), min(p.stop, b.stop)) for p, b in zip(chunk.place, box, strict=True)]
        target = into[(..., *_within(common, box))]
        direct = target.shape == chunk.stored and target.flags.c_contiguous
        size = into.itemsize * math.prod(chunk.stored)
        memory = manifests.as_bytes(target) if direct else files.scratch(size)
        if isinstance(chunk.found, places.Place | bytes) and len(chunk.found) != size:
            raise ValueError(f"a chunk of {size} bytes has {len(chunk.found)}")
        crc = 0
        for at in range(0, size, manifests.BLOCK_BYTES):
            block = memory[at : at + manifests.BLOCK_BYTES]
            files.read(chunk.found, at, block)
            crc = self.manifest.extended(crc, block)
        if direct:
            return crc == chunk.checksum
        bits = np.dtype(f"u{into.itemsize}")  # numpy copies integers faster than numbers that it does not know
        values = memory.view(bits).reshape(chunk.stored)
        target.view(bits)[...] = values[_within(common, chunk.place)]
        whole = values[tuple(slice(0, p.stop - p.start) for p in chunk.place)]  # the shape may cut off a last chunk
        return (crc if whole.size == values.size else self.manifest.checksum(whole)) == chunk.checksum


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to be read: where it lies (None: TensorStore stores no zeros), its shape there, its box of the tensor."""

    found: places.Place | bytes | None
    stored: tuple[int, ...]
    place: manifests.Box
    checksum: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """A box on its way."""

    name: str
    box: manifests.Box
    array: np.ndarray
    futures: list[concurrent.futures.Future[bool]]
    nbytes: int


class _Files:
    """The open files of a reading, by path, and memory for what does not go straight to its place."""

    def __init__(self) -> None:
        self.numbers: dict[pathlib.Path, int] = {}
        self._of_thread = threading.local()

    def scratch(self, size: int) -> np.ndarray:
        """Bytes of this thread's own, the same ones each time."""
        held = getattr(self._of_thread, "bytes", None)
        if held is None or held.size < size:
            held = self._of_thread.bytes = np.empty(size, np.uint8)
        return held[:size]

    def read(self, found: places.Place | bytes | None, at: int, block: np.ndarray) -> None:
        """Fill a block with what lies from byte `at` on of a stored value."""
        if not isinstance(found, places.Place):
            block[...] = 0 if found is None else np.frombuffer(found, np.uint8)[at : at + block.size]
            return
        number, got = self.numbers[found.path], 0
        while got < block.size:
            more = os.preadv(number, [block[got:].data], found.offset + at + got)
            if not more:
                raise OSError(f"{found.path} ends at byte {found.offset + at + got}")
            got += more


def _within(box: Iterable[slice], outer: manifests.Box) -> tuple[slice, ...]:
    """A box as it lies in another one."""
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, outer, strict=True))
