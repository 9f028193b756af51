"""Runs of a sweep side by side: paired differences by hand, runs that are not finished, arms without a value."""

from __future__ import annotations

import json

import pytest

from rstar2_jax.io import metrics
from rstar2_jax.report import compare

STOPS = {"answered": 5.0, "length": 0.0, "budget": 1.0, "turns": 1.0, "lost": 1.0}


def write_run(folder, errors, steps=6, accuracy=0.5):
    """A run whose call errors are 1 in the first two steps and `errors` afterwards; None is no call at all."""
    folder.mkdir(parents=True)
    with metrics.MetricsWriter(folder, start_step=0) as writer:
        for step in range(steps):
            writer.write(
                step,
                {
                    "rollout/call_error_rate_correct": None if errors is None else 1.0 if step < 2 else errors,
                    "rollout/sampled_tokens_mean": 20.0 + step,
                    "rollout/reward_mean": accuracy,
                    "rollout/live_groups_frac": 1.0,
                    "rollout/episodes": 8.0,
                    **{f"rollout/stop_{name}": count for name, count in STOPS.items()},
                },
            )


@pytest.fixture
def study(tmp_path):
    for seed, (plain, half) in enumerate([(0.10, 0.30), (0.20, 0.30), (0.10, 0.40)]):
        write_run(tmp_path / "plain" / f"seed{seed}", plain)
        write_run(tmp_path / "random_half" / f"seed{seed}", half)
    write_run(tmp_path / "no_tool" / "seed0", None, steps=4)
    return tmp_path


def test_differences_are_taken_seed_by_seed_over_the_steps_that_count(study):
    runs = compare.find(study, 2)
    table = compare.summary(runs, "random_half")
    label = "call errors in correct trajectories"
    # Differences -0.2, -0.1, -0.3: mean -0.2, s = 0.1, half = 4.303 * 0.1 / sqrt(3) = 0.2484
    found = table["plain"][label]["difference"]
    assert found["pairs"] == 3
    assert [found[k] for k in ("mean", "low", "high")] == pytest.approx([-0.2, -0.4484, 0.0484], abs=1e-3)
    assert table["random_half"][label]["mean"] == pytest.approx(1 / 3)
    assert "difference" not in table["random_half"][label] and label not in table["no_tool"]
    assert compare.summary(compare.find(study, 0), "")["plain"][label]["mean"] > 0.35


def test_the_command_draws_and_writes_what_it_prints(study, capsys):
    assert compare.main([str(study), "--baseline", "random_half", "--from_step", "2"]) == 0
    printed = capsys.readouterr().out
    assert (study / "comparison.md").read_text() == printed
    assert "| plain | 3 | 6 | 0.133 [" in printed
    assert "| no_tool | 1 | 4 | - | 22.500 | 0.500 | 1.000 | 0.250 |" in printed  # 2 of 8 were cut off
    assert "Difference from random_half, seed by seed:" in printed and "| plain | -0.200 [-0.448, 0.048]" in printed
    assert json.loads((study / "comparison.json").read_text())["arms"]["plain"]["accuracy"]["seeds"] == [0, 1, 2]
    assert (study / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_named(study, tmp_path, capsys):
    assert compare.main([str(study), "--baseline", "grpo"]) == 2
    assert "'grpo' is none of the arms no_tool, plain, random_half" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert compare.main([str(tmp_path / "empty")]) == 2
    assert "holds no run with rollouts" in capsys.readouterr().err
