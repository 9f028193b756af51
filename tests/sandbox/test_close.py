"""Closing a client ends its tasks, whatever they are doing at that moment."""

from __future__ import annotations

import asyncio

from rstar2_sandbox import client, local
from rstar2_sandbox.protocol import Execution, Status


def test_tasks_that_lose_a_cancellation_are_ended_all_the_same():
    async def stubborn(times):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                times.append(1)
                if len(times) > 2:
                    raise

    async def scene():
        times = []
        tasks = [asyncio.create_task(stubborn(times)), asyncio.create_task(asyncio.sleep(0))]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(client.end_tasks(tasks), 5)
        return times, [task.done() for task in tasks]

    times, done = asyncio.run(scene())
    assert len(times) == 3 and all(done)


def test_a_client_closes_while_it_reads_back_results():
    async def scene(url):
        for round_number in range(25):
            opened = client.Client(url, run=f"close-{round_number}")
            outcome = await opened.execute(Execution(code="print(1)"))
            assert outcome.status is Status.OK
            opened._resync.set()  # the sweep starts now, as after a reconnection
            await asyncio.sleep(0.0005 * (round_number % 5))
            await asyncio.wait_for(opened.close(), 10)

    with local.start_local(slots=1) as running:
        asyncio.run(scene(running.redis_url))
