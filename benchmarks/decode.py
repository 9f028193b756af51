"""Ids sampled per CPU-second by the embedded engine: python benchmarks/decode.py [box|small] [GROUP].

    box     the model and the load of the box recipe: 64 rows, prompts of 25-90 ids in groups of 16, turns of about 30
    small   4 layers, 256 wide, 8,192 ids: 16 rows, 64 + 128 ids, one wave

Prints wall and CPU rates of the whole engine, prefill and host work included; the compilation is not counted. CPU
seconds are those of the process, so that the rate can be read on a machine that does other work as well.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from rstar2_jax.model import decoder
from rstar2_jax.rollout.engine import Request, Sampling
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.settings import Model
from rstar2_jax.weights import publish

BOX = Model(
    family="qwen3", vocab_size=100, d_model=96, d_mlp=256, layers=3, heads=4, kv_heads=2, head_dim=24, max_positions=192
)
SMALL = Model(
    family="qwen3",
    vocab_size=8192,
    d_model=256,
    d_mlp=1024,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    tie_embeddings=False,
    max_positions=192,
)
LOADS = {
    "box": (BOX, {"slots": 64, "prefill_chunk_tokens": 32}, 512, 16, (25, 91), (15, 46)),
    "small": (SMALL, {"slots": 16, "prefill_chunk_tokens": 64}, 16, 1, (64, 65), (128, 129)),
}


def make_requests(model: Model, count: int, group: int, prompt: tuple[int, int], new: tuple[int, int]) -> list[Request]:
    """Requests in groups of equal prompts, with lengths drawn from the half-open ranges."""
    rng = np.random.default_rng(0)
    requests = []
    for i in range(count):
        ids = (
            requests[-1].prompt_ids
            if i % group
            else rng.integers(0, model.vocab_size, size=rng.integers(*prompt)).tolist()
        )
        sampling = Sampling(max_new_tokens=int(rng.integers(*new)), stop_ids=())
        requests.append(Request(rid=str(i), prompt_ids=ids, seed=i, sampling=sampling))
    return requests


async def measure(load: str, group: int | None) -> None:
    """Run one load three times and print the rates."""
    model, sizes, count, own_group, prompt, new = LOADS[load]
    group = own_group if group is None else group
    params = decoder.init_params(model, jax.random.key(0))
    print(
        f"{load}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {sizes},"
        f" {count} requests in groups of {group}"
    )
    engine = JaxEngine(model, context_tokens=model.max_positions, **sizes)
    requests = make_requests(model, count, group, prompt, new)
    with tempfile.TemporaryDirectory() as root:
        publish.publish(params, model, root, 0)
        await engine.update_weights(root, 0)
    await engine.generate(requests[0])
    for _ in range(3):
        before, wall, cpu = engine.stats, time.perf_counter(), time.process_time()
        await asyncio.gather(*(engine.generate(request) for request in requests))
        wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, engine.stats
        sampled, steps = after.sampled_tokens - before.sampled_tokens, after.decode_steps - before.decode_steps
        print(
            f"{sampled / cpu:,.0f} ids per CPU-second, {sampled / wall:,.0f} per second; {steps} steps,"
            f" {sampled / steps:.1f} ids a step"
        )
    await engine.close()


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1] if len(sys.argv) > 1 else "box", int(sys.argv[2]) if len(sys.argv) > 2 else None))
