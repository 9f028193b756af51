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

    def __init__(self):
        self.asked = []

    async def update_weights(self, weights, version):
        self.asked.append(("update", version))

    async def verify(self, weights, version):
        self.asked.append(("verify", version))


def desk_with(engine):
    return SimpleNamespace(
        hands=Slow(),
        rooms=SimpleNamespace(engine=Engine(), rules="1"),
        sampler=SimpleNamespace(engine=engine),
        weights="store",
        run=settings.Run(workdir="run", steps=1),
        model=None,
        task=settings.Task(source="box", tokenizer="box", template="box"),
        clock=SimpleNamespace(phase=lambda name: contextlib.nullcontext()),
    )


@pytest.mark.parametrize("prove", [False, True])
def test_engines_prove_new_weights_where_that_is_asked(prove):
    engine, progress = Engine(), train._Progress(step=50, cursor=0, carried=())
    asyncio.run(train._publish(desk_with(engine), progress, prove=prove))
    assert engine.asked == [("update", 50), ("verify", 50)][: 1 + prove]


@pytest.mark.parametrize("what", ["publish", "save"])
def test_engines_tools_and_probes_are_served_while_weights_are_written(what, monkeypatch):
    monkeypatch.setattr(begin, "identity", lambda *parts: {})
    desk = desk_with(Engine())
    progress = train._Progress(step=1, cursor=0, carried=())

    async def longest_wait():
        work = (
            train._publish(desk, progress, prove=False)
            if what == "publish"
            else train._save_when_due(desk, progress, False)
        )
        task, waits = asyncio.create_task(work), []
        while not task.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - before)
        await task
        return waits

    waits = asyncio.run(longest_wait())
    assert len(waits) >= 5  # on the event loop it would be one
