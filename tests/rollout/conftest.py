"""Weights and real servers that several files of this room share: a real server takes a minute to start."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import subprocess
from typing import Any

import pytest

from tests.rollout import engines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Versions 0 and 1 of the contract's model: in a store, as parameters, and each as a Hugging Face folder."""

    store: str
    params: dict[int, Any]
    folders: dict[int, pathlib.Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A real server that was started on the folder of version 0."""

    url: str
    process: subprocess.Popen
    log: pathlib.Path


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    params = engines.publish_versions(root / "store")
    folders = {v: engines.hugging_face_folder(root / f"model-{v}", tree) for v, tree in params.items()}
    return Weights(store=str(root / "store"), params=params, folders=folders)


@pytest.fixture(scope="session")
def real_servers(weights):
    """The real server with a number of tensor-parallel ranks, started when it is first asked for; one at a time."""
    with contextlib.ExitStack() as stack:
        running: dict[int, Server] = {}

        def server(ranks: int) -> Server:
            if ranks not in running:
                stack.close()
                running.clear()
                url, process, log = stack.enter_context(engines.real_server(weights.folders[0], ranks=ranks))
                running[ranks] = Server(url=url, process=process, log=log)
            return running[ranks]

        yield server
