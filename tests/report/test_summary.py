"""The summary of a whole run, from files that the real writers made, and of runs that lack parts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rstar2_jax.io import clock, metrics
from rstar2_jax.report import evaluation, summary


def _entry(name, kind, n, correct, bad):
    return {
        "set": name,
        "kind": kind,
        "n": n,
        "correct": correct,
        "unscored": 1,
        "tool_episodes": n // 2,
        "correct_calls": 100,
        "correct_bad_calls": bad,
        "accuracy": correct / n,
        "ci95": list(evaluation.wilson(correct, n)),
        "tool_rate": 0.5,
        "call_error_rate_correct": bad / 100,
        "mean_tokens": 20.0,
        "mean_response_tokens": 30.0,
    }


def _evaluate(folder, correct, bad):
    folder.mkdir(parents=True)
    sets = [_entry("gcd", "trained", 200, correct, bad), _entry("lcm", "trained", 200, correct, bad)]
    sets.append(_entry("pow", "held_out", 100, correct // 4, bad))
    (folder / "evaluation.json").write_text(json.dumps({"temperature": 1.0, "sets": sets}))


def _stage(folder, steps, error, **changes):
    with metrics.MetricsWriter(folder) as writer:
        for step in range(steps):
            numbers = {
                "rollout/reward_mean": 0.5,
                "rollout/call_error_rate_correct": error,
                "rollout/status_ok": 7,
                "rollout/status_timeout_wall": 1,
                "rollout/unscored": 1,
                "rollout/lost": 0,
                "learner/loss": 0.0,
                "learner/grad_norm": 0.5,
                "learner/skipped_steps": 0,
                "mismatch/logprob_gap_max": 1e-5 * (step + 1),
            }
            writer.write(step, {**numbers, **changes})
    seconds = iter([0.0, 0.0, 4.0, 4.0])
    watch = clock.Clock(folder, wall=lambda: next(seconds), cpu=lambda: 0.0)
    with watch.phase("rollout"):
        pass
    watch.save()


@pytest.fixture
def run(tmp_path):
    with metrics.MetricsWriter(tmp_path / "sft") as writer:
        for step in range(20):
            writer.write(step, {"learner/loss": 2.0 if step < 5 else 0.5})
    _evaluate(tmp_path / "eval_sft", 100, 30)
    _evaluate(tmp_path / "eval_rl", 180, 6)
    for name, error in (("stage1", 0.4), ("stage2", 0.2), ("stage3", 0.1), ("stage10", 0.05)):
        _stage(tmp_path / name, 12, error)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text('{"max_delta_logit": 3e-05}')
    return tmp_path


def test_the_result_of_a_whole_run(run):
    result = summary.summarise(summary.read_files(run))
    trained = result["accuracy"]["trained"]
    assert trained["after_sft"] == {
        "n": 400,
        "correct": 200,
        "accuracy": 0.5,
        "ci95": list(evaluation.wilson(200, 400)),
        "unscored": 2,
    }
    assert trained["after_rl"]["accuracy"] == 0.9 and result["accuracy"]["held_out"]["after_rl"]["accuracy"] == 0.45
    errors = result["call_error_rate_correct"]
    assert errors["evaluation"] == {"after_sft": 0.3, "after_rl": 0.06, "ratio": pytest.approx(0.2)}
    assert errors["rl_steps"] == pytest.approx({"first": 0.4, "last": 0.05, "ratio": 0.125})
    assert result["tool_rate"] == {"after_sft": 0.5, "after_rl": 0.5}
    assert result["mean_tokens"]["after_rl"] == 20 and result["mean_response_tokens"]["after_rl"] == 30
    assert result["export"] == {"max_delta_logit": 3e-5}
    assert result["sft"] == {"steps": 20, "loss_first": 2.0, "loss_last": 0.5}
    assert result["missing"] == []


def test_the_health_of_the_run_is_counted_over_all_steps(run):
    rl = summary.summarise(summary.read_files(run))["rl"]
    assert list(rl["steps"]) == ["stage1", "stage2", "stage3", "stage10"]
    assert rl["call_statuses"] == {"ok": 7 * 48, "timeout_wall": 48}
    assert (rl["unscored"], rl["lost"], rl["skipped_steps"], rl["losses_finite"]) == (48, 0, 0, True)
    assert rl["logprob_gap_max"] == pytest.approx(12e-5)


@pytest.mark.parametrize("told", [{}, {"learner/trained_rows": 16.0}])
def test_a_loss_that_was_not_finite_is_seen(tmp_path, told):
    _stage(tmp_path / "stage1", 3, 0.1, **{"learner/loss": float("nan"), **told})
    assert summary.summarise(summary.read_files(tmp_path))["rl"]["losses_finite"] is False


def test_a_step_that_had_nothing_to_train_on_has_no_loss_to_be_finite(tmp_path):
    _stage(tmp_path / "stage1", 3, 0.1, **{"learner/loss": 0.5, "learner/trained_rows": 16.0})
    _stage(tmp_path / "stage2", 3, 0.1, **{"learner/loss": float("nan"), "learner/trained_rows": 0.0})
    assert summary.summarise(summary.read_files(tmp_path))["rl"]["losses_finite"] is True


def test_seconds_add_up_by_phase_and_by_part(run):
    seconds = summary.summarise(summary.read_files(run))["seconds"]
    phases = sum(part["rollout"]["wall_s"] for part in seconds["by_part"].values())
    assert list(seconds["by_part"]) == ["stage1", "stage2", "stage3", "stage10"]
    assert seconds["by_phase"]["rollout"]["wall_s"] == phases > 0
    assert seconds["total"]["wall_s"] == pytest.approx(sum(s["wall_s"] for s in seconds["by_phase"].values()))


def test_the_command_writes_the_result_and_the_curves_and_tells_both(run, capsys):
    assert summary.main([str(run)]) == 0
    text = capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert (run / "curves.png").stat().st_size > 10_000
    assert result["paths"]["curves"] == str(run / "curves.png") and result["paths"]["result"] == str(
        run / "result.json"
    )
    low, high = evaluation.wilson(360, 400)
    assert f"0.900 [{low:.3f}, {high:.3f}]" in text and "n = 400" in text
    for expected in ("30.0%", "6.0%", "x 0.20", "ok 336, timeout_wall 48", "3e-05 max |delta logit|", *result["paths"]):
        assert expected in text
    assert "Not found" not in text and max(map(len, text.splitlines())) <= 120 + len(str(run))


def test_what_is_missing_is_named_and_not_made_up(tmp_path, capsys):
    _stage(tmp_path / "stage1", 3, None)
    assert summary.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["missing"] == [
        "eval_sft/evaluation.json",
        "eval_rl/evaluation.json",
        "sft/metrics.jsonl",
        "export/export.json",
    ]
    assert "Not found, and so not in the result: eval_sft/evaluation.json" in text
    assert result["accuracy"]["trained"] == {"after_sft": None, "after_rl": None}
    assert result["call_error_rate_correct"]["rl_steps"] == {"first": None, "last": None, "ratio": None}
    assert result["export"]["max_delta_logit"] is None


def test_a_run_that_was_only_evaluated_has_a_summary(tmp_path):
    _evaluate(tmp_path / "eval_rl", 180, 6)
    assert summary.main([str(tmp_path)]) == 0
    assert not (tmp_path / "curves.png").exists()


def test_errors_that_fall_to_nothing_from_nothing_have_no_ratio(tmp_path):
    _evaluate(tmp_path / "eval_sft", 100, 0)
    _evaluate(tmp_path / "eval_rl", 180, 0)
    errors = summary.summarise(summary.read_files(tmp_path))["call_error_rate_correct"]["evaluation"]
    assert errors == {"after_sft": 0, "after_rl": 0, "ratio": None}


@pytest.mark.parametrize("damage", ["", "no json", "[1]"])
def test_a_damaged_file_ends_the_command_with_its_name(run, capsys, damage):
    (run / "export" / "export.json").write_text(damage)
    with pytest.raises(SystemExit) as stopped:
        summary.main([str(run)])
    assert stopped.value.code == 1 and "export.json" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        summary.main([str(tmp_path)])
    assert "not a run" in capsys.readouterr().err


def test_the_pool_of_rl_steps_is_the_mean_of_what_is_there(tmp_path):
    with metrics.MetricsWriter(tmp_path / "stage1") as writer:
        for step, error in enumerate([0.5, None, 0.3, None, None, 0.1]):
            writer.write(step, {"rollout/reward_mean": 0.0, "rollout/call_error_rate_correct": error})
    steps = summary.summarise(summary.read_files(tmp_path))["call_error_rate_correct"]["rl_steps"]
    assert steps["first"] == pytest.approx(0.4) and steps["last"] == pytest.approx(np.mean([0.5, 0.3, 0.1]))
