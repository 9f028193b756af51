"""Event simulation of one rollout step on many engines: the pool's scheduler against simpler ones, on equal traces.

    python benchmarks/scheduler_sim.py --json            64 engines, 16,384 rollouts of heavy-tailed length

scheduler_check.py holds its clock against one real embedded engine.

The decisions of `pool` are rstar2_jax.rollout.balance itself. An engine decodes all of its running rows in step; a
step takes `base_s + per_kv_token_s * tokens held` seconds, prefill so many tokens a second, and rows that outgrow the
memory are evicted (latest first), wait, and are prefilled again: those tokens are counted as recomputed.

Several steps follow one another, as in training: in the first the pool knows of lengths what an exam has shown, with
which a run begins as gin/base.gin has it (`--exam` problems, four answers to each; 0 is none), in each later one what
the steps before have shown; the oracle and the others start every step alike.

    static       every prompt's samples go to engine i mod n at the start, whatever they turn out to need
    round_robin  every turn goes to the next engine, which prefills the whole context again
    pool         balance.Balancer: free KV tokens, expected lengths, affinity, moves between turns; first come, or
                 longest prompts first
    oracle       the same with every true length known beforehand, longest first, without moves

Utilisation is sampled tokens / (seconds * engines * tokens per second of a full engine). Not modelled: network,
weight updates, and engines of unlike speed.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rstar2_jax.rollout import balance, lengths

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from scheduler_engine import Engine, Machine, Row, Trace  # noqa: E402 (found beside this file)


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


class Oracle(balance.Balancer):
    """The scheduler with every rollout's budget its true length: what an engine is to hold, and to do, is no estimate.
    Of the engines with room that one takes a rollout which has least to do."""

    def __init__(self, capacities: Sequence[int], budget: int) -> None:
        super().__init__(capacities, quantile=0.5)  # no margin
        self._grid = np.arange(lengths.BUCKETS) * budget / lengths.BUCKETS

    @property
    def _knows(self) -> bool:
        return True

    def need(self, rollout: balance.Rollout) -> int:
        """What it reaches."""
        return rollout.longest_tokens

    def _choose(self, rollout: balance.Rollout) -> int | None:
        peaks = zip(self.up, self._peaks(self.up, rollout).tolist(), strict=True)
        room = [index for index, peak in peaks if peak <= self._engines[index].capacity_tokens]
        return min(room, key=lambda index: self._mean[index].sum(), default=None)

    def _outlook(self, rollout: balance.Rollout) -> tuple[np.ndarray, np.ndarray]:
        return self._truth([rollout.prompt_tokens], [rollout.used_tokens], [rollout.budget_tokens])

    def _refresh(self) -> None:
        for index in self._stale:
            it = self._engines[index]
            rollouts = list(it.rollouts.values())
            used = [it.used_by(one) for one in rollouts]
            columns = [one.prompt_tokens for one in rollouts], used, [one.budget_tokens for one in rollouts]
            self._mean[index], self._variance[index] = self._truth(*columns)
        self._stale.clear()

    def _truth(self, prompts: list[int], used: list[int], ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
        reached = np.array(used, float)[:, None] + self._grid
        there = reached < np.array(ends, float)[:, None]
        return (there * (np.array(prompts, float)[:, None] + reached)).sum(axis=0), np.zeros(lengths.BUCKETS)


POOLS: dict[str, dict[str, Any]] = {
    "pool": {"quantile": 0.95, "move_share": 0.01},
    "pool_longest_first": {"quantile": 0.95, "move_share": 0.01, "longest_first": True},
}
KINDS = ("static", "round_robin", *POOLS, "oracle")
EXAM_SAMPLES = 4  # HELD_OUT_SAMPLES of gin/base.gin


def scheduler(kind: str, engines: int, machine: Machine, budget: int) -> balance.Balancer | None:
    """Who places rollouts where a kind has somebody who does; rollouts of the oracle come longest first."""
    capacities = [machine.kv_tokens] * engines
    if kind == "oracle":
        return Oracle(capacities, budget)
    return balance.Balancer(capacities, **POOLS[kind]) if kind in POOLS else None


class Simulation:
    """One step under one scheduler."""

    def __init__(
        self,
        work: Sequence[Trace],
        engines: Sequence[Engine],
        kind: str,
        budget: int,
        balancer: balance.Balancer | None,
    ) -> None:
        self.work, self.kind, self.budget = work, kind, budget
        self.engines, self.balancer = list(engines), balancer
        self.place: dict[str, int] = {}
        self.turn_number = itertools.count()
        self.tools: list[tuple[float, int, Row]] = []
        self.events: list[tuple[float, int, int]] = []
        self.stamps = [0] * len(self.engines)
        self.rows: dict[str, Row] = {}

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
                    self.balancer.grow(row.entry, row.trace.response_tokens, row.trace.turns[row.turn - 1])
                    self.balancer.release(row.entry, ended=True)
                continue
            row.context += row.trace.reply_tokens
            if self.balancer is not None and row.entry is not None:
                self.balancer.grow(row.entry, int(row.context) - row.trace.prompt_tokens, row.trace.turns[row.turn - 1])
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
        if self.balancer is not None and row.entry is not None:
            moved = self.balancer.begin(row.entry)
            if moved is not None and moved != index:
                self.engines[index].forget(row)
                index = moved
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
    runs: dict[str, list[list[dict[str, float]]]] = collections.defaultdict(list)
    for seed in range(args.seeds):
        work = [traces(args.prompts, args.samples, 1000 * seed + step, args.budget) for step in range(args.steps)]
        exam = traces(args.exam, EXAM_SAMPLES, 1000 * seed + 999, args.budget)
        for kind in KINDS:
            runs[kind].append(steps_of(work, exam, args.engines, machine, kind, args.budget))
    found: dict[str, object] = {
        kind: [{name: statistics.median(run[step][name] for run in each) for name in each[0][step]}
               for step in range(args.steps)]
        for kind, each in runs.items()
    }  # fmt: skip
    for kind in ("static", "pool", "pool_longest_first"):
        ratios = [
            [o["seconds"] / p["seconds"] for p, o in zip(mine, oracle, strict=True)]
            for mine, oracle in zip(runs[kind], runs["oracle"], strict=True)
        ]
        found[f"{kind}_of_oracle"] = [round(statistics.median(each), 4) for each in zip(*ratios, strict=True)]
    return found


def steps_of(
    work: Sequence[Sequence[Trace]], exam: Sequence[Trace], engines: int, machine: Machine, kind: str, budget: int
) -> list[dict[str, float]]:
    """What came of each of some steps, one after the other, under one scheduler, which was asked the exam before."""
    balancer, found = scheduler(kind, engines, machine, budget), []
    for step in [exam, *work]:
        fresh = [Engine(machine) for _ in range(engines)]
        found.append(Simulation(step, fresh, kind, budget, balancer).run() if step else {})
    return found[1:]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--kv_tokens", type=int, default=732_000)
    parser.add_argument("--exam", type=int, default=30, help="problems asked before the first step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="one after another: lists of numbers are by step")
    found = compare(parser.parse_args(argv))
    if "--json" in (argv or sys.argv):
        print(json.dumps(found, indent=1))
        return 0
    for kind, numbers in found.items():
        print(f"{kind:<16} {numbers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
