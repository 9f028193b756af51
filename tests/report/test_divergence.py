"""The alarm of diverging training and held-out problems: a leaky source, honest learning, noise, gaps."""

from __future__ import annotations

import numpy as np
import pytest

from rstar2_jax.report import divergence

STEPS = 21


def columns(accuracy, scored=200, **rewards):
    """A run of 21 steps with an evaluation at every tenth."""
    evaluated = np.full(STEPS, np.nan)
    evaluated[::10] = accuracy
    counts = np.where(np.isfinite(evaluated), float(scored), np.nan)
    named = {f"reward/{name}_mean": np.linspace(*ends, STEPS) for name, ends in rewards.items()}
    return {"step": np.arange(STEPS), "eval/accuracy": evaluated, "eval/scored": counts, **named}


def test_a_leaky_source_that_rises_while_held_out_accuracy_falls_is_named_and_the_honest_one_is_not():
    text = divergence.alarm(columns([0.5, 0.6, 0.3], leaky=(0.4, 0.95), honest=(0.5, 0.5)))
    assert text is not None and "fell from 0.60 (step 10) to 0.30 (step 20)" in text
    assert "leaky" in text and "honest" not in text
    found = columns([0.5, 0.6, 0.3], leaky=(0.4, 0.95))
    assert divergence.alarm(found | {"step": found["step"].astype(float)}) == divergence.alarm(found)


def test_accuracy_is_held_against_the_best_evaluation_and_not_against_the_last_one():
    assert divergence.alarm(columns([0.7, 0.42, 0.40], leaky=(0.4, 0.9))) is not None


@pytest.mark.parametrize(
    "found",
    [
        columns([0.3, 0.5, 0.6], box=(0.3, 0.9)),  # both rise
        columns([0.6, 0.5, 0.3], box=(0.9, 0.3)),  # both fall: not this alarm's fault
        columns([0.6, 0.6, 0.5], scored=30, box=(0.3, 0.9)),  # within the noise of 30 answers
        columns([0.6, np.nan, np.nan], box=(0.3, 0.9)),  # one evaluation
        columns([np.nan, np.nan, np.nan], box=(0.3, 0.9)),
        columns([0.0, 0.0, 0.0], box=(0.3, 0.9)),
        {"step": np.arange(3)},
    ],
)
def test_no_alarm_without_a_significant_fall_and_a_rise(found):
    assert divergence.alarm(found) is None


def test_a_source_without_values_around_the_evaluations_is_passed_over():
    found = columns([0.6, 0.6, 0.2], leaky=(0.4, 0.9), absent=(0.1, 0.9))
    found["reward/absent_mean"][:] = np.nan
    text = divergence.alarm(found)
    assert text is not None and "leaky" in text and "absent" not in text


def test_the_z_value_is_that_of_two_shares_by_hand():
    # p = 0.45, spread = 0.45 * 0.55 * (1/100 + 1/100): z = 0.3 / 0.070356
    assert divergence._z(0.6, 100, 0.3, 100) == pytest.approx(4.26401, abs=1e-4)
