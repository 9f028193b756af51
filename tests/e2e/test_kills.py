"""Runs that are killed: the trainer, the sandbox worker, Redis. What comes out is as if nothing had happened. And the
control of them all: a run that may not learn leaves the policy as it was, through every publish and every fetch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from rstar2_jax.io import checkpoint, metrics, trajectories
from rstar2_jax.types import StopReason, Verdict
from tests.e2e import starts

pytestmark = pytest.mark.e2e

STEPS = 4
SMALL = (
    *starts.SIZES,
    "Rollout.prompts_per_step=4",
    "Rollout.oversample=8",
    "Rollout.group_size=4",
    "Rollout.engine_slots=16",
    "Roc.max_refills=2",
    "Run.save_every_steps=2",
    "Optimizer.lr=2e-3",
    "HELD_OUT_EVERY=2",
    "HELD_OUT_PROBLEMS=6",
)


def command(start, workdir, *bindings, steps=STEPS, overlays=()):
    """A run of stage 1 from what was fine-tuned below the folder `start`."""
    files = [f"--gin_file={name}" for name in ("stage1.gin", "model/box.gin", "scale/box.gin", *overlays)]
    init = f'Run.init_from="{start / "sft"}"'
    pairs = [f"--gin_bindings={text}" for text in (*SMALL, init, *bindings)]
    return [sys.executable, "-m", "rstar2_jax.launch", *files, f"--workdir={workdir}", f"--steps={steps}", *pairs]


def environment():
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}


def run(line, limit_s=240.0):
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=limit_s)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A model with a little of the format, and an uninterrupted RL run from it."""
    root = tmp_path_factory.mktemp("kills")
    (root / "sft").symlink_to(starts.fine_tuned(tmp_path_factory))
    code, text = run(command(root, root / "whole"))
    assert code == 0, text
    return root


def wait_for(condition, limit_s=120.0, process=None):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert process is None or process.poll() is None, "the run ended before it could be disturbed"
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def named(pid, word):
    """Descendants of a process whose command line holds the word."""
    matches = []
    for child in children(pid):
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line:
            matches.append(child)
    return matches


def final_params(workdir):
    return checkpoint.restore_params(workdir)[0]


def what_was_trained_on(workdir):
    """Prompts, seeds, ids, log-probabilities, verdicts and selection of every step, whichever engine it was."""
    rows = []
    for step in trajectories.list_steps(workdir):
        for record in trajectories.read_step(workdir, step):
            value = trajectories.record_to_json(record)
            value["trajectory"].pop("engine")
            for turn in value["trajectory"]["turns"]:
                for result in turn["results"]:
                    result.pop("queue_s"), result.pop("run_s")
            rows.append(json.dumps(value, sort_keys=True))
    return rows


def assert_same_run(left, right):
    jax.tree.map(np.testing.assert_array_equal, final_params(left), final_params(right))
    assert what_was_trained_on(left) == what_was_trained_on(right)
    first, second = metrics.read_metrics(left), metrics.read_metrics(right)
    assert first["step"].tolist() == second["step"].tolist() == list(range(STEPS))
    for name in ("rollout/reward_mean", "learner/grad_norm", "learner/lr", "mismatch/logprob_gap_max", "eval/accuracy"):
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_the_run_has_tools_rewards_and_updates_to_lose(started):
    numbers = metrics.read_metrics(started / "whole")
    assert np.nanmax(numbers["rollout/tool_rate"]) > 0.3
    assert np.nansum(numbers["rollout/status_ok"]) > 0
    assert np.nanmax(numbers["learner/grad_norm"]) > 0
    assert np.nansum(numbers["rollout/unscored"]) == 0
    assert np.nansum(numbers["rollout/refills"]) > 0
    assert np.nanmax(numbers["mismatch/logprob_gap_max"]) < 1e-3
    assert np.isfinite(numbers["eval/accuracy"]).tolist() == [True, False, True, False]
    assert numbers["eval/scored"][::2].tolist() == [6, 6] and numbers["eval/diverged"][::2].tolist() == [0, 0]


def test_a_run_of_learning_rate_zero_samples_from_the_same_policy_at_every_version(started):
    workdir = started / "still"
    code, text = run(command(started, workdir, "Optimizer.lr=0.0", steps=3))
    assert code == 0, text
    jax.tree.map(np.testing.assert_array_equal, final_params(workdir), final_params(started / "sft"))
    numbers = metrics.read_metrics(workdir)
    assert np.nanmax(numbers["learner/grad_norm"]) > 0 and np.nanmax(numbers["mismatch/logprob_gap_max"]) < 1e-4
    versions = {
        version
        for step in trajectories.list_steps(workdir)
        for record in trajectories.read_step(workdir, step)
        for turn in record.trajectory.turns
        for version in turn.weights_versions.tolist()
    }
    assert {0, 1, 2} <= versions


def test_kill_nine_of_the_trainer_in_a_step_and_the_same_command_gives_the_same_run_bit_for_bit(started):
    line = command(started, started / "killed")
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        # Step 3 is in work when the metrics of step 2 are there; the newest checkpoint is that of 2 done steps.
        log = started / "killed" / metrics.METRICS_FILE
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, process=process)
        descendants = children(process.pid)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not [pid for pid in descendants if Path(f"/proc/{pid}").exists()], 30)
    code, text = run(line)
    assert code == 0, text
    assert_same_run(started / "whole", started / "killed")
    code, text = run(line)
    assert code == 0 and "done already" in text


def test_a_run_that_generates_ahead_of_training_keeps_its_bound_over_a_kill(started):
    workdir, steps = started / "ahead", 6
    line = command(started, workdir, steps=steps, overlays=["ablation/async.gin"])
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        log = workdir / metrics.METRICS_FILE
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, process=process)
    finally:
        process.kill()
        process.wait()
    code, text = run(line)
    assert code == 0, text
    numbers = metrics.read_metrics(workdir)
    assert numbers["step"].tolist() == list(range(steps))
    assert numbers["rollout/staleness_max"].max() == 1  # it did run ahead, and never further than allowed
    ages = {step - int(turn.weights_versions[turn.mask].min()) for step, turn in kept_turns(workdir)}
    assert ages == {0, 1}
    assert np.nansum(numbers["rollout/unscored"]) == 0


def kept_turns(workdir):
    """(step, turn) of every trained rollout."""
    for step in trajectories.list_steps(workdir):
        for record in trajectories.read_step(workdir, step):
            if record.kept:
                yield from ((step, turn) for turn in record.trajectory.turns if turn.mask.any())


def test_a_run_on_engine_processes_is_the_run_on_the_engine_inside(started):
    line = command(started, started / "processes", overlays=["ablation/engine_processes.gin"])
    code, text = run(line)
    assert code == 0 and "2 engine processes ready" in text, text
    assert_same_run(started / "whole", started / "processes")


def test_a_polite_stop_ends_with_a_checkpoint_and_the_same_command_goes_on(started):
    line = command(started, started / "stopped")
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    log = started / "stopped" / metrics.METRICS_FILE
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 1, process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert checkpoint.read_record(started / "stopped")["step"] < STEPS
    assert run(line)[0] == 0
    assert_same_run(started / "whole", started / "stopped")


def test_the_next_stage_over_a_set_goes_on_at_the_end_of_an_epoch_bit_for_bit(started):
    folder = started / "eight"
    folder.mkdir()
    # So poor a model says each digit now and then: of 32 samples some are right, whatever the question.
    rows = [json.dumps({"question": f"gcd({4 * n},{4 * n + 4})", "answer": "4"}) for n in range(3, 11)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    told = (
        "Task.source='jsonl'",
        f"Task.path='{folder}'",
        f"Run.init_from='{started / 'whole'}'",
        "Run.optimizer_start='restart'",
        "Rollout.oversample=32",
        "Roc.max_refills=0",  # four prompts a step, two steps an epoch
        "HELD_OUT_EVERY=0",
    )
    for name, steps in (("set", 3), ("set-in-two", 2), ("set-in-two", 3)):
        code, text = run(command(started, started / name, *told, steps=steps))
        assert code == 0, text
    jax.tree.map(np.testing.assert_array_equal, *(final_params(started / name) for name in ("set", "set-in-two")))
    assert what_was_trained_on(started / "set") == what_was_trained_on(started / "set-in-two")
    asked = [{r.prompt.question for r in trajectories.read_step(started / "set-in-two", step)} for step in range(3)]
    assert len(asked[0] | asked[1]) == 8 and len(asked[2]) == 4  # all of the set once, then the next epoch
    rates = metrics.read_metrics(started / "set")["learner/lr"]
    rates = rates[np.isfinite(rates)]  # of the steps with something to learn from
    assert len(rates) and rates[0] == 0 and checkpoint.read_record(started / "set")["cursor"] == 12


@pytest.mark.parametrize("victim", ["redis-server", "rstar2_sandbox worker"])
def test_kill_nine_of_the_sandbox_leaves_no_wrong_reward(started, victim):
    workdir = started / f"without-{victim.split()[0]}"
    line = command(started, workdir)
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        log = workdir / metrics.METRICS_FILE
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 1, process=process)
        for pid in wait_for(lambda: named(process.pid, victim), process=process):
            os.kill(pid, signal.SIGKILL)
        text, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, text
    graded_elsewhere = dict(zip(*verdicts(started / "whole"), strict=True))
    for name, verdict in zip(*verdicts(workdir), strict=True):
        # The same ids have the same verdict as in the undisturbed run, or none at all.
        assert verdict in (Verdict.UNSCORED, graded_elsewhere.get(name, verdict))
    for step in trajectories.list_steps(workdir):
        for record in trajectories.read_step(workdir, step):
            statuses = [r.status for turn in record.trajectory.turns for r in turn.results]
            if any(status.value in ("infra", "rejected") for status in statuses):
                assert record.trajectory.stop_reason is StopReason.LOST
                assert record.trajectory.verdict is Verdict.UNSCORED and not record.kept


def verdicts(workdir):
    names, found = [], []
    for step in trajectories.list_steps(workdir):
        for record in trajectories.read_step(workdir, step):
            ids = [int(i) for turn in record.trajectory.turns for i in turn.token_ids]
            names.append(json.dumps([record.prompt.id, ids]))
            found.append(record.trajectory.verdict)
    return names, found
