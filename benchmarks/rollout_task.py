"""The work of benchmarks/rollout.py: models and loads, the same for every contestant. Needs numpy alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

TURNS, SAMPLES = 3, 8
PROMPT, RESPONSE, REPLY = (32, 128), (8, 256), (16, 64)  # fewest and most ids of the load `episodes`
CONTEXT = PROMPT[1] + TURNS * RESPONSE[1] + (TURNS - 1) * REPLY[1]
# 9.7 million parameters, 39% of them in the tied embedding.
SMALL: dict[str, Any] = {
    "vocab_size": 14848,
    "d_model": 256,
    "d_mlp": 768,
    "layers": 6,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "rope_theta": 1e6,
    "rms_eps": 1e-6,
}
SMOLLM2: dict[str, Any] = {  # the sizes of SmolLM2-135M
    "vocab_size": 49152,
    "d_model": 576,
    "d_mlp": 1536,
    "layers": 30,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "rope_theta": 1e5,
    "rms_eps": 1e-5,
}
FAMILY = {"equal": "qwen3", "episodes": "qwen3", "smollm2": "llama"}
SIZES = {"equal": SMALL, "episodes": SMALL, "smollm2": SMOLLM2}


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """A prompt, the lengths of its turns (where each would have ended by itself) and the replies between them."""

    prompt: list[int]
    lengths: list[int]
    replies: list[list[int]]


def episodes(load: str, prompts: int) -> list[Episode]:
    """The episodes of a load.

    equal: 16 prompts of 64 ids, one turn of 128. smollm2: 32 prompts of 16 ids, one turn of 64. episodes: `prompts`
    prompts of 32 to 128 ids, 8 samples of each, 3 turns of 8 to 256 ids with replies of 16 to 64, all uniform.
    """
    rng = np.random.default_rng(0)
    vocab = SIZES[load]["vocab_size"]
    if load != "episodes":
        count, prompt, response = (16, 64, 128) if load == "equal" else (32, 16, 64)
        return [Episode(_ids(rng, vocab, prompt), [response], []) for _ in range(count)]
    found = []
    for _ in range(prompts):
        prompt = _ids(rng, vocab, _between(rng, PROMPT))
        for _ in range(SAMPLES):
            lengths = [_between(rng, RESPONSE) for _ in range(TURNS)]
            replies = [_ids(rng, vocab, _between(rng, REPLY)) for _ in range(TURNS - 1)]
            found.append(Episode(prompt, lengths, replies))
    return found


def sampled(found: list[Episode]) -> float:
    """Ids that are sampled in all, prompts and replies not counted."""
    return float(sum(sum(episode.lengths) for episode in found))


def in_batches(contexts: list[list[int]], rows: int) -> list[list[int]]:
    """Indices of contexts in batches, neighbours in length together: what a static batch pads is then least."""
    order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
    return [order[at : at + rows] for at in range(0, len(order), rows)]


def context_lengths(found: list[Episode]) -> list[list[int]]:
    """Lengths of all contexts before each turn."""
    before, lengths = [len(episode.prompt) for episode in found], []
    for turn in range(len(found[0].lengths)):
        lengths.append(list(before))
        for i, episode in enumerate(found):
            before[i] += episode.lengths[turn] + sum(map(len, episode.replies[turn : turn + 1]))
    return lengths


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def _ids(rng: np.random.Generator, vocab: int, count: int) -> list[int]:
    return rng.integers(1, vocab, count).tolist()
