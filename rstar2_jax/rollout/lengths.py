"""How long a rollout is going to be, from the lengths of those that ended and of those that still run. Pure.

The short ones end first, so that the lengths that ended say too little while most still run: one that runs counts as
longer than what it has (the actuarial form of Kaplan and Meier's estimate, 1958). With `at risk` in bucket j of the
budget those that got there, a rollout ends in it with probability

    h(j) = ended(j) / (at risk(j) - running(j) / 2)            survival S(j) = product over i < j of (1 - h(i))

and, T being the final length of a rollout that has u tokens,

    E[T | T > u] = u + integral of S from u on / S(u)

Where nothing was seen to end S stays as it is up to the budget: what is not known is taken for long.

Rollouts i that sample side by side, one token each in a step, hold after g more steps

    H(g) = sum over i of (prompt_i + u_i + g) a_i(g)          a_i(g) = 1 with probability S(u_i + g) / S(u_i), else 0

The most that they hold at one time, max over g of H(g), is far below the sum of what each of them reaches, since the
short ones have ended when the long ones are long. The sum of H over g is how many entries are read for them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

BUCKETS = 64  # of the budget
_LEAST = 32  # rollouts that ended before their lengths say anything
_MOST = 4096  # that are remembered, and twice as many as were ever under way together
_NEWS = 16  # a fit is due when this part of what is remembered is new, and as many at least


class Lengths:
    """Mean of final lengths, and what rollouts hold together.

    >>> lengths = Lengths()
    >>> lengths.expected(0, 64)
    64.0
    >>> for tokens in range(64): lengths.add(tokens)
    >>> lengths.fit(running=[], budget=64)
    >>> [round(lengths.expected(used, 64)) for used in (0, 32)]
    [32, 48]
    """

    def __init__(self) -> None:
        self._ended: collections.deque[tuple[int, bool]] = collections.deque(maxlen=_MOST)
        self._new = 0
        self._width = 0.0
        self._mean = self._alive = self._ahead = np.zeros(0)

    @property
    def are_known(self) -> bool:
        """Whether enough have ended for an estimate."""
        return bool(len(self._mean))

    @property
    def is_due(self) -> bool:
        """Enough have ended since the last fit for another one to say more."""
        return len(self._ended) >= _LEAST and self._new >= max(_NEWS, len(self._ended) / _NEWS)

    def add(self, tokens: int, together: int = 0, *, cut: bool = False) -> None:
        """A rollout has ended with so many response tokens.

        Args:
            together: rollouts under way at once. Of those the long ones end last: fewer remembered would be the long
                ones alone.
            cut: by a budget of its own: with a larger one it would have gone on.
        """
        most = self._ended.maxlen or 0
        if 2 * together > most:
            self._ended = collections.deque(self._ended, maxlen=2 * together)
        self._ended.append((tokens, cut))
        self._new += 1

    def fit(self, running: Iterable[int], budget: int) -> None:
        """Estimate anew, in equal buckets of `budget`; `running`: tokens of the rollouts that run."""
        self._new, self._width = 0, budget / BUCKETS
        edges = np.arange(BUCKETS + 1) * self._width
        whole = [tokens for tokens, cut in self._ended if not cut or tokens >= budget]
        seen = [*running, *(tokens for tokens, cut in self._ended if cut and tokens < budget)]
        ended, _ = np.histogram(np.clip(np.asarray(whole, float), 0, budget), edges)
        left, _ = np.histogram(np.clip(np.asarray(seen, float), 0, budget), edges)
        at_risk = (ended + left)[::-1].cumsum()[::-1]
        hazard = np.clip(ended / np.maximum(at_risk - left / 2, 0.5), 0, 1)
        survival = np.concatenate([[1.0], np.cumprod(1 - hazard)[:-1]])
        start, known = edges[:-1], np.maximum(survival, 1e-12)
        area = survival * (1 - hazard / 2) * self._width  # under S, within a bucket
        mean = start + area[::-1].cumsum()[::-1] / known
        beyond = survival == 0  # longer than any that was seen
        self._mean = np.where(beyond, budget, mean)
        # [from bucket, buckets ahead]: the probability to be there still; who is longer than any may reach the budget.
        later = np.arange(BUCKETS)[:, None] + np.arange(BUCKETS)
        reached = np.append(survival, 0.0)[np.minimum(later, BUCKETS)]
        unseen = (later < BUCKETS).astype(float)
        self._alive = np.where(beyond[:, None], unseen, reached / known[:, None])
        self._ahead = np.arange(1, BUCKETS + 1) * self._width  # who is there at a bucket's start may grow through it

    def expected(self, used: int, budget: int) -> float:
        """Mean of the final length of a rollout that has `used` tokens; the budget as long as nothing is known."""
        if not len(self._mean) or used >= budget:
            return float(budget)
        return float(min(budget, max(used, self._mean[min(BUCKETS - 1, int(used / self._width))])))

    def held(self, prompts: Sequence[int], used: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of H(g), f64[buckets] each, at the end of each bucket from now on. What several rollouts
        are expected to hold adds up. Only once lengths are known.

        Args:
            prompts, used: of each rollout, tokens of its prompt and tokens that it has appended by now.
        """
        buckets = np.minimum((np.asarray(used, float) / self._width).astype(int), BUCKETS - 1)
        tokens = np.asarray(prompts, float) + np.asarray(used, float)
        count, total, squares = (np.bincount(buckets, tokens**power, BUCKETS) for power in range(3))
        mean = total @ self._alive + self._ahead * (count @ self._alive)
        unsure = self._alive * (1 - self._alive)
        return mean, squares @ unsure + self._ahead * (2 * (total @ unsure) + self._ahead * (count @ unsure))
