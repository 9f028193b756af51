"""What a person sees while a run works: one row a step, and under the rows live bars with rate and time left.

On a terminal the rows scroll up and stay, and a small region below them is redrawn four times a second: what is going
on and since when, the bars, and where the seconds of the last step went. Elsewhere (a log file, CI) the same rows come
as plain text, the header again every 20 rows, and a long wait says every half minute how far it is.

Rows are numbered as in metrics.jsonl: step s is the update from state s to s + 1. The step's row leads with reward and
live groups, not with the loss, which is 0 by construction as long as a batch is trained on once.

Deliberately not here: numbers of its own. Everything shown is in metrics.jsonl and clock.json.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

import rich.console
import rich.live
import rich.progress_bar
import rich.spinner
import rich.table
import rich.text

_HEADER_EVERY_ROWS = 20
_SAY_EVERY_S = 30.0
_LEGEND = (
    "live: groups with right and wrong answers     tool: trajectories with a call",
    "err+: failed calls in correct trajectories    len:  tokens after the prompt",
    "entr: entropy of the policy in nats           gap:  |engine - learner| logprob",
)


def _decimals(value: float, width: int) -> str:
    """Four significant digits, at most three of them decimals, or scientific form for what is far from 1."""
    if value == 0 or 1e-3 <= abs(value) < 10 ** (width - 1):
        most = 3 - max(0, math.floor(math.log10(abs(value)))) if value else 3
        for digits in range(max(most, 0), -1, -1):
            text = f"{value:.{digits}f}"
            if len(text) <= width:
                return text
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _percent(value: float, width: int) -> str:
    return f"{100 * value:.0f}%"


def _scientific(value: float, width: int) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _seconds(value: float, width: int = 0) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    header: str
    metric: str
    width: int
    form: Callable[[float, int], str]

    def cell(self, metrics: Mapping[str, Any]) -> str:
        """The metric as text, right-aligned in the width of the column."""
        value = _value(metrics, self.metric)
        text = "-" if value is None else self.form(value, self.width)
        return text.rjust(self.width)


_COLUMNS = (
    _Column("reward", "rollout/reward_mean", 6, _decimals),
    _Column("live", "rollout/live_groups_frac", 4, _percent),
    _Column("tool", "rollout/tool_rate", 4, _percent),
    _Column("err+", "rollout/call_error_rate_correct", 4, _percent),
    _Column("len", "rollout/response_tokens_mean", 5, _decimals),
    _Column("loss", "learner/loss", 7, _decimals),
    _Column("entr", "learner/entropy_mean", 5, _decimals),
    _Column("grad", "learner/grad_norm", 5, _decimals),
    _Column("lr", "learner/lr", 6, _scientific),
    _Column("gap", "mismatch/logprob_gap_mean", 6, _scientific),
)
_ONLY_WITHOUT_REWARD = ("learner/loss", "learner/lr")

# (metric, is it bad, what to say); a count is said again when it grows, a share when it turns bad again.
_ALARMS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "rollout/live_groups_frac",
        lambda v: v < 0.2,
        "only {:.0%} of the groups teach anything: problems too easy or hard",
    ),
    ("rollout/unscored", lambda v: v > 0, "unscored rollouts: {:.0f}, left out"),
    ("rollout/lost", lambda v: v > 0, "lost rollouts: {:.0f}, left out"),
    ("mismatch/logprob_gap_max", lambda v: v > 5, "engine and learner differ by {:.1f} in the logprob of one token"),
    ("learner/skipped_steps", lambda v: v > 0, "updates skipped: {:.0f}, since loss or gradient was not finite"),
    ("metrics/nonfinite_count", lambda v: v > 0, "metrics that were not finite: {:.0f}"),
)


class Console:
    """Shows a run to a person. Use it as a context manager, so that the terminal is given back on every exit.

    One thread calls it. The thread that redraws only reads, and no lock is held while rich is called: rich has its own,
    and two locks taken in both orders would stop the run for good.

    Args:
        total_steps: steps of the whole run; 0 for work that has no steps, which then shows its own bars only.
        title: name of the run, shown first and beside the spinner.
        start_step: first step of this start (above 0 when the run is continued).
        row_every: show the rows of every so many steps and of the last (for runs of many short steps).
        file: where to write; standard output by default. What it is decides between live and plain.
        now: source of seconds.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        start_step: int = 0,
        row_every: int = 1,
        file: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        out: IO[str] = sys.stdout if file is None else file
        self._out = rich.console.Console(
            file=out, force_terminal=out.isatty(), highlight=False, markup=False, emoji=False
        )
        self._now, self._title, self._row_every = now, title, row_every
        self._start = self._stage_start = self._said = now()
        self._stage = ""
        self._bars: dict[str, _Bar] = {}
        self._steps = _Bar("steps", start_step, total_steps, now())
        self._columns: tuple[_Column, ...] = ()
        self._rows = 0
        self._last_step = start_step - 1
        self._phases = ""
        self._alarms: dict[str, float] = {}
        self._spinner = rich.spinner.Spinner("dots")
        self._live: rich.live.Live | None = None
        self._say(title, "bold")
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            self._live = rich.live.Live(
                console=self._out, get_renderable=self._region, refresh_per_second=4, transient=True
            )
            self._live.start()

    def stage(self, text: str) -> None:
        """Announce a part of the run ("loading", "compiling", "evaluating"): a line that stays, and the text beside the
        spinner. Meant for a few times a run, not for each step."""
        self._stage, self._stage_start = text, self._now()
        self._say(text, "cyan")

    def note(self, text: str) -> None:
        """Print one line that stays, above the bars."""
        self._say(text)

    def progress(self, name: str, done: int, total: int) -> None:
        """Set the bar `name` to done of total; the bar goes away with the next `step`."""
        now = self._now()
        bar = self._bars.get(name)
        if bar is None or done < bar.done:
            bar = self._bars[name] = _Bar(name, done, total, now)
        bar.update(done, total, now)
        if self._live is None and now - self._said >= _SAY_EVERY_S:
            self._say("  " + bar.text(now))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the row of a step from its metrics (the names in metrics.jsonl; what is missing or None shows as -)."""
        self._bars.clear()
        self._last_step = step
        self._steps.update(step + 1, self._steps.total, self._now())
        phases = _phases(metrics)
        self._phases = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in phases)
        if step % self._row_every == 0 or step + 1 == self._steps.total:
            self._show(step, metrics, phases)
        self._warn(step, metrics)

    def _show(self, step: int, metrics: Mapping[str, Any], phases: list[tuple[str, float]]) -> None:
        if self._rows == 0 and "rollout/reward_mean" in metrics:
            for line in _LEGEND:
                self._say(line, "dim")
        if self._rows % _HEADER_EVERY_ROWS == 0:
            self._columns = _choose(metrics, self._out.width, self._step_width)
            self._say(self._row("step", [c.header.rjust(c.width) for c in self._columns], "sec", "by phase"), "bold")
        self._rows += 1
        seconds = _value(metrics, "time/step_s")
        seconds = sum(s for _, s in phases) if seconds is None else seconds
        cells = [column.cell(metrics) for column in self._columns]
        self._say(self._row(str(step), cells, _seconds(seconds), phases))

    def close(self) -> None:
        """Give the terminal back and say how long it took. A second call does nothing."""
        live, self._live = self._live, None
        if self._title:
            if live is not None:
                live.stop()
            total = self._steps.total
            steps = f"{self._last_step + 1}/{total} steps, " if total else ""
            self._say(f"{steps}{_time(self._now() - self._start)} since the start")
        self._title = ""

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _step_width(self) -> int:
        return max(4, len(str(self._steps.total)))

    def _row(self, step: str, cells: list[str], seconds: str, phases: str | list[tuple[str, float]]) -> str:
        row = " ".join([step.rjust(self._step_width), *cells, seconds.rjust(4)])
        if isinstance(phases, str):
            return f"{row}  {phases}" if len(row) + 2 + len(phases) <= self._out.width else row
        for index, (name, spent) in enumerate(phases):
            part = f"{'  ' if index == 0 else ' '}{name} {_seconds(spent)}"
            if len(row) + len(part) > self._out.width:
                break
            row += part
        return row

    def _warn(self, step: int, metrics: Mapping[str, Any]) -> None:
        for metric, is_bad, words in _ALARMS:
            value = _value(metrics, metric)
            if value is None or not is_bad(value):
                self._alarms.pop(metric, None)
                continue
            before = self._alarms.get(metric)
            if before is None or (value > before and value == int(value)):
                self._say(f"! step {step}: {words.format(value)}", "yellow")
            self._alarms[metric] = value

    def _say(self, text: str, style: str = "") -> None:
        self._said = self._now()
        self._out.print(rich.text.Text(text, style=style), soft_wrap=True)

    def _region(self) -> rich.console.RenderableType:
        now = self._now()
        since = f"{self._stage or self._title}  {_time(now - self._stage_start)}"
        self._spinner.update(text=rich.text.Text(since, style="cyan", no_wrap=True, overflow="ellipsis"))
        grid = rich.table.Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None, None):
            grid.add_column(ratio=ratio, no_wrap=True, overflow="ellipsis")
        steps = (self._steps,) if self._steps.total else ()
        for bar in (*self._bars.values(), *steps):  # copied in one go
            grid.add_row(
                bar.name,
                rich.progress_bar.ProgressBar(total=max(bar.total, 1), completed=bar.done),
                f"{bar.done}/{bar.total}",
                bar.rate_text(),
                bar.left_text(now),
            )
        parts: list[rich.console.RenderableType] = [self._spinner, grid]
        if self._phases:
            text = f"last step, seconds: {self._phases}"
            parts.append(rich.text.Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return rich.console.Group(*parts)


class _Bar:
    """Progress of one thing: how far, how fast over the last 20 updates, how long still."""

    def __init__(self, name: str, done: int, total: int, now: float) -> None:
        self.name, self.done, self.total = name, done, total
        self._marks: collections.deque[tuple[float, int]] = collections.deque([(now, done)], maxlen=20)

    def update(self, done: int, total: int, now: float) -> None:
        """Note that done of total is reached."""
        self.done, self.total = done, total
        if done > self._marks[-1][1]:
            self._marks.append((now, done))

    def rate(self) -> float | None:
        """Units a second, or None before two marks."""
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else None

    def left_s(self, now: float) -> float | None:
        """Seconds still to go, or None when there is no rate yet."""
        rate = self.rate()
        return None if not rate else max(0.0, (self.total - self.done) / rate - (now - self._marks[-1][0]))

    def rate_text(self) -> str:
        """The rate, or seconds for each when it is below one a second; empty without a rate."""
        rate = self.rate()
        if not rate:
            return ""
        return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"

    def left_text(self, now: float) -> str:
        """The time left; empty without a rate."""
        left = self.left_s(now)
        return "" if left is None else f"{_time(left)} left"

    def text(self, now: float) -> str:
        """All of it in one line."""
        parts = (f"{self.name} {self.done}/{self.total}", self.rate_text(), self.left_text(now))
        return ", ".join(part for part in parts if part)


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _phases(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(phase, seconds) of a step, the longest first."""
    names = [name for name in metrics if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"]
    phases = [(name.removeprefix("time/").removesuffix("_s"), _value(metrics, name) or 0.0) for name in names]
    return sorted(phases, key=lambda phase: -phase[1])


def _choose(metrics: Mapping[str, Any], width: int, step_width: int) -> tuple[_Column, ...]:
    """The columns of an RL step, or those that the metrics of another step fill; as many as fit."""
    if "rollout/reward_mean" in metrics:
        columns = [column for column in _COLUMNS if column.metric not in _ONLY_WITHOUT_REWARD]
    else:
        columns = [column for column in _COLUMNS if column.metric in metrics]
    while columns and step_width + sum(c.width + 1 for c in columns) + 5 > width:
        columns.pop()
    return tuple(columns)


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
