"""Engine processes killed and stopped in the middle of their rollouts: python tests/e2e/drills.py [DRILLS] [--json].

Two engine processes, kept alive by the fleet, sample the rollouts of one step after another. In the middle of each, one
of the two, by turns, gets SIGKILL or SIGSTOP. A drill is passed when every rollout has ended with the ids that an
undisturbed engine gives it, or is counted as lost by the name of its error, and when the process is back in service
with the current weights before the next one. The suite runs single drills of the same kind (test_fleet.py).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

if __name__ == "__main__":
    sys.path[:0] = [str(pathlib.Path(__file__).parents[2]), str(pathlib.Path(__file__).parents[2] / "sandbox")]

import jax

from rstar2_jax import settings
from rstar2_jax.model import decoder
from rstar2_jax.rollout import fleet, jax_engine, pool
from rstar2_jax.rollout.engine import EngineError, Request, Sampling
from rstar2_jax.weights import publish

MODEL = settings.Model(
    family="qwen3",
    vocab_size=64,
    d_model=32,
    d_mlp=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    max_positions=256,
)
SIZES = {"slots": 4, "context_tokens": 160, "prefill_chunk_tokens": 16}
FLEET = settings.Fleet(probe_s=0.3, progress_s=300.0, expected_quantile=0)
ROLLOUTS, TURNS, NEW = 24, 4, 24
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
BACK_S = 900.0  # longest time until a process is back; a stopped one is killed after half a minute


def make_store(root):
    """A store with versions 1 and 2."""
    for version in (1, 2):
        params = decoder.init_params(MODEL, jax.random.key(version))
        publish.publish(jax.tree.map(lambda leaf: 6 * leaf, params), MODEL, root, version, keep=4)
    return str(root)


def request(number, turn, ids):
    """One turn of a rollout."""
    limits = Sampling(max_new_tokens=NEW, stop_ids=())
    return Request(rid=f"{number}/{turn}", prompt_ids=list(ids), seed=100 * number + turn, sampling=limits)


async def rollout(engines, number):
    """All ids of a rollout, whose engine may change between and inside its turns."""
    ids = [3, 5 + number // 50, 7 + number % 50]
    async with engines.seat(f"r{number}", family="", prompt_tokens=3, budget_tokens=TURNS * NEW) as seat:
        for turn in range(TURNS):
            made = await seat.turn(request(number, turn, ids))
            assert set(made.weights_versions.tolist()) == {1}
            ids += made.token_ids.tolist()
    return ids


async def rollouts(engines, first=0):
    """The ids of each rollout of a step, or the error that lost it."""
    work = (rollout(engines, number) for number in range(first, first + ROLLOUTS))
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException) and not isinstance(one, EngineError):
            raise one
    return done


def undisturbed(store, steps=1):
    """The same by one engine that nothing happens to, for each step."""

    async def main():
        engines = pool.Pool([jax_engine.JaxEngine(MODEL, **SIZES)], FLEET)
        try:
            await engines.update_weights(store, 1)
            return [await rollouts(engines, ROLLOUTS * step) for step in range(steps)]
        finally:
            await engines.close()

    return asyncio.run(main())


async def started(engines, index):
    """Return in the middle of the work of one engine."""
    while (await engines.engine(index).load()).running < 3:
        await asyncio.sleep(0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drill:
    """What one drill gave: seconds from the signal until all rollouts had ended and until the process was back; lost
    rollouts by error."""

    signal: str
    engine: int
    equal: int
    lost: tuple[str, ...]
    moved: int
    ended_s: float
    back_s: float


async def disturbed(engines, replicas, number, wanted):
    """One drill; see the head of the file."""
    chosen, index = SIGNALS[number % 2], number // 2 % 2
    moved, back = engines.counts.moved, engines.counts.brought_back
    work = asyncio.create_task(rollouts(engines, ROLLOUTS * number))
    await started(engines, index)
    os.kill(replicas[index].pid, chosen)
    begun = time.monotonic()
    done = await work
    ended = time.monotonic()
    async with asyncio.timeout(BACK_S):
        while engines.counts.brought_back == back or len(engines.up) < 2:
            await asyncio.sleep(0.05)
    lost = [one for one in done if isinstance(one, EngineError)]
    return Drill(
        signal=chosen.name,
        engine=index,
        equal=sum(a == b for a, b in zip(done, wanted, strict=True)),
        lost=tuple(str(error) for error in lost),
        moved=engines.counts.moved - moved,
        ended_s=round(ended - begun, 2),
        back_s=round(time.monotonic() - begun, 2),
    )


async def run(folder, store, wanted, report):
    """One drill for each entry of `wanted`, all on the same two processes."""
    plan = fleet.Plan(folder=folder, model=MODEL, **SIZES)
    drills = []
    async with fleet.open_replicas(plan, 2, report) as (found, replicas):
        engines = pool.Pool(found, FLEET, report=report)
        try:
            await engines.update_weights(store, 1)
            await engines.warm_up([request(10**6, 0, [1, 2, 3])])
            for number, ids in enumerate(wanted):
                drills.append(await disturbed(engines, replicas, number, ids))
                report(json.dumps(dataclasses.asdict(drills[-1])))
        finally:
            await engines.close()
    return drills


def summary(drills):
    """Counts and medians, by signal."""
    found: dict[str, object] = {
        "drills": len(drills),
        "rollouts": ROLLOUTS * len(drills),
        "equal": sum(drill.equal for drill in drills),
        "lost": sum(len(drill.lost) for drill in drills),
        "moved": sum(drill.moved for drill in drills),
    }
    for name in sorted({drill.signal for drill in drills}):
        for field in ("ended_s", "back_s"):
            values = [getattr(drill, field) for drill in drills if drill.signal == name]
            found[f"{name}_{field}"] = [min(values), statistics.median(values), max(values)]
    return found


def main():
    """Run the drills. Returns 0 when every rollout had its own ids or was counted by name, and each drill moved one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drills", type=int, nargs="?", default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drills-") as name:
        folder = pathlib.Path(name)
        store = make_store(folder / "store")
        wanted = undisturbed(store, arguments.drills)
        drills = asyncio.run(run(folder, store, wanted, lambda line: print(line, file=sys.stderr, flush=True)))
    found = summary(drills)
    print(json.dumps(found) if arguments.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    accounted = found["equal"] + found["lost"] == found["rollouts"]
    return 0 if accounted and all(drill.moved for drill in drills) else 1


if __name__ == "__main__":
    raise SystemExit(main())
