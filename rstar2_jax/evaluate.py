"""Evaluation of a finished run or of a Hugging Face folder: the same engine, tools and grader as in training.

Writes evaluation.json (see report/evaluation.py) and the trajectories. Problems are the fixed held-out ones of the
task; the built-in task is also asked the families that no training saw.

Deliberately not here: what is counted (report/evaluation.py, report/samples.py) and the comparison of runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2_jax import ask, settings
from rstar2_jax.data import box_problems, prompts
from rstar2_jax.io import clock, trajectories
from rstar2_jax.report import console, evaluation
from rstar2_jax.report import samples as samples_of
from rstar2_jax.types import Prompt


def evaluate(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    samples: int,
) -> int:
    """Ask `rollout.prompts_per_step` problems of each set, `samples` times each. Returns 0.

    A finished evaluation in the workdir is left as it is; trajectories of one without its evaluation.json are removed.

    Raises:
        ValueError: no weights to evaluate, samples below 1, or the workdir holds another evaluation.
        RuntimeError: too many episodes had no verdict through faults of ours.
    """
    if samples < 1:
        raise ValueError(f"samples = {samples}: ask each problem at least once")
    if not run.init_from:
        raise ValueError("Run.init_from is empty: name the run or the Hugging Face folder to evaluate")
    done = Path(run.workdir) / evaluation.EVALUATION_FILE
    if done.exists():
        _check_same(done, _asked(run, task, rollout, samples))
        print(f"{done} is there already; delete it to evaluate again")
        return 0
    return asyncio.run(_evaluate(run, model, task, rollout, sandbox, samples))


def problem_sets(task: settings.Task, count: int, seed: int) -> list[tuple[str, str, list[Prompt]]]:
    """(name, kind, problems) of each set: one a family for the built-in task, held-out families last; else one set."""
    if task.source != "box":
        return [(task.source, "trained", prompts.eval_prompts(task, count, seed))]
    trained = task.families or box_problems.TRAINED
    kinds = [(name, "trained") for name in trained] + [(name, "held_out") for name in box_problems.HELD_OUT]
    return [
        (name, kind, _distinct(prompts.eval_prompts(dataclasses.replace(task, families=(name,)), count, seed)))
        for name, kind in kinds
    ]


def _distinct(problems: Sequence[Prompt]) -> list[Prompt]:
    """Each problem once: a small family has fewer held-out problems than are asked for, and a repeat is no evidence."""
    return list({problem.question: problem for problem in problems}.values())


async def _evaluate(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    samples: int,
) -> int:
    workdir = Path(run.workdir)
    asked = dataclasses.replace(rollout, group_size=samples, oversample=samples)
    sets = problem_sets(task, rollout.prompts_per_step, run.seed)
    watch = clock.Clock(workdir)
    title = f"{workdir.name}: {sum(len(s[2]) for s in sets)} problems x {samples} from {run.init_from}"
    with console.Console(0, title) as screen:
        async with ask.open_room(run, model, task, asked, sandbox, screen) as room:
            entries = []
            trajectories.cut(workdir, 0)  # an earlier evaluation may have had more sets, and reports read every file
            for number, (name, kind, problems) in enumerate(sets):
                ask.refuse_long(name, problems, room.tier.prompt_tokens, rollout.max_prompt_tokens)
                with watch.phase("rollout"):
                    found = await ask.ask(room.sampler, problems, number, name, screen)
                episodes = [t for group in found for t in group.trajectories]
                entry = evaluation.evaluation_set(name, kind, episodes)
                entries.append(entry | samples_of.describe(found, run.seed))
                trajectories.write_step(workdir, number, trajectories.records(found))
                screen.note(_line(entries[-1]))
        _refuse_faulty(entries)
        watch.save()
        content = {**_asked(run, task, rollout, samples), "grader_rules": room.tier.rules, "sets": entries}
        part = workdir / (evaluation.EVALUATION_FILE + ".tmp")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, workdir / evaluation.EVALUATION_FILE)
        screen.note(f"{workdir / evaluation.EVALUATION_FILE}, graded by rules {room.tier.rules.partition('+')[0]}")
    return 0


def _asked(run: settings.Run, task: settings.Task, rollout: settings.Rollout, samples: int) -> dict[str, Any]:
    """What was asked of whom and how: two evaluations that differ in any of it are two evaluations."""
    return {
        "problems_per_set": rollout.prompts_per_step,
        "samples_per_problem": samples,
        **ask.identity(run, task, rollout),
    }


def _check_same(done: Path, asked: dict[str, Any]) -> None:
    before = json.loads(done.read_text())
    for name, value in asked.items():
        if name not in before or before[name] != value:
            then = f"was made with {name} = {before[name]!r}" if name in before else f"does not say its {name}"
            raise ValueError(f"{done} {then}, this run has {value!r}: give another --workdir, or delete the file")


def _line(entry: dict) -> str:
    low, high = entry["ci95"]
    accuracy = "-" if entry["accuracy"] is None else f"{entry['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
    rate, errors = entry["tool_rate"], entry["call_error_rate_correct"]
    tool = "-" if rate is None else f"{rate:.2f}"
    wrong = "-" if errors is None else f"{errors:.3f}"
    name, kind = entry["set"], entry["kind"]
    line = f"  {name:<18} {kind:<8} accuracy {accuracy}  tool {tool}  call errors {wrong}  n {entry['n']}"
    several = [f"pass@{k} {value:.3f}" for k, value in list(entry["pass_at"].items())[-1:] if k != "1"]
    several += [f"maj@{k} {value:.3f}" for k, value in entry["maj_at"].items() if k != "1"]
    names = {"valid_calls": "valid calls", "closed_answers": "closed answers", "single_answers": "single answers"}
    kept = [f"{words} {entry['format'][key]:.2f}" for key, words in names.items() if entry["format"][key] is not None]
    return "  ".join([line, *several, *kept])


def _refuse_faulty(entries: Sequence[dict]) -> None:
    for entry in entries:
        total = entry["n"] + entry["unscored"]
        if entry["unscored"] > 0.01 * total:
            raise RuntimeError(
                f"set {entry['set']}: {entry['unscored']} of {total} episodes have no verdict through faults of the "
                "engine or the sandbox; nothing was written, evaluate again when they are well"
            )
