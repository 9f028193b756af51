"""Which problems training sees at which point, and which ones evaluation keeps to itself.

A source maps (seed, cursor, count) to prompts and holds no state, so a run resumes from a number: prompt i of a run is
the same whoever asks for it and in whatever batches. Finite sets are shuffled anew for each epoch; the end of an epoch
is the start of the next one.

Deliberately not here: reading of files (sources.py) and the families of the built-in task (box_problems.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rstar2_jax import settings
from rstar2_jax.data import box_problems, catalog, sources, worked
from rstar2_jax.types import Prompt

GENERATED = ("box", "gsm_symbolic")
_EVAL_TRIES = 50
_SYMBOLIC_STEPS = {1: 2, 2: 4, 3: math.inf}  # computations in the worked solution, by difficulty


class Source(Protocol):
    """An endless sequence of training prompts for each seed."""

    @property
    def report(self) -> str:
        """One line on what the source holds and what it left out."""
        ...

    def batch(self, seed: int, cursor: int, count: int) -> list[Prompt]:
        """Prompts cursor .. cursor + count - 1 of the sequence that the seed names."""
        ...

    def solved(self, seed: int, cursor: int, count: int) -> list[worked.Solved]:
        """The same prompts with code that leads to their answers, where known."""
        ...

    def within(self, length: Callable[[Prompt], int], limit: int) -> Source:
        """This source without the prompts that are longer than the limit, as far as they are known beforehand."""
        ...


class GeneratedSource:
    """Problems made on demand from (seed, index)."""

    def __init__(self, make: Callable[[tuple[int, ...], int], worked.Solved], report: str) -> None:
        """Args: make gives the training problem of (entropy, index)."""
        self._make = make
        self.report = report

    def batch(self, seed: int, cursor: int, count: int) -> list[Prompt]:
        """Prompts cursor .. cursor + count - 1 of the sequence that the seed names."""
        return [row.prompt for row in self.solved(seed, cursor, count)]

    def solved(self, seed: int, cursor: int, count: int) -> list[worked.Solved]:
        """The same prompts with code that leads to their answers, where known."""
        _check_cursor(cursor, count)
        return [self._make((seed, index), index) for index in range(cursor, cursor + count)]

    def within(self, length: Callable[[Prompt], int], limit: int) -> GeneratedSource:
        """This very source: what is made on demand is measured when it is used."""
        del length, limit
        return self


class FiniteSource:
    """A fixed set, in an order of its own for each (seed, epoch).

    Args:
        rows: the problems, at least one.
    """

    def __init__(self, rows: Sequence[worked.Solved], report: str) -> None:
        self._rows = list(rows)
        self.report = report

    @property
    def prompts(self) -> list[Prompt]:
        """All problems, in their own order."""
        return [row.prompt for row in self._rows]

    @property
    def size(self) -> int:
        """Number of problems, the length of an epoch."""
        return len(self._rows)

    def batch(self, seed: int, cursor: int, count: int) -> list[Prompt]:
        """Prompts cursor .. cursor + count - 1; the batch runs on into the next epoch where one ends."""
        return [row.prompt for row in self.solved(seed, cursor, count)]

    def solved(self, seed: int, cursor: int, count: int) -> list[worked.Solved]:
        """The same prompts with code that leads to their answers, where known."""
        _check_cursor(cursor, count)
        chosen: list[worked.Solved] = []
        while len(chosen) < count:
            epoch, position = divmod(cursor + len(chosen), self.size)
            order = np.random.default_rng([seed, epoch]).permutation(self.size)
            taken = order[position : position + count - len(chosen)]
            chosen.extend(self._rows[int(i)] for i in taken)
        return chosen

    def within(self, length: Callable[[Prompt], int], limit: int) -> FiniteSource:
        """The source without prompts longer than the limit; its report says how many were left out.

        Args:
            length: tokens of a prompt as the model sees it.

        Raises:
            ValueError: no prompt is left.
        """
        rows = [row for row in self._rows if length(row.prompt) <= limit]
        if not rows:
            shortest = min(length(row.prompt) for row in self._rows)
            raise ValueError(
                f"all {self.size} prompts are longer than Rollout.max_prompt_tokens = {limit}: the shortest has "
                f"{shortest} tokens; raise the limit or use a shorter template"
            )
        left_out = self.size - len(rows)
        more = f"; {left_out} longer than {limit} tokens left out" if left_out else ""
        return FiniteSource(rows, self.report + more)


def make_source(task: settings.Task) -> Source:
    """The training problems of a task.

    Raises:
        ValueError: an unknown source or family, one that is for evaluation only, or unusable data.
    """
    if task.source in catalog.EVALUATION_ONLY:
        others = ", ".join((*GENERATED, *catalog.TRAINING_ONLY, "gsm8k", "jsonl"))
        raise ValueError(f"source {task.source!r} is for evaluation only; train on one of {others}")
    if task.source not in GENERATED:
        rows, report = sources.solved_rows(_known(task), "train")
        return FiniteSource(rows, f"{task.source}: {report}")
    make = _maker(task, held_out=False)
    share = sources.EVAL_SHARE
    report = f"{task.source}: generated, stage {task.difficulty}, 1 problem in {share} kept for evaluation"
    return GeneratedSource(make, report)


def eval_prompts(task: settings.Task, count: int, seed: int) -> list[Prompt]:
    """A fixed list of problems that `make_source` of the same task never gives, whatever its seed.

    Generated problems differ from each other as long as the held-out side has enough of them. A finite set is given
    whole, in its own order, when count reaches its size; else a draw without replacement.
    """
    if task.source in catalog.TRAINING_ONLY:
        others = ", ".join(catalog.EVALUATION_ONLY)
        raise ValueError(f"source {task.source!r} has no evaluation side; evaluate on one of {others}")
    if task.source not in GENERATED:
        prompts = [row.prompt for row in sources.solved_rows(_known(task), "eval")[0]]
        if count >= len(prompts):
            return prompts
        chosen = np.random.default_rng([seed, count]).choice(len(prompts), size=count, replace=False)
        return [prompts[int(i)] for i in chosen]
    make = _maker(task, held_out=True)
    prompts, seen = [], set()
    for index in range(count):
        for attempt in range(_EVAL_TRIES):
            prompt = make((seed, index, attempt), index).prompt
            if prompt.question not in seen:
                break
        seen.add(prompt.question)
        prompts.append(prompt)
    return prompts


def check_disjoint(train: Iterable[Prompt], evaluation: Iterable[Prompt]) -> None:
    """Refuse two lists that share a problem up to spacing.

    Raises:
        ValueError: how many they share, with one of them.
    """
    kept_out = {sources.normalised(prompt.question): prompt.id for prompt in evaluation}
    shared = [prompt for prompt in train if sources.normalised(prompt.question) in kept_out]
    if shared:
        other = kept_out[sources.normalised(shared[0].question)]
        raise ValueError(
            f"{len(shared)} training problems are evaluation problems too, such as {shared[0].id!r} = {other!r}; "
            "remove them from one side"
        )


def _check_cursor(cursor: int, count: int) -> None:
    if cursor < 0 or count < 0:
        raise ValueError(f"cursor = {cursor}, count = {count}: both must be 0 or more")


def _known(task: settings.Task) -> settings.Task:
    known = ("jsonl", *catalog.PUBLISHED)
    if task.source not in known and not task.source.startswith("hub:"):
        names = ", ".join((*GENERATED, *known))
        raise ValueError(f"source {task.source!r}: must be one of {names} or hub:<name>")
    return task


def _maker(task: settings.Task, *, held_out: bool) -> Callable[[tuple[int, ...], int], worked.Solved]:
    side = "eval" if held_out else "train"
    if task.source == "gsm_symbolic":
        generate = _gsm_symbolic()
        most = _SYMBOLIC_STEPS[task.difficulty]
        return lambda entropy, index: _symbolic_problem(
            generate, entropy, f"gsm_symbolic{task.difficulty}/{side}/{index}", held_out, most
        )
    families = task.families or box_problems.TRAINED
    unknown = [family for family in families if family not in box_problems.FAMILIES]
    if unknown:
        raise ValueError(f"families {unknown}: not among {', '.join(box_problems.FAMILIES)}")
    refused = [family for family in families if family in box_problems.HELD_OUT]
    if refused and not held_out:
        raise ValueError(f"families {refused} are for evaluation only; remove them from the training task")

    def make(entropy: tuple[int, ...], index: int) -> worked.Solved:
        family = families[index % len(families)]
        problem = box_problems.draw(family, task.difficulty, entropy, held_out=held_out)
        prompt = Prompt(
            id=f"box{task.difficulty}/{side}/{'.'.join(map(str, entropy))}",
            question=problem.question,
            answer=str(problem.answer),
            source=family,
        )
        return worked.Solved(
            prompt=prompt, setup=problem.setup, expression=problem.expression, value=str(problem.value)
        )

    return make


def _gsm_symbolic() -> Callable[[int], dict[str, Any]]:
    try:
        module = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ValueError("source 'gsm_symbolic' needs the package reasoning-gym: pip install reasoning-gym") from error
    return lambda seed: module.create_dataset("gsm_symbolic", seed=seed, size=1)[0]


def _symbolic_problem(
    generate: Callable[[int], dict[str, Any]], entropy: tuple[int, ...], name: str, held_out: bool, most_steps: float
) -> worked.Solved:
    """The first of the seed's problems that lies on the wanted side and needs no more steps than allowed."""
    attempt = 0
    while True:
        state = np.random.SeedSequence([*entropy, int(held_out), attempt]).generate_state(1, np.uint64)
        entry = generate(int(state[0] >> 1))
        answer = sources.integer_text(entry["answer"])
        short = entry["metadata"]["answer_cot"].count("=") <= most_steps
        if short and answer is not None and sources.is_held_out(entry["question"]) == held_out:
            prompt = Prompt(id=name, question=entry["question"], answer=answer, source="gsm_symbolic")
            return worked.with_expression(prompt, entry["metadata"]["answer_cot"])
        attempt += 1
