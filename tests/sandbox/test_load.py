"""What the service promises under load, measured briefly; `python -m rstar2_sandbox bench` measures it for long."""

import asyncio

import pytest

from rstar2_sandbox import bench, local

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def load():
    with local.start_local(slots=8) as running:
        made = bench.Load(running.redis_url)
        asyncio.run(made.closed(1.0))
        yield made


def test_a_burst_is_answered_exactly_once_and_run_exactly_once(load):
    found = asyncio.run(load.burst(4000))
    assert found["answered_right"] == found["executed"] == found["calls"] == 4000
    assert found["redis_peak_mib"] < 256


def test_at_70_percent_of_its_rate_calls_wait_little(load):
    """Its rate is measured just before, and again where something else took the machine's time in between."""

    def measured():
        full = asyncio.run(load.closed(3.0))
        return asyncio.run(load.open(0.7 * full["calls_per_s"], 6.0))

    assert any(wait["mean_s"] <= 0.3 and wait["p99_s"] <= 1.0 for wait in (measured() for _ in range(3)))


def test_five_second_loops_do_not_stop_quick_calls(load):
    """The ratio that README.md gives is measured with many slots and for long; here only that nobody is stuck."""
    slow = asyncio.run(load.closed(6.0, loops=0.05, outstanding=8))
    assert slow["p50_s"] < 2.0 and slow["calls"] > 20, slow
