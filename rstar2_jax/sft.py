"""Supervised fine-tuning on demonstrations that teach the formats: the start of all RL stages.

Each step takes the next batch of demonstrations in the order of its epoch, packs them and makes one update. A run
continues from its newest good checkpoint: the order is a function of the seed and the step. SIGTERM and SIGINT, of any
of its processes, end it after the step, with a checkpoint.

Deliberately not here: making demonstrations (data/sft_mix.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rstar2_jax import begin, fit, processes, settings, stops
from rstar2_jax.data import chat as chats
from rstar2_jax.data import files, mixture, pack, sft_mix, talks
from rstar2_jax.io import checkpoint, clock, metrics
from rstar2_jax.learner import batch, objective, update
from rstar2_jax.report import console
from rstar2_jax.tools import offer, python
from rstar2_jax.types import TrainBatch

_ROWS_SHOWN = 20


def sft(
    *,
    run: settings.Run,
    model: settings.Model,
    task: settings.Task,
    demonstrations: settings.Demonstrations,
    learner: settings.Learner,
) -> int:
    """Fine-tune until `run.steps` steps are done. Returns 0 when they are, INTERRUPTED after SIGTERM or SIGINT.

    Raises:
        ValueError: settings that do not fit each other, or data that cannot be used; before any step.
        stops.DivergedError: loss or gradient were not finite in several steps in a row.
    """
    fit.fine_tuning(run, learner)
    workdir = Path(run.workdir)
    chat = files.load_chat(task, offer.schemas(task))
    files.check_vocabulary(chat.tokenizer, model)
    trainer = update.Learner(model, learner, objective.supervised(), run.steps)
    store = checkpoint.Checkpoints(workdir / "checkpoints", keep=run.keep_checkpoints)
    with contextlib.closing(store):
        begun = begin.begin("sft", run, model, trainer, store)
        if begun.step >= run.steps:
            print(f"{run.workdir}: all {run.steps} steps are done already")
            return 0
        made = _demonstrations(task, demonstrations, chat, run.seed)
        demos = sft_mix.fitting(made, learner.row_tokens, model.max_positions)
        if len(demos) < len(made):
            longest = min(learner.row_tokens, model.max_positions)
            print(f"{len(made) - len(demos)} of {len(made)} demonstrations are longer than {longest} tokens: left out")
        if processes.leads():
            begin.save_tokenizer(chat.tokenizer, chat.template_text, workdir)
        return _loop(run, model, demonstrations, learner, (trainer, store, begun), demos)


def _demonstrations(task: settings.Task, mix: settings.Demonstrations, chat: chats.Chat, seed: int) -> list[talks.Demo]:
    """Conversations of the published mixture where one is named, else what is made of the task's problems."""
    if not mix.mixture:
        return sft_mix.demonstrations(task, mix, chat, seed)
    made, lines = mixture.demonstrations(mix, chat, python.schema(task.tool_name), seed)
    print("\n".join(lines))
    return made


def _loop(
    run: settings.Run,
    model: settings.Model,
    demonstrations: settings.Demonstrations,
    learner: settings.Learner,
    parts: tuple[update.Learner, checkpoint.Checkpoints, begin.Beginning],
    demos: Sequence[talks.Demo],
) -> int:
    trainer, store, begun = parts
    state, workdir = begun.state, Path(run.workdir)
    lead = processes.leads()  # of several processes one writes
    title = f"{workdir.name}: {run.steps} steps of {demonstrations.batch_size} from {len(demos)} demonstrations"
    watch, soundness = clock.Clock(workdir), stops.Soundness(run.steps)
    every = max(1, run.steps // _ROWS_SHOWN)

    def rows_of(step: int) -> TrainBatch:
        with watch.phase("data"):
            rows = [_row(demos[i]) for i in order(run.seed, step, demonstrations.batch_size, len(demos))]
            return pack.pack(rows, row_tokens=learner.row_tokens, rows_multiple=learner.microbatch_rows)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stops.on_signals())
        outputs: list[Callable[[int, dict[str, float]], object]] = []
        if lead:
            writer = stack.enter_context(metrics.MetricsWriter(workdir, start_step=begun.step))
            screen = stack.enter_context(console.Console(run.steps, title, start_step=begun.step, row_every=every))
            outputs += [writer.write, screen.step]
        upcoming = rows_of(begun.step)
        for step in range(begun.step, run.steps):
            whole, trained = upcoming, float(upcoming.loss_mask.sum())
            with watch.phase("learn"):
                state, wait = trainer.start(state, batch.cut(whole, learner.microbatch_rows), trained)
            if step + 1 < run.steps:
                upcoming = rows_of(step + 1)  # while the devices work
            with watch.phase("learn"):
                told = wait()
            line = _line(told, whole) | watch.lap()
            for output in outputs:
                output(step, line)
            soundness.add(step, 1, told["skipped"])
            done, stopping = step + 1, processes.any_of(stop.asked)
            store.check()
            if done % run.save_every_steps == 0 or done == run.steps or stopping:
                with watch.phase("save"):
                    store.save(done, state, {**begin.identity("sft", run, model), "step": done})
            if lead:
                watch.save()
            if stopping and done < run.steps:
                return stops.INTERRUPTED
    return 0


def _line(told: dict[str, float], whole: TrainBatch) -> dict[str, float]:
    return {
        "learner/loss": told["loss"],
        "learner/grad_norm": told["grad_norm"],
        "learner/entropy_mean": told["entropy_sum"] / max(told["tokens"], 1.0),
        "learner/lr": told["lr"],
        "learner/tokens": told["tokens"],
        "learner/skipped_steps": told["skipped"],
        "learner/padding_frac": pack.waste([whole]),
    }


def order(seed: int, step: int, batch_size: int, count: int) -> list[int]:
    """Indices of the demonstrations of one step: a new permutation each epoch, the end of one running into the next.

    Pure in its arguments, so that a resumed run sees what the uninterrupted one would have seen.
    """
    chosen: list[int] = []
    while len(chosen) < batch_size:
        epoch, position = divmod(step * batch_size + len(chosen), count)
        permutation = np.random.default_rng([seed, epoch]).permutation(count)
        chosen.extend(int(i) for i in permutation[position : position + batch_size - len(chosen)])
    return chosen


def _row(demo: talks.Demo) -> pack.Row:
    nothing = np.zeros(len(demo.token_ids), np.float32)
    return pack.Row(token_ids=demo.token_ids, mask=demo.mask, behavior_logprobs=nothing, advantage=0.0)
