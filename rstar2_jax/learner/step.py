"""All optimizer steps of one rollout batch, and what they were like as metrics.

Deliberately not here: the choice of rows (batch.py) and one single update (update.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rstar2_jax import settings
from rstar2_jax.algo import correction
from rstar2_jax.algo import loss as loss_rule
from rstar2_jax.data import pack
from rstar2_jax.learner import batch, objective, update
from rstar2_jax.types import TrainState

Metrics = dict[str, float | None]


def learn(
    trainer: update.Learner,
    state: TrainState,
    work: Sequence[batch.Minibatch],
    how: settings.Loss,
    *,
    reference: Any = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TrainState, Metrics]:
    """The state after all optimizer steps of `work` (donated), and metrics `learner/...` and `mismatch/...`.

    Without work the state comes back as it was and the metrics are None.

    Args:
        work: one entry an optimizer step, as batch.minibatches gives them.
        reference: parameters that kl_coef holds the policy to, placed as the state's are.
        on_progress: called with (micro-batches done, of how many).
    """
    if not work:
        names = ("learner/loss", "learner/grad_norm", "learner/entropy_mean", "learner/lr")
        return state, {**dict.fromkeys(names), "learner/skipped_steps": 0.0}
    anchored = len(work) > 1 or how.kl_coef > 0 or how.high_entropy_share < 1
    fixed = [_anchors(trainer, state, step, how, reference) if anchored else None for step in work]
    sums: dict[str, float] | None = None
    done, total = 0, sum(len(step.microbatches) for step in work)
    for step, anchors in zip(work, fixed, strict=True):
        state, told = trainer.update(state, step.microbatches, step.normaliser, anchors)
        sums = told if sums is None else {k: float(v) for k, v in correction.combine(sums, told).items()}
        done += len(step.microbatches)
        on_progress(done, total)
    assert sums is not None
    padding = pack.waste(rows for step in work for rows in step.microbatches)
    return state, _describe(sums, len(work)) | {"learner/padding_frac": padding}


def _anchors(
    trainer: update.Learner,
    state: TrainState,
    step: batch.Minibatch,
    how: settings.Loss,
    reference: Any,
) -> list[objective.Anchors]:
    """What ratios, KL and the entropy selection are taken against, computed before the first update.

    Rows that were carried over from an earlier step are taken against these weights too; what lies between the weights
    that sampled them and these is the business of the correction (Loss.correction), and the mismatch metrics show it.
    """
    scored = trainer.score(state.params, step.microbatches)
    held_to = trainer.score(reference, step.microbatches) if how.kl_coef > 0 else [None] * len(scored)
    threshold = None
    if how.high_entropy_share < 1:
        entropies = np.concatenate([_whole(entropy) for _, entropy in scored])
        masks = np.concatenate([np.asarray(rows.loss_mask) for rows in step.microbatches])
        threshold = loss_rule.entropy_threshold(entropies, masks, how.high_entropy_share)

    def one(found: Any, other: Any) -> objective.Anchors:
        return objective.Anchors(
            old_logprobs=found[0],
            ref_logprobs=None if other is None else other[0],
            entropy_threshold=threshold,
        )

    return [one(*pair) for pair in zip(scored, held_to, strict=True)]


def _whole(values: Any) -> np.ndarray:
    """An array on the host, also where its parts lie on the devices of several processes."""
    if jax.process_count() == 1:
        return np.asarray(values)
    return np.asarray(multihost_utils.process_allgather(values, tiled=True))


def _describe(sums: dict[str, float], steps: int) -> Metrics:
    tokens = max(sums["tokens"], 1.0)
    gap = {name: float(value) for name, value in correction.summarise(sums).items()}
    return {
        "learner/loss": sums["loss"] / steps,
        "learner/grad_norm": sums["grad_norm"] / steps,
        "learner/entropy_mean": sums["entropy_sum"] / tokens,
        "learner/lr": sums["lr"] / steps,
        "learner/skipped_steps": sums["skipped"],
        "learner/tokens": sums["tokens"],
        "learner/ratio_mean": sums["ratio_sum"] / tokens,
        "learner/clip_low_frac": sums["clip_low"] / tokens,
        "learner/clip_high_frac": sums["clip_high"] / tokens,
        "learner/kl_old": sums["kl_old_sum"] / tokens,
        "mismatch/logprob_gap_mean": gap["logprob_gap_mean"],
        "mismatch/logprob_gap_max": gap["logprob_gap_max"],
        "mismatch/k3_kl": gap["kl_k3"],
        "mismatch/ess_frac": gap["ess_share"],
        "mismatch/mult_prob_error": gap["mult_prob_error"],
    }
