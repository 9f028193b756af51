"""From graded groups to the micro-batches of one update: resample, advantages, rows, packing.

Host code around the pure functions of algo/. Everything is a function of the groups and of one key, so a step can be
done again bit for bit.

Deliberately not here: sampling further groups (rollout/groups.py) and the update itself (update.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from rstar2_jax import settings
from rstar2_jax.algo import advantages as advantage_rule
from rstar2_jax.algo import loss as loss_rule
from rstar2_jax.algo import roc
from rstar2_jax.data import pack
from rstar2_jax.reward import quality
from rstar2_jax.types import Group, StopReason, TrainBatch

_PAPER = settings.Roc()
_CUT_OFF = frozenset({StopReason.LENGTH, StopReason.BUDGET, StopReason.TURNS})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """RoC's choice for P groups, as host arrays.

    kept bool[P, N] marks the rollouts that are trained on, advantages f32[P, N] holds theirs (0 elsewhere).
    """

    kept: np.ndarray
    advantages: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Minibatch:
    """The rows of one optimizer step: micro-batches of equal shape, and the normaliser over all of them."""

    microbatches: list[TrainBatch]
    normaliser: float


def select(
    groups: Sequence[Group], key: jax.Array, rollout: settings.Rollout, how: settings.Roc, loss: settings.Loss
) -> Selection:
    """Which rollouts of each group are trained on and with which advantage; groups may differ in size.

    A step with fewer groups than prompts_per_step is filled up with empty rows, so that one program serves every step;
    a group's choice does not depend on the rows after it.

    Args:
        groups: of one step.
        key: PRNG key of the step's selection.
        rollout: group_size G, and the shape [prompts_per_step, oversample] of a full step.
    """
    widest = max([rollout.oversample, *(len(group.trajectories) for group in groups)])
    shape = (max(rollout.prompts_per_step, len(groups)), widest)
    rewards, penalties = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    valid = np.zeros(shape, bool)
    for row, group in enumerate(groups):
        size = len(group.trajectories)
        rewards[row, :size], valid[row, :size] = group.rewards, group.valid
        penalties[row, :size] = group.penalties + _repetition(group, how.repetition_weight)
    selector = _selector(rollout.group_size, how, loss.ddof, loss.advantage_eps)
    chosen, advantages = selector(key, rewards, penalties, valid)
    return Selection(kept=np.asarray(chosen)[: len(groups)], advantages=np.asarray(advantages)[: len(groups)])


def _repetition(group: Group, weight: float) -> np.ndarray:
    """What repeated n-grams add to each rollout's penalty."""
    if weight == 0:
        return np.zeros(len(group.trajectories), np.float32)
    return weight * np.asarray([quality.repetition(t) for t in group.trajectories], np.float32)


@functools.lru_cache(maxsize=8)
def _selector(group_size: int, how: settings.Roc, ddof: int, eps: float):
    def run(key, rewards, penalties, valid):
        indices, kept = roc.resample(key, rewards, penalties, valid, group_size=group_size, settings=how)
        picked = jax.numpy.take_along_axis(rewards, indices, axis=1)
        values = advantage_rule.advantages(picked, kept, ddof=ddof, eps=eps)
        rows = jax.numpy.arange(rewards.shape[0])[:, None]
        chosen = jax.numpy.zeros(rewards.shape, bool).at[rows, indices].max(kept)
        return chosen, jax.numpy.zeros_like(rewards).at[rows, indices].add(jax.numpy.where(kept, values, 0))

    return jax.jit(run)


def rows(groups: Sequence[Group], selection: Selection, how: settings.Roc = _PAPER) -> list[pack.Row]:
    """Training rows of the kept rollouts whose advantage is not zero, in the order of groups and samples.

    A rollout with zero advantage has no gradient and must not count in the normaliser either; nor does one that a limit
    cut off, under overlong filtering.
    """
    masked = _CUT_OFF if how.truncated == "masked" else frozenset()
    return [
        pack.trajectory_row(trajectory, selection.advantages[place, index])
        for place, group in enumerate(groups)
        for index, trajectory in enumerate(group.trajectories)
        if selection.kept[place, index]
        and selection.advantages[place, index] != 0
        and trajectory.num_sampled_tokens
        and trajectory.stop_reason not in masked
    ]


def cut(whole: TrainBatch, microbatch_rows: int) -> list[TrainBatch]:
    """Micro-batches of `microbatch_rows` rows each.

    Raises:
        ValueError: the rows are no multiple of microbatch_rows.
    """
    count = whole.tokens.shape[0]
    if count % microbatch_rows:
        raise ValueError(f"{count} rows do not divide into micro-batches of {microbatch_rows}: pack to a multiple")
    starts = range(0, count, microbatch_rows)
    return [jax.tree.map(lambda leaf, at=at: leaf[at : at + microbatch_rows], whole) for at in starts]


def minibatches(training: Sequence[pack.Row], learner: settings.Learner) -> list[Minibatch]:
    """The optimizer steps of this rollout batch; none when there is nothing to train on.

    Rows are dealt to `learner.minibatches` optimizer steps in turn, so that each step sees every group.
    """
    made = []
    for number in range(learner.minibatches):
        share = list(training[number :: learner.minibatches])
        if not share:
            continue
        whole = pack.pack(share, row_tokens=learner.row_tokens, rows_multiple=learner.microbatch_rows)
        parts = cut(whole, learner.microbatch_rows)
        made.append(Minibatch(microbatches=parts, normaliser=_normaliser(whole, learner.loss)))
    return made


def _normaliser(whole: TrainBatch, how: settings.Loss) -> float:
    lengths = loss_rule.inverse_lengths(whole.loss_mask, whole.segment_ids) if how.aggregation == "seq_mean" else None
    return float(loss_rule.normaliser(whole.loss_mask, how, lengths))
