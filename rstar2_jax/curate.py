"""The hard-problem filter before stage 3: problems that the stage-2 model always solves are dropped.

Asks `samples` rollouts of each problem and keeps those that were not solved every time. Writes train.jsonl, which a
task reads with source = 'jsonl'.

Deliberately not here: decontamination and label checks of data from outside (data/sources.py has what loading refuses).

Source: rStar2-Agent paper, stage 3 (8 rollouts of the stage-2 model, 8 of 8 correct dropped).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rstar2_jax import ask, settings
from rstar2_jax.data import prompts
from rstar2_jax.io import clock
from rstar2_jax.report import console
from rstar2_jax.types import Group

PROMPTS_FILE = "train.jsonl"
_MAX_UNSCORED = 0.01


def curate(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    samples: int,
) -> int:
    """Filter the first `rollout.prompts_per_step` problems of the task's order. Returns 0.

    A finished train.jsonl in the workdir is left as it is.

    Raises:
        ValueError: no model to ask, samples below 1, or no problem was left.
        RuntimeError: too many rollouts had no verdict through faults of ours.
    """
    if samples < 1 or not run.init_from:
        raise ValueError(
            f"samples = {samples}, Run.init_from = {run.init_from!r}: the filter needs a model to ask, and one rollout "
            "of each problem or more"
        )
    done = Path(run.workdir) / PROMPTS_FILE
    if done.exists():
        print(f"{done} is there already; delete it to filter again")
        return 0
    return asyncio.run(_curate(run, model, task, rollout, sandbox, samples))


def is_hard(group: Group) -> bool:
    """True when at least one scored rollout failed; a group without a verdict is not judged and not kept."""
    scored = group.rewards[group.valid]
    return bool(scored.size) and not bool(scored.all())


async def _curate(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    samples: int,
) -> int:
    workdir = Path(run.workdir)
    asked = dataclasses.replace(rollout, group_size=samples, oversample=samples)
    watch = clock.Clock(workdir)
    total = rollout.prompts_per_step
    title = f"{workdir.name}: {total} problems x {samples} rollouts from {run.init_from}"
    with console.Console(0, title) as screen:
        async with ask.open_room(run, model, task, asked, sandbox, screen) as room:
            source = prompts.make_source(task).within(room.tier.prompt_tokens, rollout.max_prompt_tokens)
            screen.note(source.report)
            screen.stage("asking")
            with watch.phase("rollout"):
                problems = source.batch(run.seed, 0, total)
                found = await ask.ask(room.sampler, problems, 0, "problems", screen)
            watch.save()
            kept = [group for group in found if is_hard(group)]
            unscored = sum(int((~group.valid).sum()) for group in found)
            screen.note(f"kept {len(kept)} of {total} problems; {unscored} rollouts had no verdict")
    if unscored > _MAX_UNSCORED * total * samples:
        raise RuntimeError(
            f"{unscored} of {total * samples} rollouts have no verdict through faults of the engine or the sandbox; "
            "nothing was written, filter again when they are well"
        )
    if not kept:
        raise ValueError(f"all {total} problems were solved every time: raise the difficulty of the task or ask more")
    _write(workdir / PROMPTS_FILE, kept)
    return 0


def _write(path: Path, kept: Sequence[Group]) -> None:
    unique = {group.prompt.question: group.prompt for group in kept}
    part = path.with_suffix(".tmp")
    part.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in unique.values()))
    os.replace(part, path)
