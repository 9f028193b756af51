"""Our weight loader inside a real SGLang server, on one rank and on two: equal to the safetensors path, or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from rstar2_jax.model import hf
from rstar2_jax.rollout import sglang
from rstar2_jax.rollout import sglang_wire as wire
from rstar2_jax.rollout.engine import EngineError
from rstar2_jax.weights import manifest, publish
from tests.rollout import engines
from tests.rollout.engines import MODEL, learner_logprobs, request

pytestmark = pytest.mark.sglang
LIMIT_S = 120.0


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request, real_servers):
    return real_servers.get(request.param)


def post(url, path, **body):
    """(status, answer) of a call."""
    call = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=LIMIT_S) as response:
            text, status = response.read(), response.status
    except urllib.error.HTTPError as error:
        text, status = error.read(), error.code
    return status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()


def update(url, path, version):
    """(status, message) of an update from any model path, on a server that is not paused.

    Such a server refuses to flush its cache for a moment after it has answered; our client pauses it first.
    """
    body = {"model_path": str(path), "load_format": "auto", "weight_version": str(version)}
    for _ in range(20):
        status, said = post(url, "/update_weights_from_disk", **body)
        if "the cache was not flushed" not in said["message"]:
            break
        time.sleep(0.2)
    return status, said["message"]


def update_from_store(url, store, version):
    return update(url, f"{wire.SCHEME}{manifest.version_folder(store, version)}", version)


def sampled(url, seed=5):
    """(ids, log-probabilities) of greedy decoding."""
    wanted = request(seed, new=8, temperature=0.0)
    status, said = post(url, "/generate", **wire.generate_body(wanted, f"rid-{time.monotonic_ns()}", "k"))
    assert status == 200, said
    entries = said["meta_info"]["output_token_logprobs"]
    return said["output_ids"], [entry[0] for entry in entries]


def assert_repeated(again, before):
    """The same ids, and log-probabilities equal up to what a prefix cache changes: equal weights, other last bits."""
    for (ids, logprobs), (wanted_ids, wanted) in zip(again, before, strict=True):
        assert ids == wanted_ids
        np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=1e-5)


def staged(log):
    """(bytes read, bytes in the store) of each time that a rank staged a version."""
    found = re.findall(r"staged: (\d+) bytes read of (\d+) in the store", log.read_text())
    return [(int(read), int(stored)) for read, stored in found]


def test_the_store_gives_the_ids_and_log_probabilities_of_the_safetensors_path(server, weights):
    for version in (1, 0):
        assert update(server.url, weights.folders[version], "0")[0] == 200
        wanted = [sampled(server.url, seed) for seed in range(2)]
        assert update(server.url, weights.folders[1 - version], "0")[0] == 200
        assert not {tuple(sampled(server.url, seed)[0]) for seed in range(2)} & {tuple(ids) for ids, _ in wanted}
        assert update_from_store(server.url, weights.store, version)[0] == 200
        assert_repeated([sampled(server.url, seed) for seed in range(2)], wanted)


def test_each_rank_reads_its_own_share_of_the_bytes(server, weights):
    ranks = 2 if "--tp=2" in " ".join(server.process.args) else 1
    before = len(staged(server.log))
    assert update_from_store(server.url, weights.store, 0)[0] == 200
    new = staged(server.log)[before:]
    assert len(new) == ranks
    for read, stored in new:
        assert stored / ranks <= read <= 1.02 * stored / ranks
        print(f"{ranks} ranks: {read / stored:.4f} of the bytes")


def test_log_probabilities_of_server_and_learner_agree(server, weights):
    assert update_from_store(server.url, weights.store, 0)[0] == 200
    worst = 0.0
    for seed in range(4):
        prompt = list(request(seed).prompt_ids)
        ids, logprobs = sampled(server.url, seed)
        wanted = learner_logprobs(weights.params[0], [*prompt, *ids])[len(prompt) - 1 :]
        worst = max(worst, float(np.abs(np.asarray(logprobs) - wanted).max()))
    print(f"largest |delta log-probability| of server and learner: {worst:.2e}")
    assert worst < 1e-4


def copied(weights, tmp_path, edit=None):
    """A store whose version 7 is a copy of version 1, its entries changed by `edit`."""
    folder = manifest.version_folder(tmp_path, 7)
    shutil.copytree(manifest.version_folder(weights.store, 1), folder)
    found = manifest.read(folder)
    tensors = dict(found.tensors)
    if edit is not None:
        edit(tensors)
    manifest.write(folder, dataclasses.replace(found, version=7, tensors=tensors))
    return folder


NAME = "model.layers.1.mlp.down_proj.weight"


def _missing(tensors):
    del tensors[NAME]


def _wrong_shape(tensors):
    e = tensors[NAME]
    shape = (e.shape[0], e.shape[1] * 2)
    tensors[NAME] = dataclasses.replace(e, shape=shape, checksums=e.checksums * 2)


def _wrong_dtype(tensors):
    tensors[NAME] = dataclasses.replace(tensors[NAME], dtype="bfloat16")


def _last_chunk_of_a_matrix(tensors):
    e = tensors[NAME]
    tensors[NAME] = dataclasses.replace(e, checksums=(*e.checksums[:-1], e.checksums[-1] ^ 1))


def truncate_the_largest_file(folder):
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN = {
    "missing tensor": (_missing, None, f"missing .*{NAME}"),
    "wrong shape": (_wrong_shape, None, f"{NAME} is .*the server needs"),
    "wrong dtype": (_wrong_dtype, None, f"tensor {NAME} cannot be opened"),
    "a chunk that only the last rank reads": (_last_chunk_of_a_matrix, None, f"{NAME} does not match its checksum"),
    "truncated": (None, truncate_the_largest_file, "cannot be"),
    "absent": (None, shutil.rmtree, "no committed version"),
}


@pytest.mark.parametrize("edit, damage, complaint", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_version_is_refused_by_all_ranks_and_the_old_weights_stay(
    server, weights, tmp_path, edit, damage, complaint
):
    assert update_from_store(server.url, weights.store, 0)[0] == 200
    before = sampled(server.url)
    folder = copied(weights, tmp_path, edit)
    if damage is not None:
        damage(folder)
    start = time.monotonic()
    status, message = update(server.url, f"{wire.SCHEME}{folder}", 7)
    seconds = time.monotonic() - start
    assert status == 400 and message.startswith(wire.UNTOUCHED) and re.search(complaint, message), message
    print(f"refused after {seconds * 1000:.0f} ms")
    assert_repeated([sampled(server.url)], [before])
    action = f"{wire.VERIFY}{manifest.version_folder(weights.store, 0)}"
    assert post(server.url, "/weights_checker", action=action)[0] == 200


def read_ahead(url, folder):
    """(status, message) of reading a version ahead to its end."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        status, said = post(url, "/weights_checker", action=f"{wire.PREFETCH}{folder}")
        if status == 200 or wire.NOT_YET not in said["message"]:
            break
        time.sleep(0.02)
    return status, said.get("message", "")


def test_the_memory_of_an_update_serves_the_next_whatever_came_between(server, weights, tmp_path):
    folder = copied(weights, tmp_path / "broken", _last_chunk_of_a_matrix)
    for version in range(3):  # the one before is deleted each time
        publish.publish(weights.params[version % 2], MODEL, tmp_path, version, keep=1)
        live = manifest.version_folder(tmp_path, version)
        assert read_ahead(server.url, live)[0] == 200
        assert update(server.url, f"{wire.SCHEME}{live}", version)[0] == 200
        before = sampled(server.url)
        status, message = read_ahead(server.url, folder)
        assert status == 400 and f"{NAME} does not match its checksum" in message, message
        post(server.url, "/weights_checker", action=f"{wire.PREFETCH}{live}")  # left behind, perhaps while it is read
        assert update(server.url, f"{wire.SCHEME}{folder}", 7)[0] == 400
        assert_repeated([sampled(server.url)], [before])
        assert post(server.url, "/weights_checker", action=f"{wire.VERIFY}{live}")[0] == 200


def test_a_store_of_another_dtype_than_the_server_computes_in_is_refused(server, weights, tmp_path):
    assert update_from_store(server.url, weights.store, 0)[0] == 200
    publish.publish(weights.params[1], MODEL, tmp_path, 3, dtype="bfloat16")
    status, message = update_from_store(server.url, tmp_path, 3)
    assert status == 400 and "publish with dtype='float32'" in message


def test_weights_that_differ_from_a_version_are_found_out_on_every_rank(server, weights):
    assert update_from_store(server.url, weights.store, 0)[0] == 200
    action = f"{wire.VERIFY}{manifest.version_folder(weights.store, 1)}"
    status, said = post(server.url, "/weights_checker", action=action)
    assert status == 400 and "differ from version 1" in said["message"], said
    assert len(sampled(server.url)[0]) == 8


def test_ids_beyond_the_vocabulary_never_reach_the_server(server, weights):
    async def use(engine):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await engine.generate(request(0, prompt=[1, MODEL.vocab_size]))
        return await engine.alive(), await engine.generate(request(1))

    opener = engines.over_http(server.url, weights.store)
    alive, generation = engines.Bench(open=opener, store=weights.store, params=weights.params).run(use)
    assert alive and len(generation.token_ids) == 12


@pytest.mark.parametrize("ranks", [2])
def test_tied_embeddings_load_from_the_store_too(tmp_path, ranks, real_servers):
    real_servers.stop()
    model = dataclasses.replace(MODEL, tie_embeddings=True)
    params = {version: engines.sharpened(version, model) for version in (0, 1)}
    for version, tree in params.items():
        publish.publish(tree, model, tmp_path / "store", version)
        hf.save_folder(tree, model, tmp_path / f"model-{version}")
    with engines.real_server(tmp_path / "model-0", ranks=ranks) as (url, _, log):
        assert update(url, tmp_path / "model-1", "0")[0] == 200
        wanted = [sampled(url, seed) for seed in range(2)]
        assert update_from_store(url, tmp_path / "store", 0)[0] == 200
        assert not {tuple(sampled(url, seed)[0]) for seed in range(2)} & {tuple(ids) for ids, _ in wanted}
        assert update_from_store(url, tmp_path / "store", 1)[0] == 200
        assert_repeated([sampled(url, seed) for seed in range(2)], wanted)
        action = f"{wire.VERIFY}{manifest.version_folder(tmp_path / 'store', 1)}"
        assert post(url, "/weights_checker", action=action)[0] == 200


def test_a_server_killed_in_the_middle_of_an_update_is_an_engine_error_and_its_successor_takes_up(
    weights, real_servers
):
    real_servers.stop()

    async def kill_it():
        with engines.real_server(weights.folders[0]) as (url, process, _):
            engine = await sglang.connect(url, MODEL, deadlines=engines.DEADLINES)
            await engine.update_weights(weights.store, 0)
            generation = await engine.generate(request(5, temperature=0.0))
            scheduler = scheduler_of(process.pid)
            os.kill(scheduler, signal.SIGSTOP)  # so that the update has begun and cannot end
            task = asyncio.ensure_future(engine.update_weights(weights.store, 1))
            await asyncio.sleep(1.0)
            assert not task.done()
            os.killpg(process.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="failed in"):
                await asyncio.wait_for(task, 30)
            assert not await engine.alive()
            with pytest.raises(EngineError):
                await engine.generate(request(5, temperature=0.0))
            await engine.close()
            return generation

    before = asyncio.run(kill_it())

    async def successor():
        with engines.real_server(weights.folders[1], extra=["--load-format=dummy"]) as (url, _, _):
            engine = await sglang.connect(url, MODEL, deadlines=engines.DEADLINES)
            with pytest.raises(EngineError, match="no weights yet"):
                await engine.generate(request(5))
            await engine.update_weights(weights.store, 0)
            await engine.verify(weights.store, 0)
            generation = await engine.generate(request(5, temperature=0.0))
            await engine.close()
            return generation

    after = asyncio.run(successor())
    assert after.token_ids.tolist() == before.token_ids.tolist()


def scheduler_of(parent):
    """The process of a server's children that holds the weights."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            name = (folder / "cmdline").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and "scheduler" in name:
            return int(folder.name)
    raise AssertionError(f"server {parent} has no scheduler")
