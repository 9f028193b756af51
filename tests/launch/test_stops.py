"""How runs end before their last step."""

from __future__ import annotations

import os
import signal

import pytest

from rstar2_jax import stops


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_one_kills(number):
    before = signal.getsignal(number)
    with stops.on_signals() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert signal.getsignal(number) is before


def test_steps_whose_every_update_was_skipped_end_a_run_when_there_are_five_in_a_row():
    watch = stops.Soundness(100)
    for step in range(4):
        watch.add(step, 2, 2.0)
    watch.add(4, 2, 1.0)  # one of two was sound
    for step in range(5, 9):
        watch.add(step, 1, 1.0)
        watch.add(step, 0, 0.0)  # nothing to learn from: no sign of anything
    with pytest.raises(stops.DivergedError, match=r"last 5 steps was skipped.*after step 9 are those of before"):
        watch.add(9, 1, 1.0)


def test_a_short_run_that_learned_nothing_ends_so_too():
    watch = stops.Soundness(2)
    watch.add(0, 1, 1.0)
    with pytest.raises(stops.DivergedError):
        watch.add(1, 1, 1.0)
