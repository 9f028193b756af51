"""Checkpoints: whole or absent, newest good one first, restored onto any mesh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rstar2_jax import settings
from rstar2_jax.algo import optimizer as optimizers
from rstar2_jax.io import checkpoint
from rstar2_jax.learner import state
from rstar2_jax.model import decoder, sharding

TINY = settings.Model(
    family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, max_positions=64
)


def make_state(seed: int, mesh=(1, 1, 1), offload="none"):
    params = decoder.init_params(TINY, jax.random.key(seed))
    transform = optimizers.make_optimizer(settings.Optimizer(lr=1e-3), 10)
    spread = sharding.Layout(sharding.make_mesh(mesh))
    return state.create(params, transform, state.layout(params, transform, spread, offload=offload))


def save_whole(folder, step, saved, record):
    """Save and wait until it is committed."""
    store = checkpoint.Checkpoints(folder, keep=1)
    store.save(step, saved, record)
    store.close()


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_saved_state_comes_back_bit_for_bit_with_its_record(tmp_path):
    saved = make_state(1)
    store = checkpoint.Checkpoints(tmp_path, keep=2)
    store.save(3, saved, {"cursor": 48, "surplus": []})
    step, restored, record = store.restore(make_state(2))
    assert (step, record["cursor"], record["surplus"]) == (3, 48, [])
    assert_equal(saved, restored)


def test_an_empty_folder_restores_nothing(tmp_path):
    assert checkpoint.Checkpoints(tmp_path, keep=1).restore(make_state(0)) is None


def test_only_the_newest_are_kept_over_restarts(tmp_path):
    for start in range(3):
        store = checkpoint.Checkpoints(tmp_path, keep=1)
        store.save(start, make_state(start), {})
        store.close()
    assert checkpoint.Checkpoints(tmp_path, keep=1).steps() == [2]


def test_a_torn_checkpoint_is_passed_over_with_a_word_and_the_one_before_is_taken(tmp_path):
    told: list[str] = []
    store = checkpoint.Checkpoints(tmp_path, keep=3, warn=told.append)
    good = make_state(1)
    store.save(1, good, {"n": 1})
    store.save(2, make_state(2), {"n": 2})
    store.close()
    for shard in (tmp_path / "2" / "state").rglob("d/*"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    again = checkpoint.Checkpoints(tmp_path, keep=3, warn=told.append)
    step, restored, record = again.restore(make_state(0))
    assert (step, record["n"]) == (1, 1) and "2 is torn" in told[0]
    assert_equal(good, restored)
    words: list[str] = []
    assert checkpoint.restore_params(tmp_path, warn=words.append)[1]["n"] == 1
    assert len(words) == 1 and "passed over what cannot be read (step 2: " in words[0]
    for kept in ("2.unreadable", "2.unreadable-2"):  # nothing is deleted: a file system may come back
        again.set_aside_after(step)
        assert again.steps() == [1] and (tmp_path / kept / "state").is_dir() and kept in told[-1]
        again.save(2, good, {"n": 2})
        assert again.restore(make_state(0))[0] == 2
    again.save(3, good, {"n": 3})
    again.close()
    assert checkpoint.read_record(tmp_path)["n"] == 3 and (tmp_path / "2.unreadable").is_dir()


def test_a_state_is_read_from_another_run_without_changing_it(tmp_path):
    save_whole(tmp_path / "checkpoints", 3, make_state(1), {"n": 3})
    leftover = tmp_path / "checkpoints" / f"4{checkpoint.ocp.utils.TMP_DIR_SUFFIX}7"  # that run may be saving
    leftover.mkdir()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    step, restored, record = checkpoint.restore_state(tmp_path, make_state(0))
    assert (step, record["n"]) == (3, 3)
    assert_equal(make_state(1), restored)
    checkpoint.restore_params(tmp_path)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_read_that_fails_once_passes_nothing_over():
    faults, told = [OSError(116, "Stale file handle")], []

    def read(step):
        if faults:
            raise faults.pop()
        return step

    found = checkpoint._newest_whole([1, 2], read, lambda step, fault: told.append(step))
    assert found == 2 and told == []


def test_each_torn_file_alone_is_passed_over(tmp_path):
    states = {1: make_state(1), 2: make_state(2)}
    store = checkpoint.Checkpoints(tmp_path / "whole", keep=3)
    for step, state_ in states.items():
        store.save(step, state_, {"n": step})
    store.close()
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole" / "2").rglob("*") if path.is_file()]
    torn = [path for path in files if path.parent.name == "d" or path.name == "metadata"]
    fallen_back = 0
    for number, path in enumerate(torn):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", root)
        (root / path).write_bytes((root / path).read_bytes()[:3])
        step, restored, _ = checkpoint.Checkpoints(root, keep=3, warn=lambda _: None).restore(make_state(0))
        params, record = checkpoint.restore_params(root)
        # A file that nothing refers to may be torn without harm; whatever is restored is whole.
        assert_equal(states[step], restored)
        assert_equal(states[record["n"]].params, params)
        fallen_back += step == 1
        assert checkpoint.read_record(root)["n"] in (1, 2)
    assert fallen_back >= 3


def test_when_every_checkpoint_is_torn_the_error_names_them(tmp_path):
    store = checkpoint.Checkpoints(tmp_path, keep=1, warn=lambda _: None)
    store.save(4, make_state(1), {})
    store.wait()
    for shard in (tmp_path / "4" / "state").rglob("d/*"):
        shard.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"none of the checkpoints \[4\]"):
        store.restore(make_state(0))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2)])
def test_a_state_saved_on_one_mesh_comes_back_on_another(tmp_path, mesh):
    saved = make_state(5, (2, 2, 2))
    save_whole(tmp_path, 7, saved, {})
    _, restored, _ = checkpoint.Checkpoints(tmp_path, keep=1).restore(make_state(6, mesh))
    assert_equal(saved, restored)
    kernel = restored.params["layers_0"]["mlp"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == mesh[0] * mesh[1] * mesh[2]
    counts = optax.tree.get_all_with_path(restored.opt_state, "count")
    assert counts and all(int(value) == 0 for _, value in counts)


@pytest.mark.parametrize("before, after", [("moments", "moments"), ("moments", "none"), ("none", "moments")])
def test_moments_on_the_host_are_saved_and_come_back_wherever_they_shall_be(tmp_path, before, after):
    saved = make_state(5, (1, 2, 2), before)
    save_whole(tmp_path, 7, saved, {})
    _, restored, _ = checkpoint.Checkpoints(tmp_path, keep=1).restore(make_state(6, (2, 1, 2), after))
    assert_equal(saved, restored)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(restored.opt_state) if leaf.ndim}
    assert kinds == {"device" if after == "none" else "pinned_host"}


def test_parameters_alone_are_read_from_a_finished_run_and_shapes_are_checked(tmp_path, caplog):
    saved = make_state(3)
    save_whole(tmp_path / "checkpoints", 9, saved, {"model": {"layers": 1}})
    caplog.clear()
    params, record = checkpoint.restore_params(tmp_path)
    assert_equal(saved.params, params)
    assert [line.getMessage() for line in caplog.records if line.levelname == "WARNING"] == []
    assert record["model"] == {"layers": 1} == checkpoint.read_record(tmp_path)["model"]
    wrong = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape, 1), leaf.dtype), params)
    with pytest.raises(checkpoint.CheckpointError, match="use the settings that the checkpoint was trained with"):
        checkpoint.restore_params(tmp_path, wrong)


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no such folder"):
        checkpoint.restore_params(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint"):
        checkpoint.restore_params(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint"):
        checkpoint.read_record(tmp_path)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    store = checkpoint.Checkpoints(tmp_path, keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="10 bytes free"):
        store.save(1, make_state(0), {})
    assert store.steps() == []


def test_another_number_of_cores_is_reported_on_resume(tmp_path, monkeypatch):
    told: list[str] = []
    store = checkpoint.Checkpoints(tmp_path, keep=1, warn=told.append)
    store.save(1, make_state(0), {})
    monkeypatch.setattr(checkpoint.os, "sched_getaffinity", lambda _: set(range(999)))
    store.restore(make_state(0))
    assert "cores" in told[0] and "999" in told[0] and "not bit for bit" in told[0]


def test_kill_nine_during_a_save_leaves_the_checkpoint_before_it(tmp_path):
    script = textwrap.dedent("""
        import sys, jax.numpy as jnp, optax
        from rstar2_jax.io import checkpoint
        from rstar2_jax.types import TrainState
        opt = optax.adamw(1e-3)
        params = {"w": jnp.ones((256, 1024))}
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt.init(params))
        store = checkpoint.Checkpoints(sys.argv[1], keep=2)
        for step in range(1, 10_000):
            store.save(step, state, {"n": step})
            print(step, flush=True)
    """)
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    reported = 0
    for line in child.stdout:
        reported = int(line)
        if reported >= 5:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    params = {"w": jnp.zeros((256, 1024))}
    like = checkpoint.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optax.adamw(1e-3).init(params))
    store = checkpoint.Checkpoints(tmp_path, keep=2, warn=lambda _: None)
    step, restored, record = store.restore(like)
    assert step >= reported - 1 and record["n"] == step  # the last one may still have been on its way
    np.testing.assert_array_equal(restored.params["w"], np.ones((256, 1024)))
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    store = checkpoint.Checkpoints(tmp_path, keep=50)
    advance = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + 1, s), donate_argnums=0)
    like = make_state(0)
    running, seen = make_state(0), {}
    for step in range(12):
        store.save(step, running, {})
        seen[step] = jax.tree.map(lambda leaf: np.array(leaf, copy=True), running.params)
        running = advance(running)
    store.close()
    for step, params in seen.items():
        assert_equal(params, checkpoint.Checkpoints(_only(tmp_path, step), keep=1).restore(like)[1].params)


def _only(folder, step):
    alone = folder.parent / f"only-{step}"
    shutil.copytree(folder / str(step), alone / str(step))
    return alone


@pytest.mark.parametrize("means", ["check", "wait", "save"])
def test_a_save_that_fails_in_the_background_is_raised_soon_after_and_the_one_before_it_stays(tmp_path, means):
    script = textwrap.dedent("""
        import resource, sys, time, jax, jax.numpy as jnp, optax
        from rstar2_jax.io import checkpoint
        from rstar2_jax.types import TrainState
        opt = optax.adamw(1e-3)
        params = {"w": jax.random.normal(jax.random.key(0), (256, 1024))}
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt.init(params))
        store = checkpoint.Checkpoints(sys.argv[1], keep=1)
        store.save(1, state, {"n": 1})
        store.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a file can no longer grow beyond it
        try:
            store.save(2, state, {"n": 2})
            for step in range(600):  # steps of training
                {"check": store.check, "wait": store.wait, "save": lambda: store.save(3, state, {})}[sys.argv[2]]()
                time.sleep(0.1)
        except checkpoint.CheckpointError as error:
            print(f"raised: {error}", flush=True)
    """)
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", script, str(tmp_path), means]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=120)
    assert "raised: " in done.stdout and str(tmp_path) in done.stdout, done.stderr
    store = checkpoint.Checkpoints(tmp_path, keep=1, warn=lambda _: None)
    assert store.steps() == [1]
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
