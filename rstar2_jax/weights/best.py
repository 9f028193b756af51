"""The best weights of a run so far, kept beside it under their own name: RUN/best is a weight store of one version.

    RUN/best/0000000040/    a copy of the version that step 40 sampled with
    RUN/best/best.json      {"step": 40, "accuracy": 0.81, "scored": 384}, written last

A run, an evaluation or an export starts from it by `init_from = 'RUN/best'`.

Deliberately not here: what best means (report/guards.py) and moments (they stay in checkpoints).
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

from rstar2_jax.weights import manifest as manifests

FOLDER = "best"
_RECORD = "best.json"


def keep(store: str | pathlib.Path, folder: str | pathlib.Path, version: int, record: dict[str, Any]) -> None:
    """Copy a committed version into the folder, then forget the one that was kept before.

    Args:
        store: the run's weight store.
        folder: RUN/best.
        version: committed in the store.
        record: accuracy and what else is to be known of it.

    Raises:
        FileNotFoundError: the store does not hold the version.
    """
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    wanted, made = manifests.version_folder(root, version), manifests.read(manifests.version_folder(store, version))
    if wanted.exists() and manifests.read(wanted).digest != made.digest:
        # Of a life of the run that was killed: it came to this step with other weights.
        shutil.rmtree(wanted)
    if not wanted.exists():
        part = root / f"{manifests.WRITING}{version}"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(manifests.version_folder(store, version), part)
        os.replace(part, wanted)
    text = root / (_RECORD + ".tmp")
    text.write_text(json.dumps({"step": version, **record}) + "\n")
    os.replace(text, root / _RECORD)
    for other in manifests.committed_versions(root):
        if other != version:
            shutil.rmtree(manifests.version_folder(root, other))


def read(folder: str | pathlib.Path) -> dict[str, Any] | None:
    """The record of what is kept, or None."""
    path = pathlib.Path(folder) / _RECORD
    return json.loads(path.read_text()) if path.is_file() else None
