"""Seconds by phase: hand-made clocks for the sums, real processes for the CPU of descendants."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rstar2_jax.io import clock


class _Hands:
    """Two sources of seconds that a test moves by hand."""

    def __init__(self):
        self.wall_s, self.cpu_s = 100.0, 7.0

    def advance(self, wall_s, cpu_s=0.0):
        self.wall_s += wall_s
        self.cpu_s += cpu_s

    def clock(self, workdir=None):
        return clock.Clock(workdir, wall=lambda: self.wall_s, cpu=lambda: self.cpu_s)


def test_each_phase_gets_its_wall_and_cpu_seconds_and_the_rest_is_other():
    hands = _Hands()
    watch = hands.clock()
    hands.advance(1, 0.5)
    for _ in range(2):
        with watch.phase("rollout"):
            hands.advance(4, 6)
    with watch.phase("train"):
        hands.advance(3, 2)
    assert watch.totals() == {
        "other": clock.Seconds(wall_s=1, cpu_s=0.5),
        "rollout": clock.Seconds(wall_s=8, cpu_s=12, count=2),
        "train": clock.Seconds(wall_s=3, cpu_s=2, count=1),
    }


def test_an_inner_phase_stops_the_outer_one():
    hands = _Hands()
    watch = hands.clock()
    with watch.phase("rollout"):
        hands.advance(1)
        with watch.phase("grade"):
            hands.advance(10)
        hands.advance(2)
    assert {name: seconds.wall_s for name, seconds in watch.totals().items()} == {"other": 0, "rollout": 3, "grade": 10}


def test_a_phase_is_charged_also_when_its_block_raises():
    hands = _Hands()
    watch = hands.clock()
    with pytest.raises(KeyError), watch.phase("rollout"):
        hands.advance(5)
        raise KeyError
    hands.advance(1)
    assert watch.totals()["rollout"].wall_s == 5 and watch.totals()["other"].wall_s == 1


def test_a_lap_counts_from_the_lap_before_and_adds_up():
    hands = _Hands()
    watch = hands.clock()
    with watch.phase("rollout"):
        hands.advance(4)
    hands.advance(1)
    assert watch.lap() == {"time/other_s": 1, "time/rollout_s": 4, "time/step_s": 5}
    with watch.phase("train"):
        hands.advance(2)
    assert watch.lap() == {"time/other_s": 0, "time/train_s": 2, "time/step_s": 2}
    assert watch.totals()["rollout"].wall_s == 4


def test_a_lap_inside_a_phase_splits_it():
    hands = _Hands()
    watch = hands.clock()
    with watch.phase("rollout"):
        hands.advance(4)
        assert watch.lap()["time/rollout_s"] == 4
        hands.advance(3)
        assert watch.lap()["time/rollout_s"] == 3


def test_totals_go_on_after_a_restart(tmp_path):
    hands = _Hands()
    first = hands.clock(tmp_path)
    with first.phase("rollout"):
        hands.advance(4, 2)
    first.save()
    hands.advance(1000)  # the machine was off: nobody's time
    second = hands.clock(tmp_path)
    with second.phase("rollout"):
        hands.advance(1, 1)
    second.save()
    assert clock.read_clock(tmp_path)["rollout"] == clock.Seconds(wall_s=5, cpu_s=3, count=2)
    assert second.lap()["time/rollout_s"] == 1


def test_a_clock_without_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock.Clock().save()
    assert not list(tmp_path.iterdir())


def test_a_source_that_runs_backwards_gives_no_negative_time():
    hands = _Hands()
    watch = hands.clock()
    with watch.phase("rollout"):
        hands.advance(-50, -3)
    with watch.phase("rollout"):
        hands.advance(51, 4)
    assert watch.totals()["rollout"] == clock.Seconds(wall_s=1, cpu_s=1, count=2)


@pytest.mark.parametrize("name", ["Rollout", "a/b", "", "other", "1st"])
def test_a_phase_name_that_is_no_metric_name_is_refused(name):
    with pytest.raises(ValueError, match="phase"), clock.Clock().phase(name):
        pass


def test_phases_that_overlap_are_an_error():
    watch = clock.Clock()
    first, second = watch.phase("rollout"), watch.phase("train")
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="one clock serves one task"):
        first.__exit__(None, None, None)


@pytest.mark.parametrize("text", ["", "[]", '{"phases": {"a": 3}}', '{"phases": {"a": {"cpu_s": 1}}}', '{"phases": 1}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "clock.json").write_text(text)
    with pytest.raises(ValueError, match="clock.json"):
        clock.Clock(tmp_path)


def test_the_file_is_plain_json(tmp_path):
    hands = _Hands()
    watch = hands.clock(tmp_path / "new")
    with watch.phase("train"):
        hands.advance(2, 3)
    watch.save()
    assert json.loads((tmp_path / "new" / "clock.json").read_text())["phases"]["train"] == {
        "wall_s": 2,
        "cpu_s": 3,
        "count": 1,
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["clock.json"]


def test_cpu_of_a_living_grandchild_counts_and_stays_counted_after_its_end():
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn + 'print(1, flush=True); input()'!r}])"
    before = clock.tree_cpu_s()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    living = clock.tree_cpu_s() - before
    process.communicate("\n")
    ended = clock.tree_cpu_s() - before
    assert living >= 0.28 and ended >= living - 0.03
