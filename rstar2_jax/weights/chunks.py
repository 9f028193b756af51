"""Reading of boxes of tensors out of a committed version: whole chunks, each held to its checksum, in bounded memory.

Both readers of the store use it: fetch.py for whole tensors, sglang_loader.py for the slices of one tensor-parallel
rank. Everything is opened before anything is read, so that an absent tensor or other metadata is known first.

Deliberately not here: what a model needs of a version, and any import of JAX or torch.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from rstar2_jax.weights import manifest as manifests

WINDOW_BYTES = 256 * 2**20  # of tensors that are read ahead of the one that is handed out
_THREADS = max(2, min(8, os.cpu_count() or 1))  # checksums and copies, which release the interpreter
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs", "overlay"))


class StoreError(RuntimeError):
    """What the store holds is absent, torn or not what its manifest says."""


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
        # One context for one reader: tensors share the database's pages, and nothing cached outlives a deleted version.
        context = ts.Context({"file_io_mode": {"mode": "memmap" if is_local(folder) else "default"}})
        opening, self._arrays = {}, {}
        name = ""
        try:
            for name, entry in manifest.tensors.items():
                for writer in sorted(set(entry.writers) or {0}):
                    spec = manifests.array_spec(folder, name, entry, writer)
                    opening[name, writer] = ts.open(spec, open=True, context=context)
            for (name, writer), future in opening.items():
                self._arrays[name, writer] = future.result()
        except (ValueError, OSError, RuntimeError) as error:
            raise StoreError(f"version {manifest.version}: tensor {name} cannot be opened: {error}") from error

    def read(self, wanted: Iterable[tuple[str, manifests.Box]]) -> Iterator[tuple[str, manifests.Box, np.ndarray]]:
        """(name, box, array) of each box wanted, in that order; an array comes once all its chunks are proved.

        Raises:
            StoreError: a chunk cannot be read, or differs from its checksum.
        """
        pending: collections.deque[_Pending] = collections.deque()
        ahead = 0
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            try:
                for name, box in wanted:
                    pending.append(self._start(threads, name, box))
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

    def _start(self, threads: concurrent.futures.Executor, name: str, box: manifests.Box) -> _Pending:
        entry = self.manifest.tensors[name]
        array = np.empty([s.stop - s.start for s in box], self._arrays[name, entry.writer(0)].dtype.numpy_dtype)
        futures, nbytes = [], 0
        for index in entry.covering(box):
            place = entry.box(index)
            stored = self._arrays[name, entry.writer(index)][place]
            nbytes += entry.itemsize * int(np.prod([s.stop - s.start for s in place], dtype=np.int64))
            futures.append(threads.submit(self._prove, stored, entry.checksums[index], place, box, array))
        self.bytes_read += nbytes
        return _Pending(name, box, array, futures, nbytes)

    def _finish(self, pending: _Pending) -> tuple[str, manifests.Box, np.ndarray]:
        where = f"version {self.manifest.version}: tensor {pending.name}"
        for future in pending.futures:
            try:
                proved = future.result()
            except (ValueError, OSError, RuntimeError) as error:
                raise StoreError(f"{where} cannot be read: {error}") from error
            if not proved:
                raise StoreError(f"{where} does not match its checksum")
        return pending.name, pending.box, pending.array

    def _prove(self, stored: Any, checksum: int, place: manifests.Box, box: manifests.Box, into: np.ndarray) -> bool:
        """Put a chunk's share of a box where it belongs; False where the chunk differs from its checksum."""
        common = [slice(max(p.start, b.start), min(p.stop, b.stop)) for p, b in zip(place, box, strict=True)]
        target = into[tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, box, strict=True))]
        # Started only here, so that no more than _THREADS chunks are on their way.
        if tuple(common) == place:  # without a copy between the file's pages and the box
            ts.array(target).write(stored).result()
            return self.manifest.checksum(target) == checksum
        chunk = stored.read().result()
        target[...] = chunk[
            tuple(slice(c.start - p.start, c.stop - p.start) for c, p in zip(common, place, strict=True))
        ]
        return self.manifest.checksum(chunk) == checksum


class _Pending:
    """A box on its way."""

    def __init__(self, name: str, box: manifests.Box, array: np.ndarray, futures: list[Any], nbytes: int) -> None:
        self.name, self.box, self.array, self.futures, self.nbytes = name, box, array, futures, nbytes


def is_local(folder: pathlib.Path) -> bool:
    """Whether files in a folder can be mapped: on a disk of this machine, a page that was there stays there.

    On a network's file system a mapped file that its server forgets kills the process; a read of it is only an error.
    """
    try:
        device = folder.stat().st_dev
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {fields[fields.index("-") + 1] for fields in map(str.split, mounts) if fields[2] == number}
    return bool(kinds) and kinds <= _LOCAL
