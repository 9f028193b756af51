"""Fetch a committed version of the weight store as parameters, checked before anything is handed out.

Deliberately not here: reading of slices by tensor-parallel ranks (sglang_loader.py).
"""

from __future__ import annotations

import pathlib
from typing import Any

from rstar2_jax.model import hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import chunks
from rstar2_jax.weights import manifest as manifests


class FetchError(RuntimeError):
    """A version is absent, or what the store holds is not what its manifest or the model says."""


def latest_version(root: str | pathlib.Path) -> int | None:
    """The newest committed version of a store, None where there is none."""
    return max(manifests.committed_versions(root), default=None)


def digest(root: str | pathlib.Path, version: int) -> str:
    """What names the content of a committed version: equal exactly when names, shapes, dtypes and checksums are.

    Raises:
        FetchError: the version is absent or its manifest is broken.
    """
    return _read_manifest(root, version).digest


def check(root: str | pathlib.Path, version: int, model: Model) -> None:
    """Return when a committed version holds this model, by its manifest; nothing of its tensors is read.

    Raises:
        FetchError: names what is absent, of another shape or of an unknown dtype.
    """
    _check_against_model(_read_manifest(root, version), model)


def fetch(root: str | pathlib.Path, version: int, model: Model, *, dtype: str = "float32") -> Any:
    """The parameters of a committed version as the decoder's tree, on the default device.

    Names, shapes and dtypes are checked against the model before a tensor is read, and every chunk's checksum before
    any tensor is returned.

    Args:
        dtype: dtype of the returned arrays, whatever the store holds.

    Raises:
        FetchError: names what is absent, torn or of the wrong shape.
    """
    manifest = _read_manifest(root, version)
    _check_against_model(manifest, model)
    boxes = [(name, manifests.whole(entry.shape)) for name, entry in manifest.tensors.items()]
    try:
        reader = chunks.Reader(manifests.version_folder(root, version), manifest)
        tensors = {name: array for name, _, array in reader.read(boxes)}
    except chunks.StoreError as error:
        raise FetchError(str(error)) from error
    return hf.from_hf(tensors.pop, model, dtype=dtype)


def _read_manifest(root: str | pathlib.Path, version: int) -> manifests.Manifest:
    try:
        committed = manifests.committed_versions(root)
        manifest = manifests.read(manifests.version_folder(root, version)) if version in committed else None
    except (ValueError, OSError, ArithmeticError) as error:  # of an edited manifest, of a file system over a network
        raise FetchError(f"version {version} of {root}: {error}") from error
    if manifest is None:
        raise FetchError(f"version {version} is not in the weight store {root}: it holds {committed or 'no version'}")
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
        if found[name].dtype not in manifests.DTYPES:
            raise FetchError(f"version {manifest.version}: {name} has dtype {found[name].dtype}")
