"""The recipe's final table: a row for each model and set that was evaluated, and nothing for what was not."""

from __future__ import annotations

import json

from rstar2_jax.report import recipe


def entry(name, correct, n=32, **more):
    return {
        "set": name, "kind": "trained", "n": n, "correct": correct, "unscored": 0, "tool_episodes": 16,
        "correct_calls": 10, "correct_bad_calls": 1, "accuracy": correct / n, "ci95": [0.125, 0.5], "tool_rate": 0.5,
        "call_error_rate_correct": 0.1, "mean_tokens": 10234.4, "mean_response_tokens": 11000.0, **more,
    }  # fmt: skip


def evaluated(runs, folder, *entries):
    (runs / folder).mkdir(parents=True)
    (runs / folder / "evaluation.json").write_text(json.dumps({"sets": list(entries)}))


def test_each_model_has_a_row_for_each_set_and_what_is_missing_is_named(tmp_path, capsys):
    many = {"problems": 2, "pass_at": {"1": 0.25, "8": 0.4, "16": 0.5}, "maj_at": {"16": 0.375},
            "tokens": {"p50": 9000.0, "p95": 30720.0, "max": 30720.0}}  # fmt: skip
    evaluated(tmp_path, "eval_base_aime24", entry("aime24", 0, tool_rate=None, call_error_rate_correct=None))
    evaluated(tmp_path, "eval_stage1_aime24", entry("aime24", 8, **many))
    evaluated(tmp_path, "eval_stage1_math_500", entry("math_500", 16, **many))
    (tmp_path / "stage1").mkdir()
    (tmp_path / "stage1" / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n')
    assert recipe.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1] == ["base", "aime24", "-", "0.0 [12.5, 50.0]", "-", "-", "-", "-", "10,234", "-", "0"]
    assert rows[2][:6] == ["stage1", "aime24", "2", "25.0 [12.5, 50.0]", "50.0 (k 16)", "37.5 (k 16)"]
    assert rows[2][6:] == ["50.0%", "10.0%", "10,234", "30,720", "0"]
    assert [row[1] for row in rows[1:]] == ["aime24", "aime24", "math_500"]
    assert "Steps: stage1 2." in text and "Not evaluated yet: sft, stage2, stage3." in text
    assert text == (tmp_path / "recipe.md").read_text()
    assert json.loads((tmp_path / "recipe.json").read_text())["rows"][1]["pass_at_1"] == 0.25


def test_a_folder_without_evaluations_is_no_recipe(tmp_path, capsys):
    assert recipe.main([str(tmp_path)]) == 1
    assert "holds no eval_MODEL_SET/evaluation.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
