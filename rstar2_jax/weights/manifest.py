"""The layout of a weight store and the manifest that makes a version valid.

    root/0000000012/manifest.json    names, shapes, dtypes, chunks, checksums, version, parent: written last
    root/0000000012/tensors/         one OCDBT database, inside it one zarr3 array for each tensor
    root/.writing-*, root/.deleting-*   never looked at by readers

A version folder comes into being by one rename and goes away by one rename, so a reader sees it whole or not at all.
Tensors carry Hugging Face names and orientation: any loader of that format can read the store through the manifest.

Deliberately not here: writing (publish.py) and reading (fetch.py) of tensors, and any import of JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

FORMAT = "rstar2-weights/1"
FILE = "manifest.json"
TENSORS = "tensors"
WRITING, DELETING = ".writing-", ".deleting-"
MAX_CHUNK_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor: its shape, dtype name, zarr chunk shape and the CRC-32 of its C-ordered little-endian bytes."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a committed version holds. `parent` is the version published before it, -1 for the first."""

    version: int
    parent: int
    tensors: Mapping[str, Entry]

    @property
    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes and checksums: equal exactly when the content is (up to CRC-32)."""
        rows = [(name, e.shape, e.dtype, e.crc32) for name, e in sorted(self.tensors.items())]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def version_folder(root: str | pathlib.Path, version: int) -> pathlib.Path:
    """Folder of a version under root (whether it exists or not)."""
    if version < 0:
        raise ValueError(f"version = {version}: weight versions count from 0")
    return pathlib.Path(root) / f"{version:010d}"


def committed_versions(root: str | pathlib.Path) -> list[int]:
    """Versions that readers may use, in rising order; empty when root does not exist."""
    folder = pathlib.Path(root)
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    return sorted(int(name) for name in names if name.isdecimal() and (folder / name / FILE).is_file())


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the bytes of an array in C order."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of at most MAX_CHUNK_BYTES, cut along the first axis into 2, 4, 8... equal parts where it divides.

    Powers of two, so that chunks fall onto the cuts of tensor-parallel readers.
    """
    if not shape or 0 in shape:
        return tuple(max(n, 1) for n in shape)
    rows, row_bytes = shape[0], itemsize * int(np.prod(shape[1:], dtype=np.int64))
    while rows % 2 == 0 and rows * row_bytes > MAX_CHUNK_BYTES:
        rows //= 2
    return (rows, *shape[1:])


def array_spec(folder: pathlib.Path, name: str, entry: Entry) -> dict[str, Any]:
    """TensorStore spec of one tensor of a version folder; it states the metadata, so that a mismatch is an error."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{folder.absolute()}/{TENSORS}/", "path": f"{name}/"},
        "metadata": {
            "data_type": entry.dtype,
            "shape": list(entry.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(entry.chunks)}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose tensors are complete."""
    text = json.dumps({"format": FORMAT, "digest": manifest.digest, **dataclasses.asdict(manifest)}, indent=1)
    (folder / FILE).write_text(text)


def read(folder: pathlib.Path) -> Manifest:
    """The manifest of a version folder.

    Raises:
        ValueError: it is of another format, torn, or does not carry its own digest.
        OSError: it is not there or cannot be read.
    """
    path = folder / FILE
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"{path}: format {raw['format']!r}, this reader knows {FORMAT!r}")
        tensors = {
            name: Entry(shape=tuple(e["shape"]), dtype=e["dtype"], chunks=tuple(e["chunks"]), crc32=e["crc32"])
            for name, e in raw["tensors"].items()
        }
        manifest = Manifest(version=raw["version"], parent=raw["parent"], tensors=tensors)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a weight manifest ({error!r}); publish this version again") from error
    if raw.get("digest") != manifest.digest:
        raise ValueError(f"{path}: its digest does not match its entries; publish this version again")
    return manifest
