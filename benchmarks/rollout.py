"""Ids sampled per CPU-second by the embedded engine, beside tunix and transformers: benchmarks/rollout.py [--json]

One core, float32, random weights. Prefill, host work and tool replies are in the time, compilation is not. Each
contestant samples the same numbers of ids; they take turns, each in its own process and environment
(benchmarks/peers.sh builds those).

    equal      a Qwen3 of 9.7 million parameters, 16 prompts of 64 ids, 128 ids each
    episodes   the same model; 8 samples of each prompt, 3 turns of 8 to 256 ids, a tool reply after each but the last
    smollm2    the sizes of SmolLM2-135M, 32 rows, 64 ids each (no tunix: it has no Llama of these sizes)
    box        the model of the box alone, for a quick look: 64 rows, groups of 16, turns of about 30 ids

    --peers FOLDER   where the environments are (default .venv-peers)
    --load NAME      one of the above, or all (equal, episodes and smollm2; default)
    --rounds N       turns of each contestant (default 5; one of `episodes`)
    --prompts N      prompts of `episodes` (default 64)
    --rows N         rows of a batch in `episodes`, lanes of the engine (default 64)
    --json           print one JSON object instead of a table
    --only NAME      this contestant, with its errors shown (ours, tunix, torch); may be given again
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import pathlib
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import paired  # noqa: E402 (found beside this file)
import rollout_task  # noqa: E402

BOX: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 96,
    "d_mlp": 256,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 24,
}
PEERS = {"equal": ["tunix", "torch"], "episodes": ["tunix", "torch"], "smollm2": ["torch"], "box": []}


def contestants(peers: pathlib.Path) -> dict[str, list[str]]:
    """Command lines by name."""
    return {
        "ours": [sys.executable, str(HERE / "rollout.py"), "--serve"],
        "tunix": [str(peers / "tunix" / "bin" / "python"), str(HERE / "rollout_tunix.py")],
        "torch": [str(peers / "torch" / "bin" / "python"), str(HERE / "rollout_torch.py")],
    }


def box_episodes() -> list[rollout_task.Episode]:
    """What a step of the box samples: 32 prompts, 16 samples of each."""
    import numpy as np

    rng, found = np.random.default_rng(0), []
    for _ in range(32):
        prompt = rng.integers(0, BOX["vocab_size"], rng.integers(25, 91)).tolist()
        found += [rollout_task.Episode(prompt, [int(rng.integers(15, 46))], []) for _ in range(16)]
    return found


def make_request(number: int, turn: int, ids: list[int], length: int) -> Any:
    """One turn of an episode, which ends at its length."""
    from rstar2_jax.rollout.engine import Request, Sampling

    sampling = Sampling(max_new_tokens=length, stop_ids=())
    return Request(rid=f"{number}/{turn}", prompt_ids=ids, seed=8 * number + turn, sampling=sampling)


async def run_episode(engines: Any, number: int, episode: rollout_task.Episode) -> None:
    """Turn after turn in a seat of its own, each a request that holds all before it, as the agent loop sends them."""
    ids, size = list(episode.prompt), len(episode.prompt)
    budget = engines.caps.max_context_tokens - size  # how long it gets is not known beforehand
    async with engines.seat(str(number), family=str(number // 8), prompt_tokens=size, budget_tokens=budget) as seat:
        for turn, length in enumerate(episode.lengths):
            generation = await seat.turn(make_request(number, turn, ids, length))
            ids += generation.token_ids.tolist()
            ids += episode.replies[turn] if turn < len(episode.replies) else []


def model_of(load: str, found: list[rollout_task.Episode]) -> Any:
    """The model of a load, with a context as long as its longest episode."""
    from rstar2_jax import settings

    sizes, family = (BOX, "qwen3") if load == "box" else (rollout_task.SIZES[load], rollout_task.FAMILY[load])
    context = max(len(e.prompt) + sum(e.lengths) + sum(map(len, e.replies)) for e in found)
    return settings.Model(**sizes, family=family, tie_embeddings=load != "box", max_positions=context)


async def start_engine(model: Any, params: Any, lanes: int, kv_tokens: int | None, prompt: list[int]) -> Any:
    """An engine with these parameters whose programs are compiled."""
    from rstar2_jax.rollout import jax_engine
    from rstar2_jax.weights import publish

    context = model.max_positions
    engine = jax_engine.JaxEngine(
        model, slots=lanes, context_tokens=context, prefill_chunk_tokens=64, kv_tokens=kv_tokens
    )
    with tempfile.TemporaryDirectory() as root:
        publish.publish(params, model, root, 0)
        await engine.update_weights(root, 0)
    for ending in ([1], [2]):  # the second parts from the first inside a page: copies are compiled too
        await engine.generate(make_request(0, 0, [*prompt[:5], *ending, 3], 2))
    return engine


def prepare(task: dict[str, Any]) -> Any:
    """Our contestant: the embedded engine as an episode sees it, behind the pool that training puts before it."""
    import dataclasses

    import jax

    from rstar2_jax import hosts
    from rstar2_jax.model import decoder
    from rstar2_jax.rollout import pool

    load = task["load"]
    found = box_episodes() if load == "box" else rollout_task.episodes(load, task["prompts"])
    model, lanes, runner = model_of(load, found), min(task["rows"], len(found)), asyncio.Runner()
    params = decoder.init_params(model, jax.random.key(0))
    engine = runner.run(start_engine(model, params, lanes, task.get("kv_tokens"), found[0].prompt))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    engines = pool.Pool([engine], hosts.Fleet())

    async def run_all() -> None:
        await engine.flush()  # a round finds nothing of the one before
        await asyncio.gather(*(run_episode(engines, number, episode) for number, episode in enumerate(found)))

    def work() -> float:
        before = dataclasses.asdict(engine.stats)
        runner.run(run_all())
        after = dataclasses.asdict(engine.stats)
        print("counters", {name: after[name] - before[name] for name in after}, file=sys.stderr)
        return rollout_task.sampled(found)

    if load != "episodes":
        work()
    return work, {"parameters": count, "rows": lanes, "versions": f"jax {jax.__version__}"}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--peers", type=pathlib.Path, default=HERE.parent / ".venv-peers")
    options.add_argument("--load", choices=[*PEERS, "all"], default="all")
    options.add_argument("--rounds", type=int)
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--kv_tokens", type=int)
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", choices=["ours", "tunix", "torch"], action="append")
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.serve:
        paired.serve(prepare)
        return
    found = {}
    for load in ["equal", "episodes", "smollm2"] if asked.load == "all" else [asked.load]:
        names = asked.only or ["ours", *PEERS[load]]
        running = {name: command for name, command in contestants(asked.peers).items() if name in names}
        task = {"load": load, "prompts": asked.prompts, "rows": asked.rows, "kv_tokens": asked.kv_tokens}
        rounds = asked.rounds or (1 if load == "episodes" else 5)
        task["quiet"] = not asked.only
        report = functools.partial(print, file=sys.stderr, flush=True)
        results = paired.measure(running, task, rounds, report, paired.HUGE_PAGES)
        found[load] = {
            r.name: {"median": r.median, "rates": r.rates, "peak_bytes": r.peak_bytes} | r.told for r in results
        }
        if not asked.json:
            print("\n".join(paired.table(load, "ids sampled", results)), flush=True)
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
