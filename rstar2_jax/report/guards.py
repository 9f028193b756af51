"""What should wake somebody up while a run trains: each guard says in one sentence what it saw, once until it clears.

    collapse     accuracy fell far below its best in the last two looks, and answers grew by half or calls repeat
    unscored     more than 1% of a step's episodes have no verdict
    live_groups  fewer than 20% of the groups of five steps have a gradient
    grad_norm    a gradient more than ten times the median of the run so far
    logprob_gap  engine and learner differ by more than 5 nats at a token, or by 5% on average, five steps in a row
    disk         the disk will not hold two more checkpoints at the end of the run, at the rate so far

A look is an exam of held-out problems where the run has them, else five steps of training. "Far" is three standard
errors of the difference of two shares, as in divergence.py. The best look is named, so that its weights can be kept.

Pure but for its own memory. Deliberately not here: any reaction (train.py), and training against held-out problems
(divergence.py).

Source: rStar2-Agent paper, collapse after the peak (reward oscillates, length jumps); thresholds are ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Told = Mapping[str, float | None]

_LOOKS = 2
_FAR = 3.0
_LONGER = 1.5
_REPEATS = 0.2
_WINDOW = 5
_MOST_UNSCORED = 0.01
_FEWEST_LIVE = 0.2
_STEEPER = 10.0
_GAP_MAX = 5.0
_GAP_MEAN = 1.05
_CHECKPOINTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One measurement of the policy: accuracy of n answers, their mean length, share of repeated calls."""

    step: int
    accuracy: float
    n: float
    tokens: float
    repeats: float


def looks(history: Sequence[tuple[int, Told]]) -> list[Look]:
    """The measurements of a run so far: its exams, or blocks of five steps where it holds none."""
    exams = [(step, told) for step, told in history if told.get("eval/accuracy") is not None]
    if exams:
        return [
            Look(
                step=step,
                accuracy=_value(told, "eval/accuracy"),
                n=_value(told, "eval/scored"),
                tokens=_value(told, "eval/response_tokens_mean"),
                repeats=_value(told, "rollout/repeat_call_frac", 0.0),
            )
            for step, told in exams
        ]
    known = [(step, told) for step, told in history if told.get("rollout/reward_mean") is not None]
    blocks = [known[i : i + _WINDOW] for i in range(0, len(known) - _WINDOW + 1, _WINDOW)]
    return [
        Look(
            step=block[-1][0],
            accuracy=_mean(block, "rollout/reward_mean"),
            n=sum(_value(told, "rollout/episodes") for _, told in block),
            tokens=_mean(block, "rollout/response_tokens_mean"),
            repeats=_mean(block, "rollout/repeat_call_frac", 0.0),
        )
        for block in blocks
    ]


def best(found: Sequence[Look]) -> Look | None:
    """The look of highest accuracy, the latest of equals."""
    return max(found, key=lambda look: (look.accuracy, look.step), default=None)


def collapse(found: Sequence[Look]) -> str | None:
    """One sentence when the policy has collapsed, else None."""
    top = best(found)
    last = found[-_LOOKS:]
    if top is None or len(found) <= _LOOKS or top in last:
        return None
    if any(_errors(top, look) < _FAR for look in last):
        return None
    longer = all(look.tokens >= _LONGER * top.tokens for look in last)
    repeating = all(look.repeats >= top.repeats + _REPEATS for look in last)
    if not (longer or repeating):
        return None
    now = last[-1]
    how = f"answers grew from {top.tokens:.0f} to {now.tokens:.0f} tokens" if longer else "calls repeat each other"
    return (
        f"collapse: accuracy fell from {top.accuracy:.2f} (step {top.step}) to {now.accuracy:.2f} (step {now.step}) "
        f"and {how}: go back to the weights of step {top.step}"
    )


def disk(free: Sequence[tuple[int, int]], checkpoint_bytes: int, last_step: int) -> str | None:
    """One sentence when the disk will not last.

    Args:
        free: (step, bytes free) after steps so far.
        checkpoint_bytes: size of one checkpoint.
        last_step: of the run.
    """
    if not free:
        return None
    (first, before), (step, now) = free[0], free[-1]
    rate = max(0.0, (before - now) / (step - first)) if step > first else 0.0
    left = now - rate * max(0, last_step - step)
    if left >= _CHECKPOINTS * checkpoint_bytes:
        return None
    return (
        f"disk: {now / 2**30:.1f} GiB free at step {step}, falling by {rate / 2**20:.1f} MiB a step: at step "
        f"{last_step} there is no room for {_CHECKPOINTS} checkpoints of {checkpoint_bytes / 2**30:.1f} GiB"
    )


class Guards:
    """The guards of one run; they remember its steps."""

    def __init__(
        self, history: Sequence[tuple[int, Told]] = (), *, checkpoint_bytes: int = 0, last_step: int = 0
    ) -> None:
        """Args: history holds the metrics of the steps that are done already; the rest is what `disk` asks for."""
        self._history = list(history)
        self._disk = checkpoint_bytes, last_step
        self._raised: set[str] = set()

    @property
    def best(self) -> Look | None:
        """The best look so far."""
        return best(looks(self._history))

    def add(self, step: int, told: Told) -> tuple[list[str], dict[str, float]]:
        """What is new to be said after a step, and `guard/<name>` metrics: 1 while a guard has something to say."""
        self._history.append((step, told))
        found = {
            "collapse": collapse(looks(self._history)),
            "unscored": self._unscored(told),
            "live_groups": self._live_groups(),
            "grad_norm": self._grad_norm(told),
            "logprob_gap": self._logprob_gap(told),
            "disk": self._forecast(),
        }
        new = [text for name, text in found.items() if text and name not in self._raised]
        self._raised = {name for name, text in found.items() if text}
        return new, {f"guard/{name}": float(text is not None) for name, text in found.items()}

    def _forecast(self) -> str | None:
        free = [(step, _value(told, "disk/free_bytes")) for step, told in self._history]
        known = [(step, int(left)) for step, left in free if math.isfinite(left)]
        return disk(known, *self._disk) if len(known) >= _WINDOW else None

    def _unscored(self, told: Told) -> str | None:
        episodes, lost = _value(told, "rollout/episodes", 0.0), _value(told, "rollout/unscored", 0.0)
        if lost <= _MOST_UNSCORED * episodes:
            return None
        return f"unscored: {lost:.0f} of {episodes:.0f} episodes have no verdict: look at sandbox and engines"

    def _live_groups(self) -> str | None:
        recent = self._history[-_WINDOW:]
        share = _mean(recent, "rollout/live_groups_frac")
        if len(recent) < _WINDOW or not share < _FEWEST_LIVE:
            return None
        return f"live groups: {share:.0%} of the last {_WINDOW} steps: problems are too easy or too hard, or use refill"

    def _grad_norm(self, told: Told) -> str | None:
        norms = [_value(t, "learner/grad_norm") for _, t in self._history[:-1]]
        known, now = [n for n in norms if math.isfinite(n)], _value(told, "learner/grad_norm")
        if len(known) < _WINDOW or not now > _STEEPER * float(np.median(known)):
            return None
        return f"gradient: norm {now:.3g}, ten times the usual {float(np.median(known)):.3g}"

    def _logprob_gap(self, told: Told) -> str | None:
        most = _value(told, "mismatch/logprob_gap_max")
        if most > _GAP_MAX:
            return (
                f"mismatch: engine and learner differ by {most:.1f} nats at one token: same weights, same temperature?"
            )
        factors = [_value(t, "mismatch/mult_prob_error") for _, t in self._history[-_WINDOW:]]
        if len(factors) == _WINDOW and all(factor > _GAP_MEAN for factor in factors):
            return f"mismatch: probabilities differ by a factor of {factors[-1]:.2f} for {_WINDOW} steps"
        return None


def _errors(top: Look, now: Look) -> float:
    """The fall from one look to another in standard errors."""
    if not (top.n > 0 and now.n > 0):
        return 0.0
    share = (top.accuracy * top.n + now.accuracy * now.n) / (top.n + now.n)
    spread = share * (1 - share) * (1 / top.n + 1 / now.n)
    return (top.accuracy - now.accuracy) / math.sqrt(spread) if spread > 0 else 0.0


def _value(told: Told, name: str, otherwise: float = math.nan) -> float:
    value = told.get(name)
    return otherwise if value is None else float(value)


def _mean(block: Sequence[tuple[int, Told]], name: str, otherwise: float = math.nan) -> float:
    values = [_value(told, name) for _, told in block]
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else otherwise
