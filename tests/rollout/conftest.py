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


class RealServers:
    """The real server with a number of tensor-parallel ranks, started when it is first asked for; one at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._running: tuple[int, Server] | None = None

    def get(self, ranks: int) -> Server:
        """The server on so many ranks; any other is ended first."""
        if self._running is None or self._running[0] != ranks:
            self.stop()
            url, process, log = self._stack.enter_context(engines.real_server(self._folder, ranks=ranks))
            self._running = ranks, Server(url=url, process=process, log=log)
        return self._running[1]

    def stop(self) -> None:
        """End what runs, before a test starts a server of its own: two cores are for one."""
        self._stack.close()
        self._running = None


@pytest.fixture(scope="session")
def real_servers(weights):
    servers = RealServers(weights.folders[0])
    yield servers
    servers.stop()
