"""The tunix contestant of rollout.py: its Qwen3 and its own sampler, in batches of neighbours in length.

Prompts are padded to a multiple of 128 and the cache is as short as that allows. A batch runs as long as its longest
row, as it does where rows end by themselves. No log-probabilities are asked for.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import paired
import rollout_task
from flax import nnx
from tunix.generate import sampler
from tunix.models.qwen3 import model as qwen3

BUCKET = 128


class Ids:
    """What the sampler takes for a tokenizer: ids go in as they are."""

    def encode(self, ids: list[int]) -> list[int]:
        """The ids themselves."""
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        """Nothing: text plays no part."""
        return ""

    def bos_id(self) -> int:
        """None is put in front."""
        return 0

    def eos_id(self) -> int:
        """Never sampled."""
        return rollout_task.SMALL["vocab_size"]

    def pad_id(self) -> int:
        """Never part of a prompt."""
        return 0


def prepare(task: dict[str, Any]) -> Any:
    """Build the model and give back one round of work."""
    sizes = rollout_task.SIZES[task["load"]]
    model = qwen3.Qwen3(
        qwen3.ModelConfig(
            num_layers=sizes["layers"], vocab_size=sizes["vocab_size"], embed_dim=sizes["d_model"],
            hidden_dim=sizes["d_mlp"], num_heads=sizes["heads"], head_dim=sizes["head_dim"],
            num_kv_heads=sizes["kv_heads"], rope_theta=int(sizes["rope_theta"]), norm_eps=sizes["rms_eps"],
            use_tied_embedding=True, dtype=jnp.float32,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    found = rollout_task.episodes(task["load"], task["prompts"])
    rows = min(task["rows"], len(found))
    samplers: dict[tuple[int, int], sampler.Sampler] = {}

    def bucket(longest: int) -> int:
        return longest if task["load"] == "equal" else -(-longest // BUCKET) * BUCKET

    def generate(contexts: list[list[int]], steps: int, seed: int) -> list[list[int]]:
        padded = bucket(max(map(len, contexts)))
        contexts = contexts + [contexts[0]] * (rows - len(contexts))
        if (padded, steps) not in samplers:
            config = sampler.CacheConfig(padded + steps, sizes["layers"], sizes["kv_heads"], sizes["head_dim"])
            samplers[padded, steps] = sampler.Sampler(model, Ids(), config)
        out = samplers[padded, steps](
            contexts, max_generation_steps=steps, max_prompt_length=padded, temperature=1.0, top_p=1.0, seed=seed
        )
        return [tokens.tolist() for tokens in out.tokens]

    def work() -> float:
        contexts = [list(episode.prompt) for episode in found]
        for turn in range(len(found[0].lengths)):
            steps = max(episode.lengths[turn] for episode in found)
            for batch in rollout_task.in_batches(contexts, rows):
                texts = generate([contexts[i] for i in batch], steps, turn)
                for i, text in zip(batch, texts, strict=False):
                    episode = found[i]
                    contexts[i] += [max(1, token) for token in text[: episode.lengths[turn]]]
                    contexts[i] += episode.replies[turn] if turn < len(episode.replies) else []
        return rollout_task.sampled(found)

    for lengths, turn in zip(rollout_task.context_lengths(found), range(len(found[0].lengths)), strict=True):
        fillers = [[1] * length for length in lengths]
        steps = max(episode.lengths[turn] for episode in found)
        for batch in rollout_task.in_batches(fillers, rows):
            longest = max(len(fillers[i]) for i in batch)
            if (bucket(longest), steps) not in samplers:  # compile it
                generate([fillers[i] for i in batch], steps, 0)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    versions = f"google-tunix {importlib.metadata.version('google-tunix')}, jax {jax.__version__}"
    return work, {"parameters": parameters, "versions": versions, "rows": rows}


if __name__ == "__main__":
    paired.serve(prepare)
