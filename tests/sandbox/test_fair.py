"""Runs share the cluster; an epoch's end reaches what runs; no burst fills memory; a node takes little ahead."""

import asyncio
import time

import pytest
import redis

from rstar2_sandbox import client, fair, keys, metrics, outbox, protocol
from rstar2_sandbox.protocol import Call, Execution, Limits, Outcome, Status, Verdict


def call(run, key="k"):
    return Call(run=run, key=key, epoch=0, lane="execute", reply="c", expires=0, body={})


def test_runs_take_turns_and_calls_of_a_run_keep_their_order():
    queue = fair.FairQueue()
    for number in range(3):
        queue.push(call("a", f"a{number}"))
    queue.push(call("b", "b0"))
    queue.push(call("c", "c0"))
    assert len(queue) == 5 and queue.runs() == {"a", "b", "c"}
    assert [queue.pop().key for _ in range(5)] == ["a0", "b0", "c0", "a1", "a2"]
    with pytest.raises(IndexError):
        queue.pop()


def test_calls_that_are_dropped_are_given_back_and_forgotten():
    queue = fair.FairQueue()
    for key in "abc":
        queue.push(call("r", key))
    assert [dropped.key for dropped in queue.drop(lambda one: one.key == "b")] == ["b"]
    assert [queue.pop().key for _ in range(2)] == ["a", "c"] and len(queue) == 0


def test_quick_calls_are_taken_ahead_and_slow_ones_are_not():
    quick, slow = fair.Appetite(4), fair.Appetite(4)
    for _ in range(100):
        quick.learn_time(0.002)
        slow.learn_time(2.0)
    assert quick.ahead == fair.MAX_AHEAD and slow.ahead == 0
    assert slow.entries(4) == 0 and slow.entries(3) == 1
    assert quick.entries(4 + quick.ahead) == 0 and quick.entries(0) > 4


@pytest.mark.parametrize("lane", ["execute", "verify"])
def test_a_run_with_thousands_of_calls_does_not_hold_up_another(sandbox, lane):
    """Counted in calls, not seconds: taking turns lets about as many of the crowd go first as the others are."""
    many = 900 if lane == "execute" else 200
    crowd_done = 0

    async def ask(caller, number):
        if lane == "execute":
            return await caller.execute(Execution(code=f"print({number})"))
        return await caller.verify(text=rf"<answer>\boxed{{\sqrt{{{number}}}}}</answer>", gold="3")

    async def scene():
        async with (
            client.Client(sandbox.redis_url, run=f"crowd-{lane}") as crowd,
            client.Client(sandbox.redis_url, run=f"few-{lane}") as few,
        ):

            async def one_of_the_crowd(number):
                nonlocal crowd_done
                await ask(crowd, number)
                crowd_done += 1

            busy = [asyncio.create_task(one_of_the_crowd(number)) for number in range(many)]
            while crowd_done < 4:  # the whole crowd is in the queue, and its turn has come
                await asyncio.sleep(0.005)
            before = crowd_done
            await asyncio.gather(*(ask(few, number) for number in range(8)))
            meanwhile = crowd_done - before
            await asyncio.gather(*busy)
            return meanwhile

    meanwhile = asyncio.run(scene())
    assert crowd_done == many
    assert meanwhile < many / 8, meanwhile


def test_a_new_epoch_kills_what_runs_and_drops_what_waits_at_once(sandbox):
    async def scene():
        async with (
            client.Client(sandbox.redis_url, run="epoch-kill") as old,
            client.Client(sandbox.redis_url, run="epoch-kill") as new,
            client.Client(sandbox.redis_url, run="bystander") as other,
        ):
            limits = Limits(wall_s=30)
            sleepers = [
                asyncio.create_task(old.execute(Execution(code="import time\ntime.sleep(20)", limits=limits)))
                for _ in range(6)
            ]
            session = await old.execute(Execution(code="x = 1", session="s"))
            bystander = asyncio.create_task(other.execute(Execution(code="print('mine')", limits=limits)))
            await asyncio.sleep(0.5)
            started = time.monotonic()
            await new.advance_epoch()
            fresh = await new.execute(Execution(code="print('new')"))
            took_s = time.monotonic() - started
            return session, took_s, fresh, await asyncio.gather(*sleepers), await bystander

    session, took_s, fresh, old, bystander = asyncio.run(scene())
    assert session.status is Status.OK
    assert took_s < 5 and fresh.stdout == "new\n" and bystander.stdout == "mine\n"
    assert {outcome.status for outcome in old} == {Status.REJECTED}
    assert {outcome.detail for outcome in old} == {protocol.SUPERSEDED}


def test_a_key_of_an_ended_epoch_may_be_asked_again_in_the_new_one(sandbox):
    async def scene():
        async with (
            client.Client(sandbox.redis_url, run="again") as old,
            client.Client(sandbox.redis_url, run="again") as new,
        ):
            first = Execution(code="import time\ntime.sleep(20)", key="one", limits=Limits(wall_s=30))
            task = asyncio.create_task(old.execute(first))
            await asyncio.sleep(0.4)
            await new.advance_epoch()
            again = await new.execute(Execution(code="print('again')", key="one"))
            return again, await task

    again, old = asyncio.run(scene())
    assert again.stdout == "again\n"
    assert old.status is Status.REJECTED


def test_a_grader_that_is_killed_with_its_epoch_gives_no_verdict(sandbox):
    """Else an answer would be wrong for a quarter of an hour because a trainer was restarted while it was graded."""
    text, gold = r"<answer>\boxed{9^{9^{9^{9}}}}</answer>", "3"

    async def scene():
        async with (
            client.Client(sandbox.redis_url, run="graded", retries=0) as old,
            client.Client(sandbox.redis_url, run="graded") as new,
        ):
            await old.verify(text=r"<answer>\boxed{\sqrt{9}}</answer>", gold=gold)
            task = asyncio.create_task(old.verify(text=text, gold=gold, key="slow"))
            await asyncio.sleep(0.7)
            await new.advance_epoch()
            return await task, await new.verify(text=text, gold=gold, key="slow")

    killed, again = asyncio.run(scene())
    assert (killed.verdict, killed.reason) == (Verdict.INFRA, protocol.SUPERSEDED)
    assert again.verdict is Verdict.WRONG and "timeout" in again.reason


def test_a_client_writes_no_more_than_its_window_and_answers_everything(sandbox, monkeypatch):
    monkeypatch.setattr(outbox, "WINDOW_CALLS", 100)

    async def scene():
        most = 0
        async with client.Client(sandbox.redis_url, run="window") as caller:
            texts = [rf"<answer>\boxed{{{n}}}</answer>" for n in range(2000)]
            tasks = [asyncio.create_task(caller.verify(text=text, gold="7")) for text in texts]
            while not all(task.done() for task in tasks):
                most = max(most, caller._outbox.flying)
                await asyncio.sleep(0.002)
            return most, [task.result().verdict for task in tasks], caller._outbox.flying

    most, verdicts, left = asyncio.run(scene())
    assert verdicts == [Verdict.CORRECT if n == 7 else Verdict.WRONG for n in range(2000)]
    assert 0 < most <= 100 and left == 0


def test_a_run_that_is_silent_is_forgotten_and_comes_back(sandbox):
    from rstar2_sandbox import master

    async def scene():
        server = client.connect(sandbox.redis_url)
        async with client.Client(sandbox.redis_url, run="silent") as caller:
            await caller.execute(Execution(code="1"))
            reaper = master.Reaper(server, "test")
            seconds, _ = await server.time()
            await asyncio.sleep(0.2)
            await reaper._tend(keys.EXECUTE, "silent", set(), seconds + 1000)
            gone = not await server.sismember(keys.runs(keys.EXECUTE), "silent")
            outcome = await caller.execute(Execution(code="print('back')"))
        await server.aclose()
        return gone, outcome

    gone, outcome = asyncio.run(scene())
    assert gone and outcome.stdout == "back\n"


def test_a_large_result_is_kept_for_less_time_than_a_small_one():
    small, large = (protocol.encode_result("k", Outcome(status=Status.OK, stdout="x" * size)) for size in (10, 64_000))
    assert protocol.result_ttl_s(small) == protocol.RESULT_TTL_S
    assert protocol.MIN_TTL_S == protocol.result_ttl_s(large) == 60


def test_the_age_of_the_queue_is_that_of_its_oldest_call(sandbox):
    async def scene():
        async with client.Client(sandbox.redis_url, run="age") as caller:
            slow = Execution(code="import time\ntime.sleep(1.5)")
            # More than a node ever holds ahead, so that none of those after them is taken.
            tasks = [asyncio.create_task(caller.execute(slow)) for _ in range(2 + fair.MAX_AHEAD)]
            await asyncio.sleep(0.2)
            tasks += [asyncio.create_task(caller.execute(slow)) for _ in range(12)]
            await asyncio.sleep(1.2)
            cluster = await metrics.look(caller._redis)
            await caller.advance_epoch()
            await asyncio.gather(*tasks)
            return cluster

    cluster = asyncio.run(scene())
    assert cluster.age_s["execute"] > 0.5 and "age" in cluster.runs["execute"]
    with redis.Redis.from_url(sandbox.redis_url) as server:
        assert server.xlen(keys.stream(keys.EXECUTE, "age")) == 0
