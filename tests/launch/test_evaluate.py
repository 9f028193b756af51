"""A finished evaluation or curation is taken for this one only where nothing that answers depend on differs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types

import numpy as np
import pytest

from rstar2_jax import ask, curate, evaluate, settings
from rstar2_jax.io import trajectories
from rstar2_jax.types import FinishReason, Group, StopReason, Trajectory, Turn, Verdict

TASK = settings.Task(source="box", families=("gcd", "power_mod"), tokenizer="box", template="box")
ROLLOUT = settings.Rollout(
    prompts_per_step=2, group_size=1, oversample=1, max_prompt_tokens=99, max_response_tokens=9, max_turns=2
)
TINY = settings.Model(
    family="qwen3", vocab_size=64, d_model=8, d_mlp=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_positions=64
)
OTHER = [
    ("rollout", dict(top_p=0.5)), ("rollout", dict(top_k=4)), ("rollout", dict(temperature=0.5)),
    ("rollout", dict(max_reply_tokens=8)), ("rollout", dict(max_calls_per_turn=1)), ("rollout", dict(max_turns=1)),
    ("task", dict(families=("gcd",))), ("task", dict(difficulty=2)), ("task", dict(tools=())),
    ("task", dict(tool_name="run")), ("task", dict(template="rstar2")), ("task", dict(source="gsm_symbolic")),
    ("run", dict(seed=3)), ("run", dict(init_from="other")),
]  # fmt: skip


def episode(problem, turn):
    return Trajectory(
        prompt_id=problem.id, prompt_ids=np.array([1], np.int32), seed=1, sample_index=0, turns=(turn,), answer="1",
        stop_reason=StopReason.ANSWERED, verdict=Verdict.CORRECT,
    )  # fmt: skip


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Arguments of an evaluation whose model answers every problem with one id."""

    @contextlib.asynccontextmanager
    async def open_room(*_):
        yield types.SimpleNamespace(tier=types.SimpleNamespace(prompt_tokens=lambda _: 1, rules="7+x"), sampler=None)

    async def answer(_, problems, *__):
        turn = Turn(
            token_ids=np.array([1], np.int32), mask=np.array([True]), behavior_logprobs=np.zeros(1, np.float32),
            weights_versions=np.zeros(1, np.int32), finish_reason=FinishReason.STOP,
        )  # fmt: skip
        return [
            Group(prompt=problem, trajectories=(episode(problem, turn),), p_err=(0.0,), p_format=(0.0,))
            for problem in problems
        ]

    monkeypatch.setattr(ask, "open_room", open_room)
    monkeypatch.setattr(ask, "ask", answer)
    return {
        "run": settings.Run(workdir=str(tmp_path), steps=0, init_from="model"), "model": TINY, "task": TASK,
        "rollout": ROLLOUT, "sandbox": settings.Sandbox(), "samples": 1,
    }  # fmt: skip


def changed(given, part, values):
    return {**given, part: dataclasses.replace(given[part], **values)}


@pytest.mark.parametrize("part, values", OTHER, ids=lambda value: str(value))
def test_a_finished_evaluation_is_not_taken_for_one_that_asks_otherwise(given, part, values):
    assert evaluate.evaluate(**given) == 0
    (name,) = values
    with pytest.raises(ValueError, match=f"evaluation.json was made with {name} = .*another --workdir"):
        evaluate.evaluate(**changed(given, part, values))


def test_a_finished_evaluation_is_left_as_it_is_whatever_the_shapes_of_the_engine(given, tmp_path, capsys):
    assert evaluate.evaluate(**given) == 0
    before = (tmp_path / "evaluation.json").read_bytes()
    assert evaluate.evaluate(**changed(given, "rollout", dict(engine_slots=3, deadline_s=9.0))) == 0
    assert (tmp_path / "evaluation.json").read_bytes() == before and "is there already" in capsys.readouterr().out


def test_a_file_that_says_less_than_is_asked_now_is_not_taken_for_this_evaluation(given, tmp_path):
    assert evaluate.evaluate(**given) == 0
    told = json.loads((tmp_path / "evaluation.json").read_text())
    del told["top_p"], told["families"]
    (tmp_path / "evaluation.json").write_text(json.dumps(told))
    with pytest.raises(
        ValueError, match=r"evaluation.json does not say its families, this run has \[.*another --workdir"
    ):
        evaluate.evaluate(**given)


def test_an_evaluation_that_is_made_again_leaves_no_trajectories_of_the_one_before(given, tmp_path):
    assert evaluate.evaluate(**given) == 0
    sets, before = len(TASK.families), trajectories.list_steps(tmp_path)
    (tmp_path / "evaluation.json").unlink()
    assert evaluate.evaluate(**changed(given, "task", dict(families=("gcd",)))) == 0
    assert len(before) > sets and trajectories.list_steps(tmp_path) == before[:-1]
    assert len(json.loads((tmp_path / "evaluation.json").read_text())["sets"]) == len(before) - 1


@pytest.mark.parametrize("part, values", OTHER, ids=lambda value: str(value))
def test_answers_of_a_curation_that_asked_otherwise_are_refused(given, tmp_path, part, values):
    how, path = settings.Curation(samples=2, max_solved=1), tmp_path / "judged.jsonl"
    now = changed(given, part, values)
    identities = [curate._identity(case["run"], case["task"], case["rollout"], how) for case in (given, now)]
    assert curate._judged(path, identities[0]) == curate._judged(path, identities[0]) == {}
    with pytest.raises(ValueError, match="holds answers of"):
        curate._judged(path, identities[1])
