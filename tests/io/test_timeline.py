"""The timeline: mean concurrency by hand, spans over the border of a step, training beside generation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax.io import timeline
from rstar2_jax.report import timeline as drawn


class Hand:
    """A clock that is set by hand."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


def test_two_spans_over_each_other_are_counted_by_hand(tmp_path):
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    first, second = line.span("generate"), line.span("generate")
    first.__enter__()
    now.s += 0.05
    second.__enter__()
    now.s += 0.05
    first.__exit__(None, None, None)
    now.s += 0.025
    second.__exit__(None, None, None)
    now.s += 0.075
    line.flush(7)
    (read,) = timeline.read_timeline(tmp_path)
    assert read["step"] == 7 and read["start_s"] == 0.0 and read["bin_s"] == 0.05
    assert read["busy"]["generate"] == pytest.approx([1.0, 2.0, 0.5, 0.0], abs=1e-6)


def test_a_span_that_outlives_its_step_goes_on_in_the_next(tmp_path):
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    with line.span("learn"):
        now.s += 0.1
        line.flush(0)
        now.s += 0.05
    now.s += 0.05
    line.flush(1)
    first, second = timeline.read_timeline(tmp_path)
    assert first["busy"]["learn"] == pytest.approx([1.0, 1.0]) and second["start_s"] == 0.1
    assert second["busy"]["learn"] == pytest.approx([1.0, 0.0], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=30))
def test_the_area_under_the_curve_is_the_time_of_the_spans(tmp_path_factory, moves):
    now = Hand()
    line = timeline.Timeline(tmp_path_factory.mktemp("t"), now=now)
    opened, spent = [], 0.0
    for wait, begins in moves:
        now.s += wait
        spent += wait * len(opened)
        if begins or not opened:
            opened.append(line.span("tool"))
            opened[-1].__enter__()
        else:
            opened.pop().__exit__(None, None, None)
    line.flush(0)
    (read,) = timeline.read_timeline(line._path.parent)
    area = sum(read["busy"].get("tool", [])) * read["bin_s"]
    assert area == pytest.approx(spent, rel=1e-3, abs=0.02 * (1 + len(moves)))


def test_a_process_that_writes_no_line_for_a_week_keeps_few_numbers_and_tells_all_of_it_in_the_end(tmp_path):
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    for _ in range(20_000):
        with line.span("generate"):
            now.s += 20.0
        now.s += 10.0
    kept = sum(spent.size for spent in line._spent.values())
    assert kept <= timeline._MOST_BINS
    line.close()
    (read,) = timeline.read_timeline(tmp_path)
    busy = read["busy"]["generate"]
    assert read["step"] == 0 and 200 < len(busy) <= timeline._MOST_BINS
    assert timeline.end_s(read) == pytest.approx(600_000, abs=read["bin_s"])
    assert busy[:-1] == pytest.approx([2 / 3] * (len(busy) - 1), abs=0.02)


def test_closing_tells_what_no_step_has_told_and_nothing_where_there_is_nothing(tmp_path):
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    now.s += 1.0
    line.close()
    assert not (tmp_path / timeline.TIMELINE_FILE).exists()
    with line.span("generate"):
        line.flush(4)
        now.s += 0.1
    line.close()
    line.close()
    assert [(read["step"], read["start_s"]) for read in timeline.read_timeline(tmp_path)] == [(4, 0.0), (5, 1.0)]


def test_a_run_that_goes_on_follows_its_first_part_however_long_it_paused(tmp_path):
    starts = []
    for first, steps in ((0, 3), (2, 1), (3, 2)):  # the second start does step 2 again
        timeline.cut(tmp_path, first)
        now = Hand()
        line = timeline.Timeline(tmp_path, now=now)
        for step in range(first, first + steps):
            with line.span("learn"):
                now.s += 1.0
            line.flush(step)
    lines, starts = timeline.in_a_row(timeline.read_timeline(tmp_path))
    assert [read["step"] for read in lines] == [0, 1, 2, 3, 4]
    assert [read["start_s"] for read in lines] == [0.0, 1.0, 2.0, 3.0, 4.0] and starts == [2.0, 3.0]
    assert timeline.in_a_row([]) == ([], [])


def test_no_span_of_a_run_that_went_on_is_drawn_over_another(tmp_path, monkeypatch):
    drawn_at = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda axis, starts, values, **_: drawn_at.extend(starts))
    for _ in range(2):
        now = Hand()
        line = timeline.Timeline(tmp_path, now=now)
        with line.span("learn"):
            now.s += 1.0
        line.close()
    drawn.plot(tmp_path, tmp_path / "x.png")
    assert len(drawn_at) == 40 and np.all(np.diff(drawn_at) > 0)


def test_overlap_is_the_share_of_learning_beside_generation(tmp_path):
    lines = [{"bin_s": 0.5, "busy": {"learn": [1.0, 1.0, 0.0, 1.0], "generate": [0.0, 9.0, 9.0, 0.5]}}]
    assert drawn.overlap(lines) == pytest.approx((1.0 + 0.5) / 3)
    assert drawn.overlap([{"bin_s": 0.5, "busy": {"learn": [1.0]}}]) == 0.0
    assert drawn.overlap([]) == 0.0


def test_the_picture_of_a_run_is_drawn_and_an_empty_one_is_refused(tmp_path):
    (tmp_path / timeline.TIMELINE_FILE).write_text("")
    with pytest.raises(ValueError, match="has no step"):
        drawn.plot(tmp_path, tmp_path / "x.png")
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    for step in range(2):
        with line.span("generate"), line.span("learn"):
            now.s += 1.0
        line.flush(step)
    with (tmp_path / timeline.TIMELINE_FILE).open("a") as file:
        file.write('{"step": 2, "torn')
    assert drawn.main([str(tmp_path)]) == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert np.isclose(drawn.overlap(timeline.read_timeline(tmp_path)), 1.0)


def test_a_run_that_goes_on_cuts_the_lines_of_the_steps_that_it_does_again(tmp_path):
    now = Hand()
    line = timeline.Timeline(tmp_path, now=now)
    for step in range(5):
        now.s += 0.1
        line.flush(step)
    path = tmp_path / timeline.TIMELINE_FILE
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole) + '{"step": 5, "st')
    timeline.cut(tmp_path, 3)
    assert path.read_text() == "".join(whole[:3])
    timeline.cut(tmp_path, 0)
    assert timeline.read_timeline(tmp_path) == [] and [p.name for p in tmp_path.iterdir()] == [path.name]
    timeline.cut(tmp_path / "absent", 0)
