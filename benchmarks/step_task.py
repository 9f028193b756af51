"""The work of benchmarks/train_step.py: one model and two loads, the same for every contestant. Needs numpy alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import rollout_task

PROMPT, RESPONSE = 64, 128
TOKENS = PROMPT + RESPONSE
LR = 1e-4
# 9.7 million parameters, 39% of them in the tied embedding.
SIZES = rollout_task.SMALL


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """One episode: ids i32[n], mask bool[n] (True on the response), old log-probabilities f32[n], its advantage."""

    ids: np.ndarray
    mask: np.ndarray
    old_logprobs: np.ndarray
    advantage: float
    prompt: int


def sequences(load: str) -> list[Sequence]:
    """The sequences of a load: `full` has 16 of full length, `ragged` 64 that average a quarter, one of them full."""
    rng = np.random.default_rng(0)
    count = 16 if load == "full" else 64
    prompts = np.full(count, PROMPT) if load == "full" else _ragged(rng, count, PROMPT)
    responses = np.full(count, RESPONSE) if load == "full" else _ragged(rng, count, RESPONSE)
    return [_sequence(rng, int(p), int(r), i) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]


def _ragged(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Lengths with mean longest / 4: many short, few long, one of full length."""
    lengths = np.clip(rng.gamma(2.0, longest / 8, count).round(), 2, longest).astype(int)
    lengths[0] = longest
    while (gap := int(lengths.sum()) - count * longest // 4) != 0:
        places = 1 + rng.permutation(count - 1)[: min(abs(gap), count - 1)]
        lengths[places] = np.clip(lengths[places] - np.sign(gap), 2, longest)
    return lengths


def _sequence(rng: np.random.Generator, prompt: int, response: int, index: int) -> Sequence:
    total = prompt + response
    mask = np.arange(total) >= prompt
    return Sequence(
        ids=rng.integers(1, SIZES["vocab_size"], total).astype(np.int32),
        mask=mask,
        old_logprobs=np.where(mask, -9.6, 0).astype(np.float32),
        advantage=1.0 if index % 2 else -1.0,
        prompt=prompt,
    )


def padded(load: str) -> dict[str, np.ndarray]:
    """Prompts padded on the left to PROMPT, responses on the right to RESPONSE, as the contestants take them."""
    found = sequences(load)
    count = len(found)
    arrays = {
        "prompt_ids": np.zeros((count, PROMPT), np.int32),
        "prompt_mask": np.zeros((count, PROMPT), bool),
        "completion_ids": np.zeros((count, RESPONSE), np.int32),
        "completion_mask": np.zeros((count, RESPONSE), bool),
        "old_logprobs": np.zeros((count, RESPONSE), np.float32),
        "advantages": np.array([s.advantage for s in found], np.float32),
    }
    for row, s in enumerate(found):
        response = len(s.ids) - s.prompt
        arrays["prompt_ids"][row, PROMPT - s.prompt :] = s.ids[: s.prompt]
        arrays["prompt_mask"][row, PROMPT - s.prompt :] = True
        arrays["completion_ids"][row, :response] = s.ids[s.prompt :]
        arrays["completion_mask"][row, :response] = True
        arrays["old_logprobs"][row, :response] = s.old_logprobs[s.prompt :]
    return arrays
