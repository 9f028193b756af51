"""Frozen settings of the data that a run makes or chooses: demonstrations to fine-tune on, problems to keep.

Apart from settings.py for its size, which binds them as `settings.Demonstrations` and `settings.Curation`.
"""

from __future__ import annotations

import dataclasses

from rstar2_jax import ranges


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """The mix of non-reasoning SFT demonstrations (shares of all demonstrations, in [0, 1]).

    Args:
        count: demonstrations made or read.
        tool_share: share answered with the tool; the rest answer directly.
        failing_share: share of the tool demonstrations whose first call fails and is corrected.
        doubled_answer_share: share with a second answer block (so that p_format has something to see).
        batch_size: demonstrations of one SFT step.
        mixture: published conversations instead of demonstrations made from the task's problems, as pairs of a set
            (data/talk_sets.py lists them) and how many of it; they add up to count.
        folder: a folder with one folder or file for each set, named after it; empty reads them from the hub.
    """

    count: int
    tool_share: float = 0.5
    failing_share: float = 0.5
    doubled_answer_share: float = 0.0
    batch_size: int = 32
    mixture: tuple[tuple[str, int], ...] = ()
    folder: str = ""

    def __post_init__(self) -> None:
        ranges.positive(self, "count", "batch_size")
        total = sum(share for _, share in self.mixture)
        ranges.check(not self.mixture or total == self.count, self, "count", f"the shares of mixture add up to {total}")
        for field in ("tool_share", "failing_share", "doubled_answer_share"):
            ranges.check(0 <= getattr(self, field) <= 1, self, field, "must be in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curation:
    """Which problems are kept for training.

    Args:
        samples: rollouts of the asked model for each problem; 0 asks no model and judges by text and answer alone.
        min_solved: a problem stays when at least this many of them give its answer (the label may be wrong below that).
        max_solved: and at most this many do (above that there is nothing to learn).
        against: evaluation sets that training must not overlap with, as pairs of a source and its path (or '').
        max_answer_digits: problems with longer answers are left out.
    """

    samples: int
    min_solved: int = 0
    max_solved: int
    against: tuple[tuple[str, str], ...] = ()
    max_answer_digits: int = 18

    def __post_init__(self) -> None:
        ranges.positive(self, "max_answer_digits")
        ranges.check(self.samples >= 0, self, "samples", "must be 0 (no model is asked) or more")
        ranges.check(
            0 <= self.min_solved <= self.max_solved, self, "min_solved", f"must be 0 to max_solved = {self.max_solved}"
        )
        ranges.check(self.max_solved <= self.samples, self, "max_solved", f"must be at most samples = {self.samples}")
