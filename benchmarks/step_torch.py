"""The Hugging Face contestant of train_step.py: Qwen3ForCausalLM and a GRPO step written by hand, the lean way.

The head runs on response positions only, the log-probability is a gather minus a logsumexp, attention is SDPA, AdamW is
the fused one, and as many micro-batches of 16 sequences as the load has are accumulated.
"""

from __future__ import annotations

from typing import Any

import paired
import step_task
import torch
import transformers


def prepare(task: dict[str, Any]) -> Any:
    """Build the model and give back one round of work."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = step_task.SIZES
    config = transformers.Qwen3Config(
        vocab_size=sizes["vocab_size"], hidden_size=sizes["d_model"], intermediate_size=sizes["d_mlp"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"], tie_word_embeddings=True, max_position_embeddings=step_task.TOKENS,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=step_task.LR, weight_decay=0.01, fused=True)
    arrays = {name: torch.from_numpy(value) for name, value in step_task.padded(task["load"]).items()}
    ids = torch.cat([arrays["prompt_ids"], arrays["completion_ids"]], dim=1).long()
    mask = torch.cat([arrays["prompt_mask"], arrays["completion_mask"]], dim=1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    trained = float(arrays["completion_mask"].sum())
    full = bool(mask.all())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for at in range(0, len(ids), 16):
            rows = slice(at, at + 16)
            logits = model(
                input_ids=ids[rows], attention_mask=None if full else mask[rows], position_ids=positions[rows],
                use_cache=False, logits_to_keep=step_task.RESPONSE + 1,
            ).logits[:, :-1]  # fmt: skip
            targets = arrays["completion_ids"][rows].long()
            logp = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
            ratio = torch.exp(logp - arrays["old_logprobs"][rows])
            advantage = arrays["advantages"][rows][:, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            ((loss * arrays["completion_mask"][rows]).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def work() -> float:
        for _ in range(task["steps"]):
            step()
        return trained * task["steps"]

    work()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return work, {"parameters": sum(p.numel() for p in model.parameters()), "versions": versions}


if __name__ == "__main__":
    paired.serve(prepare)
