"""Drills: kill -9 of each part at random moments under load. Nothing is lost, nothing is answered twice, and the time
until calls end again is printed (pytest -s)."""

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from rstar2_sandbox import client, keys, local, master
from rstar2_sandbox.protocol import Execution, Limits, Status

pytestmark = pytest.mark.e2e
CALLS, OUTSTANDING, KILLS = 240, 24, 3


def generations(root):
    """Children of a process, their children, and so on, as the moment has them."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found, layer = [], {root}
    while layer := {pid for pid, parent in parents.items() if parent in layer}:
        found.append(sorted(layer))
    return found


def victims(running, part):
    """Processes of a part that live now: programs are children of keepers, those of the warm interpreters."""
    if part == "redis":
        return [running.redis_pid]
    if part == "worker":
        return [running.worker_pid]
    layers = generations(running.worker_pid)
    number = ("interpreter", "keeper", "program").index(part)
    return layers[number] if number < len(layers) else []


async def load_while(url, run, wreck, moments):
    """Outcomes of CALLS calls; what was announced under each key; for each wreck, seconds until a call ended again."""
    announced, ends, recoveries = collections.defaultdict(set), [], []
    async with client.Client(url, run=run, retries=3) as caller:
        take = caller._take

        def listen(payload, many=True):
            for row in json.loads(payload) if many else [json.loads(payload)]:
                announced[row[0]].add(json.dumps(row))
            take(payload, many)

        caller._take = listen
        await caller.execute(Execution(code="print('ready')"))
        gate = asyncio.Semaphore(OUTSTANDING)

        async def one(number):
            async with gate:
                code = f"import time\ntime.sleep(0.02)\nprint({number})"
                outcome = await caller.execute(Execution(code=code, key=f"call{number}", limits=Limits(wall_s=20)))
                ends.append(time.monotonic())
                return outcome

        async def wreck_now_and_then():
            for moment in moments:
                await asyncio.sleep(moment)
                while not wreck() and len(ends) < CALLS:  # nothing of that part lives at this moment
                    await asyncio.sleep(0.002)
                at = time.monotonic()
                seen = len(ends)
                while len(ends) == seen and len(ends) < CALLS:
                    await asyncio.sleep(0.01)
                recoveries.append(time.monotonic() - at)

        wrecking = asyncio.create_task(wreck_now_and_then())
        outcomes = await asyncio.gather(*(one(number) for number in range(CALLS)))
        await wrecking
    return outcomes, announced, recoveries


def check(outcomes, announced, *, program_may_die=False):
    wrong = [outcome for number, outcome in enumerate(outcomes) if outcome.stdout != f"{number}\n"]
    if program_may_die:
        # Whoever kills the program itself from outside is not told from the program: the kernel's word is all there is.
        assert {outcome.status for outcome in wrong} <= {Status.KILLED} and len(wrong) <= KILLS
    else:
        assert wrong == []
    for key, payloads in announced.items():
        kinds = {json.loads(payload)[2]["status"] for payload in payloads}
        assert len(payloads) == 1 or kinds == {"infra"}, (key, payloads)


@pytest.mark.parametrize("part", ["program", "keeper", "interpreter", "worker", "redis"])
def test_a_part_killed_at_random_moments_loses_and_doubles_nothing(part):
    draw = random.Random(part)

    def wreck():
        found = victims(running, part)
        with contextlib.suppress(ProcessLookupError):
            if found:
                os.kill(draw.choice(found), signal.SIGKILL)
                return True
        return False

    with local.start_local(slots=2) as running:
        moments = [draw.uniform(0.1, 0.6) for _ in range(KILLS)]
        outcomes, announced, recoveries = asyncio.run(load_while(running.redis_url, part, wreck, moments))
    print(f"\n{part}: calls ended again after", ", ".join(f"{seconds:.2f} s" for seconds in recoveries))
    check(outcomes, announced, program_may_die=part in ("program", "keeper", "interpreter"))
    assert max(recoveries) < 30


class Cluster:
    """A Redis, a master and nodes as processes of their own, as on several machines."""

    def __init__(self, folder, nodes, keep):
        self.folder, self.keep = folder, keep
        self.environment = os.environ | {"RSTAR2_SANDBOX_REDIS_URL": f"unix://:secret@{folder}/redis.sock"}
        self.redis = self.start_redis()
        self.master = self.role("master")
        self.nodes = [self.role("worker", "--slots", "1", "--name", f"node{n}") for n in range(nodes)]
        for node in self.nodes:
            assert "tier" in json.loads(node.stdout.readline())

    @property
    def url(self):
        return self.environment["RSTAR2_SANDBOX_REDIS_URL"]

    def start_redis(self):
        return master.start_redis(master.redis_config(str(self.folder), "secret", keep=self.keep))

    def role(self, *arguments):
        command = [sys.executable, "-m", "rstar2_sandbox", *arguments]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE)

    def close(self):
        for process in (*self.nodes, self.master, self.redis):
            process.terminate()
        for process in (*self.nodes, self.master, self.redis):
            process.wait(20)
            if process.stdout:
                process.stdout.close()


@contextlib.contextmanager
def cluster(folder, *, nodes=2, keep=False):
    made = Cluster(folder, nodes, keep)
    try:
        yield made
    finally:
        made.close()


def test_a_killed_master_and_a_killed_node_of_several_lose_nothing(tmp_path):
    with cluster(tmp_path) as running:
        todo = [running.master, running.nodes[0]]

        def wreck():
            victim = todo.pop()
            victim.kill()
            victim.wait()
            return True

        outcomes, announced, recoveries = asyncio.run(load_while(running.url, "several", wreck, [0.4, 0.5]))
    print("\nnode, master: calls ended again after", ", ".join(f"{seconds:.2f} s" for seconds in recoveries))
    check(outcomes, announced)


@pytest.mark.parametrize("keep", [False, True], ids=["without its data", "with its data"])
def test_a_restarted_redis_loses_nothing(tmp_path, keep):
    with cluster(tmp_path, keep=keep) as running:

        def wreck():
            running.redis.kill()
            running.redis.wait()
            time.sleep(0.3)
            running.redis = running.start_redis()
            return True

        outcomes, announced, recoveries = asyncio.run(load_while(running.url, f"redis-{keep}", wreck, [0.5, 1.5]))
        print("\nredis: calls ended again after", ", ".join(f"{seconds:.2f} s" for seconds in recoveries))
        check(outcomes, announced)


def test_a_redis_that_never_comes_back_ends_in_typed_faults(tmp_path):
    with cluster(tmp_path, nodes=1) as running:

        async def scene():
            async with client.Client(running.url, run="gone", retries=0) as caller:
                await caller.execute(Execution(code="1"))
                calls = [
                    caller.execute(Execution(code="import time\ntime.sleep(0.5)", deadline_s=3.0)) for _ in range(20)
                ]
                tasks = [asyncio.create_task(call) for call in calls]
                await asyncio.sleep(0.3)
                running.redis.kill()
                running.redis.wait()
                started = time.monotonic()
                return await asyncio.gather(*tasks), time.monotonic() - started

        outcomes, took_s = asyncio.run(scene())
    assert {outcome.status for outcome in outcomes} == {Status.INFRA}
    assert took_s < 6 and all("redis.sock" in outcome.detail for outcome in outcomes)


def test_a_full_redis_has_clients_wait_while_what_it_holds_is_answered(tmp_path):
    with cluster(tmp_path, nodes=1) as running:

        async def scene():
            async with client.Client(running.url, run="full") as caller:
                await caller.execute(Execution(code="1"))
                server = caller._redis
                code = "import time\ntime.sleep(0.2)\nprint({})"
                early = [asyncio.create_task(caller.execute(Execution(code=code.format(n)))) for n in range(4)]
                await asyncio.sleep(0.1)
                await server.config_set("maxmemory", 1)
                held = [asyncio.create_task(caller.execute(Execution(code=f"print({n})"))) for n in range(20)]
                # Only answers make room: they must find a way in. Meanwhile the node's lease runs out.
                await asyncio.wait(early, timeout=8)
                answered = all(task.done() for task in early)
                await asyncio.sleep(6)
                waiting = not any(task.done() for task in held)
                await server.config_set("maxmemory", 0)
                return answered, waiting, await asyncio.gather(*early, *held)

        answered, waiting, outcomes = asyncio.run(scene())
    assert answered and waiting
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in (*range(4), *range(20))]


def test_what_is_given_up_leaves_a_letter(tmp_path):
    with cluster(tmp_path, nodes=1) as running:

        async def scene():
            async with client.Client(running.url, run="letters", retries=0) as caller:
                await caller.execute(Execution(code="1"))
                server = caller._redis
                for node in running.nodes:
                    node.kill()
                    node.wait()
                await server.delete(keys.nodes())
                task = asyncio.create_task(caller.execute(Execution(code="print('poison')", key="p")))
                reaper = master.Reaper(server, "test")
                for number in range(3):
                    await asyncio.sleep(0.2)
                    stream = keys.stream(keys.EXECUTE, "letters")
                    await server.xreadgroup(keys.GROUP, "a-dead-node", {stream: ">"}, count=1)
                    # What a node does that starts a call which lost a node before.
                    await server.set(keys.started("letters", "p"), number)
                    await reaper.reap()
                letters = await server.xrange(keys.dead_letters())
                return await task, [json.loads(fields[b"letter"]) for _, fields in letters]

        outcome, letters = asyncio.run(scene())
    assert outcome.status is Status.INFRA and "3 deliveries" in outcome.detail
    assert [(letter["run"], letter["key"]) for letter in letters] == [("letters", "p")]
    assert letters[0]["body"]["code"] == "print('poison')"
