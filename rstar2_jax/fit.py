"""Do the settings of a run fit each other? What one class alone can tell it refuses at birth (settings.py).

Pure. Deliberately not here: whether data and files are there (the RUN functions).
"""

from __future__ import annotations

from rstar2_jax import settings


def training(run: settings.Run, rollout: settings.Rollout, learner: settings.Learner, model: settings.Model) -> None:
    """Raise ValueError where the settings of reinforcement learning do not fit each other."""
    _start(run, learner.optimizer)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > learner.row_tokens:
        raise ValueError(
            f"an episode may take max_prompt_tokens + max_response_tokens = {longest} tokens, but Learner.row_tokens = "
            f"{learner.row_tokens}: raise row_tokens to {longest} or lower the budgets"
        )
    if longest > model.max_positions:
        raise ValueError(
            f"an episode may take {longest} tokens, but Model.max_positions = {model.max_positions}: lower the budgets"
        )
    if rollout.max_staleness > 0 and learner.loss.correction == "off":
        raise ValueError(
            f"Rollout.max_staleness = {rollout.max_staleness} trains on ids of older weights, but Loss.correction is "
            "'off': set it to 'token', 'band' or 'sequence' (--gin_file=ablation/async.gin does both)"
        )
    if run.steps == 0:
        raise ValueError("Run.steps = 0: training needs at least one step (--steps=...)")


def fine_tuning(run: settings.Run, learner: settings.Learner) -> None:
    """Raise ValueError where the settings of fine-tuning do not fit each other."""
    if run.steps == 0:
        raise ValueError("Run.steps = 0: fine-tuning needs at least one step (--steps=...)")
    _start(run, learner.optimizer)


def _start(run: settings.Run, optimizer: settings.Optimizer) -> None:
    if run.optimizer_start == "continue" and optimizer.schedule == "cosine":
        raise ValueError(
            "Run.optimizer_start = 'continue' keeps the place in the schedule of the run before, but a cosine ends "
            "with its own run (Optimizer.schedule = 'cosine'): take 'restart', or the 'constant' schedule"
        )
