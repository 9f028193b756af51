"""Held-out problems asked in the middle of training, by the policy that samples the step, and the alarm they can raise.

Deliberately not here: the evaluation of a finished run (evaluate.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rstar2_jax import ask, settings
from rstar2_jax.data import prompts
from rstar2_jax.io import metrics
from rstar2_jax.report import console, divergence, evaluation
from rstar2_jax.rollout import groups, tier
from rstar2_jax.types import Prompt, Trajectory, Verdict

_OWN_SEED = 715_827_883
_MOST_UNSCORED = 0.01  # as in evaluate.py: above it a fault of ours would show as a number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examiner:
    """The problems and who is asked; none where the settings say never."""

    every_steps: int
    problems: Sequence[Prompt]
    sampler: groups.Sampler

    def is_due(self, step: int) -> bool:
        """Whether the step begins with the exam."""
        return self.every_steps > 0 and step % self.every_steps == 0

    async def ask(self, step: int, screen: console.Console) -> dict[str, float | None]:
        """`eval/...` metrics of the weights that the step starts with; no accuracy when faults of ours ate answers."""
        found = await ask.ask(self.sampler, self.problems, step, "held out", screen)
        by_source: dict[str, list[Trajectory]] = collections.defaultdict(list)
        for group in found:
            by_source[group.prompt.source].extend(group.trajectories)
        everything = [t for episodes in by_source.values() for t in episodes]
        told = _numbers(everything)
        if len(by_source) > 1:
            told |= {f"eval/{metrics.name_part(s)}_accuracy": _accuracy(ts) for s, ts in sorted(by_source.items())}
        return told


def open_examiner(
    exam: settings.Exam, rooms: tier.Tier, sampler: groups.Sampler, seed: int, source: prompts.Source
) -> Examiner:
    """The examiner of a run, its problems drawn and measured, and held against those that training sees.

    Args:
        source: of the training problems; one that makes them keeps the held-out side to itself.

    Raises:
        ValueError: the source has no held-out side, or a problem is longer than Rollout.max_prompt_tokens or one that
            training sees too.
    """
    if not exam.every_steps:
        return Examiner(every_steps=0, problems=(), sampler=sampler)
    problems = prompts.eval_prompts(exam.task, exam.problems, seed)
    distinct = list({problem.question: problem for problem in problems}.values())
    if isinstance(source, prompts.FiniteSource):
        prompts.check_disjoint(source.prompts, distinct)
    ask.refuse_long(exam.task.source, distinct, rooms.prompt_tokens, sampler.rollout.max_prompt_tokens)
    asked = dataclasses.replace(sampler.rollout, group_size=exam.samples, oversample=exam.samples)
    # Seeds of its own: a problem of the exam may carry the id of a training problem.
    own = dataclasses.replace(sampler, rollout=asked, seed=(sampler.seed + _OWN_SEED) % 2**31)
    return Examiner(every_steps=exam.every_steps, problems=distinct, sampler=own)


def alarm(
    workdir: Path, step: int, told: Mapping[str, float | None], report: Callable[[str], None] = print
) -> str | None:
    """What report.divergence says of the run so far, `told` being the numbers of the step that is not yet on disk.

    Args:
        report: receives a message for each line on disk that cannot be read.
    """
    there = (workdir / metrics.METRICS_FILE).exists()
    columns = metrics.read_metrics(workdir, report) if there else {"step": np.zeros(0)}
    length = len(columns["step"])
    now = {"step": float(step), **{name: np.nan if value is None else float(value) for name, value in told.items()}}
    empty = np.full(length, np.nan)
    return divergence.alarm(
        {name: np.append(columns.get(name, empty), now.get(name, np.nan)) for name in {*columns, *now}}
    )


def _numbers(episodes: Sequence[Trajectory]) -> dict[str, float | None]:
    entry = evaluation.evaluation_set("held out", "held_out", episodes)
    return {
        divergence.ACCURACY: _accuracy(episodes),
        divergence.SCORED: float(entry["n"]),
        "eval/unscored": float(entry["unscored"]),
        "eval/tool_rate": entry["tool_rate"],
        "eval/response_tokens_mean": entry["mean_response_tokens"],
    }


def _accuracy(episodes: Sequence[Trajectory]) -> float | None:
    scored = [t for t in episodes if t.verdict is not Verdict.UNSCORED]
    if not scored or len(episodes) - len(scored) > _MOST_UNSCORED * len(episodes):
        return None
    return sum(t.verdict is Verdict.CORRECT for t in scored) / len(scored)
