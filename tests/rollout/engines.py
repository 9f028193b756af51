"""Ways to open a rollout engine for the contract tests: each gives the same interface on the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rstar2_jax.model import decoder, hf
from rstar2_jax.rollout import sglang
from rstar2_jax.rollout.engine import Request, RolloutEngine, Sampling
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.settings import Model
from rstar2_jax.weights import publish

# Sizes that a real server takes too, large enough for chunks on the cuts of two ranks.
MODEL = Model(
    family="qwen3",
    vocab_size=512,
    d_model=256,
    d_mlp=512,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    max_positions=512,
    tie_embeddings=False,
)
CONTEXT = 256
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SGLANG_PYTHON = pathlib.Path(os.environ.get("VENV_SGLANG", REPOSITORY / ".venv-sglang")) / "bin" / "python"
START_S = 900.0  # limit on the start of a process; a real server takes about 60 s alone on its cores
DEADLINES = sglang.Deadlines(probe_s=60, control_s=120, update_s=200, turn_s=300)
VERSIONS = (0, 1)
WAIT_S = 400.0  # limit of one test's engine work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What a contract test runs on: how to open the engine, its weights and how exact it is.

    Args:
        open: gives an engine with version 0, idle and not paused.
        params: the learner's parameters of each version of the store.
        logprob_atol: largest difference from the learner's log-probabilities.
        long_tokens: new ids of a request that is to be still running when the test acts.
    """

    open: Callable[[], contextlib.AbstractAsyncContextManager[RolloutEngine]]
    store: str
    params: dict[int, Any]
    logprob_atol: float = 1e-4
    long_tokens: int = 200

    def run(self, use):
        """What `use(engine)` returns, on an engine that is closed afterwards."""

        async def work():
            async with self.open() as engine:
                return await use(engine)

        return asyncio.run(asyncio.wait_for(work(), timeout=WAIT_S))


def sharpened(key, model=MODEL):
    """Random parameters whose distributions are neither flat nor certain, so that samples differ between weights."""
    params = decoder.init_params(model, jax.random.key(key))
    if "head" in params:
        shape = params["head"]["kernel"].shape
        params["head"]["kernel"] = jax.random.normal(jax.random.key(100 + key), shape) * 0.15
    return params


def publish_versions(root):
    """Both versions in a store at root; returns the parameters of each."""
    params = {version: sharpened(version) for version in VERSIONS}
    for version, tree in params.items():
        publish.publish(tree, MODEL, root, version, keep=len(VERSIONS))
    return params


def in_process(store, **changes):
    """Opens a fresh embedded engine each time."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[RolloutEngine]:
        sizes = {"slots": 6, "context_tokens": CONTEXT, "prefill_chunk_tokens": 16, "decode_steps": 1, **changes}
        engine = JaxEngine(MODEL, **sizes)
        try:
            await engine.update_weights(store, 0)
            yield engine
        finally:
            await engine.close()

    return opened


def over_http(url, store, model=MODEL):
    """Opens a client of a server that lives longer than it."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[RolloutEngine]:
        engine = await sglang.connect(url, model, deadlines=DEADLINES, context_tokens=CONTEXT)
        try:
            await engine.resume()
            await engine.update_weights(store, 0)
            yield engine
            if await engine.alive():
                await engine.resume()
        finally:
            await engine.close()

    return opened


@contextlib.contextmanager
def served(folder, *, model=MODEL, **sizes) -> Iterator[tuple[str, subprocess.Popen]]:
    """(url, process) of an embedded engine in a process of its own, ended afterwards."""
    path = pathlib.Path(folder) / "model.json"
    path.write_text(json.dumps(dataclasses.asdict(model)))
    sizes = {"slots": 6, "context_tokens": CONTEXT, "prefill_chunk_tokens": 16, "decode_steps": 1, **sizes}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, "-m", "rstar2_jax.rollout.serve", f"--model={path}", *flags]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sandbox'}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server ended at once ({process.wait()})"
            yield json.loads(line)["url"], process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port():
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def real_server(folder, *, ranks=1, dtype="float32", extra=()) -> Iterator[tuple[str, subprocess.Popen, pathlib.Path]]:
    """(url, process, log) of a real SGLang server on a Hugging Face folder, ended afterwards with all its processes."""
    if not SGLANG_PYTHON.is_file():
        pytest.skip("no environment for SGLang: run `make sglang-env`")
    url = f"http://127.0.0.1:{free_port()}"
    log = pathlib.Path(folder).parent / f"server-{ranks}-{url.rpartition(':')[2]}.log"
    flags = ["--device=cpu", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--grammar-backend=none"]
    flags += ["--max-total-tokens=4096", "--context-length=512", "--disable-overlap-schedule", "--skip-tokenizer-init"]
    flags += ["--sleep-on-idle"]  # its processes spin otherwise
    flags += [f"--dtype={dtype}", f"--tp={ranks}", "--host=127.0.0.1", f"--port={url.rpartition(':')[2]}", *extra]
    command = [str(SGLANG_PYTHON), "-m", "sglang.launch_server", f"--model-path={folder}", *flags]
    if shutil.which("setpriv"):  # tests that end in the middle leave no server behind
        command = ["setpriv", "--pdeathsig=KILL", *command]
    # The server's environment is its own: none of the variables that the tests were started with reach into it.
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))) if ranks > 1 else "all",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for(url, process, log)
        yield url, process, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the server and its ranks, nobody else
        process.wait(30)


def _wait_for(url, process, log):
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            tail = log.read_text()[-3000:]
            assert process.poll() is None, f"the server ended: {tail}"
            assert time.monotonic() < end, f"the server is not there after {START_S:g} s: {tail}"
            time.sleep(1)


def hugging_face_folder(folder, params, model=MODEL, dtype="float32"):
    """What a real server is started on."""
    hf.save_folder(params, model, folder, dtype=dtype, ids=hf.SpecialIds())
    return folder


def request(seed, *, prompt=None, new=12, stop=(), rid=None, **sampling):
    """A request whose prompt follows from its seed."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, MODEL.vocab_size, size=rng.integers(2, 30)).tolist() if prompt is None else prompt
    limits = Sampling(max_new_tokens=new, stop_ids=tuple(stop), **sampling)
    return Request(rid=rid or f"r{seed}", prompt_ids=prompt, seed=seed, sampling=limits)


@jax.jit
def _whole_row(params, row, length):
    at = np.arange(CONTEXT)[None]
    model, variables = decoder.Decoder(MODEL), {"params": params}
    hidden = model.apply(variables, row[None], at, (at < length).astype(np.int32))
    return jax.nn.log_softmax(model.apply(variables, hidden, method=decoder.Decoder.logits)[0])


def learner_logprobs(params, ids):
    """Log-probability of every id but the first, as the learner computes them on a whole row."""
    row = np.zeros(CONTEXT, np.int32)
    row[: len(ids)] = ids
    return np.asarray(_whole_row(params, row, len(ids)))[np.arange(len(ids) - 1), ids[1:]]
