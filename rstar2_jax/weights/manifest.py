"""The layout of a weight store and the manifest that makes a version valid.

    root/0000000012/manifest.json    names, shapes, dtypes, chunks, checksums, version, parent: written last
    root/0000000012/tensors/0/       one OCDBT database for each process of the trainer, here the first's; inside it one
                                     zarr3 array for each tensor, and of that the chunks that this process wrote
    root/.writing-*, root/.deleting-*   never looked at by readers

A version folder comes into being by one rename and goes away by one rename, so a reader sees it whole or not at all.
Tensors carry Hugging Face names and orientation: any loader of that format can read the store through the manifest.
Chunks fall onto the cuts of tensor-parallel readers, so that a rank reads its own part and can check it alone.

Deliberately not here: writing (publish.py) and reading (chunks.py) of tensors, and any import of JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

FORMAT = "rstar2-weights/3"
OLDER = "rstar2-weights/2"  # read as well: its checksums are plain CRC-32s
FILE = "manifest.json"
TENSORS = "tensors"
WRITING, DELETING = ".writing-", ".deleting-"
MAX_CHUNK_BYTES = 64 * 2**20
MIN_CHUNK_BYTES = 32 * 2**10  # smaller ones cost more in names than they save in reading
READER_CUTS = 8  # tensor-parallel readers, at most, that each read only their own part
DTYPES = ("float32", "bfloat16")
_LINE, _LINES = 1024, 128  # words of a line, lines of a block
BLOCK_BYTES = 8 * _LINE * _LINES  # what a checksum takes at a time: it stays in a core's cache
_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")  # cut along their inputs; all others along their first axis

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor.

    Args:
        shape, dtype: of the tensor, dtype by name.
        chunks: shape of a zarr chunk; those at the upper ends may be cut off by the shape.
        checksums: of the C-ordered little-endian bytes of each chunk (`checksum`), in C order of the grid.
        writers: process of the trainer that wrote each chunk; empty where the first wrote all.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    checksums: tuple[int, ...]
    writers: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-n // chunk) for n, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return 2 if self.dtype == "bfloat16" else 4

    def writer(self, index: int) -> int:
        """Process that wrote chunk `index`."""
        return self.writers[index] if self.writers else 0

    def box(self, index: int) -> Box:
        """Place of chunk `index` in the tensor."""
        at = np.unravel_index(index, self.grid) if self.grid else ()
        return tuple(
            slice(int(i) * chunk, min((int(i) + 1) * chunk, n))
            for i, chunk, n in zip(at, self.chunks, self.shape, strict=True)
        )

    def key(self, name: str, index: int) -> str:
        """What chunk `index` of the tensor of this name is called in its database."""
        at = np.unravel_index(index, self.grid) if self.grid else ()
        return "/".join((name, "c", *map(str, at)))

    def covering(self, box: Box) -> Iterator[int]:
        """Indices of the chunks that hold some of a box."""
        ranges = [range(s.start // c, -(-s.stop // c)) for s, c in zip(box, self.chunks, strict=True)]
        for at in itertools.product(*ranges):
            yield int(np.ravel_multi_index(at, self.grid)) if at else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a committed version holds. `parent` is the version published before it, -1 for the first."""

    version: int
    parent: int
    tensors: Mapping[str, Entry]
    format: str = FORMAT

    def checksum(self, array: np.ndarray) -> int:
        """Checksum of a chunk as this version's writer made it."""
        return checksum(array, self.extended)

    def extended(self, crc: int, block: np.ndarray) -> int:
        """That of some bytes, given the checksum of those before the last block (`extended`)."""
        return extended(crc, block) if self.format == FORMAT else zlib.crc32(block.data, crc)

    @property
    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, chunks, checksums: equal when content and layout are (up to 32 bits)."""
        rows = [(name, e.shape, e.dtype, e.chunks, e.checksums) for name, e in sorted(self.tensors.items())]
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


def checksum(array: np.ndarray, extend: Callable[[int, np.ndarray], int] | None = None) -> int:
    """Checksum over the bytes of an array in C order: block after block."""
    data, crc = as_bytes(np.ascontiguousarray(array)), 0
    for at in range(0, data.size, BLOCK_BYTES):
        crc = (extend or extended)(crc, data[at : at + BLOCK_BYTES])
    return crc


def extended(crc: int, block: np.ndarray) -> int:
    """CRC-32 of sums over bytes, at a third of a plain CRC-32's time, given the one of the bytes before this block.

    Every block but the last has BLOCK_BYTES: 64-bit words in lines of _LINE words. The CRC takes the sums of columns
    and of lines, modulo 2**64, and at the end the bytes that fill no line as they are. Sums of columns see any change
    within the length of a line, sums of lines see two that changed places.
    """
    full = block.size - block.size % (8 * _LINE)
    if full:
        lines = block[:full].view("<u8").reshape(-1, _LINE)
        for axis in (0, 1):
            crc = zlib.crc32(np.add.reduce(lines, axis=axis).data, crc)
    return zlib.crc32(block[full:].data, crc)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, n) for n in shape)


def cut_axis(name: str) -> int:
    """Axis along which tensor-parallel readers cut a tensor of this Hugging Face name."""
    return 1 if name.endswith(_ROW_PARALLEL) else 0


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, axis: int = 0, shard: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Chunks of at most MAX_CHUNK_BYTES, cut along one axis into 2, 4, 8... equal parts where it divides.

    At least READER_CUTS parts where none is smaller than MIN_CHUNK_BYTES: powers of two, so that chunks fall onto the
    cuts of tensor-parallel readers.

    Args:
        axis: along which the readers cut.
        shard: shape of the shards in which the writers hold the tensor; no chunk then lies in two of them.
    """
    if not shape or 0 in shape:
        return tuple(max(n, 1) for n in shape)
    chunks, parts = list(shape), 1
    size = itemsize * math.prod(shape)
    while chunks[axis] % 2 == 0 and (size > MAX_CHUNK_BYTES or (parts < READER_CUTS and size // 2 >= MIN_CHUNK_BYTES)):
        chunks[axis], size, parts = chunks[axis] // 2, size // 2, parts * 2
    if shard is not None:
        chunks = [math.gcd(chunk, held) for chunk, held in zip(chunks, shard, strict=True)]
    return tuple(chunks)


def database(folder: pathlib.Path, writer: int) -> pathlib.Path:
    """Where one process of the trainer keeps the chunks that it wrote of a version."""
    return folder / TENSORS / str(writer)


def array_spec(folder: pathlib.Path, name: str, entry: Entry, writer: int = 0) -> dict[str, Any]:
    """TensorStore spec of one tensor as one process wrote it; it states the metadata: a mismatch is an error."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{database(folder, writer).absolute()}/", "path": f"{name}/"},
        "metadata": {
            "data_type": entry.dtype,
            "shape": list(entry.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(entry.chunks)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose tensors are complete."""
    text = json.dumps({"digest": manifest.digest, **dataclasses.asdict(manifest)}, indent=1)
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
        if raw["format"] not in (FORMAT, OLDER):
            raise ValueError(f"{path}: format {raw['format']!r}, this reader knows {FORMAT!r}")
        tensors = {
            name: Entry(
                shape=tuple(e["shape"]),
                dtype=e["dtype"],
                chunks=tuple(e["chunks"]),
                checksums=tuple(e["checksums" if raw["format"] == FORMAT else "crc32"]),
                writers=tuple(e["writers"]),
            )
            for name, e in raw["tensors"].items()
        }
        manifest = Manifest(version=raw["version"], parent=raw["parent"], tensors=tensors, format=raw["format"])
        lengths = {name: math.prod(e.grid) - len(e.checksums) for name, e in tensors.items()}
        if any(lengths.values()):
            raise ValueError(f"{path}: checksums are missing; publish this version again")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a weight manifest ({error!r}); publish this version again") from error
    if raw.get("digest") != manifest.digest:
        raise ValueError(f"{path}: its digest does not match its entries; publish this version again")
    return manifest
