"""The tunix contestant of train_step.py: its Qwen3, its GRPO loss, and the jitted step that its trainer makes of them.

Sequences are padded to the full shape, prompts on the left and responses on the right; micro-batches of 16 are
accumulated by optax.MultiSteps, as its trainer does. No KL term, token mean.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import optax
import paired
import step_task
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common
from tunix.rl.grpo import grpo_learner


def prepare(task: dict[str, Any]) -> Any:
    """Build the model and give back one round of work."""
    sizes = step_task.SIZES
    model = qwen3.Qwen3(
        qwen3.ModelConfig(
            num_layers=sizes["layers"], vocab_size=sizes["vocab_size"], embed_dim=sizes["d_model"],
            hidden_dim=sizes["d_mlp"], num_heads=sizes["heads"], head_dim=sizes["head_dim"],
            num_kv_heads=sizes["kv_heads"], rope_theta=int(sizes["rope_theta"]), norm_eps=sizes["rms_eps"],
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    arrays = {name: jnp.asarray(value) for name, value in step_task.padded(task["load"]).items()}
    count = len(arrays["advantages"]) // 16
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(step_task.LR, weight_decay=0.01))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(transform, count) if count > 1 else transform, wrt=nnx.Param)
    config = grpo_learner.GRPOConfig(num_generations=8, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean")
    object.__setattr__(config, "temperature", 1.0)
    trained = float(arrays["completion_mask"].sum())

    def examples() -> list[Any]:
        cut = [{name: value[at : at + 16] for name, value in arrays.items()} for at in range(0, 16 * count, 16)]
        return [
            common.TrainExample(
                prompt_ids=part["prompt_ids"], prompt_mask=part["prompt_mask"], completion_ids=part["completion_ids"],
                completion_mask=part["completion_mask"], advantages=part["advantages"], ref_per_token_logps=None,
                old_per_token_logps=part["old_logprobs"],
            )
            for part in cut
        ]  # fmt: skip

    def train_step(model: Any, optimizer: Any, example: Any) -> Any:
        def loss(model: Any, example: Any) -> Any:
            return algo_core.grpo_loss_fn(model, example, config, pad_id=0, eos_id=-1)

        (value, aux), gradients = nnx.value_and_grad(loss, has_aux=True)(model, example)
        norm = optax.global_norm(gradients)
        optimizer.update(model, gradients)
        return value, aux, norm

    jitted = nnx.cached_partial(nnx.jit(train_step, donate_argnames=("optimizer",)), model, optimizer)
    parts = examples()

    def work() -> float:
        for _ in range(task["steps"]):
            told = [jitted(example) for example in parts]
        assert all(jnp.isfinite(value) for value, _, _ in told)
        return trained * task["steps"]

    work()
    sizes_of = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    versions = f"google-tunix {importlib.metadata.version('google-tunix')}, jax {jax.__version__}"
    return work, {"parameters": sum(sizes_of), "versions": versions}


if __name__ == "__main__":
    paired.serve(prepare)
