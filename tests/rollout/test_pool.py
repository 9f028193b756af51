"""A pool of engines: seats, queue, engines that die, lie, stand still and come back; every rollout ends as its own."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.rollout import engine, pool, sglang_wire, watch
from rstar2_jax.types import FinishReason

CAPS = engine.Caps(name="e", vocab_size=100, max_context_tokens=64, kv_tokens=64, seeded=True)
FAST = settings.Fleet(expected_quantile=0, probe_s=0.02, progress_s=0.2)
STILL = dataclasses.replace(FAST, probe_s=0)


class Replica:
    """A seeded engine whose ids follow from the request alone; it can be broken while it works."""

    def __init__(self, name, *, kv_tokens=64, turn_s=0.01):
        self.caps = dataclasses.replace(CAPS, name=name, kv_tokens=kv_tokens)
        self.weights_version = -1
        self.turn_s = turn_s
        self.served, self.running, self.most_running = [], 0, 0
        self.dead = self.stuck = self.silent = self.closed = False
        self.refuses_weights = False
        self.fails = 0

    async def generate(self, request):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.fails:
                self.fails -= 1
                raise engine.EngineError(f"{self.caps.name} failed {request.rid}")
            await asyncio.sleep(self.turn_s)
            while self.stuck:
                await asyncio.sleep(0.005)
            if self.dead:
                raise engine.EngineError(f"{self.caps.name} is dead")
            self.served.append(request.rid)
            return answer(request, self.weights_version)
        finally:
            self.running -= 1

    async def load(self):
        return engine.Load(kv_tokens_used=0, kv_tokens_free=64, running=self.running, waiting=0)

    async def alive(self):
        if self.silent:
            await asyncio.Event().wait()
        return not self.dead

    async def update_weights(self, root, version):
        if self.dead or self.refuses_weights:
            raise engine.EngineError(f"{self.caps.name} takes no weights")
        self.weights_version = version

    async def verify(self, root, version):
        if self.weights_version != version:
            raise engine.EngineError(f"{self.caps.name} has {self.weights_version}")

    async def close(self):
        self.closed = True


def answer(request, version):
    ids = np.random.default_rng(request.seed).integers(0, 100, request.sampling.max_new_tokens).astype(np.int32)
    return engine.Generation(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        weights_versions=np.full(len(ids), version, np.int32),
        finish_reason=FinishReason.LENGTH,
    )


def request(number, turn=0, new=4, prompt=4):
    sampling = engine.Sampling(max_new_tokens=new, stop_ids=())
    return engine.Request(rid=f"{number}/{turn}", prompt_ids=[1] * prompt, seed=1000 * number + turn, sampling=sampling)


async def rollout(engines, number, *, turns=3, tool_s=0.0, budget=12):
    """All ids of one rollout of several turns."""
    ids = []
    async with engines.seat(f"r{number}", family=f"p{number // 4}", prompt_tokens=4, budget_tokens=budget) as seat:
        for turn in range(turns):
            made = await seat.turn(request(number, turn, prompt=4 + len(ids)))
            ids += made.token_ids.tolist()
            await asyncio.sleep(tool_s)
    return ids


def expected(number, turns=3):
    return [i for turn in range(turns) for i in answer(request(number, turn), 0).token_ids.tolist()]


def drive(replicas, policy, act):
    """What `act(pool)` returns, with the lines that the pool reported."""

    async def main():
        lines = []
        engines = pool.Pool(replicas, policy, report=lines.append)
        try:
            return await act(engines), engines, lines
        finally:
            await engines.close()

    return asyncio.run(main())


async def many(engines, count=24, **more):
    return await asyncio.gather(*(rollout(engines, number, **more) for number in range(count)))


def all_expected(count=24):
    return [expected(number) for number in range(count)]


def test_rollouts_spread_over_the_engines_never_beyond_their_memory_and_end_with_their_own_ids():
    replicas = [Replica("a"), Replica("b", kv_tokens=32)]
    results, engines, _ = drive(replicas, STILL, many)
    assert results == all_expected()
    assert replicas[0].most_running <= 4 and replicas[1].most_running <= 2  # 16 tokens each
    assert len(replicas[0].served) > len(replicas[1].served) > 0
    assert engines.counts.seated == 24 and engines.counts.moved == 0 and engines.counts.queue_s > 0
    assert all(replica.closed for replica in replicas)


class _Unlucky(Replica):
    """Meets an error that is no engine's own, once, while it takes weights."""

    odd = 0

    async def update_weights(self, root, version):
        if self.odd:
            self.odd -= 1
            raise OSError(116, "Stale file handle")
        await super().update_weights(root, version)


def test_an_engine_that_meets_any_error_on_its_way_back_is_tried_again():
    replica = _Unlucky("a")

    async def act(engines):
        await engines.update_weights("store", 0)
        replica.dead = True
        work = asyncio.create_task(many(engines, 2))
        await asyncio.sleep(0.05)
        replica.odd, replica.dead = 1, False
        return await asyncio.wait_for(work, 10)

    results, engines, lines = drive([replica], FAST, act)
    assert results == all_expected(2) and engines.counts.brought_back == 1
    assert any("cannot serve: OSError(116" in line for line in lines)


def test_a_rollout_inside_a_tool_call_outlives_an_outage_that_ends_meanwhile():
    replicas = [Replica("a", kv_tokens=16), Replica("b", kv_tokens=16)]

    async def act(engines):
        await engines.update_weights("store", 0)
        work = [asyncio.create_task(rollout(engines, n, turns=2, tool_s=tool_s)) for n, tool_s in ((0, 1.2), (1, 1.6))]
        await asyncio.sleep(0.1)
        for replica in replicas:
            replica.dead = True
        await asyncio.sleep(0.6)  # longer than engines may stand still: who waits for one is told so
        replicas[1].dead = False  # and has room for one of the two alone
        return await asyncio.gather(*work)

    results, engines, _ = drive(replicas, FAST, act)
    assert results == [expected(0, 2), expected(1, 2)]


def test_waiting_ends_while_an_engine_takes_for_ever_to_come_back():
    replica = Replica("a")

    async def act(engines):
        await engines.update_weights("store", 0)
        await engines.warm_up([request(99)])
        replica.dead = True
        work = asyncio.create_task(rollout(engines, 0))
        await asyncio.sleep(0.05)
        replica.stuck, replica.dead = True, False  # it answers, but its warm-up does not end
        with pytest.raises(engine.EngineError, match="none of 1 engines is in service"):
            await asyncio.wait_for(work, 10)

    drive([replica], FAST, act)


def test_failures_of_turns_that_an_engine_left_behind_do_not_count_when_it_is_back():
    replicas = [Replica("a", turn_s=0.05), Replica("b", turn_s=0.05)]

    async def act(engines):
        await engines.update_weights("store", 0)
        work = asyncio.create_task(many(engines, 8, turns=1, budget=4))
        await asyncio.sleep(0.03)
        replicas[0].dead = True
        await work
        replicas[0].dead = False
        while "a" not in engines.up:
            await asyncio.sleep(0.01)
        replicas[0].fails = replicas[1].fails = 1
        await many(engines, 8, turns=1, budget=4)
        assert engines.counts.taken_down == 1

    drive(replicas, FAST, act)


@pytest.mark.parametrize("lost", [False, True])
def test_lengths_of_lost_rollouts_teach_nothing(lost):
    policy = dataclasses.replace(STILL, expected_quantile=0.95)

    async def act(engines):
        for number in range(40):
            async with engines.seat(f"r{number}", family="f", prompt_tokens=4, budget_tokens=600) as seat:
                await seat.turn(request(number))
                seat.lost = lost
        async with engines.seat("last", family="f", prompt_tokens=4, budget_tokens=600) as seat:
            await seat.ready()
            return 1000 - engines._balancer.free(0)

    reserved, _, _ = drive([Replica("a", kv_tokens=1000)], policy, act)
    assert (reserved == 604) == lost


def test_a_rollout_that_moves_between_two_turns_samples_the_next_one_there():
    async def act(engines):
        books = engines._balancer
        async with engines.seat("r", family="f", prompt_tokens=4, budget_tokens=50) as seat:
            await seat.turn(request(0))
            first = seat.rollout.engine
            books._even_out = lambda one: (books._engines[first].drop(one), books._take(one, 1 - first))
            await seat.turn(request(1))
            assert seat.rollout.engine == 1 - first and engines.counts.evened == 1
        assert [books.held(index) for index in (0, 1)] == [[], []]
        return first

    replicas = [Replica("a"), Replica("b")]
    first, _, _ = drive(replicas, STILL, act)
    assert len(replicas[first].served) == len(replicas[1 - first].served) == 1


def test_a_turn_that_is_sampled_again_elsewhere_is_begun_there():
    begun = []

    async def act(engines):
        whole = engines.turn_begins
        engines.turn_begins = lambda seat: (whole(seat), begun.append(seat.rollout.engine))
        async with engines.seat("r", family="f", prompt_tokens=4, budget_tokens=50) as seat:
            await seat.turn(request(0))
            engines._take_down(seat.rollout.engine, "for the test")
            await seat.turn(request(1))

    replicas = [Replica("a"), Replica("b")]
    drive(replicas, STILL, act)
    assert sorted(begun) == [0, 1]


def test_more_rollouts_than_are_seated_at_once_are_all_seated():
    async def act(engines):
        async def one(number):
            sizes = {"prompt_tokens": 1, "budget_tokens": 3}
            async with engines.seat(f"r{number}", family=f"{number}", **sizes) as seat:
                await seat.ready()
                await asyncio.sleep(0.05)

        await asyncio.gather(*(one(number) for number in range(200)))
        return engines.counts.seated

    seated, _, _ = drive([Replica("a", kv_tokens=200 * 4)], STILL, act)
    assert seated == 200


def test_a_rollout_keeps_its_engine_between_turns_and_its_siblings_sit_beside_it():
    replicas = [Replica("a", kv_tokens=640), Replica("b", kv_tokens=640)]
    drive(replicas, STILL, many)
    for replica in replicas:
        families = {int(rid.split("/")[0]) // 4 for rid in replica.served}
        assert all(sum(int(rid.split("/")[0]) // 4 == f for rid in replica.served) == 12 for f in families)
    assert len(replicas[0].served) == len(replicas[1].served)


def test_without_keeping_places_tools_leave_room_for_other_rollouts():
    def longest_wait(policy):
        replica = Replica("a", kv_tokens=16)

        async def two(engines):
            await asyncio.gather(*(rollout(engines, number, tool_s=0.05) for number in range(2)))
            return replica.served

        return drive([replica], policy, two)[0]

    kept = longest_wait(STILL)
    assert [rid[0] for rid in kept] == ["0", "0", "0", "1", "1", "1"]
    shared = longest_wait(dataclasses.replace(STILL, keep_place=False))
    assert [rid[0] for rid in shared] == ["0", "1", "0", "1", "0", "1"]


def test_rollouts_of_an_engine_that_dies_in_the_middle_end_elsewhere_with_the_same_ids():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        work = asyncio.create_task(many(engines))
        await asyncio.sleep(0.03)
        replicas[0].dead = True
        return await work

    results, engines, lines = drive(replicas, FAST, act)
    assert results == all_expected()
    assert engines.up == ["b"] and engines.counts.taken_down == 1 and engines.counts.moved > 0
    assert "engine a is taken down (a is dead)" in lines[0]


def test_an_engine_that_stands_still_but_answers_is_taken_down_after_the_progress_limit():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        replicas[0].stuck = True
        return await many(engines)

    results, engines, lines = drive(replicas, FAST, act)
    assert results == all_expected() and "no progress for 0 s with" in lines[0]
    assert not set(replicas[0].served)


def test_an_engine_that_answers_no_probe_is_taken_down_although_nothing_failed(monkeypatch):
    monkeypatch.setattr(pool, "_FEWEST_PROBE_S", 0.02)
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        replicas[0].silent = replicas[0].stuck = True
        return await many(engines)

    results, _, lines = drive(replicas, dataclasses.replace(FAST, progress_s=30.0), act)
    assert results == all_expected() and "no answer to 3 probes" in lines[0]


def test_an_engine_that_comes_back_gets_the_current_weights_before_any_rollout():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        await engines.update_weights("store", 1)
        replicas[0].dead = True
        await engines.update_weights("store", 2)
        assert engines.up == ["b"] and engines.weights_version == 2
        assert engines.versions_in_use == {1, 2}
        replicas[0].dead = False
        work = asyncio.create_task(many(engines, count=40))
        while "a" not in engines.up:
            await asyncio.sleep(0.01)
        assert replicas[0].weights_version == 2
        return await work

    results, engines, lines = drive(replicas, FAST, act)
    assert results == all_expected(40) and engines.counts.brought_back == 1
    assert replicas[0].served and lines[-1] == "engine a is back with weights 2"


def test_an_engine_that_comes_back_during_an_update_takes_the_newest_weights_before_it_serves():
    class Slow(Replica):
        slow_s = 0.0

        async def update_weights(self, root, version):
            await asyncio.sleep(self.slow_s)
            await super().update_weights(root, version)

    replicas = [Slow("a"), Slow("b")]

    async def act(engines):
        await engines.update_weights("store", 1)
        replicas[0].dead = True
        await engines.update_weights("store", 2)
        replicas[0].dead, replicas[0].slow_s = False, 0.15
        await many(engines, count=2)
        await asyncio.sleep(0.05)  # it is taking version 2 now
        await engines.update_weights("store", 3)
        while "a" not in engines.up:
            await asyncio.sleep(0.01)
        return [replica.weights_version for replica in replicas]

    assert drive(replicas, FAST, act)[0] == [3, 3]


def test_an_update_waits_for_the_only_engine_to_come_back_with_the_version():
    replica = Replica("a")

    async def act(engines):
        await engines.update_weights("store", 1)
        replica.dead = True
        asyncio.get_running_loop().call_later(0.1, lambda: setattr(replica, "dead", False))
        await engines.update_weights("store", 2)
        return engines.up, replica.weights_version

    assert drive([replica], dataclasses.replace(FAST, progress_s=5.0), act)[0] == (["a"], 2)
    replica.dead = True
    with pytest.raises(engine.EngineError, match="none of 1 engines could"):
        drive([replica], FAST, lambda engines: engines.update_weights("store", 3))


def test_an_engine_that_answers_and_fails_every_turn_costs_no_rollout_and_stays_away_longer_each_time():
    replicas = [Replica("bad"), Replica("good", kv_tokens=32)]

    async def act(engines):
        replicas[0].fails = 10**6
        return await many(engines, count=48)

    results, engines, _ = drive(replicas, FAST, act)
    assert results == all_expected(48)
    assert engines.counts.taken_down <= 8


def test_a_short_absence_of_all_engines_is_forgotten_by_those_that_were_seated():
    replica = Replica("a", kv_tokens=64)

    async def act(engines):
        async with engines.seat("x", family="", prompt_tokens=4, budget_tokens=12) as seat:
            await seat.ready()
            seat.fail(engine.EngineError("once"))
            seat.sit(0)
            seat.lose_place(queued=False)
            return await seat.turn(request(0))

    assert drive([replica], STILL, act)[0].token_ids.tolist() == expected(0, 1)


def test_an_engine_that_lives_but_takes_no_weights_stays_out():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        await engines.update_weights("store", 1)
        replicas[0].refuses_weights = True
        await engines.update_weights("store", 2)
        await many(engines, count=4)
        await asyncio.sleep(0.1)
        return engines.up

    up, _, lines = drive(replicas, FAST, act)
    assert up == ["b"] and any("answers again, but cannot serve" in line for line in lines)


def test_one_failed_turn_is_sampled_again_and_does_not_cost_the_engine():
    replica = Replica("a", kv_tokens=640)

    async def act(engines):
        replica.fails = 1
        return await many(engines, count=4)

    results, engines, _ = drive([replica], FAST, act)
    assert results == all_expected(4) and engines.counts.taken_down == 0


def test_three_failed_turns_in_a_row_take_an_engine_down_that_still_answers():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        replicas[0].fails = 10**6
        return await many(engines, count=12)

    results, engines, _ = drive(replicas, STILL, act)
    assert results == all_expected(12) and engines.up == ["b"]


def test_a_limit_of_this_process_is_an_error_of_its_own_and_costs_no_engine_its_place():
    class Unreached(Replica):
        limited = False

        async def _try(self):
            if self.limited:
                raise engine.LimitError("this process may open no more files")

        async def generate(self, request):
            await self._try()
            return await super().generate(request)

        async def load(self):
            await self._try()
            return await super().load()

        async def alive(self):
            await self._try()
            return await super().alive()

        async def update_weights(self, root, version):
            await self._try()
            await super().update_weights(root, version)

    replicas = [Unreached("a"), Unreached("b")]

    async def act(engines):
        await engines.update_weights("store", 0)
        for replica in replicas:
            replica.limited = True
        results = await asyncio.gather(*(rollout(engines, n) for n in range(24)), return_exceptions=True)
        assert all(type(error) is engine.LimitError for error in results)
        await asyncio.sleep(0.3)  # some probes, and longer than engines may stand still
        with pytest.raises(engine.LimitError, match="no more files"):
            await engines.update_weights("store", 1)
        assert engines.up == ["a", "b"]
        for replica in replicas:
            replica.limited = False
        await engines.update_weights("store", 1)
        return await many(engines)

    results, engines, lines = drive(replicas, FAST, act)
    assert results == all_expected() and lines == [] and engines.counts.taken_down == 0


class Pausable(Replica):
    """Turns that end only while it is not paused."""

    paused = False

    async def generate(self, request):
        while self.paused:
            await asyncio.sleep(0.005)
        return await super().generate(request)

    async def pause(self, mode):
        if self.dead:
            raise engine.EngineError(f"{self.caps.name} takes no pause")
        self.paused = True

    async def resume(self):
        self.paused = False


@pytest.mark.parametrize("fails", [False, True], ids=["twice", "in vain"])
def test_after_a_pause_engines_that_stand_still_are_found_out_again(fails):
    replicas = [Pausable("a"), Pausable("b")]

    async def act(engines):
        await engines.update_weights("store", 0)
        for replica in replicas:
            replica.dead = fails
        if fails:
            with pytest.raises(engine.EngineError, match="none of 2 engines could"):
                await engines.pause("in_place")
            for replica in replicas:
                replica.dead = False
            while len(engines.up) < 2:
                await asyncio.sleep(0.01)
        else:
            await engines.pause("in_place")
            await engines.pause("retract")  # applies the new mode
            await engines.resume()
        replicas[0].stuck = True
        async with asyncio.timeout(10.0):
            return await many(engines)

    results, _, lines = drive(replicas, FAST, act)
    assert results == all_expected() and any("no progress for" in line for line in lines)


def test_no_engine_comes_back_into_a_pool_that_is_paused():
    replicas = [Pausable("a"), Pausable("b")]

    async def act(engines):
        await engines.update_weights("store", 0)
        replicas[0].dead = True
        await engines.update_weights("store", 1)
        await engines.pause("in_place")
        replicas[0].dead = False
        work = asyncio.create_task(many(engines, 8))
        await asyncio.sleep(0.3)
        assert engines.up == ["b"] and not replicas[0].served
        await engines.resume()
        return await work, [await _up(engines, "a")]

    assert drive(replicas, FAST, act)[0][0] == all_expected(8)


async def _up(engines, name):
    while name not in engines.up:
        await asyncio.sleep(0.01)


def test_an_update_ends_on_every_engine_before_an_odd_error_of_one_is_told():
    class Odd(Replica):
        async def update_weights(self, root, version):
            if self.caps.name == "a":
                raise KeyError("odd")
            await asyncio.sleep(0.05)
            await super().update_weights(root, version)

    replicas = [Odd("a"), Odd("b")]

    async def act(engines):
        with pytest.raises(KeyError, match="odd"):
            await engines.update_weights("store", 3)
        return replicas[1].weights_version

    assert drive(replicas, STILL, act)[0] == 3


class Diverging(Replica):
    """Gives no finite number for rollouts of some numbers."""

    def __init__(self, name, numbers, **more):
        super().__init__(name, **more)
        self.numbers = numbers

    async def generate(self, request):
        if int(request.rid.split("/")[0]) in self.numbers:
            raise engine.DivergedError(f"weights 0 {engine.DIVERGED}")
        return await super().generate(request)


def test_a_prompt_whose_samples_diverge_costs_no_engine_its_place_and_no_other_rollout_anything():
    replicas = [Diverging(name, range(4), turn_s=0.05) for name in "ab"]

    async def act(engines):
        return await asyncio.gather(*(rollout(engines, number) for number in range(28)), return_exceptions=True)

    results, engines, lines = drive(replicas, FAST, act)
    assert results[4:] == all_expected(28)[4:] and engines.counts.taken_down == 0 and lines == []
    assert all(engine.DIVERGED in str(error) for error in results[:4])


def test_an_engine_on_which_every_prompt_diverges_is_taken_down_and_no_rollout_is_lost():
    replicas = [Diverging("a", range(99), kv_tokens=640), Replica("b", kv_tokens=640)]
    results, engines, lines = drive(replicas, STILL, many)
    assert results == all_expected() and engines.up == ["b"] and engine.DIVERGED in lines[0]


def test_when_no_engine_is_left_every_rollout_ends_with_an_error_that_says_so():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        for replica in replicas:
            replica.dead = True
        return await asyncio.gather(*(rollout(engines, n) for n in range(12)), return_exceptions=True)

    for policy in (STILL, FAST):
        for replica in replicas:
            replica.dead = False
        results, _, _ = drive(replicas, policy, act)
        assert len(results) == 12 and all(isinstance(error, engine.EngineError) for error in results)
        assert "none of 2 engines is in service" in str(results[-1])


def test_rollouts_wait_for_an_engine_that_restarts_within_the_progress_limit():
    replica = Replica("a")

    async def act(engines):
        work = asyncio.create_task(many(engines, count=8))
        await asyncio.sleep(0.02)
        replica.dead = True
        await asyncio.sleep(0.08)
        assert engines.up == []
        replica.dead = False
        return await work

    results, engines, _ = drive([replica], dataclasses.replace(FAST, progress_s=5.0), act)
    assert results == all_expected(8) and engines.counts.brought_back == 1


def test_a_seat_is_given_back_on_every_exit():
    replica = Replica("a", kv_tokens=16)

    async def act(engines):
        with pytest.raises(KeyError):
            async with engines.seat("x", family="", prompt_tokens=4, budget_tokens=12) as seat:
                await seat.ready()
                raise KeyError
        task = asyncio.create_task(rollout(engines, 0, tool_s=10.0))
        queued = asyncio.create_task(rollout(engines, 1))
        await asyncio.sleep(0.03)
        for one in (queued, task):
            one.cancel()
        await asyncio.gather(task, queued, return_exceptions=True)
        return await rollout(engines, 2)

    assert drive([replica], STILL, act)[0] == expected(2)


def test_a_rollout_that_no_engine_can_hold_and_a_name_that_is_taken_are_refused():
    async def act(engines):
        with pytest.raises(ValueError, match="may reach 70 tokens, the largest engine holds 64"):
            await rollout(engines, 0, budget=66)
        async with engines.seat("x", family="", prompt_tokens=4, budget_tokens=12):
            with pytest.raises(ValueError, match="has a seat already"):
                async with engines.seat("x", family="", prompt_tokens=4, budget_tokens=12):
                    pass

    drive([Replica("a")], STILL, act)
    with pytest.raises(ValueError, match="at least one engine"):
        pool.Pool([], STILL)


def test_an_update_does_not_wait_for_an_engine_that_was_taken_down_in_the_middle_of_it(monkeypatch):
    monkeypatch.setattr(pool, "_FEWEST_PROBE_S", 0.02)

    class Wedged(Replica):
        async def update_weights(self, root, version):
            while self.silent:
                await asyncio.sleep(60.0)
            await super().update_weights(root, version)

    replicas = [Wedged("a"), Wedged("b")]

    async def act(engines):
        await engines.update_weights("store", 1)
        replicas[0].silent = True
        async with asyncio.timeout(10.0):
            await engines.update_weights("store", 2)

    for rolling in (False, True):
        for replica in replicas:
            replica.silent = False
        _, engines, lines = drive(replicas, dataclasses.replace(FAST, rolling=rolling), act)
        assert engines.up == ["b"] and replicas[1].weights_version == 2
        assert "no answer to 3 probes" in lines[0]


class Compiling(Replica):
    """Its first turn after a start takes long."""

    def __init__(self, name, **more):
        super().__init__(name, **more)
        self.is_warm = False
        self.slow = []

    async def generate(self, request):
        if not self.is_warm and not request.rid.startswith("warm"):
            self.slow.append(request.rid)
        made = await super().generate(request)
        self.is_warm = True
        return made


def test_every_engine_is_warmed_up_and_one_that_restarts_before_it_takes_a_rollout():
    replicas = [Compiling(name) for name in "abc"]
    warm_up = dataclasses.replace(request(99), rid="warm-up/0")

    async def act(engines):
        await engines.update_weights("store", 1)
        await engines.warm_up([warm_up])
        assert all(replica.is_warm for replica in replicas)
        replicas[0].dead, replicas[0].is_warm = True, False
        await engines.update_weights("store", 2)
        replicas[0].dead = False
        work = asyncio.create_task(many(engines, count=40))
        while "a" not in engines.up:
            await asyncio.sleep(0.01)
        assert replicas[0].is_warm
        return await work

    results, _, _ = drive(replicas, FAST, act)
    assert results == all_expected(40) and not [rid for replica in replicas for rid in replica.slow]
    assert [rid for rid in replicas[0].served if not rid.startswith("warm")]


def test_an_engine_that_fails_of_its_warm_up_takes_no_rollout():
    replicas = [Replica("a"), Replica("b")]

    async def act(engines):
        replicas[0].fails = 10**6
        await engines.warm_up([request(99)])
        return await many(engines, count=4)

    results, engines, _ = drive(replicas, STILL, act)
    assert results == all_expected(4) and engines.up == ["b"]


def test_a_rollout_that_only_an_engine_out_of_service_could_hold_ends_within_the_limit_and_holds_up_nobody():
    replicas = [Replica("small", kv_tokens=32), Replica("large")]

    async def act(engines):
        replicas[1].dead = True
        await asyncio.gather(rollout(engines, 100), rollout(engines, 101), rollout(engines, 102))  # finds it dead
        assert engines.up == ["small"]
        large = asyncio.create_task(rollout(engines, 50, budget=60))
        await asyncio.sleep(0)
        results = await many(engines, count=8)
        assert not large.done()
        async with asyncio.timeout(10.0):
            with pytest.raises(engine.RoomError, match=r"r50 needs 64 KV tokens, and none large enough \(large\)"):
                await large
        return results

    assert drive(replicas, dataclasses.replace(FAST, progress_s=3.0), act)[0] == all_expected(8)
    replicas[1].dead = False
    waiting = dataclasses.replace(FAST, probe_s=0)
    replicas[1].dead = True

    async def at_once(engines):
        await asyncio.gather(*(rollout(engines, number) for number in range(8)))
        with pytest.raises(engine.RoomError, match="none large enough"):
            await rollout(engines, 50, budget=60)

    drive(replicas, waiting, at_once)


def test_a_rollout_that_only_an_engine_out_of_service_could_hold_runs_when_that_engine_comes_back():
    replicas = [Replica("small", kv_tokens=32), Replica("large")]

    async def act(engines):
        replicas[1].dead = True
        await asyncio.gather(*(rollout(engines, number) for number in range(8)))
        large = asyncio.create_task(rollout(engines, 50, budget=60))
        await asyncio.sleep(0.05)
        assert not large.done()
        replicas[1].dead = False
        return await large

    assert drive(replicas, dataclasses.replace(FAST, progress_s=20.0), act)[0] == expected(50)


def test_waiting_for_room_ends_when_nobody_was_given_a_place_for_long_and_not_before():
    replica = Replica("a", kv_tokens=16)

    async def act(engines):
        async def waits(number):
            async with engines.seat(f"w{number}", family="", prompt_tokens=4, budget_tokens=12) as seat:
                await seat.ready(0.2)
                await asyncio.sleep(0.12)  # holds the only place
            return True

        assert await asyncio.gather(*(waits(number) for number in range(6))) == [True] * 6
        async with engines.seat("holder", family="", prompt_tokens=4, budget_tokens=12) as holder:
            await holder.ready()
            with pytest.raises(engine.RoomError, match=r"waited 0.\d+ s for room .* 1 of 1 engines in service, 1 wait"):
                await waits(9)

    drive([replica], STILL, act)


def test_a_turn_that_every_engine_dies_of_ends_by_name():
    class Fragile(Replica):
        async def generate(self, request):
            if request.rid.startswith("13/"):
                self.dead = True
                asyncio.get_running_loop().call_later(0.03, lambda: setattr(self, "dead", False))
                raise engine.EngineError(f"{self.caps.name} died of {request.rid}")
            return await super().generate(request)

    replicas = [Fragile("a"), Fragile("b")]

    async def act(engines):
        engines._away_s = [-100.0, -100.0]  # no growing absences, for a short test
        with pytest.raises(engine.EngineError, match="16 engines were taken down under it"):
            async with asyncio.timeout(30.0):
                await rollout(engines, 13)
        return await rollout(engines, 14)

    assert drive(replicas, dataclasses.replace(FAST, progress_s=10.0), act)[0] == expected(14)


def test_rolling_updates_go_engine_by_engine_and_others_all_at_once():
    class Slow(Replica):
        updating = 0
        most = 0

        async def update_weights(self, root, version):
            Slow.updating += 1
            Slow.most = max(Slow.most, Slow.updating)
            await asyncio.sleep(0.01)
            Slow.updating -= 1
            self.weights_version = version

    for rolling, most in ((True, 1), (False, 3)):
        Slow.most = 0
        drive([Slow(n) for n in "abc"], dataclasses.replace(STILL, rolling=rolling), lambda p: p.update_weights("s", 1))
        assert Slow.most == most


def test_progress_counts_only_while_there_is_work_and_starts_again_with_it():
    seen = watch.Progress(10.0)
    assert seen.see("a", 0.0, idle=False) is None
    assert seen.see("a", 10.0, idle=False) is None
    assert seen.see("a", 11.0, idle=False) == 11.0
    assert seen.see("b", 12.0, idle=False) is None
    assert seen.see("b", 30.0, idle=True) is None
    assert seen.see("b", 40.0, idle=False) is None
    assert seen.see("b", 51.0, idle=False) == 11.0


def test_a_turn_whose_cache_was_taken_away_is_counted_over_http_as_well():
    asked = request(1)
    told = dataclasses.replace(answer(asked, 0), preempted=2)
    body = sglang_wire.generate_body(asked, "x/1", "")
    assert sglang_wire.generation(sglang_wire.reply_to_generate(body, told), asked, "x/1", 100).preempted == 2

    class Pressed(Replica):
        async def generate(self, request):
            return dataclasses.replace(await super().generate(request), preempted=2)

    async def run():
        shared = pool.Pool([Pressed("a")], settings.Fleet(probe_s=0))
        await asyncio.gather(*(shared.generate(request(n)) for n in range(3)))
        await shared.close()
        return shared.preempted

    assert asyncio.run(run()) == 6
