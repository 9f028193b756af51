"""Client, Redis and node together: order, identity, limits, back-pressure, and what is left behind."""

import asyncio
import dataclasses
import gc
import os
import threading
import time

import pytest
import redis

from rstar2_sandbox import answers, client, keys, local, protocol
from rstar2_sandbox.protocol import Call, Execution, Limits, Status, Verdict

HALF = rb'[["\ud800","k",0,"execute","c",1e12,{},0]]'


def talk(sandbox, conversation, **options):
    """Run a conversation with a fresh client and return what it returns."""

    async def session():
        async with client.Client(sandbox.redis_url, **({"run": "queue"} | options)) as caller:
            return await conversation(caller)

    return asyncio.run(session())


def program(code, **fields):
    return Execution(code=code, **fields)


def test_300_prints_on_two_slots_never_time_out_for_waiting(sandbox):
    async def conversation(caller):
        limits = Limits(wall_s=2.0)
        return await asyncio.gather(*(caller.execute(program(f"print({n})", limits=limits)) for n in range(300)))

    outcomes = talk(sandbox, conversation)
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(300)]
    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert max(outcome.queue_s for outcome in outcomes) > max(outcome.run_s for outcome in outcomes)


def test_the_status_comes_from_the_kernel_and_never_from_the_text(sandbox):
    async def conversation(caller):
        codes = ["1/0", "print('Traceback (most recent call last): error')", "import sys\nprint('ok', file=sys.stderr)"]
        return await asyncio.gather(*(caller.execute(program(code)) for code in codes))

    assert [outcome.status for outcome in talk(sandbox, conversation)] == [Status.ERROR, Status.OK, Status.OK]


def test_a_slow_call_holds_up_neither_its_neighbours_nor_their_order(sandbox):
    async def conversation(caller):
        async def timed(code):
            outcome = await caller.execute(program(code))
            return outcome.stdout, time.monotonic()

        slow = "import time\ntime.sleep(1.5)\nprint('slow')"
        return await asyncio.gather(timed(slow), *map(timed, ["print('a')"] * 20))

    (slow, slow_at), *others = talk(sandbox, conversation)
    assert slow == "slow\n"
    assert {text for text, _ in others} == {"a\n"}
    assert all(at < slow_at for _, at in others)


def test_one_key_is_executed_once_whoever_asks(sandbox):
    code = "import time\nprint(time.time_ns())"

    async def conversation(caller):
        same = await asyncio.gather(*(caller.execute(program(code, key="once")) for _ in range(5)))
        async with client.Client(sandbox.redis_url, run="queue") as another:
            same.append(await another.execute(program(code, key="once")))
        async with client.Client(sandbox.redis_url, run="another-run") as stranger:
            other = await stranger.execute(program(code, key="once"))
        return same, other

    same, other = talk(sandbox, conversation)
    assert len({outcome.stdout for outcome in same}) == 1
    assert other.stdout != same[0].stdout


def test_a_key_of_an_execution_is_not_that_of_a_verification(sandbox):
    async def conversation(caller):
        outcome = await caller.execute(program("print(1)", key="shared"))
        return outcome, await caller.verify(text=r"<answer>\boxed{2}</answer>", gold="2", key="shared")

    outcome, verification = talk(sandbox, conversation)
    assert outcome.stdout == "1\n"
    assert verification.verdict is Verdict.CORRECT


def test_a_call_that_waited_longer_than_its_queue_limit_is_rejected_and_not_run(sandbox):
    async def conversation(caller):
        busy = [caller.execute(program("import time\ntime.sleep(1.2)")) for _ in range(2)]
        tasks = [asyncio.ensure_future(call) for call in busy]
        await asyncio.sleep(0.2)
        late = await caller.execute(program("print(1)", limits=Limits(queue_s=0.3)))
        await asyncio.gather(*tasks)
        return late

    late = talk(sandbox, conversation)
    assert (late.status, late.stdout) == (Status.REJECTED, "")
    assert "queue" in late.detail


def test_calls_of_an_earlier_epoch_are_dropped_before_they_start(sandbox):
    async def conversation(caller):
        tasks = [asyncio.ensure_future(caller.execute(program("import time\ntime.sleep(0.4)"))) for _ in range(80)]
        await asyncio.sleep(0.3)
        await caller.advance_epoch()
        fresh = await caller.execute(program("print('new')"))
        return fresh, await asyncio.gather(*tasks)

    started = time.monotonic()
    fresh, old = talk(sandbox, conversation, run="epochs")
    assert fresh.stdout == "new\n"
    assert Status.REJECTED in {outcome.status for outcome in old}
    assert {outcome.status for outcome in old} <= {Status.REJECTED, Status.OK}
    assert time.monotonic() - started < 30


def test_thousands_of_calls_are_in_flight_at_once(sandbox):
    async def conversation(caller):
        calls = [caller.verify(text=rf"<answer>\boxed{{{n}}}</answer>", gold="7") for n in range(5000)]
        return await asyncio.gather(*calls)

    verdicts = [found.verdict for found in talk(sandbox, conversation)]
    assert verdicts == [Verdict.CORRECT if n == 7 else Verdict.WRONG for n in range(5000)]


def test_without_a_server_a_call_ends_as_infra_and_says_what_it_waited_for(tmp_path):
    async def session():
        async with client.Client(f"unix://{tmp_path}/none.sock", run="lost", retries=0) as caller:
            outcome = await caller.execute(program("print(1)", key="k1", deadline_s=0.5))
            verification = asyncio.create_task(caller.verify(text="", gold="1"))
            await asyncio.sleep(0.1)
        return outcome, await verification

    outcome, verification = asyncio.run(session())
    assert outcome.status is Status.INFRA
    for word in ("'k1'", "rstar2:calls:execute", "not yet written", "none.sock"):
        assert word in outcome.detail
    assert verification.verdict is Verdict.INFRA
    assert verification.reason == "the client was closed"


def test_a_call_without_a_node_ends_at_its_deadline(sandbox):
    """The stream of a lane that nobody reads: another database of the same server."""

    async def session():
        async with client.Client(sandbox.redis_url + "?db=7", run="alone", retries=0) as caller:
            return await caller.execute(program("print(1)", deadline_s=0.5))

    outcome = asyncio.run(session())
    assert outcome.status is Status.INFRA
    assert "written to stream" in outcome.detail


def test_a_connection_closed_midway_loses_no_call(sandbox):
    async def conversation(caller):
        tasks = [asyncio.ensure_future(caller.execute(program(f"print({n})"))) for n in range(60)]
        with redis.Redis.from_url(sandbox.redis_url) as server:
            for _ in range(3):
                await asyncio.sleep(0.1)
                server.client_kill_filter(_type="pubsub")
                server.client_kill_filter(_type="normal")
        return await asyncio.gather(*tasks)

    outcomes = talk(sandbox, conversation, run="cut")
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(60)]


def test_what_cannot_be_read_is_dropped_and_the_node_goes_on(sandbox):
    with redis.Redis.from_url(sandbox.redis_url) as server:
        for lane in keys.LANES:
            server.sadd(keys.runs(lane), "queue")
            for payload in (b"\xff", b"[", b"[[1,2]]", b'[["r","k",0,"execute","c",1e12,{"code":1},0]]', HALF, b""):
                server.xadd(keys.stream(lane, "queue"), {"calls": payload})
            server.xadd(keys.stream(lane, "queue"), {"other": "field"})

    async def conversation(caller):
        return await caller.execute(program("print('alive')"))

    assert talk(sandbox, conversation).stdout == "alive\n"
    deadline = time.monotonic() + 10
    with redis.Redis.from_url(sandbox.redis_url) as server:
        while any(server.xlen(keys.stream(lane, "queue")) for lane in keys.LANES):
            assert time.monotonic() < deadline, "entries were left in the streams"
            time.sleep(0.05)


def test_entries_of_two_lanes_may_have_one_id(sandbox):
    """Ids are unique in a stream only, and two streams written in one millisecond share them."""
    entry = f"{int(time.time() * 1000) + 2000}-0"

    async def conversation(caller):
        await caller.execute(program("1"))
        calls = [
            protocol.Call(
                run="ids", key=lane, epoch=0, lane=lane, reply="nobody", expires=2**40, body=body
            )
            for lane, body in (
                (keys.EXECUTE, protocol.execution_body(program("import time\ntime.sleep(0.5)"))),
                (keys.VERIFY, {"text": "", "gold": "1"}),
            )
        ]  # fmt: skip
        with redis.Redis.from_url(sandbox.redis_url) as server:
            for call in calls:
                server.xadd(keys.stream(call.lane, "ids"), {"calls": protocol.encode_calls([call])}, id=entry)
                server.sadd(keys.runs(call.lane), "ids")
            deadline = time.monotonic() + 10
            while not server.exists(keys.result("ids", keys.VERIFY)):
                assert time.monotonic() < deadline, "the second entry of this id was never done"
                await asyncio.sleep(0.05)

    talk(sandbox, conversation)


def test_opening_and_closing_200_clients_leaves_nothing_open(sandbox):
    async def session():
        async def one(n):
            async with client.Client(sandbox.redis_url, run="many") as caller:
                if n % 20 == 0:
                    return await caller.execute(program(f"print({n})"))

        await one(0)
        before = counts()
        for n in range(200):
            await one(n)
        gc.collect()
        return before, counts()

    def counts():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    before, after = asyncio.run(session())
    assert before == after


def test_a_closed_client_refuses_and_cancelled_callers_are_forgotten(sandbox):
    async def session():
        caller = client.Client(sandbox.redis_url, run="closing")
        task = asyncio.create_task(caller.execute(program("import time\ntime.sleep(5)")))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not caller._pending
        await caller.close()
        with pytest.raises(RuntimeError, match="closed"):
            await caller.execute(program("print(1)"))

    asyncio.run(session())


def test_a_child_cannot_find_the_server(sandbox):
    code = """
import os
seen = []
for folder, _, names in os.walk('/'):
    seen += [name for name in names if 'redis' in name and name.endswith('.sock')]
print(seen, 'redis' in str(os.environ))
"""

    async def conversation(caller):
        return await caller.execute(program(code, limits=Limits(wall_s=20)))

    assert talk(sandbox, conversation).stdout == "[] False\n"


def test_without_a_server_program_the_error_says_how_to_get_one(monkeypatch):
    from rstar2_sandbox import master

    monkeypatch.setattr(master.os, "access", lambda *_: False)
    monkeypatch.setattr(master.shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="apt-get install redis-server"):
        master.find_redis_server()


def test_an_isolation_that_cannot_be_had_is_a_clear_error(capfd):
    with pytest.raises(RuntimeError, match="worker ended 3 times"):
        local.start_local(slots=1, isolation="plain" if os.geteuid() == 0 else "uid")
    assert "no permitted isolation" in capfd.readouterr().err
    with pytest.raises(ValueError, match="isolation"):
        local.start_local(slots=1, isolation="strong")


def test_the_limits_of_the_protocol_hold_at_the_client(sandbox):
    async def conversation(caller):
        with pytest.raises(ValueError, match="gold"):
            await caller.verify(text="", gold=None)
        with pytest.raises(ValueError, match="key"):
            await caller.verify(text="", gold="1", key="\ud800")
        assert protocol.MAX_DELIVERIES == 3

    talk(sandbox, conversation)
    with pytest.raises(ValueError, match="run"):
        client.Client(sandbox.redis_url, run="")


def test_the_first_call_of_a_client_is_written_once(sandbox):
    async def conversation(caller):
        await caller.execute(program("print(1)"))
        return caller.run

    runs = [talk(sandbox, conversation, run=f"once-{number}") for number in range(10)]
    with redis.Redis.from_url(sandbox.redis_url) as server:
        assert [server.xinfo_stream(keys.stream(keys.EXECUTE, run))["entries-added"] for run in runs] == [1] * 10


def test_a_call_that_comes_again_at_any_moment_is_not_done_again(sandbox):
    """Also in the milliseconds in which its result is on the way to Redis: each cell counts how often it ran."""
    count = Execution(code="n = globals().get('n', 0) + 1\nn", session="count", limits=Limits(wall_s=15))

    async def conversation(caller):
        first = await caller.execute(count)
        stream, last = keys.at_node(first.at), ""
        for number in range(80):
            key = f"cell-{number}"
            call = Call(
                run="queue", key=key, epoch=0, lane=keys.SESSION, reply="nobody", expires=time.time() + 30,
                body=protocol.execution_body(dataclasses.replace(count, key=key)),
            )  # fmt: skip
            for _ in range(2):
                await caller._redis.xadd(stream, {"calls": protocol.encode_calls([call])})
                await asyncio.sleep(number * 1e-4)
            while (result := await caller._redis.get(keys.result("queue", key))) is None:
                await asyncio.sleep(0.002)
            last = protocol.decode_result(result)[1].stdout
        await caller.end_session("count")
        return last

    assert talk(sandbox, conversation) == "81\n"


def test_results_are_written_in_pieces_that_redis_takes(monkeypatch):
    monkeypatch.setattr(answers, "WRITE_CHARS", 100)
    results = [["name", 9, "x" * size, 0] for size in (10, 90, 200, 5)]
    assert answers._pieces(results) == [results[:2], results[2:3], results[3:]]
    assert answers._pieces(results[:3]) == [results[:2], results[2:3], []]
    with pytest.raises(ValueError, match="output_bytes"):
        Limits(output_bytes=protocol.MAX_OUTPUT_BYTES + 1)


def test_no_two_runs_share_the_key_of_a_result():
    assert keys.result("a", "b:c") != keys.result("a:b", "c")
    assert keys.started("a", "b:c") != keys.started("a:b", "c")
