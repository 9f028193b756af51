"""Our contestant of train_step.py: the learner's own update over packed rows, the program that training runs."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import paired  # noqa: E402
import step_task  # noqa: E402

from rstar2_jax import settings  # noqa: E402
from rstar2_jax.data import pack  # noqa: E402
from rstar2_jax.learner import batch, objective, update  # noqa: E402
from rstar2_jax.model import decoder  # noqa: E402

ROW_TOKENS = {"full": step_task.TOKENS, "ragged": 208}  # as many as 16 rows need


def prepare(task: dict[str, Any]) -> Any:
    """Build the learner and give back one round of work."""
    sequences, row_tokens = step_task.sequences(task["load"]), ROW_TOKENS[task["load"]]
    model = settings.Model(**step_task.SIZES, family="qwen3", tie_embeddings=True, max_positions=row_tokens)
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=step_task.LR, warmup_steps=0, weight_decay=0.01, max_grad_norm=1.0),
        microbatch_rows=task["microbatch_rows"],
        row_tokens=row_tokens,
        remat=task["remat"],
    )
    trainer = update.Learner(model, learner, objective.grpo(learner.loss), total_steps=1000)
    rows = [
        pack.Row(token_ids=s.ids, mask=s.mask, behavior_logprobs=s.old_logprobs, advantage=s.advantage)
        for s in sequences
    ]
    whole = pack.pack(rows, row_tokens=row_tokens, rows_multiple=16)
    parts, trained = batch.cut(whole, learner.microbatch_rows), float(whole.loss_mask.sum())
    anchors = [objective.Anchors(old_logprobs=part.behavior_logprobs) for part in parts]
    held = {"state": trainer.create(decoder.init_params(model, jax.random.key(0)))}

    def work() -> float:
        for _ in range(task["steps"]):
            held["state"], told = trainer.update(held["state"], parts, trained, anchors)
        assert told["skipped"] == 0
        return trained * task["steps"]

    work()
    count = sum(leaf.size for leaf in jax.tree.leaves(held["state"].params))
    return work, {"parameters": count, "rows": len(whole.tokens), "padding": pack.waste(parts)}


if __name__ == "__main__":
    paired.serve(prepare)
