"""When an engine process that keeps ending is left alone."""

from __future__ import annotations

from rstar2_jax.rollout import fleet


def test_rare_restarts_never_add_up_and_many_in_a_row_do():
    restarts = fleet.Restarts(20, 3600.0)
    assert all(restarts.allowed(6 * 3600.0 * number) for number in range(200)) and restarts.total == 200
    late = 1e9
    assert [restarts.allowed(late + number) for number in range(21)] == [True] * 20 + [False]
    assert restarts.total == 220


def test_the_window_moves_on():
    restarts = fleet.Restarts(2, 10.0)
    assert [restarts.allowed(now) for now in (0.0, 6.0, 9.0, 10.0, 11.0, 16.0)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
