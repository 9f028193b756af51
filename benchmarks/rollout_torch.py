"""The Hugging Face contestant of rollout.py: generate with a KV cache, in batches of neighbours in length.

A row ends at its length; a batch runs as long as its longest row. Sampling is plain (no top-k, no top-p), attention is
SDPA, and no scores are asked for.
"""

from __future__ import annotations

from typing import Any

import paired
import rollout_task
import torch
import transformers


class Lengths(transformers.StoppingCriteria):
    """A row is done when it has its length."""

    def __init__(self, start: int, lengths: list[int]) -> None:
        self.start, self.lengths = start, torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """bool[rows]"""
        return self.lengths <= input_ids.shape[1] - self.start


def build(load: str) -> Any:
    """The model of a load, with random weights."""
    sizes = rollout_task.SIZES[load]
    names = {
        "vocab_size": sizes["vocab_size"], "hidden_size": sizes["d_model"], "intermediate_size": sizes["d_mlp"],
        "num_hidden_layers": sizes["layers"], "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"], "head_dim": sizes["head_dim"], "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "attn_implementation": "sdpa",
    }  # fmt: skip
    if rollout_task.FAMILY[load] == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**names)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**names)).eval()


def prepare(task: dict[str, Any]) -> Any:
    """Build the model and give back one round of work."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(task["load"])
    found = rollout_task.episodes(task["load"], task["prompts"])
    rows = min(task["rows"], len(found))

    def generate(contexts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, pad_token_id=0, eos_token_id=None, use_cache=True,
            stopping_criteria=transformers.StoppingCriteriaList([Lengths(longest, lengths)]),
        )  # fmt: skip
        return out[:, longest:].tolist()

    def work() -> float:
        contexts = [list(episode.prompt) for episode in found]
        with torch.inference_mode():
            for turn in range(len(found[0].lengths)):
                for batch in rollout_task.in_batches(contexts, rows):
                    lengths = [found[i].lengths[turn] for i in batch]
                    texts = generate([contexts[i] for i in batch], lengths)
                    for i, text, length in zip(batch, texts, lengths, strict=True):
                        replies = found[i].replies
                        contexts[i] += text[:length] + (replies[turn] if turn < len(replies) else [])
        return rollout_task.sampled(found)

    if task["load"] != "episodes":
        work()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return work, {"parameters": sum(p.numel() for p in model.parameters()), "versions": versions, "rows": rows}


if __name__ == "__main__":
    paired.serve(prepare)
