"""Event simulation of one rollout step on many engines: the pool's scheduler against simpler ones, on equal traces.

    python benchmarks/scheduler_sim.py --json            64 engines, 16,384 rollouts of heavy-tailed length

scheduler_check.py holds its clock against one real embedded engine.

The decisions of `pool` are rstar2_jax.rollout.balance itself. An engine decodes all of its running rows in step; a
step takes `base_s + per_kv_token_s * tokens held` seconds, prefill so many tokens a second, and rows that outgrow the
memory are evicted (latest first), wait, and are prefilled again: those tokens are counted as recomputed.

    static       every prompt's samples go to engine i mod n at the start, whatever they turn out to need
    round_robin  every turn goes to the next engine, which prefills the whole context again
    pool         balance.Balancer: free KV tokens, expected lengths, affinity; first come, or longest prompts first
    oracle       the same with every true length known beforehand, longest first

Utilisation is sampled tokens / (seconds * engines * tokens per second of a full engine). Not modelled: network,
weight updates, and engines of unlike speed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import json
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from rstar2_jax.rollout import balance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One engine: KV tokens, seconds of a decode step, prefill tokens a second, most rows at once."""

    kv_tokens: int = 732_000
    base_s: float = 8e-3
    per_kv_token_s: float = 3.3e-8
    prefill_tokens_per_s: float = 20_000.0
    rows: int = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One rollout: prompt, sampled tokens and tool seconds of each turn (the last turn's tool is 0)."""

    name: str
    family: str
    prompt_tokens: int
    turns: tuple[int, ...]
    tools_s: tuple[float, ...]
    reply_tokens: int

    @property
    def response_tokens(self) -> int:
        """Everything after the prompt."""
        return sum(self.turns) + self.reply_tokens * (len(self.turns) - 1)


def traces(prompts: int, samples: int, seed: int, budget: int) -> list[Trace]:
    """Heavy-tailed turns (log-normal, sigma 0.9 within a prompt's own scale) and tool waits (0.3 s, 5% of 5 s)."""
    rng = np.random.default_rng(seed)
    made = []
    for prompt in range(prompts):
        scale = rng.lognormal(6.2, 0.6)
        tokens = int(rng.integers(100, 600))
        for sample in range(samples):
            count = int(rng.integers(1, 8))
            turns, left = [], budget
            for _ in range(count):
                turn = int(np.clip(rng.lognormal(np.log(scale), 0.9), 8, left))
                turns.append(turn)
                left -= turn + 80
                if left < 16:
                    break
            waits = [float(5.0 if rng.random() < 0.05 else rng.exponential(0.3)) for _ in turns[1:]]
            made.append(
                Trace(
                    name=f"{prompt}/{sample}",
                    family=str(prompt),
                    prompt_tokens=tokens,
                    turns=tuple(turns),
                    tools_s=(*waits, 0.0),
                    reply_tokens=80,
                )
            )
    return made


@dataclasses.dataclass(eq=False)
class Row:
    """A rollout in the simulation. While it runs, its tokens are those at `joined` plus the engine's progress since."""

    trace: Trace
    turn: int = 0
    done_in_turn: float = 0.0
    context: float = 0.0  # tokens that it has, cached or not
    cached: float = 0.0
    joined: float = 0.0  # the engine's progress when it started to run
    entry: balance.Rollout | None = None


class Engine:
    """Rows that decode in step: `progress` counts the tokens that a row running from the start would have."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now_s = self.progress = 0.0
        self.running: dict[str, Row] = {}
        self.ends: list[tuple[float, int, Row]] = []  # (progress at which its turn ends, tie, row)
        self.tie = itertools.count()
        self.waiting: collections.deque[Row] = collections.deque()
        self.resting: dict[str, Row] = {}  # tools run, pages stay
        self.cached_running = self.cached_resting = 0.0  # the sums over the rows, kept as they change
        self.prefill_s = 0.0
        self.recomputed = 0.0
        self.evictions = 0

    @property
    def held(self) -> float:
        """KV tokens in use."""
        return self.cached_running + self.cached_resting

    def step_s(self) -> float:
        """Seconds of the next decode step."""
        return self.machine.base_s + self.machine.per_kv_token_s * self.held

    def advance(self, until_s: float) -> None:
        """Progress of all running rows up to a time."""
        spent = until_s - self.now_s
        used = min(spent, self.prefill_s)
        self.prefill_s -= used
        if self.running and spent > used:
            tokens = (spent - used) / self.step_s()
            self.progress += tokens
            self.cached_running += tokens * len(self.running)
        self.now_s = until_s

    def next_event_s(self) -> float:
        """When a row ends its turn or the memory is full, whichever comes first."""
        while self.ends and not self._is_current(*self.ends[0]):
            heapq.heappop(self.ends)
        if not self.ends:
            return float("inf")
        room = max(0.0, self.machine.kv_tokens - self.held) / len(self.running)
        left = max(0.0, min(self.ends[0][0] - self.progress, room + 1.0))
        return self.now_s + self.prefill_s + left * self.step_s()

    def add(self, row: Row) -> None:
        """A turn arrives."""
        if self.resting.pop(row.trace.name, None) is not None:
            self.cached_resting -= row.cached
        self.waiting.append(row)
        self.admit()

    def admit(self) -> None:
        """Start waiting rows while there is room for what they have."""
        while self.waiting and len(self.running) < self.machine.rows:
            row = self.waiting[0]
            missing = row.context - row.cached
            if self.held + missing > self.machine.kv_tokens * 0.98 and self.running:
                return
            self.waiting.popleft()
            self.prefill_s += missing / self.machine.prefill_tokens_per_s
            row.cached, row.joined = row.context, self.progress
            self.cached_running += row.cached
            self.running[row.trace.name] = row
            heapq.heappush(self.ends, (self._end_of(row), next(self.tie), row))

    def ended(self) -> list[Row]:
        """Rows whose turn is done, taken off."""
        done = []
        while self.ends and self.ends[0][0] <= self.progress + 1e-6:
            end, tie, row = heapq.heappop(self.ends)
            if self._is_current(end, tie, row):
                self._leave(row)
                done.append(row)
        return done

    def relieve(self) -> None:
        """Evict the latest rows while the memory is over-full; rows whose tools run lose their pages first."""
        while self.held > self.machine.kv_tokens and (self.resting or len(self.running) > 1):
            if self.resting:
                _, row = self.resting.popitem()
                self.cached_resting -= row.cached
            else:
                row = next(reversed(self.running.values()))
                self._leave(row)
                self.waiting.appendleft(row)
            self.evictions += 1
            self.recomputed += row.cached
            row.cached = 0.0

    def _end_of(self, row: Row) -> float:
        return row.joined + row.trace.turns[row.turn] - row.done_in_turn

    def _is_current(self, end: float, tie: int, row: Row) -> bool:
        return self.running.get(row.trace.name) is row and self._end_of(row) == end

    def _leave(self, row: Row) -> None:
        del self.running[row.trace.name]
        grown = self.progress - row.joined
        row.done_in_turn += grown
        row.context += grown
        row.cached += grown
        self.cached_running -= row.cached


# Quantile and order of the pool; the oracle's rollouts come in the order of their true lengths and reserve just them.
POOLS = {"pool": (0.9, False), "pool_longest_first": (0.9, True), "oracle": (None, False)}


class Simulation:
    """One step under one scheduler."""

    def __init__(self, work: Sequence[Trace], engines: int, machine: Machine, kind: str, budget: int) -> None:
        self.work, self.kind, self.budget = work, kind, budget
        self.engines = [Engine(machine) for _ in range(engines)]
        self.place: dict[str, int] = {}
        self.turn_number = itertools.count()
        self.tools: list[tuple[float, int, Row]] = []
        self.events: list[tuple[float, int, int]] = []
        self.stamps = [0] * engines
        self.rows: dict[str, Row] = {}
        self.balancer = None
        if kind in POOLS:
            quantile, longest_first = POOLS[kind]
            capacities = [machine.kv_tokens] * engines
            self.balancer = balance.Balancer(capacities, quantile=quantile, longest_first=longest_first)

    def run(self) -> dict[str, float]:
        """Seconds, utilisation, recomputed share and evictions of the step."""
        order = self.work
        if self.kind == "oracle":
            order = sorted(self.work, key=lambda trace: -trace.response_tokens)
        for number, trace in enumerate(order):
            row = Row(trace=trace, context=float(trace.prompt_tokens))
            self.rows[trace.name] = row
            if self.balancer is None:
                family = int(trace.family) if self.kind == "static" else number
                self._send(row, family % len(self.engines))
            else:
                budget = trace.response_tokens if self.kind == "oracle" else self.budget
                row.entry = balance.Rollout(
                    name=trace.name, family=trace.family, prompt_tokens=trace.prompt_tokens, budget_tokens=budget
                )
                self.balancer.submit(row.entry)
        self._seat()
        left = len(self.work)
        while left:
            at, index, stamp = self.events[0] if self.events else (float("inf"), 0, 0)
            if self.events and stamp != self.stamps[index]:
                heapq.heappop(self.events)  # the engine has changed since
                continue
            if self.tools and self.tools[0][0] <= at:
                at, _, row = heapq.heappop(self.tools)
                self._send(row, self._engine_of(row), at)
                continue
            heapq.heappop(self.events)
            self.engines[index].advance(at)
            left -= self._end_turns(self.engines[index])
            self._schedule(index)
        return self._result()

    def _end_turns(self, engine: Engine) -> int:
        ended = 0
        for row in engine.ended():
            last = row.turn + 1 == len(row.trace.turns)
            wait_s, row.done_in_turn, row.turn = row.trace.tools_s[row.turn], 0.0, row.turn + 1
            if last:
                ended += 1
                if self.balancer is not None and row.entry is not None:
                    self.balancer.grow(row.entry, row.trace.response_tokens)
                    self.balancer.release(row.entry, ended=True)
                continue
            row.context += row.trace.reply_tokens
            if self.balancer is not None and row.entry is not None:
                self.balancer.grow(row.entry, int(row.context) - row.trace.prompt_tokens)
            if self.kind == "round_robin":
                self.engines[0].recomputed += row.cached
                row.cached = 0.0
            else:
                engine.resting[row.trace.name] = row
                engine.cached_resting += row.cached
            heapq.heappush(self.tools, (engine.now_s + wait_s, next(self.turn_number), row))
        engine.relieve()
        engine.admit()
        if ended:
            self._seat(engine.now_s)
        return ended

    def _seat(self, now_s: float = 0.0) -> None:
        if self.balancer is not None:
            for rollout, index in self.balancer.place():
                self._send(self.rows[rollout.name], index, now_s)

    def _engine_of(self, row: Row) -> int:
        if self.kind == "round_robin":
            return next(self.turn_number) % len(self.engines)
        return self.place[row.trace.name]

    def _send(self, row: Row, index: int, now_s: float = 0.0) -> None:
        self.place[row.trace.name] = index
        engine = self.engines[index]
        engine.advance(max(now_s, engine.now_s))
        engine.add(row)
        self._schedule(index)

    def _schedule(self, index: int) -> None:
        self.stamps[index] += 1
        heapq.heappush(self.events, (self.engines[index].next_event_s(), index, self.stamps[index]))

    def _result(self) -> dict[str, float]:
        seconds = max(engine.now_s for engine in self.engines)
        sampled = sum(trace.response_tokens - trace.reply_tokens * (len(trace.turns) - 1) for trace in self.work)
        context = statistics.fmean(trace.prompt_tokens + trace.response_tokens / 2 for trace in self.work)
        machine = self.engines[0].machine
        rows = min(machine.rows, machine.kv_tokens / context)
        full = rows / (machine.base_s + machine.per_kv_token_s * machine.kv_tokens)
        recomputed = sum(engine.recomputed for engine in self.engines)
        return {
            "seconds": seconds,
            "utilisation": sampled / (seconds * len(self.engines) * full),
            "recomputed_share": recomputed / sampled,
            "evictions": sum(engine.evictions for engine in self.engines),
        }


def compare(args: argparse.Namespace) -> dict[str, object]:
    """Medians over seeds for every scheduler, and the two numbers that count."""
    machine = Machine(kv_tokens=args.kv_tokens)
    runs: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    for seed in range(args.seeds):
        work = traces(args.prompts, args.samples, seed, args.budget)
        for kind in ("static", "round_robin", *POOLS):
            runs[kind].append(Simulation(work, args.engines, machine, kind, args.budget).run())
    found: dict[str, object] = {
        kind: {name: statistics.median(run[name] for run in each) for name in each[0]} for kind, each in runs.items()
    }
    for kind in ("pool", "pool_longest_first"):
        ratios = [o["seconds"] / p["seconds"] for p, o in zip(runs[kind], runs["oracle"], strict=True)]
        found[f"{kind}_of_oracle"] = statistics.median(ratios)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--kv_tokens", type=int, default=732_000)
    parser.add_argument("--seeds", type=int, default=3)
    found = compare(parser.parse_args(argv))
    if "--json" in (argv or sys.argv):
        print(json.dumps(found, indent=1))
        return 0
    for kind, numbers in found.items():
        print(f"{kind:<16} {numbers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
