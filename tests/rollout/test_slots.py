"""The plan of calls, carried out by hand on a pool of ids: every row reads its own, whoever comes, leaves or yields."""

from __future__ import annotations

import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np

from rstar2_jax.rollout import device, slots
from rstar2_jax.rollout.engine import Request, Sampling
from rstar2_jax.types import FinishReason

CONTEXT, PAGE, VOCAB = 24, 4, 5


def next_id(ids):
    """What the stand-in for a model says after these ids."""
    return zlib.crc32(np.asarray(ids, np.int32).tobytes()) % VOCAB


def alone(prompt, new, stop):
    """(ids, reason) of a request by itself."""
    ids = list(prompt)
    while True:
        ids.append(next_id(ids))
        if ids[-1] in stop:
            return ids[len(prompt) :], FinishReason.STOP
        if len(ids) - len(prompt) == new:
            return ids[len(prompt) :], FinishReason.LENGTH


class Device:
    """Carries out what a table asks for: pages of ids, read through the tables that it is sent."""

    def __init__(self, lanes, pages):
        self.table = slots.SlotTable(lanes, CONTEXT, pages, PAGE)
        self.pool = np.full((pages, PAGE), -1)
        self.finished, self.moved = {}, 0

    def submit(self, name, prompt, new, stop=()):
        sampling = Sampling(max_new_tokens=new, stop_ids=tuple(stop))
        request = Request(rid=str(name), prompt_ids=prompt, seed=0, sampling=sampling)
        self.table.waiting.append(slots.Job(request=request, prompt_ids=np.array(prompt, np.int32), reply=None))

    def turn(self, steps=3):
        before = self.pool.copy()
        for copy in self.table.admit():
            self.pool[copy.target] = before[copy.source]
        call = self.table.plan(steps)
        if call is None:
            return
        ids, done = self.run(call)
        _, ended = self.table.record(ids, np.zeros(ids.shape, np.float32), done, version=0)
        for job, reason in ended:
            self.finished[job.request.rid] = job.ids, reason

    def run(self, call):
        rows, given, lanes = call.rows, call.given, len(call.rows.token)
        ids = np.full((lanes, device.MAX_STEPS), -1)
        token, position, remaining = (np.array(part) for part in (rows.token, rows.position, rows.remaining))
        ended, step = 0, 0
        last_given = max((k + 1 for k in range(len(given.position)) if (given.position[k] >= 0).any()), default=0)
        while step < call.steps and ((position >= 0).any() or step < last_given) and ended < call.leave_after:
            carries = given.position[step] >= 0
            live = (position >= 0) & (rows.start <= step)
            assert not (carries & live).any(), "a lane carries one token"
            for lane in np.flatnonzero(carries):
                self.put(rows.table[given.owner[step, lane]], given.position[step, lane], given.token[step, lane])
            for lane in np.flatnonzero(live):
                self.put(rows.table[lane], position[lane], token[lane])
            for lane in np.flatnonzero(live):
                held = self.pool[rows.table[lane]].reshape(-1)[: position[lane] + 1]
                token[lane] = ids[lane, step] = next_id(held)
                remaining[lane] -= 1
                over = token[lane] in rows.stop_ids[lane] or remaining[lane] == 0
                position[lane] = -1 if over else position[lane] + 1
                ended += over
            self.moved += int(carries.sum() + live.sum())
            step += 1
        return ids, step

    def put(self, table, position, token):
        self.pool[table[position // PAGE], position % PAGE] = token

    def drain(self, limit=500):
        while self.table.is_busy and limit:
            self.turn()
            limit -= 1
        assert not self.table.is_busy, "requests are left over"
        assert self.table.cache.held_pages == 0


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 10), st.sets(st.integers(0, VOCAB - 1), max_size=1)), max_size=12)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(REQUESTS, st.integers(1, 5), st.integers(6, 20), st.integers(0, 4), st.data())
def test_every_request_gets_what_it_gets_alone(requests, lanes, pages, together, data):
    machine = Device(lanes, pages)
    for name, (prompt, new, stop) in enumerate(requests):
        machine.submit(name, prompt, new, stop)
        for _ in range(0 if name < together else data.draw(st.integers(0, 2))):
            machine.turn(steps=data.draw(st.integers(1, 5)))
        if data.draw(st.booleans()):
            machine.table.retract()
    machine.drain()
    assert machine.finished == {str(name): alone(*request) for name, request in enumerate(requests)}


def test_a_prompt_of_many_samples_is_written_once():
    machine, prompt = Device(8, 40), [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    for name in range(8):
        machine.submit(name, prompt, 3)
    machine.drain()
    # Every sample takes a step for each of its ids; the ids before the prompt's last are written by one of them.
    assert machine.moved == 8 * 3 + len(prompt) - 1
    assert machine.table.shared_tokens == 7 * (len(prompt) - 1)


def test_the_next_turn_writes_only_what_is_new():
    machine, prompt = Device(2, 20), [1, 0, 1, 1, 0]
    machine.submit("first", prompt, 6)
    machine.drain()
    sampled, moved = machine.finished["first"][0], machine.moved
    machine.submit("second", [*prompt, *sampled, 2, 3], 4)
    machine.drain()
    # The last sampled id was never written, and the last of the reply is the first step's own.
    assert machine.moved - moved == 2 + 4


def test_when_pages_run_out_the_youngest_yields_and_comes_first_again():
    machine = Device(4, 6)
    for name in range(4):
        machine.submit(name, [name], 20)
    order = []
    while machine.table.is_busy:
        machine.turn()
        order += [name for name in machine.finished if name not in order]
    assert machine.table.preempted > 0 and machine.table.recomputed_tokens > 0
    assert order == ["0", "1", "2", "3"]
    assert machine.finished == {str(name): alone([name], 20, ()) for name in range(4)}


def test_lanes_that_sample_nothing_write_prompts():
    machine = Device(4, 40)
    machine.submit("sampling", [1], 12)
    machine.turn(steps=1)
    machine.submit("long", [0] * 10, 1)
    machine.turn(steps=4)
    # Nine ids over the three lanes that are left, then the row begins in the fourth step.
    assert machine.finished["long"] == alone([0] * 10, 1, ())


def test_a_cancelled_request_leaves_its_pages_to_others():
    machine = Device(1, 8)
    machine.submit("cancelled", [1, 0, 1], 20)
    machine.submit("next", [0, 0], 3)
    machine.turn()
    machine.table.rows[0].cancelled = True
    machine.drain()
    assert list(machine.finished) == ["next"]
