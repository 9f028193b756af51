"""The summary of the job on real weights, from files that the real writers made: what holds, and what does not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rstar2_jax.io import metrics, trajectories
from rstar2_jax.report import evaluation, real
from rstar2_jax.types import (
    CallStatus,
    FinishReason,
    Group,
    Prompt,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)

AGREED = {
    "dtype": "float32",
    "max_delta_logit": 0.0,
    "transformers_max_delta_logit": 2e-5,
    "transformers_equal_texts": 16,
    "transformers_prompts": 16,
    "transformers_faults": 0,
}


def _trajectory(statuses, index):
    turn = Turn(
        token_ids=np.arange(3, dtype=np.int32),
        mask=np.array([True, True, False]),
        behavior_logprobs=np.array([-1.0, -1.0, 0.0], np.float32),
        weights_versions=np.array([0, 0, -1], np.int32),
        calls=tuple(ToolCall(name="python", arguments={"code": "1"}) for _ in statuses),
        results=tuple(ToolResult(status=status) for status in statuses),
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        prompt_id="p",
        sample_index=index,
        seed=0,
        prompt_ids=np.arange(2, dtype=np.int32),
        turns=(turn,),
        stop_reason=StopReason.ANSWERED,
        verdict=Verdict.WRONG,
    )


def _calls(folder, step, *episodes):
    prompt = Prompt(id="p", question="?", answer="1", source="gsm_symbolic")
    found = tuple(_trajectory(statuses, index) for index, statuses in enumerate(episodes))
    nothing = (0.0,) * len(found)
    group = Group(prompt=prompt, trajectories=found, p_err=nothing, p_format=nothing)
    trajectories.write_step(folder, step, trajectories.records([group]))


def _step(**changes):
    return {
        "rollout/reward_mean": 0.1,
        "rollout/episodes": 32.0,
        "rollout/live_groups_frac": 0.5,
        "rollout/refills": 1.0,
        "rollout/status_ok": 2.0,
        "learner/trained_rows": 8.0,
        "learner/loss": -0.01,
        "learner/grad_norm": 0.5,
        "learner/skipped_steps": 0.0,
        "mismatch/logprob_gap_max": 1e-5,
        **changes,
    }


def _metrics(folder, steps):
    with metrics.MetricsWriter(folder) as writer:
        for step, line in enumerate(steps):
            writer.write(step, line)


@pytest.fixture
def run(tmp_path):
    _metrics(tmp_path / "sft", [{"learner/loss": 1.5}] * 4)
    _metrics(tmp_path / "stage1", [_step()] * 3)
    _calls(tmp_path / "stage1", 0, [CallStatus.OK, CallStatus.ERROR], [])
    _calls(tmp_path / "stage1", 2, [CallStatus.OK], [CallStatus.PARSE_ERROR])
    _calls(tmp_path / "eval_rl", 0, [CallStatus.TIMEOUT_WALL])
    entry = evaluation.evaluation_set("aime24", "trained", [_trajectory([CallStatus.OK], 0)] * 30)
    (tmp_path / "eval_rl" / "evaluation.json").write_text(json.dumps({"sets": [entry]}))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text(json.dumps(AGREED))
    return tmp_path


def holds(folder):
    return {name: found["holds"] for name, found in real.result_of(folder)["requirements"].items()}


def test_a_good_run_holds_everything_and_says_that_it_learned_little(run, capsys):
    assert real.main([str(run)]) == 0
    text = capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert all(found["holds"] is True for found in result["requirements"].values())
    assert result["missing"] == [] and result["paths"]["result"] == str(run / "result.json")
    assert "learned little: 4 small SFT steps and 3 RL steps on 24 rollouts" in text
    assert "aime24: 0 of 30 correct" in text and "same greedy text on 16 of 16 prompts" in text
    assert max(map(len, text.splitlines())) <= 140 + len(str(run))


def test_every_kind_of_status_is_counted_over_all_steps_and_in_the_evaluation(run):
    counts = real.result_of(run)["call_statuses"]
    assert counts["stage1"] == {kind.value: 0 for kind in CallStatus} | {"ok": 2, "error": 1, "parse_error": 1}
    assert counts["eval_rl"] == {kind.value: 0 for kind in CallStatus} | {"timeout_wall": 1}


@pytest.mark.parametrize(
    "change, name",
    [
        ({"learner/trained_rows": 0.0, "learner/loss": None, "learner/grad_norm": None}, "RL steps that changed"),
        ({"learner/skipped_steps": 1.0}, "RL steps that changed"),
        ({"learner/loss": float("nan")}, "losses are finite"),
        ({"mismatch/logprob_gap_max": 2e-3}, "engine and learner agree"),
    ],
)
def test_one_bad_step_is_named_and_ends_with_status_1(run, capsys, change, name):
    (run / "stage1" / "metrics.jsonl").unlink()
    _metrics(run / "stage1", [_step(), _step(**change), _step()])
    failed = [requirement for requirement, found in holds(run).items() if found is False]
    assert len(failed) == 1 and failed[0].startswith(name)
    assert real.main([str(run)]) == 1
    assert f"{failed[0]}" in capsys.readouterr().out


def test_calls_that_never_ran_do_not_count_as_executed(run):
    _calls(run / "stage1", 0, [CallStatus.PARSE_ERROR])
    _calls(run / "stage1", 2, [CallStatus.UNKNOWN_TOOL], [CallStatus.NOT_EXECUTED])
    assert holds(run)["tool calls were executed"] is False


def test_without_transformers_the_export_is_said_to_be_unchecked(run, capsys):
    (run / "export" / "export.json").write_text(json.dumps({"dtype": "float32", "max_delta_logit": 0.0}))
    assert real.main([str(run)]) == 0
    assert "not checked  torch and transformers are not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{"transformers_equal_texts": 15}, {"transformers_max_delta_logit": 2e-4}, {"transformers_faults": 1}],
)
def test_an_export_that_transformers_reads_otherwise_fails(run, change):
    (run / "export" / "export.json").write_text(json.dumps(AGREED | change))
    assert holds(run)["transformers agrees"] is False


def test_a_run_that_stopped_early_fails_what_it_lacks(run):
    (run / "eval_rl" / "evaluation.json").unlink()
    (run / "export" / "export.json").unlink()
    found = holds(run)
    assert found["evaluation is complete"] is False and found["export reads back"] is False
    assert real.result_of(run)["missing"] == ["eval_rl/evaluation.json", "export/export.json"]


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        real.main([str(tmp_path)])
    assert stopped.value.code == 1 and "not a run" in capsys.readouterr().err
