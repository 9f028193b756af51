"""Settings that do not fit each other are refused before anything starts."""

from __future__ import annotations

import pytest

from rstar2_jax import fit, settings


def test_a_schedule_that_ended_cannot_be_gone_on_with():
    run = settings.Run(workdir="two", steps=5, init_from="one", optimizer_start="continue")
    fit.fine_tuning(run, settings.Learner(row_tokens=64, optimizer=settings.Optimizer(lr=1.0, schedule="constant")))
    with pytest.raises(ValueError, match="a cosine ends with its own run .*take 'restart'"):
        fit.fine_tuning(run, settings.Learner(row_tokens=64, optimizer=settings.Optimizer(lr=1.0, schedule="cosine")))


def test_fine_tuning_without_a_step_is_refused():
    run = settings.Run(workdir="two", steps=0)
    with pytest.raises(ValueError, match="Run.steps = 0"):
        fit.fine_tuning(run, settings.Learner(row_tokens=64, optimizer=settings.Optimizer(lr=1.0)))
