"""Curation: problems that are clean, have a label that a model agrees with, and are not solved every time.

By text and answer alone first (data/curation.py): huge answers, overlap with evaluation sets, near duplicates. What is
left is asked `samples` times; a problem stays when min_solved to max_solved answers match its label. The two uses of
the paper are settings of this one rule: label checks of a raw set (16 samples of a strong model, at least 2), and the
hard-problem filter before stage 3 (8 samples of the stage-2 model, 8 of 8 dropped). With 0 samples no model is asked,
and neither engine nor sandbox is opened: sets whose labels are trusted are only cleaned.

Answers go into judged.jsonl chunk by chunk; the same command goes on behind the last whole chunk. In the end
train.jsonl holds what is kept (a task reads it with source = 'jsonl'), curation.json and curation.md what was left out
and why.

Deliberately not here: what loading refuses (data/sources.py).

Source: rStar2-Agent paper, data curation and stage 3.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rstar2_jax import ask, settings
from rstar2_jax.data import curation as rules
from rstar2_jax.data import files, prompts, tables, worked
from rstar2_jax.io import clock
from rstar2_jax.report import console
from rstar2_jax.tools import offer
from rstar2_jax.types import Group, Prompt

PROMPTS_FILE = "train.jsonl"
JUDGED_FILE = "judged.jsonl"
REPORT_FILE = "curation"
_MAX_UNSCORED = 0.01
_CHUNK = 64


def curate(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    curation: settings.Curation,
) -> int:
    """Filter the first `rollout.prompts_per_step` problems of the task's order, all of a set with fewer. Returns 0.

    A finished train.jsonl in the workdir is left as it is.

    Raises:
        ValueError: no model to ask, an evaluation set that cannot be read, judged.jsonl of other settings, or no
            problem was left.
        RuntimeError: too many rollouts had no verdict through faults of ours.
    """
    if curation.samples and not run.init_from:
        raise ValueError("Run.init_from is empty: the filter needs a model to ask")
    done = Path(run.workdir) / PROMPTS_FILE
    if done.exists():
        print(f"{done} is there already; delete it to filter again")
        return 0
    if not curation.samples:
        return _by_text(Path(run.workdir), run.seed, task, rollout, curation)
    return asyncio.run(_curate(run, model, task, rollout, sandbox, curation))


def verdict(solved: int, scored: int, how: settings.Curation) -> str | None:
    """Why a problem is left out, or None: it stays. Judged are only problems with all their answers scored.

    >>> how = settings.Curation(samples=8, max_solved=7)
    >>> [verdict(n, 8, how) for n in (0, 7, 8)]
    [None, None, 'solved too often']
    """
    if scored < how.samples:
        return "answers without a verdict"
    if solved > how.max_solved:
        return "solved too often"
    return "label not confirmed" if solved < how.min_solved else None


def clean(rows: Sequence[worked.Solved], how: settings.Curation, task: settings.Task) -> tuple[list, tables.Rejects]:
    """The problems that text and answer say nothing against, and the others by reason."""
    left_out, kept = tables.Rejects(), []
    contaminated, near = rules.Contamination(_evaluation(how, task)), rules.NearDuplicates()
    for row in rows:
        prompt = row.prompt
        if rules.is_huge(prompt.answer, how.max_answer_digits):
            left_out.add(f"answer above {how.max_answer_digits} digits", prompt.id)
        elif other := contaminated.of(prompt.question):
            left_out.add("8-gram overlap with evaluation", f"{prompt.id} = {other}")
        elif other := near.add(prompt.id, prompt.question, prompt.answer):
            left_out.add("near duplicate", f"{prompt.id} = {other}")
        else:
            kept.append(row)
    return kept, left_out


def _evaluation(how: settings.Curation, task: settings.Task) -> list[tuple[str, str]]:
    found = []
    for source, path in how.against:
        named = dataclasses.replace(task, source=source, path=path)
        found += [(prompt.id, prompt.question) for prompt in prompts.eval_prompts(named, 10**9, 0)]
    return found


def _problems(
    task: settings.Task, rollout: settings.Rollout, seed: int, length: Callable[[Prompt], int]
) -> tuple[list[worked.Solved], str]:
    """Each problem once, and the report of the source."""
    source = prompts.make_source(task).within(length, rollout.max_prompt_tokens)
    wanted = rollout.prompts_per_step
    if isinstance(source, prompts.FiniteSource):  # its order begins anew where it ends
        wanted = min(wanted, source.size)
    return list({row.prompt.question: row for row in source.solved(seed, 0, wanted)}.values()), source.report


def _by_text(workdir: Path, seed: int, task: settings.Task, rollout: settings.Rollout, how: settings.Curation) -> int:
    chat = files.load_chat(task, offer.schemas(task))
    rows, report = _problems(task, rollout, seed, lambda prompt: len(chat.prompt_ids(prompt.question)))
    print(report)
    fit, left_out = clean(rows, how, task)
    judged = {row.prompt.id: {"solved": 0, "scored": 0, "rollouts": 0} for row in fit}
    workdir.mkdir(parents=True, exist_ok=True)
    return _finish(workdir, how, report, (rows, fit, left_out), judged)


async def _curate(
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    sandbox: settings.Sandbox,
    how: settings.Curation,
) -> int:
    workdir = Path(run.workdir)
    asked = dataclasses.replace(rollout, group_size=how.samples, oversample=how.samples)
    watch = clock.Clock(workdir)
    with console.Console(0, f"{workdir.name}: problems x {how.samples} from {run.init_from}") as screen:
        async with ask.open_room(run, model, task, asked, sandbox, screen) as room:
            rows, report = _problems(task, rollout, run.seed, room.tier.prompt_tokens)
            screen.note(report)
            fit, left_out = clean(rows, how, task)
            screen.note(f"{len(fit)} of {len(rows)} problems are asked; left out by their text: {left_out}")
            judged = _judged(workdir / JUDGED_FILE, _identity(run, task, rollout, how))
            with watch.phase("rollout"):
                await _ask(room, [row for row in fit if row.prompt.id not in judged], judged, workdir, screen)
            watch.save()
        return _finish(workdir, how, report, (rows, fit, left_out), judged)


async def _ask(
    room: ask.Room, rows: Sequence[worked.Solved], judged: dict[str, Any], workdir: Path, screen: console.Console
) -> None:
    """Ask chunk by chunk; each is on disk before the next one starts."""
    with (workdir / JUDGED_FILE).open("a", encoding="utf-8") as file:
        for start in range(0, len(rows), _CHUNK):
            problems = [row.prompt for row in rows[start : start + _CHUNK]]
            found = [_count(group) for group in await ask.ask(room.sampler, problems, 0, "problems", screen)]
            file.write("".join(json.dumps(line) + "\n" for line in found))
            file.flush()
            os.fsync(file.fileno())
            judged |= {line["id"]: line for line in found}


def _count(group: Group) -> dict[str, Any]:
    return {
        "id": group.prompt.id,
        "scored": int(group.valid.sum()),
        "solved": int(group.rewards[group.valid].sum()),
        "rollouts": len(group.trajectories),
    }


def _identity(
    run: settings.Run, task: settings.Task, rollout: settings.Rollout, how: settings.Curation
) -> dict[str, Any]:
    """What answers in judged.jsonl depend on."""
    return {**ask.identity(run, task, rollout), "samples": how.samples}


def _judged(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Problems judged before, by id; a torn last line is cut off, a new file gets its head."""
    if not path.exists():
        path.write_text(json.dumps(identity) + "\n")
        return {}
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines or lines[0] != identity:
        raise ValueError(
            f"{path} holds answers of {lines[0] if lines else 'nothing'}, this run asks {identity}: delete it, or give "
            "another --workdir"
        )
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return {line["id"]: line for line in lines[1:]}


def _finish(workdir: Path, how: settings.Curation, report: str, parts: tuple[Any, ...], judged: dict[str, Any]) -> int:
    rows, fit, left_out = parts
    lines = [judged[row.prompt.id] for row in fit]
    unscored = sum(line["rollouts"] - line["scored"] for line in lines)
    asked = sum(line["rollouts"] for line in lines)
    if unscored > _MAX_UNSCORED * max(asked, 1):
        (workdir / JUDGED_FILE).unlink()
        raise RuntimeError(
            f"{unscored} of {asked} rollouts have no verdict through faults of the engine or the sandbox; nothing was "
            "kept, filter again when they are well"
        )
    kept = []
    for row, line in zip(fit, lines, strict=True):
        reason = verdict(line["solved"], line["scored"], how)
        if reason is None:
            kept.append(row)
        else:
            left_out.add(reason, f"{row.prompt.id}: {line['solved']} of {line['scored']}")
    if not kept:
        raise ValueError(f"none of {len(rows)} problems is left ({left_out}): ask more, or other ones")
    histogram = {n: sum(line["solved"] == n for line in lines) for n in range(how.samples + 1)}
    told = {
        "problems": len(rows),
        "asked": len(fit),
        "kept": len(kept),
        "left_out": {
            reason: {"count": n, "examples": left_out.examples[reason]} for reason, n in left_out.counts.items()
        },
        "solved": histogram,
        "loaded": report,
        "settings": dataclasses.asdict(how),
    }
    _replace(workdir / f"{REPORT_FILE}.json", json.dumps(told, indent=1) + "\n")
    _replace(workdir / f"{REPORT_FILE}.md", page(told))
    _replace(workdir / PROMPTS_FILE, "".join(json.dumps(_row(row)) + "\n" for row in kept))
    print(f"kept {len(kept)} of {len(rows)} problems; left out: {left_out}; {workdir / REPORT_FILE}.md")
    return 0


def page(told: dict[str, Any]) -> str:
    """The report as Markdown: what was left out and why, and how often problems were solved."""
    lines = [f"# Curation\n\n{told['loaded']}\n", f"Kept {told['kept']} of {told['problems']} problems.\n"]
    lines += ["| left out because | problems | such as |", "|---|---|---|"]
    for reason, entry in sorted(told["left_out"].items(), key=lambda item: -item[1]["count"]):
        lines.append(f"| {reason} | {entry['count']} | {'; '.join(entry['examples'])} |".replace("\n", " "))
    lines += ["", f"| solved, of {told['settings']['samples']} | problems |", "|---|---|"]
    lines += [f"| {solved} | {count} |" for solved, count in told["solved"].items()]
    return "\n".join(lines) + "\n"


def _row(row: worked.Solved) -> dict[str, Any]:
    licence = {"licence": row.licence} if row.licence else {}
    return {**dataclasses.asdict(row.prompt), **licence}


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
