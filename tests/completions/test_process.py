"""The endpoint as a run of its own, beside an evaluation of the same model: the same question, the same sample."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import aiohttp
import jax
import pytest

from rstar2_jax import gin_strict
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.io import trajectories
from rstar2_jax.model import decoder, hf

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
OVERLAYS = ["scale/box.gin", "model/toy.gin"]
LIMIT_S = 300


def command(run, folder, workdir, *bindings):
    files = [f"--gin_file={REPOSITORY / 'gin' / name}" for name in (run, *OVERLAYS)]
    return [
        sys.executable, "-m", "rstar2_jax.launch", *files, f"--workdir={workdir}",
        *(f"--gin_bindings={text}" for text in (f"settings.Run.init_from={str(folder)!r}", *bindings)),
    ]  # fmt: skip


def environment():
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sandbox'}", "XLA_FLAGS": ""}


@contextlib.contextmanager
def running(folder, workdir, *bindings):
    """(url, process) of an endpoint in a process of its own."""
    said = command("endpoint.gin", folder, workdir, "settings.Endpoint.port=0", *bindings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(said, env=environment(), **pipes) as process:
        try:
            end, note = time.monotonic() + LIMIT_S, workdir / "endpoint.json"
            while not note.exists():
                assert process.poll() is None and time.monotonic() < end, process.stdout.read()
                time.sleep(0.1)
            yield json.loads(note.read_text())["url"], process
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy model with random weights, as a Hugging Face folder."""
    _, arguments = gin_strict.build(
        gin_strict.resolve([str(REPOSITORY / "gin" / name) for name in ("eval.gin", *OVERLAYS)], [])
    )
    path = tmp_path_factory.mktemp("toy") / "toy-model"
    params = decoder.init_params(arguments["model"], jax.random.key(0))
    hf.save_folder(params, arguments["model"], path, dtype="float32", ids=hf.SpecialIds())
    return path


def test_a_question_asked_by_its_seed_gives_the_sample_that_an_evaluation_made(folder, tmp_path):
    said = command("eval.gin", folder, tmp_path / "eval", "PROMPTS=2", "SAMPLES=2")
    done = subprocess.run(said, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = trajectories.list_steps(tmp_path / "eval")
    records = [record for step in steps for record in trajectories.read_step(tmp_path / "eval", step)]
    assert len(records) > 10

    async def ask(url):
        async with aiohttp.ClientSession(f"{url}/") as http:

            async def one(record):
                body = {
                    "model": "toy-model",
                    "messages": [{"role": "user", "content": record.prompt.question}],
                    "seed": record.trajectory.seed,
                }
                async with http.post("v1/chat/completions", json=body) as response:
                    return response.status, await response.json()

            return await asyncio.gather(*(one(record) for record in records))

    with running(folder, tmp_path / "endpoint", "settings.Endpoint.reasoning='inside'") as (url, process):
        answers = asyncio.run(ask(url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        printed = process.stdout.read()
    assert not (tmp_path / "endpoint" / "endpoint.json").exists()
    assert f"served {len(records)}, refused 0, lost by faults of ours 0" in printed and "loopback only" in printed
    decode = tokenizers.Tokenizer.box().decode
    for record, (status, body) in zip(records, answers, strict=True):
        assert status == 200
        choice, rest = body["choices"][0], body["choices"][0]["message"]["content"]
        assert choice["episode"]["stop_reason"] == record.trajectory.stop_reason.value
        for turn in record.trajectory.turns:
            text = decode([i for i in turn.sampled_ids.tolist() if i != tokenizers.Tokenizer.box().eos_ids[0]])
            assert text in rest
            rest = rest.split(text, 1)[1] if text else rest
        assert rest.strip() == ""
        assert body["usage"]["completion_tokens"] == record.trajectory.num_sampled_tokens


def test_an_endpoint_without_weights_says_what_is_missing(tmp_path):
    said = command("endpoint.gin", "", tmp_path / "endpoint")
    done = subprocess.run(said, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and "name the run or the Hugging Face folder to serve" in done.stderr
