"""metrics.jsonl across kills and resumes, numbers that are none, and what TensorBoard is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from rstar2_jax.io import metrics


def _write(workdir, steps, start_step=0):
    with metrics.MetricsWriter(workdir, start_step=start_step) as writer:
        for step in steps:
            writer.write(step, {"rollout/reward_mean": step / 10, "learner/grad_norm": 1.0})


def _events(workdir):
    events = []
    for path in sorted((workdir / "tensorboard").glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event()
            event.ParseFromString(data[12 : 12 + size])
            events.append(event)
            data = data[16 + size :]
    return events


def test_one_line_a_step_is_on_disk_as_soon_as_write_returns(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, {"learner/loss": 0.5})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
            "step": 0,
            "learner/loss": 0.5,
            "metrics/nonfinite_count": 0,
        }


def test_a_resumed_file_equals_that_of_an_uninterrupted_run(tmp_path):
    _write(tmp_path / "whole", range(8))
    _write(tmp_path / "broken", range(6))
    _write(tmp_path / "broken", range(4, 8), start_step=4)
    whole, broken = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken"))
    assert whole == broken


def test_a_torn_last_line_is_repaired(tmp_path):
    _write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"step": 3, "rollout/rew', b"\xff\x00", b'{"step": 3}', b"\n"):
        path.write_bytes(whole + torn)
        assert metrics.read_metrics(tmp_path)["step"].tolist() == [0, 1, 2]
        metrics.MetricsWriter(tmp_path, start_step=3).close()
        assert path.read_bytes() == whole


DAMAGED = ['{"st', '{"step": 1, "a/b": "text"}', "[1]", "", '{"step": "1"}', '{"step": 1} {"step": 2}']


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_left_out_with_a_message_that_gives_its_number_and_ends_no_run(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 0, "a/b": 1.0}}\n{damage}\n{{"step": 2, "a/b": 3.0}}\n'
    path.write_text(text)
    with metrics.MetricsWriter(tmp_path, start_step=3) as writer:
        writer.write(3, {"a/b": 4.0})
    assert path.read_text().startswith(text)
    messages = []
    columns = metrics.read_metrics(tmp_path, messages.append)
    assert columns["step"].tolist() == [0, 2, 3] and columns["a/b"].tolist() == [1.0, 3.0, 4.0]
    assert messages == [f"{path}, line 2: not the record of a step, left out"]
    metrics.MetricsWriter(tmp_path, start_step=1).close()
    assert path.read_text() == '{"step": 0, "a/b": 1.0}\n'


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ("a diary\nof mine\n", '{"step": 0}\n{"step": 0}\n{"step": 1}\n', '{"step": 1}\n{"step": 0}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="metrics.jsonl.* remove the file"):
            metrics.MetricsWriter(tmp_path, start_step=1)
        assert path.read_text() == text


def test_a_writer_killed_in_full_run_leaves_every_step_it_reported(tmp_path):
    code = (
        "import sys; from rstar2_jax.io import metrics\n"
        "writer = metrics.MetricsWriter(sys.argv[1])\n"
        "for step in range(10**6):\n"
        "    writer.write(step, {'learner/loss': 1 / 3})\n"
        "    print(step, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 20:
            break
    process.send_signal(signal.SIGKILL)
    reported = [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    last = max([20, *reported])
    steps = metrics.read_metrics(tmp_path)["step"].tolist()
    assert steps[: last + 1] == list(range(last + 1))
    metrics.MetricsWriter(tmp_path, start_step=10).close()
    assert metrics.read_metrics(tmp_path)["step"].tolist() == list(range(10))


def test_numbers_that_are_not_finite_become_null_and_are_counted(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, {"learner/loss": float("nan"), "learner/grad_norm": np.float32("inf"), "learner/lr": 1e-3})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    columns = metrics.read_metrics(tmp_path)
    assert columns["metrics/nonfinite_count"].tolist() == [2]
    assert np.isnan(columns["learner/loss"][0]) and columns["learner/lr"][0] == 1e-3
    tags = {value.tag: value.simple_value for event in _events(tmp_path) for value in event.summary.value}
    assert tags == {"learner/lr": pytest.approx(1e-3), "metrics/nonfinite_count": 2}


def test_none_means_no_value_and_is_not_counted(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, {"rollout/call_error_rate_correct": None})
        writer.write(1, {"rollout/call_error_rate_correct": 0.25})
    columns = metrics.read_metrics(tmp_path)
    np.testing.assert_array_equal(columns["rollout/call_error_rate_correct"], [np.nan, 0.25])
    assert columns["metrics/nonfinite_count"].tolist() == [0, 0]


def test_a_name_that_comes_late_has_no_value_before(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, {"learner/loss": 1})
        writer.write(1, {"learner/loss": 2, "rollout/status_timeout_cpu": 3})
    np.testing.assert_array_equal(metrics.read_metrics(tmp_path)["rollout/status_timeout_cpu"], [np.nan, 3])


def test_scalars_of_numpy_and_jax_are_read_out_exactly(tmp_path):
    values = {"a/np": np.float32(0.1), "a/jax": jnp.float32(0.1), "a/int": np.int64(2**40), "a/bool": np.True_}
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, values)
    columns = metrics.read_metrics(tmp_path)
    assert {name: columns[name][0] for name in values} == {
        "a/np": float(np.float32(0.1)),
        "a/jax": float(np.float32(0.1)),
        "a/int": 2**40,
        "a/bool": 1,
    }


@pytest.mark.parametrize("name", ["loss", "Learner/loss", "learner/", "learner/a b", "metrics/nonfinite_count", ""])
def test_a_name_outside_the_scheme_is_refused(tmp_path, name):
    with metrics.MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="stage/name_unit"):
        writer.write(0, {name: 1.0})


@pytest.mark.parametrize("value", ["0.5", np.zeros(2), [1.0], {}])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path, value):
    with metrics.MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="learner/loss"):
        writer.write(0, {"learner/loss": value})


def test_steps_must_advance_also_over_a_resume(tmp_path):
    _write(tmp_path, range(3))
    with metrics.MetricsWriter(tmp_path, start_step=3) as writer, pytest.raises(ValueError, match="step 2 after"):
        writer.write(2, {})


def test_tensorboard_holds_every_step_at_once_and_hides_the_repeated_ones(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(0, {"learner/loss": 0.5})
        writer.write(1, {"learner/loss": 0.25})
        seen = [(event.step, v.simple_value) for event in _events(tmp_path) for v in event.summary.value]
        assert (1, 0.25) in seen  # before close: a killed run loses nothing
    metrics.MetricsWriter(tmp_path, start_step=1).close()
    starts = [event.step for event in _events(tmp_path) if event.WhichOneof("what") == "session_log"]
    assert starts == [0, 1]
