"""GRPO-RoC's loss written a second time, in torch and from the paper alone: loss, gradients, clipped tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.algo import advantages as advantage_rule
from rstar2_jax.learner import objective, update
from rstar2_jax.model import decoder, hf
from rstar2_jax.types import TrainBatch

pytestmark = pytest.mark.torch

SIZES = settings.Model(
    family="qwen3", vocab_size=96, d_model=32, d_mlp=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64
)
ROWS, TOKENS, TEMPERATURE = 8, 24, 0.7


def made():
    """Two groups of four rollouts as rows of one sequence each, and old log-probabilities that are not ours."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, TOKENS + 1, ROWS)
    places = np.arange(TOKENS)[None]
    inside = places < lengths[:, None]
    mask = inside & (places >= 5) & (rng.random((ROWS, TOKENS)) < 0.8)  # holes stand for tool replies
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]], np.float32)
    given = np.asarray(advantage_rule.advantages(rewards, np.ones_like(rewards, bool), ddof=0, eps=0.0)).reshape(-1)
    batch = TrainBatch(
        tokens=np.where(inside, rng.integers(0, 96, (ROWS, TOKENS)), 0).astype(np.int32),
        positions=np.where(inside, places, 0).astype(np.int32),
        segment_ids=inside.astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -4.5 + 0.3 * rng.normal(size=mask.shape), 0).astype(np.float32),
        advantages=np.where(mask, given[:, None], 0).astype(np.float32),
    )
    return batch, rewards, np.where(mask, -4.5 + 0.5 * rng.normal(size=mask.shape), 0).astype(np.float32)


def of_torch(params, batch, rewards, old, aggregation):
    """(loss, gradients under Hugging Face names, tokens that a bound of the clip cut) by transformers and autograd."""
    import torch
    import transformers

    config = transformers.Qwen3Config(**hf.config_from_settings(SIZES, hf.SpecialIds()))
    config._attn_implementation = "eager"
    model = transformers.Qwen3ForCausalLM(config).to(torch.float32)
    tensors = {name: torch.tensor(array) for name, array in hf.to_hf(params, SIZES).items()}
    if SIZES.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    model.tie_weights()
    total, cut, sequences, tokens = torch.zeros(()), 0, 0, 0
    for row in range(ROWS):
        group, member = divmod(row, 4)
        scores = torch.tensor(rewards[group])
        advantage = (scores[member] - scores.mean()) / scores.std(unbiased=False)
        length = int(batch.segment_ids[row].sum())
        ids = torch.tensor(batch.tokens[row, :length]).long()
        logits = model(ids[None]).logits[0] / TEMPERATURE
        terms = []
        for t in range(1, length):
            if batch.loss_mask[row, t]:
                logp = torch.log_softmax(logits[t - 1], dim=-1)[ids[t]]
                ratio = torch.exp(logp - float(old[row, t]))
                bounded = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
                terms.append(-torch.min(ratio * advantage, bounded * advantage))
                cut += int((ratio * advantage > bounded * advantage).item())
        tokens, sequences = tokens + len(terms), sequences + bool(terms)
        if terms:
            total = total + (sum(terms) if aggregation == "token_mean" else sum(terms) / len(terms))
    loss = total / (tokens if aggregation == "token_mean" else sequences)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, cut, (tokens, sequences)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_loss_gradients_and_clipped_tokens_are_those_of_torch(aggregation):
    batch, rewards, old = made()
    params = decoder.init_params(SIZES, jax.random.key(3))
    how = settings.Loss(aggregation=aggregation)
    learner = settings.Learner(optimizer=settings.Optimizer(lr=1e-3), loss=how, microbatch_rows=4, row_tokens=TOKENS)
    trainer = update.Learner(SIZES, learner, objective.grpo(how), total_steps=1, temperature=TEMPERATURE)
    wanted, gradients, cut, (tokens, sequences) = of_torch(params, batch, rewards, old, aggregation)
    parts = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], batch) for at in (0, 4)]
    anchors = [objective.Anchors(old_logprobs=old[at : at + 4]) for at in (0, 4)]
    normaliser = float(tokens if aggregation == "token_mean" else sequences)
    found, told = trainer.gradients(params, parts, normaliser, anchors)
    assert float(told["loss"]) == pytest.approx(wanted, abs=1e-5)
    assert float(told["clip_low"] + told["clip_high"]) == cut > 0
    ours = hf.to_hf(found, SIZES)
    assert ours.keys() == gradients.keys()
    largest = max(np.abs(array).max() for array in gradients.values())
    for name, array in gradients.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-5 * max(1.0, largest), err_msg=name)
