"""What the loop of training owes to those that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from rstar2_jax import begin, settings, train


class Slow:
    """The processes of a run, each of whose works takes a while."""

    def publish(self, version, in_use):
        time.sleep(0.3)

    def save(self, number, record):
        time.sleep(0.3)


class Engine:
    versions_in_use = frozenset()

    async def update_weights(self, weights, version):
        pass


@pytest.mark.parametrize("what", ["publish", "save"])
def test_engines_tools_and_probes_are_served_while_weights_are_written(what, monkeypatch):
    desk = SimpleNamespace(
        hands=Slow(),
        rooms=SimpleNamespace(engine=Engine(), rules="1"),
        sampler=SimpleNamespace(engine=Engine()),
        weights="store",
        run=settings.Run(workdir="run", steps=1),
        model=None,
        task=settings.Task(source="box", tokenizer="box", template="box"),
        clock=SimpleNamespace(phase=lambda name: contextlib.nullcontext()),
    )
    monkeypatch.setattr(begin, "identity", lambda *parts: {})
    progress = train._Progress(step=1, cursor=0, carried=())

    async def longest_wait():
        work = train._publish(desk, progress) if what == "publish" else train._save_when_due(desk, progress, False)
        task, waits = asyncio.create_task(work), []
        while not task.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - before)
        await task
        return waits

    waits = asyncio.run(longest_wait())
    assert len(waits) >= 5  # on the event loop it would be one
