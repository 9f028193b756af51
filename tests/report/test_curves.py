"""Curves as PNG: what is drawn for RL, for SFT, for gaps, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from rstar2_jax.io import metrics
from rstar2_jax.report import curves


def _stage(folder, steps, **changes):
    rng = np.random.default_rng(0)
    with metrics.MetricsWriter(folder) as writer:
        for step in range(steps):
            numbers = {
                "rollout/reward_mean": 0.5 + step / 100,
                "rollout/call_error_rate_correct": None if step % 3 else 0.3,
                "learner/grad_norm": float(rng.uniform(0.1, 1)),
                "mismatch/logprob_gap_mean": 1e-6,
            }
            writer.write(step, {**numbers, **changes})
    return folder


def _pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def _share_of(pixels, color):
    return (np.abs(pixels - np.array(color)).sum(-1) < 12).mean()


def test_stages_are_drawn_one_after_the_other(tmp_path):
    stages = [(name, _stage(tmp_path / name, 20)) for name in ("stage1", "stage2", "stage3")]
    points = [
        curves.Point("rollout/reward_mean", at_end, value, value - 0.05, value + 0.05, "fresh")
        for at_end, value in ((False, 0.5), (True, 0.9))
    ]
    out = curves.plot_run(stages, tmp_path / "new" / "curves.png", points=points)
    pixels = _pixels(out)
    assert pixels.shape[1] == 1430 and pixels.shape[0] > 1000
    assert _share_of(pixels, (0x1F, 0x6F, 0xEB)) > 1e-3  # curves
    assert _share_of(pixels, (0xF3, 0xF5, 0xF8)) > 0.1  # bands of stages 1 and 3
    assert _share_of(pixels, (0xD1, 0x57, 0x0A)) > 1e-5  # evaluations


def test_the_same_metrics_give_the_same_bytes(tmp_path):
    stages = [("stage1", _stage(tmp_path / "stage1", 5))]
    one = curves.plot_run(stages, tmp_path / "a.png").read_bytes()
    assert curves.plot_run(stages, tmp_path / "b.png").read_bytes() == one


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (1, {"learner/grad_norm": float("nan"), "mismatch/logprob_gap_mean": 0.0}),
        (2, {"rollout/call_error_rate_correct": None}),
        (13, {"rollout/response_tokens_mean": 0.0, "learner/entropy_mean": -0.1}),
    ],
)
def test_gaps_zeros_and_short_stages_are_drawn_without_warning(tmp_path, steps, changes):
    curves.plot_run([("stage1", _stage(tmp_path / "stage1", steps, **changes))], tmp_path / "c.png")


def test_a_run_without_rollouts_shows_its_loss(tmp_path):
    with metrics.MetricsWriter(tmp_path / "sft") as writer:
        for step in range(30):
            writer.write(step, {"learner/loss": 3.0 / (step + 1), "learner/grad_norm": 1.0, "learner/lr": 1e-4})
    alone = _pixels(curves.plot_run([("sft", tmp_path / "sft")], tmp_path / "sft.png"))
    assert alone.shape[0] < 500 and _share_of(alone, (0x1F, 0x6F, 0xEB)) > 1e-3
    both = [("sft", tmp_path / "sft"), ("stage1", _stage(tmp_path / "stage1", 5))]
    assert _pixels(curves.plot_run(both, tmp_path / "both.png")).shape[0] > 1000  # the panels of RL


def test_nothing_to_draw_is_an_error_that_says_where_it_looked(tmp_path):
    metrics.MetricsWriter(tmp_path / "stage1").close()
    with pytest.raises(ValueError, match="stage1"):
        curves.plot_run([("stage1", tmp_path / "stage1")], tmp_path / "c.png")
    with pytest.raises(ValueError, match="empty list"):
        curves.plot_run([], tmp_path / "c.png")
    with pytest.raises(FileNotFoundError):
        curves.plot_run([("stage9", tmp_path / "stage9")], tmp_path / "c.png")


def test_the_running_mean_equals_a_plain_loop_over_what_is_there():
    values = np.random.default_rng(1).normal(size=40)
    values[[0, 7, 8, 9, 10, 11, 12, 13, 14, 39]] = np.nan
    half = len(values) // 12
    expected = []
    for index in range(len(values)):
        window = [v for v in values[max(0, index - half) : index + half + 1] if not np.isnan(v)]
        expected.append(np.mean(window) if window else np.nan)
    np.testing.assert_allclose(curves._running_mean(values), expected, rtol=1e-12)
    assert np.isnan(expected).any()
