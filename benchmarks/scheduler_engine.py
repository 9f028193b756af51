"""The engines of scheduler_sim.py: rows that decode in step, memory that fills up, and what is evicted then."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools

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

    def forget(self, row: Row) -> None:
        """A row whose tool runs goes elsewhere: what it had here is computed again there."""
        if self.resting.pop(row.trace.name, None) is not None:
            self.cached_resting -= row.cached
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
