"""One stage of reinforcement learning, read from top to bottom in the order of the data:

    prompts -> rollout <-> tools -> reward -> RoC -> advantages -> loss -> update -> publish weights -> rollout

A run continues from its newest good checkpoint: the state, the prompt cursor, the surplus groups and the root seed give
the same steps again, bit for bit (with Rollout.max_staleness = 0: ahead of training, which weights sample an id depends
on the clock).

Deliberately not here: any maths (algo/), any detail of I/O (io/, weights/), and when generation may run ahead
(rollout/ahead.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rstar2_jax import begin, crew, fit, processes, settings, stops
from rstar2_jax import exam as exams
from rstar2_jax.algo import roc as roc_rule
from rstar2_jax.data import pack, prompts
from rstar2_jax.io import checkpoint, clock, metrics, timeline, trajectories
from rstar2_jax.learner import batch, objective, update
from rstar2_jax.model import decoder
from rstar2_jax.report import console, guards
from rstar2_jax.rollout import ahead, groups, statistics, tier
from rstar2_jax.types import Group
from rstar2_jax.weights import best, publish

Metrics = dict[str, float | None]
_MAX_ABANDONED = 3
_PROVE_EVERY = 50  # updates


class AbandonedError(RuntimeError):
    """Too many steps in a row had too many unscored episodes: the infrastructure needs a look before more is spent."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Progress:
    """Where the loop stands; a checkpoint holds all of it but the count of abandoned steps."""

    step: int
    cursor: int
    carried: tuple[Group, ...]
    abandoned_in_row: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Desk:
    """What every step works with."""

    run: settings.Run
    model: settings.Model
    rollout: settings.Rollout
    roc: settings.Roc
    learner: settings.Learner
    task: settings.Task
    hands: crew.Crew
    source: prompts.Source
    rooms: tier.Tier
    sampler: groups.Sampler
    examiner: exams.Examiner
    guards: guards.Guards
    clock: clock.Clock
    soundness: stops.Soundness
    screen: console.Console

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return Path(self.run.workdir)

    @property
    def weights(self) -> str:
        """Root of the weight store."""
        return str(self.workdir / "weights")


def train(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    rollout: settings.Rollout,
    roc: settings.Roc,
    learner: settings.Learner,
    sandbox: settings.Sandbox,
    exam: settings.Exam,
) -> int:
    """Train until `run.steps` steps are done. Returns 0 when they are, INTERRUPTED after SIGTERM or SIGINT, COLLAPSED
    where the settings let a collapse end the run.

    Raises:
        ValueError: settings that do not fit each other, or data that cannot be used; before any step.
        AbandonedError: the infrastructure failed in several steps in a row.
        stops.DivergedError: loss or gradient were not finite in several steps in a row.
    """
    fit.training(run, rollout, learner, model)
    total_updates = run.steps * learner.minibatches
    trainer = update.Learner(model, learner, objective.grpo(learner.loss), total_updates, rollout.temperature)
    store = checkpoint.Checkpoints(Path(run.workdir) / "checkpoints", keep=run.keep_checkpoints)
    with contextlib.closing(store):
        begun = begin.begin("train", run, model, trainer, store, {"source": task.source})
        progress = _Progress(
            step=begun.step,
            cursor=begun.record.get("cursor", 0),
            carried=tuple(trajectories.group_from_json(value) for value in begun.record.get("carried", [])),
        )
        if progress.step >= run.steps:
            print(f"{run.workdir}: all {run.steps} steps are done already")
            return 0
        held_to = None
        if learner.loss.kl_coef > 0:
            held_to = trainer.place(begin.load_params(run.init_from, model, run.seed, trainer.where))
        weights = str(Path(run.workdir) / "weights"), rollout.fleet.published_dtype(model.compute_dtype)
        hands = crew.Crew(trainer, learner.loss, store, model, weights, begun.state, held_to)
        if not processes.leads():
            return hands.follow()
        parts = (run, model, task, rollout, roc, learner, exam)
        with hands.leading():
            code = asyncio.run(_train(parts, sandbox, hands, progress))
        return hands.dismiss(code)


async def _train(
    parts: tuple[Any, ...],
    sandbox: settings.Sandbox,
    hands: crew.Crew,
    progress: _Progress,
) -> int:
    run, model, task, rollout, roc, learner, exam = parts
    workdir = Path(run.workdir)
    title = f"{workdir.name}: {run.steps} steps of {rollout.prompts_per_step} prompts x {rollout.oversample} rollouts"
    async with contextlib.AsyncExitStack() as stack:
        screen = stack.enter_context(console.Console(run.steps, title, start_step=progress.step))
        opened = tier.open_tier(workdir, model, task, rollout, sandbox, report=screen.note)
        rooms = await stack.enter_async_context(opened)
        source = prompts.make_source(task).within(rooms.prompt_tokens, rollout.max_prompt_tokens)
        screen.note(source.report)
        begin.save_tokenizer(rooms.chat.tokenizer, rooms.chat.template_text, workdir)
        sampler = rooms.sampler(rollout, roc, run.seed)
        desk = _Desk(
            run=run,
            model=model,
            rollout=rollout,
            roc=roc,
            learner=learner,
            task=task,
            hands=hands,
            source=source,
            rooms=rooms,
            sampler=sampler,
            examiner=exams.open_examiner(exam, rooms, sampler, run.seed, source),
            guards=_open_guards(workdir, run, model, progress.step),
            clock=clock.Clock(workdir),
            soundness=stops.Soundness(run.steps),
            screen=screen,
        )
        writer = stack.enter_context(metrics.MetricsWriter(workdir, start_step=progress.step))
        trajectories.cut(workdir, progress.step)
        timeline.cut(workdir, progress.step)
        publish.prepare(desk.weights, progress.step - 1)
        await _publish(desk, progress, prove=True)
        await rooms.warm_up("1", rollout)
        hands.stop = stack.enter_context(stops.on_signals())
        return await _loop(desk, progress, writer, exam.stop_on_collapse)


async def _loop(desk: _Desk, progress: _Progress, writer: metrics.MetricsWriter, stop_on_collapse: bool) -> int:
    """The steps that are left; the exit code."""
    batches = _ahead(desk, progress)
    try:
        while progress.step < desk.run.steps:
            examined = await _examine(desk, progress.step)
            batches.trained(progress.step)
            told = await _step(desk, progress, batches)
            told |= examined | _judge(desk, progress.step - 1, told | examined)
            told |= _guard(desk, progress.step - 1, told) | desk.clock.lap()
            writer.write(progress.step - 1, told)
            desk.rooms.timeline.flush(progress.step - 1)
            desk.screen.step(progress.step - 1, told)
            collapsed = stop_on_collapse and bool(told["guard/collapse"])
            stopping = desk.hands.stopping  # asked once: a signal between two looks would end the run unsaved
            await _save_when_due(desk, progress, stopping or collapsed)
            desk.clock.save()
            if collapsed:
                return stops.COLLAPSED
            if stopping and progress.step < desk.run.steps:
                return stops.INTERRUPTED
        return 0
    finally:
        await batches.close()


def _ahead(desk: _Desk, progress: _Progress) -> ahead.Ahead:
    """The collections of this run, from where it stands."""

    def collect(step: int, cursor: int, left_over: Sequence[Group]) -> Awaitable[groups.Collection]:
        return groups.collect(
            desk.sampler,
            lambda offset, count: desk.source.batch(desk.run.seed, cursor + offset, count),
            step=step,
            carried=left_over,
            on_progress=lambda done, total: desk.screen.progress("rollout", done, total),
        )

    return ahead.Ahead(
        collect,
        step=progress.step,
        cursor=progress.cursor,
        left_over=progress.carried,
        steps=desk.run.steps,
        max_staleness=desk.rollout.max_staleness,
    )


async def _step(desk: _Desk, progress: _Progress, batches: ahead.Ahead) -> Metrics:
    """One step in place: sample, grade, select, update, publish. Returns its metrics.

    What takes long runs beside the event loop, which goes on serving rollouts ahead, probes of engines and tools.
    """
    disagreed, preempted = desk.rooms.disagreements(), desk.sampler.engine.preempted
    with desk.clock.phase("rollout"):
        taken = await batches.next()
    collected = taken.collection
    for fault in collected.faults[:3]:
        desk.screen.note(f"! {fault}")
    told = statistics.describe(collected.sampled) | statistics.staleness(collected.groups, progress.step)
    told |= {"rollout/refills": float(collected.refills), "rollout/stale_dropped": float(taken.dropped)}
    told["rollout/dropped_groups"] = float(collected.dropped)
    told["rollout/preempted"] = float(desk.sampler.engine.preempted - preempted)
    abandoned = collected.unscored_share > desk.roc.max_unscored
    with desk.clock.phase("select"):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(desk.run.seed), progress.step), 1)
        chosen, rows = await asyncio.to_thread(_select, desk, collected.groups, key, abandoned)
        told |= {"learner/trained_rows": float(len(rows))}
    with desk.clock.phase("learn"):
        work = batch.minibatches(rows, desk.learner)
        learned = await _learn(desk, work)
        # Of rows sampled under older weights the gap shows the training between, not a fault of the engine.
        stale = bool(told["rollout/staleness_max"])
        told |= {f"stale_{name}" if stale and name.startswith("mismatch/") else name: v for name, v in learned.items()}
    with desk.clock.phase("log"):
        await asyncio.to_thread(_log, desk, progress.step, collected, None if abandoned else chosen)
    progress.step += 1
    progress.cursor, progress.carried = taken.cursor, collected.surplus
    progress.abandoned_in_row = progress.abandoned_in_row + 1 if abandoned else 0
    with desk.clock.phase("publish"), desk.rooms.timeline.span("publish"):
        await _publish(desk, progress, prove=progress.step % _PROVE_EVERY == 0)
    desk.soundness.add(progress.step - 1, len(work), learned["learner/skipped_steps"] or 0.0)
    if progress.abandoned_in_row >= _MAX_ABANDONED:
        raise AbandonedError(
            f"{_MAX_ABANDONED} steps in a row had more than {desk.roc.max_unscored:.0%} unscored episodes (last: "
            f"{collected.unscored} of {collected.episodes}); the weights are those of before. "
            f"First fault: {collected.faults[0] if collected.faults else 'grading'}"
        )
    disagreements = float(desk.rooms.disagreements() - disagreed)
    return told | {"rollout/abandoned": float(abandoned), "reward/grader_disagree": disagreements}


def _select(
    desk: _Desk, found: Sequence[Group], key: jax.Array, abandoned: bool
) -> tuple[batch.Selection, list[pack.Row]]:
    """RoC's choice, and the rows that are trained on: none of a step that was abandoned."""
    chosen = batch.select(found, key, desk.rollout, desk.roc, desk.learner.loss)
    return chosen, [] if abandoned else batch.rows(found, chosen, desk.roc)


async def _learn(desk: _Desk, work: Sequence[batch.Minibatch]) -> Metrics:
    """All updates of one step, beside the event loop, which goes on serving rollouts, probes and tools."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(desk.screen.progress, "learn", done, total)

    with desk.rooms.timeline.span("learn"):
        return await asyncio.to_thread(desk.hands.learn, work, report)


def _log(desk: _Desk, step: int, collected: groups.Collection, chosen: batch.Selection | None) -> None:
    """Every episode of the step on disk; RoC's choice beside it, unless the step was abandoned."""
    weight = functools.partial(roc_rule.weights, p_floor=desk.roc.p_floor)
    known = desk.roc.positives == "inverse" and desk.roc.repetition_weight == 0
    drawn = weight if known else None
    used = (None, None, None) if chosen is None else (chosen.kept, chosen.advantages, drawn)
    records = trajectories.records(collected.groups, *used)
    records += trajectories.records(collected.rejected, first_group=len(collected.groups))
    trajectories.write_step(desk.workdir, step, records)


async def _examine(desk: _Desk, step: int) -> Metrics:
    """Metrics of the held-out problems, by the weights that the step samples with; nothing where none are due."""
    if not desk.examiner.is_due(step):
        return {}
    with desk.clock.phase("held_out"):
        found = await desk.examiner.ask(step, desk.screen)
    await asyncio.to_thread(_keep_best, desk, step, found)
    return found


def _keep_best(desk: _Desk, step: int, found: Metrics) -> None:
    """Copy the weights that the exam was answered with, where no earlier one was answered better."""
    accuracy, folder = found.get("eval/accuracy"), desk.workdir / best.FOLDER
    before = best.read(folder)
    if accuracy is None or (before is not None and before["step"] < step and before["accuracy"] > accuracy):
        return
    best.keep(desk.weights, folder, step, {"accuracy": accuracy, "scored": found.get("eval/scored")})


def _guard(desk: _Desk, step: int, told: Metrics) -> Metrics:
    """What the guards say of the step: aloud once, and as metrics."""
    free: Metrics = {"disk/free_bytes": float(shutil.disk_usage(desk.workdir).free)}
    said, found = desk.guards.add(step, told | free)
    for line in said:
        desk.screen.note(f"! {line}")
    return free | found


def _open_guards(workdir: Path, run: settings.Run, model: settings.Model, step: int) -> guards.Guards:
    """The guards, who remember what an interrupted run told; a checkpoint is weights and two moments in float32."""
    size = 12 * sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract_params(model)))
    return guards.Guards(_history(workdir, step), checkpoint_bytes=size, last_step=run.steps)


def _history(workdir: Path, before: int) -> list[tuple[int, Metrics]]:
    """Metrics of the steps that are done, for the guards of a run that goes on."""
    if not (workdir / metrics.METRICS_FILE).exists():
        return []
    columns = metrics.read_metrics(workdir)
    steps = columns["step"].tolist()
    rows = [{k: float(v[i]) for k, v in columns.items() if np.isfinite(v[i])} for i in range(len(steps))]
    return [(step, dict(row)) for step, row in zip(steps, rows, strict=True) if step < before]


def _judge(desk: _Desk, step: int, told: Metrics) -> Metrics:
    """Does training gain what the held-out problems lose? Said aloud, and as a metric."""
    if not desk.examiner.is_due(step):
        return {}
    diverges = exams.alarm(desk.workdir, step, told, desk.screen.note)
    if diverges:
        desk.screen.note(f"! {diverges}")
    return {"eval/diverged": float(diverges is not None)}


async def _publish(desk: _Desk, progress: _Progress, *, prove: bool) -> None:
    """Commit the weights as version = step and let the engine fetch them: one path for one machine and for many.

    Args:
        prove: every engine shows that it holds them bit for bit; what is garbled shows as a worse policy alone.
    """
    await asyncio.to_thread(desk.hands.publish, progress.step, desk.rooms.engine.versions_in_use)
    await desk.sampler.engine.update_weights(desk.weights, progress.step)
    if prove:
        await desk.sampler.engine.verify(desk.weights, progress.step)


async def _save_when_due(desk: _Desk, progress: _Progress, stopping: bool) -> None:
    last = progress.step >= desk.run.steps
    if not (last or stopping or progress.step % desk.run.save_every_steps == 0):
        return
    with desk.clock.phase("save"):
        record = {
            **begin.identity("train", desk.run, desk.model),
            "step": progress.step,
            "cursor": progress.cursor,
            "carried": [trajectories.group_to_json(group) for group in progress.carried],
            "source": desk.task.source,
            "grader_rules": desk.rooms.rules,
        }
        await asyncio.to_thread(desk.hands.save, progress.step, record)
