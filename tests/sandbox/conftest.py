"""Real slots and a real private sandbox, shared by the tests of this folder."""

import asyncio
import contextlib

import pytest

from rstar2_sandbox import build, executor, local
from rstar2_sandbox.protocol import Execution, Limits

QUICK = Limits(wall_s=1.0)


class Bench:
    """One slot of a real executor, driven from plain test functions."""

    def __init__(self, runner, pool):
        self.runner, self.pool = runner, pool

    @property
    def slot(self):
        return self.pool.slots[0]

    def run(self, code, stdin="", limits=QUICK):
        return self.runner.run(self.slot.run(Execution(code=code, stdin=stdin, limits=limits)))

    def gather(self, *runs):
        async def together():
            return await asyncio.gather(*runs)

        return self.runner.run(together())


@pytest.fixture(scope="session")
def bench():
    with asyncio.Runner() as runner:
        pool = executor.Executor(2, executor.Settings())
        runner.run(pool.start())
        try:
            yield Bench(runner, pool)
        finally:
            pool.close()


@pytest.fixture(scope="session")
def sandbox():
    with local.start_local(slots=2) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """The optional part in C, where there is a compiler; without one, everything is tested without it."""
    with contextlib.suppress(OSError):
        build.build()
