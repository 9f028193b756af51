"""The examiner of a run: problems that training sees are refused; a damaged line of the metrics ends no run."""

from __future__ import annotations

import json

import pytest

from rstar2_jax import exam, settings
from rstar2_jax.data import files, prompts
from rstar2_jax.io import metrics
from rstar2_jax.rollout import groups, tier

ROLLOUT = settings.Rollout(
    prompts_per_step=1, group_size=2, oversample=2, max_prompt_tokens=200, max_response_tokens=100, max_turns=2
)


def opened(tmp_path, train, held_out, **more):
    """The examiner of a run on two files of questions, and the folder of the second."""
    sources = {}
    for name, questions in (("train", train), ("held", held_out)):
        sources[name] = tmp_path / name
        sources[name].mkdir()
        rows = [json.dumps({"question": question, "answer": number}) for number, question in enumerate(questions)]
        (sources[name] / f"{'train' if name == 'train' else 'test'}.jsonl").write_text("\n".join(rows) + "\n")
    tasks = {n: settings.Task(source="jsonl", path=str(p), tokenizer="box", template="box") for n, p in sources.items()}
    chat = files.load_chat(tasks["held"])
    rooms = tier.Tier(engine=None, chat=chat, tools=None, grader=None, rules="", timeline=None)  # type: ignore[arg-type]
    sampler = groups.Sampler(
        engine=None, chat=chat, tools=None, grader=None, rollout=ROLLOUT, roc=settings.Roc(), seed=0
    )  # type: ignore[arg-type]
    wanted = settings.Exam(task=tasks["held"], every_steps=5, problems=10, samples=2)
    return exam.open_examiner(wanted, rooms, sampler, 0, prompts.make_source(tasks["train"]))


def test_a_held_out_problem_that_training_sees_is_refused_before_the_first_step(tmp_path):
    shared = "What  is 1 + 2?"
    with pytest.raises(ValueError, match="1 training problems are evaluation problems too"):
        opened(tmp_path, ["What is 7 - 2?", shared], ["What is 3 * 3?", "What is 1 + 2?"])


def test_problems_of_its_own_are_asked(tmp_path):
    examiner = opened(tmp_path, ["What is 7 - 2?"], ["What is 3 * 3?", "What is 1 + 2?"])
    assert [problem.question for problem in examiner.problems] == ["What is 3 * 3?", "What is 1 + 2?"]
    assert examiner.is_due(0) and not examiner.is_due(3)


def test_the_alarm_names_a_damaged_line_and_goes_on(tmp_path):
    told = {"eval/accuracy": 0.9, "eval/scored": 400, "reward/box_mean": 0.2}
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, told)
    with (tmp_path / metrics.METRICS_FILE).open("a") as file:
        file.write('{"step": 1, "reward/bo\n')
    said = []
    now = {"eval/accuracy": 0.2, "eval/scored": 400.0, "reward/box_mean": 0.8}
    alarm = exam.alarm(tmp_path, 2, now, said.append)
    assert alarm is not None and "fell from 0.90 (step 0) to 0.20 (step 2)" in alarm
    assert said == [f"{tmp_path / metrics.METRICS_FILE}, line 2: not the record of a step, left out"]
