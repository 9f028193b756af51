"""Write the golden logits of small random checkpoints of every family, made by transformers in float32 on CPU.

    python tests/golden/make_golden.py

needs torch and transformers; the tests that read the files need neither. Weights are rounded to float16 before they are
used, so that half the bytes hold them exactly. Norms and biases are random too: ones and zeros would hide a mistake.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZES = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
    "attention_dropout": 0.0,
}
ROWS, TOKENS = 2, 40


def build(family: str, tied: bool) -> transformers.PreTrainedModel:
    """A random model of a family, in eval mode."""
    sizes = dict(SIZES, tie_word_embeddings=tied)
    if family == "qwen3":
        sizes["head_dim"] = 16  # wider than hidden_size / heads, as in the real checkpoints
    config = transformers.AutoConfig.for_model(family, attn_implementation="eager", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(20 + len(family) + tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
            parameter.copy_(value.half().float())
    return model


def main() -> None:
    """Write one npz a model: config (JSON), tokens, positions, logits, and the weights under their own names."""
    for family in ("llama", "qwen2", "qwen3"):
        for tied in (True, False):
            model = build(family, tied)
            rng = np.random.default_rng(7)
            tokens = rng.integers(0, SIZES["vocab_size"], (ROWS, TOKENS))
            positions = np.stack([np.arange(TOKENS), 11 * np.arange(TOKENS)])  # far apart, so that theta shows
            with torch.no_grad():
                logits = model(
                    input_ids=torch.from_numpy(tokens),
                    position_ids=torch.from_numpy(positions),
                    attention_mask=torch.ones(ROWS, TOKENS, dtype=torch.long),
                ).logits
            weights = {f"weight:{k}": v.half().numpy() for k, v in model.state_dict().items()}
            if tied:
                weights.pop("weight:lm_head.weight", None)
            np.savez_compressed(
                HERE / f"logits_{family}_{'tied' if tied else 'untied'}.npz",
                config=json.dumps(model.config.to_dict()),
                tokens=tokens.astype(np.int32),
                positions=positions.astype(np.int32),
                logits=logits.numpy(),
                **weights,
            )
            print(family, tied, "largest logit", float(logits.abs().max()))


if __name__ == "__main__":
    main()
