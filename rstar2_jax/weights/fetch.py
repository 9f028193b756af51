"""Fetch a committed version of the weight store as parameters, checked before anything is handed out.

Deliberately not here: reading of slices by tensor-parallel ranks (the manifest's chunks are laid out for it).
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorstore as ts

from rstar2_jax.model import hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import manifest as manifests


class FetchError(RuntimeError):
    """A version is absent, or what the store holds is not what its manifest or the model says."""


def latest_version(root: str | pathlib.Path) -> int | None:
    """The newest committed version of a store, None where there is none."""
    return max(manifests.committed_versions(root), default=None)


def fetch(root: str | pathlib.Path, version: int, model: Model, *, dtype: str = "float32") -> Any:
    """The parameters of a committed version as the decoder's tree, on the default device.

    Names, shapes and dtypes are checked against the model before a tensor is read, and every tensor's checksum before
    any of them is returned.

    Args:
        dtype: dtype of the returned arrays, whatever the store holds.

    Raises:
        FetchError: names what is absent, torn or of the wrong shape.
    """
    manifest = _read_manifest(root, version)
    _check_against_model(manifest, model)
    tensors = _read_tensors(manifests.version_folder(root, version), manifest)
    return hf.from_hf(tensors, model, dtype=dtype)


def _read_manifest(root: str | pathlib.Path, version: int) -> manifests.Manifest:
    committed = manifests.committed_versions(root)
    if version not in committed:
        raise FetchError(f"version {version} is not in the weight store {root}: it holds {committed or 'no version'}")
    try:
        manifest = manifests.read(manifests.version_folder(root, version))
    except (ValueError, OSError) as error:
        raise FetchError(f"version {version} of {root}: {error}") from error
    if manifest.version != version:
        raise FetchError(f"version {version} of {root}: its manifest says version {manifest.version}")
    return manifest


def _check_against_model(manifest: manifests.Manifest, model: Model) -> None:
    expected, found = hf.hf_shapes(model), manifest.tensors
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise FetchError(
            f"version {manifest.version} does not hold this model: missing {missing[:3]} ({len(missing)} in all), "
            f"unknown {extra[:3]} ({len(extra)} in all)"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise FetchError(f"version {manifest.version}: {name} is {found[name].shape}, the model needs {shape}")
        if found[name].dtype not in ("float32", "bfloat16"):
            raise FetchError(f"version {manifest.version}: {name} has dtype {found[name].dtype}")


def _read_tensors(folder: pathlib.Path, manifest: manifests.Manifest) -> dict[str, np.ndarray]:
    # One context for one call: tensors share the database's pages, and nothing cached outlives a deleted version.
    context, name = ts.Context(), ""
    try:
        opened, reads = {}, {}
        for name, entry in manifest.tensors.items():
            opened[name] = ts.open(manifests.array_spec(folder, name, entry), open=True, context=context)
        for name, store in opened.items():
            reads[name] = store.result().read()
        tensors = {}
        for name, read in reads.items():
            tensors[name] = read.result()
    except (ValueError, OSError, RuntimeError) as error:
        raise FetchError(f"version {manifest.version}: tensor {name} cannot be read: {error}") from error
    for name, array in tensors.items():
        if manifests.checksum(array) != manifest.tensors[name].crc32:
            raise FetchError(f"version {manifest.version}: tensor {name} does not match its checksum")
    return tensors
