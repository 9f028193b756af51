"""The simulated clock of scheduler_sim.py beside one real embedded engine, on one recorded step of the box.

    python benchmarks/scheduler_check.py [--json] [--rounds 3] [--record RUN STEP]

The trace (results/box_step.json) is what a step of `make box` sampled: prompt, ids of each turn, ids of its replies.
The engine, with random weights, samples turns of just these lengths through the pool (rollout/pool.py), which decides
with the same balancer as the simulation. Time is CPU seconds of this process on one core, since the machine is shared:
so tools take none on either side. The simulation's three speeds (a step, a step for each token held, prefill) come
from other work on the same engine, before and after each replay. Printed: seconds of the whole step on both sides, and
how far the ends of single rollouts lie apart, for an engine with room for all lanes and one whose memory binds, and for
device calls of one step (as the simulation has it, and SGLang) and of up to 32 (what ends inside is seen at their end).

--record makes the trace of a run's folder and step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import scheduler_sim as simulation

TRACE = pathlib.Path(__file__).parent / "results" / "box_step.json"
LANES, CONTEXT = 64, 160
MEMORIES = (LANES * CONTEXT, 3072)
CALLS = (1, 32)
FEW = 32  # ids of a row in the calibration


def record(run: str, step: int) -> None:
    """Write the trace of a recorded step."""
    from rstar2_jax.io import trajectories

    rows = []
    for one in trajectories.read_step(run, step):
        turns = one.trajectory.turns
        sampled = [int(turn.mask.sum()) for turn in turns]
        replies = [len(turn.mask) - count for turn, count in zip(turns, sampled, strict=True)][:-1]
        rows.append(
            {"group": one.group, "prompt": len(one.trajectory.prompt_ids), "turns": sampled, "replies": replies}
        )
    TRACE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def traces() -> list[simulation.Trace]:
    """The recorded step; the replies of one rollout all get their mean length, as the simulation has it."""
    made = []
    for number, row in enumerate(json.loads(TRACE.read_text())):
        turns = tuple(max(1, count) for count in row["turns"])
        reply = round(statistics.fmean(row["replies"])) if row["replies"] else 0
        made.append(
            simulation.Trace(
                name=str(number),
                family=str(row["group"]),
                prompt_tokens=row["prompt"],
                turns=turns,
                tools_s=(0.0,) * len(turns),
                reply_tokens=reply,
            )
        )
    return made


def make_request(rid: str, seed: int, ids: list[int], new: int):
    """A turn of exactly `new` ids."""
    from rstar2_jax.rollout.engine import Request, Sampling

    return Request(rid=rid, prompt_ids=ids, seed=seed, sampling=Sampling(max_new_tokens=new, stop_ids=()))


async def calibrate(engine, rng) -> tuple[float, float, float]:
    """(CPU seconds of a decode step, more of it for each token held, prefill tokens a CPU second)."""
    steps = {}
    prefill = 0.0
    for length in (8, CONTEXT - FEW - 1):
        prompts = [rng.integers(0, 300, length).tolist() for _ in range(LANES)]

        async def load(new: int, turn: int, prompts=prompts) -> float:
            start = time.process_time()
            made = (make_request(f"c{turn}/{i}", i, prompt, new) for i, prompt in enumerate(prompts))
            await asyncio.gather(*(engine.generate(request) for request in made))
            return time.process_time() - start

        first = await load(1, 0)  # writes the prompts into the cache
        prefill = LANES * length / first
        steps[LANES * (length + FEW / 2)] = await load(FEW, 1) / FEW
    (few, short), (many, long) = sorted(steps.items())
    per_token = max(0.0, (long - short) / (many - few))
    return short - per_token * few, per_token, prefill


async def replay(engine, work: list[simulation.Trace], rng) -> dict[str, float]:
    """CPU seconds at which each rollout ended, all of them started at once."""
    from rstar2_jax import settings
    from rstar2_jax.rollout import pool

    prompts = {trace.family: rng.integers(0, 300, trace.prompt_tokens).tolist() for trace in work}
    engines = pool.Pool([engine], settings.Fleet(probe_s=0))
    ends: dict[str, float] = {}
    start = time.process_time()

    async def one(trace: simulation.Trace) -> None:
        ids = list(prompts[trace.family])
        sizes = {"prompt_tokens": trace.prompt_tokens, "budget_tokens": CONTEXT - trace.prompt_tokens}
        async with engines.seat(trace.name, family=trace.family, **sizes) as seat:
            for turn, length in enumerate(trace.turns):
                request = make_request(f"{trace.name}/{turn}", 1000 * int(trace.name) + turn, ids, length)
                made = await seat.turn(request)
                ids += made.token_ids.tolist() + [7] * trace.reply_tokens
        ends[trace.name] = time.process_time() - start

    await asyncio.gather(*(one(trace) for trace in work))
    return ends


class Watched(simulation.Simulation):
    """A simulation that notes when each rollout ends."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.ends: dict[str, float] = {}

    def _end_turns(self, engine: simulation.Engine) -> int:
        last = {row.trace.name for row in engine.running.values() if row.turn + 1 == len(row.trace.turns)}
        before = engine.now_s
        ended = super()._end_turns(engine)
        for name in last - engine.running.keys() - {row.trace.name for row in engine.waiting}:
            self.ends[name] = before
        return ended


def compared(real: dict[str, float], simulated: Watched, result: dict[str, float]) -> dict[str, float]:
    """Ratio of the step's seconds, and the ends of single rollouts as shares of it."""
    names = sorted(real)
    a, b = np.array([real[n] for n in names]), np.array([simulated.ends[n] for n in names])
    return {
        "real_s": round(float(a.max()), 3),
        "simulated_s": round(result["seconds"], 3),
        "simulated_to_real": round(result["seconds"] / float(a.max()), 3),
        "ends_apart_median": round(float(np.median(np.abs(a / a.max() - b / b.max()))), 3),
        "ends_correlation": round(float(np.corrcoef(a, b)[0, 1]), 3),
    }


async def check(kv_tokens: int, decode_steps: int, rounds: int) -> dict[str, object]:
    """Rounds on an engine of this memory."""
    import jax

    from rstar2_jax import settings
    from rstar2_jax.model import decoder
    from rstar2_jax.rollout import jax_engine
    from rstar2_jax.weights import publish

    sizes = {"d_model": 128, "d_mlp": 320, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
    model = settings.Model(family="qwen3", vocab_size=320, max_positions=512, **sizes)
    whole = {"slots": LANES, "context_tokens": CONTEXT, "prefill_chunk_tokens": 16, "decode_steps": decode_steps}
    engine = jax_engine.JaxEngine(model, **whole, kv_tokens=kv_tokens)
    ample = engine if kv_tokens >= LANES * CONTEXT else jax_engine.JaxEngine(model, **whole)
    work, found = traces(), []
    with tempfile.TemporaryDirectory() as root:
        publish.publish(decoder.init_params(model, jax.random.key(0)), model, root, 0)
        for one in {engine, ample}:
            await one.update_weights(root, 0)
    for number in range(rounds + 1):  # the first round compiles
        rng = np.random.default_rng(number)
        before = await calibrate(ample, rng)
        counted = engine.stats
        real = await replay(engine, work, rng)
        steps, calls, again = (
            getattr(engine.stats, name) - getattr(counted, name)
            for name in ("decode_steps", "decode_calls", "recomputed_tokens")
        )
        base, per_token, prefill = np.mean([before, await calibrate(ample, rng)], axis=0).tolist()
        speeds = {"base_s": base, "per_kv_token_s": per_token, "prefill_tokens_per_s": prefill}
        machine = simulation.Machine(kv_tokens=kv_tokens, rows=LANES, **speeds)
        balancer, budget = (
            simulation.scheduler("pool", 1, machine, CONTEXT),
            CONTEXT - min(t.prompt_tokens for t in work),
        )
        simulated = Watched(work, [simulation.Engine(machine)], "pool", budget, balancer)
        result = simulated.run()
        sampled = sum(sum(trace.turns) for trace in work)
        more = {
            "real_steps": steps,
            "simulated_steps": result["seconds"] / (base + per_token * kv_tokens / 2),
            "real_calls": calls,
            "requests": sum(len(trace.turns) for trace in work),
            "real_recomputed": again / sampled,
            "simulated_recomputed": result["recomputed_share"],
        }
        if number:
            found.append(compared(real, simulated, result) | speeds | more)
            print(f"{kv_tokens} KV tokens, calls of {decode_steps}: {found[-1]}", file=sys.stderr, flush=True)
    for one in {engine, ample}:
        await one.close()
    return {name: float(f"{statistics.median(row[name] for row in found):.4g}") for name in found[0]}


def main() -> int:
    """Measure and print. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", nargs=2, metavar=("RUN", "STEP"))
    args = parser.parse_args()
    if args.record:
        record(args.record[0], int(args.record[1]))
        return 0
    found = {
        f"{tokens} KV tokens, calls of {steps}": asyncio.run(check(tokens, steps, args.rounds))
        for steps in CALLS
        for tokens in MEMORIES
    }
    print(json.dumps(found, indent=1) if args.json else "\n".join(f"{name}: {row}" for name, row in found.items()))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    raise SystemExit(main())
