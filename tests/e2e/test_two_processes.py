"""Two processes over loopback: the numbers of one, each reading its own share of a batch, one writing."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from rstar2_jax import stops
from rstar2_jax.io import checkpoint, metrics
from tests.e2e import starts

pytestmark = pytest.mark.e2e

FILES = [f"--gin_file={name}" for name in starts.FILES]
SMALL = ("Model.d_model=32", "Model.d_mlp=64", "Model.layers=1", "Demonstrations.count=256", "Run.save_every_steps=2",
         "Optimizer.schedule='constant'")  # fmt: skip


def environment(devices, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    return {**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags, **more}  # fmt: skip


def start(line, devices, processes, code=0, last=(), ask=lambda started: None):
    """The same command once, or as processes that join over a free port of loopback; the last with more words. `ask` is
    called with the processes once they run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for rank in range(processes):
        told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(rank)}
        env = environment(devices // processes, **(told if processes > 1 else {}))
        words = [*line, *(last if rank == processes - 1 else ())]
        started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    texts = []
    try:
        ask(started)
        for process in started:
            texts.append(process.communicate(timeout=240)[0])
            assert process.returncode == code, texts[-1]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return texts


def terminate_last_after(step, workdir):
    """Sends SIGTERM to the last process alone, as a node that is taken away does, once a step is written."""

    def ask(started):
        give_up, path = time.monotonic() + 200, workdir / metrics.METRICS_FILE
        while not (path.exists() and f'"step": {step}' in path.read_text()):
            assert time.monotonic() < give_up and all(process.poll() is None for process in started)
            time.sleep(0.05)
        started[-1].send_signal(signal.SIGTERM)

    return ask


def test_fine_tuning_over_two_processes_gives_the_run_of_one_and_goes_on_from_its_checkpoint(tmp_path):
    def line(name, steps):
        bindings = [f"--gin_bindings={text}" for text in (*SMALL, "Learner.mesh=(1, 2, 1)")]
        launch = [sys.executable, "-m", "rstar2_jax.launch", *FILES, *bindings]
        return [*launch, f"--workdir={tmp_path / name}", f"--steps={steps}"]

    start(line("one", 4), devices=2, processes=1)
    stopped = [*line("two", 4), "--gin_bindings=Run.save_every_steps=100"]
    asked = terminate_last_after(0, tmp_path / "two")
    start(stopped, devices=2, processes=2, code=stops.INTERRUPTED, ask=asked)
    assert 1 <= checkpoint.read_record(tmp_path / "two")["step"] < 4
    first, second = start(line("two", 4), devices=2, processes=2)
    assert "step" in first and "step" not in second.replace("demonstrations", "")
    alone, together = metrics.read_metrics(tmp_path / "one"), metrics.read_metrics(tmp_path / "two")
    assert together["step"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(together["learner/loss"], alone["learner/loss"], atol=1e-5)
    pair = [checkpoint.restore_params(tmp_path / name)[0] for name in ("one", "two")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *pair)
    assert json.loads((tmp_path / "two" / "resolved.json").read_text())["outcome"] == "exit code 0"


def test_reinforcement_learning_over_two_processes_gives_the_run_of_one(tmp_path, tmp_path_factory):
    # With what looks beyond a process's own rows: the entropies of all tokens, a reference that lies as the state does.
    overlays = ("ablation/kl.gin", "ablation/high_entropy_tokens.gin")
    rl = [f"--gin_file={name}" for name in ("stage1.gin", "model/box.gin", "scale/box.gin", *overlays)]
    rollouts = [
        "Rollout.prompts_per_step=4",
        "Rollout.oversample=8",
        "Rollout.group_size=4",
        "Rollout.engine_slots=16",
        "Roc.max_refills=3",
        "Run.save_every_steps=2",
        "HELD_OUT_EVERY=0",
        "Optimizer.lr=2e-3",
    ]
    fine_tuned = starts.fine_tuned(tmp_path_factory)
    launch = [sys.executable, "-m", "rstar2_jax.launch"]

    def line(name, *more):
        bound = [*starts.SIZES, *rollouts, f"Run.init_from='{fine_tuned}'", "Learner.mesh=(1, 2, 1)", *more]
        return [*launch, *rl, *(f"--gin_bindings={t}" for t in bound), f"--workdir={tmp_path / name}", "--steps=3"]

    start(line("one"), devices=2, processes=1)
    asked = terminate_last_after(0, tmp_path / "two")
    stopped = line("two", "Run.save_every_steps=100")
    texts = start(stopped, devices=2, processes=2, code=stops.INTERRUPTED, ask=asked)
    assert checkpoint.read_record(tmp_path / "two")["step"] < 3
    texts += start(line("two"), devices=2, processes=2)
    assert all("reward" not in text for text in texts[1::2])  # one leads and shows what happens
    alone, together = metrics.read_metrics(tmp_path / "one"), metrics.read_metrics(tmp_path / "two")
    assert together["step"].tolist() == [0, 1, 2] and np.nanmax(together["learner/grad_norm"]) > 0
    np.testing.assert_allclose(together["rollout/reward_mean"][0], alone["rollout/reward_mean"][0])
    np.testing.assert_allclose(together["learner/grad_norm"][0], alone["learner/grad_norm"][0], rtol=1e-3)
    assert checkpoint.read_record(tmp_path / "two")["step"] == 3
    checkpoint.restore_params(tmp_path / "two")


def test_processes_that_were_started_otherwise_are_refused_by_name(tmp_path):
    launch = [sys.executable, "-m", "rstar2_jax.launch", *FILES, *(f"--gin_bindings={text}" for text in SMALL)]
    line = [*launch, "--gin_bindings=Learner.mesh=(1, 2, 1)", f"--workdir={tmp_path / 'run'}", "--steps=2"]
    for text in start(line, devices=2, processes=2, code=2, last=["--gin_bindings=Optimizer.lr=0.5"]):
        assert "error: processes [1] were started otherwise" in text and "has 'lr = 0.5'" in text


def test_an_error_of_the_leader_alone_ends_the_others_as_well(tmp_path):
    files = [f"--gin_file={name}" for name in ("stage1.gin", "model/box.gin", "scale/box.gin")]
    told = ("Learner.mesh=(1, 2, 1)", "Task.source='jsonl'", "Task.path='/nowhere/problems.jsonl'", "Run.init_from=''")
    line = [sys.executable, "-m", "rstar2_jax.launch", *files, *(f"--gin_bindings={t}" for t in (*starts.SIZES, *told))]
    leader, _ = start([*line, f"--workdir={tmp_path / 'run'}", "--steps=2"], devices=2, processes=2, code=1)
    assert "/nowhere/problems.jsonl" in leader


SHARE = textwrap.dedent("""
    import os, sys
    import jax
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]))
    import numpy as np
    from rstar2_jax import settings
    from rstar2_jax.learner import objective, update
    from rstar2_jax.model import decoder
    from rstar2_jax.types import TrainBatch

    sizes = settings.Model(
        family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, max_positions=64
    )
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2), microbatch_rows=4, row_tokens=16, mesh=(2, 1, 1)
    )
    trainer = update.Learner(sizes, learner, objective.supervised(), total_steps=4)
    rng = np.random.default_rng(0)
    full = np.ones((4, 16), np.int32)
    batch = TrainBatch(
        tokens=rng.integers(0, 64, (4, 16)).astype(np.int32), positions=np.arange(16, dtype=np.int32)[None] * full,
        segment_ids=full, loss_mask=(full * np.arange(16) > 2), behavior_logprobs=full * 0.0, advantages=full * 0.0,
    )
    batch = batch.replace(behavior_logprobs=np.zeros((4, 16), np.float32), advantages=np.zeros((4, 16), np.float32))
    trained = float(batch.loss_mask.sum())
    if jax.process_count() == 2:  # what belongs to the other process is not there at all
        theirs = slice(2, 4) if jax.process_index() == 0 else slice(0, 2)
        batch.tokens[theirs], batch.loss_mask[theirs] = -1, False
    state = trainer.create(decoder.init_params(sizes, jax.random.key(0)))
    state, told = trainer.update(state, [batch], trained)
    print("told", told["loss"], told["grad_norm"], told["tokens"])
""")


def test_each_process_needs_its_own_share_of_a_batch_alone(tmp_path):
    script = pathlib.Path(tmp_path / "share.py")
    script.write_text(SHARE)

    def told(texts):
        return [[float(word) for word in t.split("told ")[1].split()] for t in texts]

    (alone,) = told(start([sys.executable, str(script)], devices=2, processes=1))
    for found in told(start([sys.executable, str(script)], devices=2, processes=2)):
        np.testing.assert_allclose(found, alone, rtol=1e-5)
        assert found[2] == 4 * 13


TORN = textwrap.dedent("""
    import os, sys
    import jax
    rank = int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, rank)
    from rstar2_jax import settings
    from rstar2_jax.algo import optimizer as optimizers
    from rstar2_jax.io import checkpoint
    from rstar2_jax.learner import state
    from rstar2_jax.model import decoder, sharding

    sizes = settings.Model(
        family="qwen3", vocab_size=64, d_model=32, d_mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, max_positions=64
    )
    def made(seed):
        params = decoder.init_params(sizes, jax.random.key(seed))
        transform = optimizers.make_optimizer(settings.Optimizer(lr=1e-3), 10)
        spread = sharding.Layout(sharding.make_mesh((1, 2, 1)))
        return state.create(params, transform, state.layout(params, transform, spread))

    store = checkpoint.Checkpoints(sys.argv[1], keep=3)
    for step in (1, 2):
        store.save(step, made(step), {"n": step})
        store.wait()
    read = checkpoint.ocp.CheckpointManager.restore
    def fails_here(self, step, *rest, **more):
        if rank == 1 and step == 2:
            raise OSError(116, "Stale file handle")
        return read(self, step, *rest, **more)
    checkpoint.ocp.CheckpointManager.restore = fails_here
    step, found, record = store.restore(made(0))
    store.set_aside_after(step)
    store.save(2, found, {"n": 22})
    store.close()
    checkpoint.ocp.CheckpointManager.restore = read
    places = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), found)
    _, again = checkpoint.restore_params(sys.argv[1], places.params)
    print("told", step, record["n"], again["n"])
""")


def test_what_one_process_cannot_read_no_process_goes_on_from_and_nothing_is_deleted(tmp_path):
    script = pathlib.Path(tmp_path / "torn.py")
    script.write_text(TORN)
    texts = start([sys.executable, str(script), str(tmp_path / "kept")], devices=2, processes=2)
    assert all("told 1 1 22" in text for text in texts), texts
    assert "another process cannot read it" in texts[0] and "Stale file handle" in texts[1]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"1", "2", "2.unreadable"}
