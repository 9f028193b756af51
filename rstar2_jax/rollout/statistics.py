"""What a step's episodes looked like, as numbers: reward, tools, errors, lengths, how they ended.

Pure. Unscored episodes are in no number but their own; None stands for "no value", such as an error rate over no call.

Deliberately not here: the learner's numbers and timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rstar2_jax.io import metrics
from rstar2_jax.rollout import agent
from rstar2_jax.types import CallStatus, Group, StopReason, Trajectory, Verdict

Metrics = dict[str, float | None]


def call_error_rate(trajectories: Iterable[Trajectory]) -> float | None:
    """Bad calls / counted calls over all the trajectories; None when they made no counted call."""
    statuses = [status for t in trajectories for status in _statuses(t)]
    counted = sum(status.is_counted for status in statuses)
    return sum(status.is_bad for status in statuses) / counted if counted else None


def tool_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of trajectories with at least one executed or attempted call."""
    return _mean([_has_calls(t) for t in trajectories])


def describe(groups: Sequence[Group]) -> Metrics:
    """Metrics `rollout/...` of all episodes of a step, groups that were set aside included.

    Args:
        groups: every group sampled in the step.
    """
    everything = [t for group in groups for t in group.trajectories]
    scored = [t for t in everything if t.verdict is not Verdict.UNSCORED]
    correct = [t for t in scored if t.verdict is Verdict.CORRECT]
    wrong = [t for t in scored if t.verdict is Verdict.WRONG]
    live = [group for group in groups if group.is_live]
    calls = [call for t in scored for turn in t.turns for call in turn.calls]
    errors = [p for group in groups for p, ok in zip(group.p_err, _correct(group), strict=True) if ok]
    formats = [p for group in groups for p, ok in zip(group.p_format, _correct(group), strict=True) if ok]
    return {
        "rollout/reward_mean": _mean([t.verdict is Verdict.CORRECT for t in scored]),
        "rollout/live_groups_frac": len(live) / len(groups) if groups else None,
        "rollout/all_correct_frac": _mean([bool(g.rewards[g.valid].all()) for g in groups if g.valid.any()]),
        "rollout/all_wrong_frac": _mean([not g.rewards[g.valid].any() for g in groups if g.valid.any()]),
        "rollout/tool_rate": tool_rate(scored),
        "rollout/calls_per_episode": len(calls) / len(scored) if scored else None,
        "rollout/call_error_rate": call_error_rate(scored),
        "rollout/call_error_rate_correct": call_error_rate(correct),
        "rollout/p_err_correct": _mean(errors),
        "rollout/p_format_correct": _mean(formats),
        "rollout/response_tokens_mean": _mean([t.num_response_tokens for t in scored]),
        "rollout/sampled_tokens_mean": _mean([t.num_sampled_tokens for t in scored]),
        "rollout/sampled_tokens_correct": _mean([t.num_sampled_tokens for t in correct]),
        "rollout/sampled_tokens_wrong": _mean([t.num_sampled_tokens for t in wrong]),
        "rollout/turns_mean": _mean([len(t.turns) for t in scored]),
        "rollout/unique_frac": _mean([group.unique_frac for group in groups]),
        "rollout/repeat_call_frac": _mean([agent.repeat_call_frac(t) for t in scored if _has_calls(t)]),
        "rollout/episodes": float(len(everything)),
        "rollout/unscored": float(len(everything) - len(scored)),
        "rollout/lost": float(sum(t.stop_reason is StopReason.LOST for t in everything)),
        **_counts("stop", StopReason, Counter(t.stop_reason for t in everything)),
        **_counts("status", CallStatus, Counter(status for t in everything for status in _statuses(t))),
        **_waits(everything),
        **_by_source(groups),
    }


def staleness(groups: Sequence[Group], step: int) -> Metrics:
    """How many steps older than the step's own weights the ids of its batch are: mean and largest over groups.

    Args:
        groups: those that are trained on.
        step: also the version of the weights that the step trains.
    """
    ages = [max(0, step - group.oldest_version) for group in groups]
    return {"rollout/staleness_mean": _mean(ages), "rollout/staleness_max": float(max(ages, default=0))}


def _by_source(groups: Sequence[Group]) -> Metrics:
    """`reward/<source>_mean` of each source of problems: a set that is easy to game shows beside the others."""
    found: dict[str, list[bool]] = {}
    for group in groups:
        scored = group.rewards[group.valid].astype(bool).tolist()
        found.setdefault(metrics.name_part(group.prompt.source), []).extend(scored)
    return {f"reward/{source}_mean": _mean(scored) for source, scored in sorted(found.items())}


def _has_calls(trajectory: Trajectory) -> bool:
    return any(turn.calls for turn in trajectory.turns)


def _statuses(trajectory: Trajectory) -> list[CallStatus]:
    return [result.status for turn in trajectory.turns for result in turn.results]


def _correct(group: Group) -> list[bool]:
    return [t.verdict is Verdict.CORRECT for t in group.trajectories]


def _mean(values: Sequence[float | bool]) -> float | None:
    return float(np.mean(np.asarray(values, np.float64))) if len(values) else None


def _counts(name: str, kinds: type[StopReason] | type[CallStatus], counts: Counter) -> Metrics:
    return {f"rollout/{name}_{kind.value}": float(counts[kind]) for kind in kinds}


def _waits(trajectories: Sequence[Trajectory]) -> Metrics:
    results = [result for t in trajectories for turn in t.turns for result in turn.results if result.run_s > 0]
    if not results:
        return {"tools/queue_p95_s": None, "tools/run_p95_s": None, "tools/run_mean_s": None}
    return {
        "tools/queue_p95_s": float(np.quantile([result.queue_s for result in results], 0.95)),
        "tools/run_p95_s": float(np.quantile([result.run_s for result in results], 0.95)),
        "tools/run_mean_s": float(np.mean([result.run_s for result in results])),
    }
