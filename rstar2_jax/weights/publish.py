"""Publish parameters as a committed version of the weight store.

Order: tensors into a temporary folder (one TensorStore transaction), the manifest last, then one rename. A trainer
killed at any point leaves either a whole version or a temporary folder that the next start removes.

Deliberately not here: sharded writing by several hosts.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from rstar2_jax.model import hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import manifest as manifests

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CONTEXT = ts.Context()  # shared by all tensors: OCDBT merges writes only within one context


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
        params: the decoder's tree, on device or host.
        root: folder of the store; made when missing.
        version: the optimizer step that made the weights, 0 or more.
        dtype: `float32` or `bfloat16`, as stored.
        keep: newest versions that stay; older ones are deleted.
        in_use: older versions that stay as well (those that an engine still reports).

    Raises:
        ValueError: the version is committed with other content (see `prepare`), or dtype or keep is not usable.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype = {dtype!r}: weights are published as {' or '.join(_DTYPES)}")
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the version that is published must stay")
    arrays = {name: np.ascontiguousarray(a, _DTYPES[dtype]) for name, a in hf.to_hf(params, model).items()}
    committed = manifests.committed_versions(root)
    parent = max((v for v in committed if v < version), default=-1)
    new = manifests.Manifest(version=version, parent=parent, tensors={n: _entry(a) for n, a in arrays.items()})
    folder = manifests.version_folder(root, version)
    if version in committed:
        found = manifests.read(folder)
        if found.digest != new.digest:
            raise ValueError(
                f"{folder} is committed with other weights (digest {found.digest[:12]}, now {new.digest[:12]}): "
                f"call prepare(root, newest={version - 1}) when a run restarts from an older step"
            )
        return found
    _commit(folder, arrays, new)
    stale = [v for v in sorted({*committed, version})[:-keep] if v not in in_use and v != version]
    for old in stale:
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


def _entry(array: np.ndarray) -> manifests.Entry:
    return manifests.Entry(
        shape=array.shape,
        dtype=array.dtype.name,
        chunks=manifests.chunk_shape(array.shape, array.dtype.itemsize),
        crc32=manifests.checksum(array),
    )


def _commit(folder: pathlib.Path, arrays: dict[str, np.ndarray], manifest: manifests.Manifest) -> None:
    temporary = folder.parent / f"{manifests.WRITING}{folder.name}-{os.getpid()}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    _write_tensors(temporary, arrays, manifest)
    manifests.write(temporary, manifest)
    temporary.rename(folder)


def _write_tensors(folder: pathlib.Path, arrays: dict[str, np.ndarray], manifest: manifests.Manifest) -> None:
    with ts.Transaction() as transaction:
        opened = []
        for name, entry in manifest.tensors.items():
            spec = manifests.array_spec(folder, name, entry)
            opened.append((name, ts.open(spec, create=True, open=False, context=_CONTEXT, transaction=transaction)))
        # A write whose future is dropped is cancelled without a word: every one is waited for before the commit.
        writes = [s.result().write(arrays[name], can_reference_source_data_indefinitely=True) for name, s in opened]
        for write in writes:
            write.copy.result()


def _delete(folder: pathlib.Path) -> None:
    """Take a version away in one step for readers, then remove its files."""
    away = folder.parent / f"{manifests.DELETING}{folder.name}-{os.getpid()}"
    if away.exists():
        shutil.rmtree(away)
    folder.rename(away)
    shutil.rmtree(away)
