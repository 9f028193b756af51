"""Trajectories on disk: exact round trips, whole files or none, and the same bytes for the same records."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax.io import trajectories
from rstar2_jax.types import (
    CallStatus,
    FinishReason,
    Prompt,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)

_PROMPT = Prompt(id="gcd-7", question="What is gcd(12, 18)? \u2200", answer="6", source="gcd")


def _turn(mask, logprobs, calls=(), results=(), finish_reason=FinishReason.STOP):
    mask = np.array(mask, bool)
    return Turn(
        token_ids=np.arange(len(mask), dtype=np.int32) + 5,
        mask=mask,
        behavior_logprobs=np.where(mask, np.array(logprobs, np.float32), np.float32(0)),
        weights_versions=np.where(mask, 3, -1).astype(np.int32),
        calls=calls,
        results=results,
        finish_reason=finish_reason,
    )


def _trajectory(**changes):
    call = ToolCall(name="python", arguments={"code": "print('</tool_call>')\n", "n": [1, {"x": None}]})
    bad = ToolCall(name="", arguments={}, error="no JSON object found")
    done = ToolResult(status=CallStatus.OK, stdout="6\n", queue_s=0.1 + 0.2, run_s=1e-3)
    failed = ToolResult(status=CallStatus.PARSE_ERROR, stderr="\ud800 lone")
    fields = {
        "prompt_id": _PROMPT.id,
        "prompt_ids": np.array([1, 2, 3], np.int32),
        "seed": 2**63 - 1,
        "sample_index": 4,
        "turns": (
            _turn([1, 1, 0, 0], [-0.1, -1e-8, 0, 0], (call, bad), (done, failed)),
            _turn([1], [-math.inf], finish_reason=FinishReason.LENGTH),
        ),
        "stop_reason": StopReason.LENGTH,
        "answer": "6",
        "verdict": Verdict.CORRECT,
        "engine": "embedded",
    }
    return Trajectory(**{**fields, **changes})


def _assert_equal(one, other):
    for field in ("prompt_id", "seed", "sample_index", "stop_reason", "answer", "verdict", "engine"):
        assert getattr(one, field) == getattr(other, field)
        assert type(getattr(one, field)) is type(getattr(other, field))
    assert len(one.turns) == len(other.turns)
    pairs = [(one.prompt_ids, other.prompt_ids)]
    for a, b in zip(one.turns, other.turns, strict=True):
        assert (a.calls, a.results, a.finish_reason) == (b.calls, b.results, b.finish_reason)
        fields = ("token_ids", "mask", "behavior_logprobs", "weights_versions")
        pairs += [(getattr(a, field), getattr(b, field)) for field in fields]
    for a, b in pairs:
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_a_trajectory_comes_back_equal_through_strict_json():
    trajectory = _trajectory()
    text = json.dumps(trajectories.trajectory_to_json(trajectory), allow_nan=False)
    _assert_equal(trajectories.trajectory_from_json(json.loads(text)), trajectory)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=True), max_size=20), st.text(), st.sampled_from(CallStatus))
def test_any_float32_bit_pattern_any_text_and_any_status_survive(logprobs, text, status):
    call = ToolCall(name=text, arguments={text: text}, error=text)
    result = ToolResult(status=status, stdout=text, stderr=text)
    trajectory = _trajectory(turns=(_turn([1] * len(logprobs), logprobs, (call,), (result,)),), answer=text)
    text_json = json.dumps(trajectories.trajectory_to_json(trajectory), allow_nan=False)
    _assert_equal(trajectories.trajectory_from_json(json.loads(text_json)), trajectory)


def test_arguments_that_strict_json_cannot_hold_survive():
    call = ToolCall(name="f", arguments=json.loads('{"x": NaN, "y": 1e999, "z": 123456789012345678901234567890}'))
    trajectory = _trajectory(turns=(_turn([1], [-1.0], (call,), (ToolResult(status=CallStatus.OK),)),))
    value = json.loads(json.dumps(trajectories.trajectory_to_json(trajectory), allow_nan=False))
    arguments = trajectories.trajectory_from_json(value).turns[0].calls[0].arguments
    assert math.isnan(arguments["x"]) and arguments["y"] == math.inf
    assert arguments["z"] == 123456789012345678901234567890


def test_arguments_nested_too_deep_do_not_end_the_run(tmp_path):
    nested = []
    for _ in range(200_000):
        nested = [nested]
    call = ToolCall(name="f", arguments={"x": nested})
    trajectory = _trajectory(turns=(_turn([1], [-1.0], (call,), (ToolResult(status=CallStatus.OK),)),))
    trajectories.write_step(tmp_path, 0, [trajectories.Record(prompt=_PROMPT, group=0, trajectory=trajectory)])
    (record,) = trajectories.read_step(tmp_path, 0)
    assert "nested too deep" in record.trajectory.turns[0].calls[0].error


def _records():
    kept = trajectories.Record(
        prompt=_PROMPT,
        group=0,
        trajectory=_trajectory(),
        p_err=1 / 3,
        p_format=0.0,
        kept=True,
        weight=1 / (1 / 3 + 0.1),
        advantage=-0.258199,
    )
    lost = trajectories.Record(
        prompt=_PROMPT,
        group=1,
        trajectory=_trajectory(turns=(), stop_reason=StopReason.LOST, verdict=Verdict.UNSCORED, answer=None),
    )
    return [kept, lost]


def test_a_step_is_written_and_read_with_rocs_choice(tmp_path):
    path = trajectories.write_step(tmp_path, 12, _records())
    assert path == tmp_path / "trajectories" / "step_000012.jsonl.gz"
    read = trajectories.read_step(tmp_path, 12)
    for record, other in zip(_records(), read, strict=True):
        _assert_equal(record.trajectory, other.trajectory)
        for field in ("prompt", "group", "p_err", "p_format", "kept", "weight", "advantage"):
            assert getattr(record, field) == getattr(other, field)


def test_every_line_is_json_that_other_programs_can_read(tmp_path):
    path = trajectories.write_step(tmp_path, 0, _records())
    with gzip.open(path, "rt", encoding="ascii") as lines:
        header, first, second = (json.loads(line) for line in lines)
    assert header == {"format": 1, "step": 0, "count": 2}
    assert first["prompt"]["answer"] == "6" and first["trajectory"]["turns"][0]["results"][0]["status"] == "ok"
    assert second["kept"] is False and second["advantage"] is None


def test_numpy_scalars_are_accepted(tmp_path):
    record = trajectories.Record(
        prompt=_PROMPT,
        group=np.int64(1),
        trajectory=_trajectory(seed=np.uint32(7), sample_index=np.int32(2)),
        p_err=np.float32(0.5),
        kept=np.True_,
        advantage=np.float32(0.1),
    )
    trajectories.write_step(tmp_path, 0, [record])
    (read,) = trajectories.read_step(tmp_path, 0)
    assert (read.group, read.p_err, read.kept, read.advantage) == (1, 0.5, True, float(np.float32(0.1)))
    assert (read.trajectory.seed, read.trajectory.sample_index) == (7, 2)


def test_the_same_records_give_the_same_bytes(tmp_path):
    one = trajectories.write_step(tmp_path / "a", 3, _records()).read_bytes()
    assert trajectories.write_step(tmp_path / "b", 3, _records()).read_bytes() == one


def test_an_advantage_that_is_not_finite_is_refused_and_the_old_file_stays(tmp_path):
    trajectories.write_step(tmp_path, 0, _records())
    bad = trajectories.Record(prompt=_PROMPT, group=0, trajectory=_trajectory(), advantage=math.nan)
    with pytest.raises(ValueError):
        trajectories.write_step(tmp_path, 0, [bad])
    assert len(trajectories.read_step(tmp_path, 0)) == 2


def test_steps_are_listed_in_order_and_cut_on_resume(tmp_path):
    assert trajectories.list_steps(tmp_path) == []
    for step in (10, 2, 1_000_000):
        trajectories.write_step(tmp_path, step, [])
    (tmp_path / "trajectories" / "step_000011.jsonl.gz.tmp").write_bytes(b"half")
    assert trajectories.list_steps(tmp_path) == [2, 10, 1_000_000]
    trajectories.cut(tmp_path, 10)
    assert os.listdir(tmp_path / "trajectories") == ["step_000002.jsonl.gz"]


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    path = trajectories.write_step(tmp_path, 0, _records())
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"", b"text", gzip.compress(b'{"format": 9, "count": 0}\n')):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="step_000000"):
            trajectories.read_step(tmp_path, 0)
    with pytest.raises(FileNotFoundError):
        trajectories.read_step(tmp_path, 1)


def test_an_array_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        trajectories.trajectory_to_json(_trajectory(prompt_ids=np.zeros(2, np.complex64)))


def test_kill_9_in_the_middle_of_writing_leaves_only_whole_files(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from rstar2_jax.io import trajectories\n"
        "from rstar2_jax.types import *\n"
        "rng = np.random.default_rng(0); n = 4000\n"
        "turn = Turn(token_ids=rng.integers(0, 9, n, dtype=np.int32), mask=np.ones(n, bool),\n"
        "  behavior_logprobs=-rng.random(n, np.float32), weights_versions=np.zeros(n, np.int32),\n"
        "  finish_reason=FinishReason.STOP)\n"
        "t = Trajectory(prompt_id='p', prompt_ids=np.zeros(1, np.int32), seed=0, sample_index=0, turns=(turn,),\n"
        "  stop_reason=StopReason.ANSWERED)\n"
        "p = Prompt(id='p', question='q', answer='1', source='s')\n"
        "for step in range(10**6):\n"
        "    trajectories.write_step(sys.argv[1], step, [trajectories.Record(prompt=p, group=0, trajectory=t)] * 40)\n"
        "    print(step, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = trajectories.list_steps(tmp_path)
    assert steps == list(range(len(steps))) and len(steps) >= 3
    for step in steps:
        assert len(trajectories.read_step(tmp_path, step)) == 40
