"""Sharded publishing and reading in parts: every chunk lies in one shard and on the cuts of its readers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax.model import decoder, hf, sharding
from rstar2_jax.settings import Model
from rstar2_jax.weights import chunks, fetch, manifest, places, publish, sglang_loader
from tests.rollout.engines import free_port

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODEL = Model(
    family="qwen3", vocab_size=512, d_model=128, d_mlp=256, layers=2, heads=8, kv_heads=4, head_dim=32, max_positions=64
)
QWEN3_14B = Model(
    family="qwen3",
    vocab_size=151936,
    d_model=5120,
    d_mlp=17408,
    layers=2,
    heads=40,
    kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
    max_positions=32768,
)


@pytest.fixture(scope="module")
def params():
    return decoder.init_params(MODEL, jax.random.key(0))


def entry_of(shape, chunk):
    return manifest.Entry(shape=shape, dtype="float32", chunks=chunk, checksums=())


@settings(deadline=None)
@given(st.data())
def test_the_chunks_that_cover_a_box_are_those_that_share_a_number_with_it(data):
    sizes = st.lists(st.integers(1, 9), min_size=0, max_size=3)
    shape = tuple(data.draw(sizes))
    entry = entry_of(shape, tuple(data.draw(st.integers(1, n)) for n in shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    box = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, n))))
    wanted = set(numbers[tuple(box)].ravel().tolist())
    touching = {i for i in range(math.prod(entry.grid)) if wanted & set(numbers[entry.box(i)].ravel().tolist())}
    assert set(entry.covering(tuple(box))) == touching
    everything = sorted(x for i in range(math.prod(entry.grid)) for x in numbers[entry.box(i)].ravel().tolist())
    assert everything == list(range(math.prod(shape)))


def test_chunks_of_a_large_model_fall_onto_the_cuts_of_up_to_eight_readers():
    for name, shape in hf.hf_shapes(QWEN3_14B).items():
        axis = manifest.cut_axis(name)
        chunk = manifest.chunk_shape(shape, 2, axis)
        assert 2 * math.prod(chunk) <= manifest.MAX_CHUNK_BYTES
        assert all(n % c == 0 for n, c in zip(shape, chunk, strict=True)), name
        if len(shape) == 2:
            assert all((shape[axis] // ranks) % chunk[axis] == 0 for ranks in (2, 4, 8)), name


def test_small_tensors_stay_whole():
    assert manifest.chunk_shape((128,), 4) == (128,)
    assert manifest.chunk_shape((64, 64), 4) == (64, 64)
    assert manifest.chunk_shape((128, 128), 4, 1) == (128, 64)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_parameters_are_stored_as_whole_ones_are(tmp_path, params, mesh, dtype):
    shardings = sharding.param_shardings(decoder.abstract_params(MODEL), sharding.make_mesh(mesh))
    placed = jax.device_put(params, shardings)
    publish.publish(params, MODEL, tmp_path / "whole", 0, dtype=dtype)
    written = publish.publish(placed, MODEL, tmp_path / "sharded", 0, dtype=dtype)
    for name, entry in written.tensors.items():
        leaf = dict(leaves(placed))[name]
        shard = leaf.sharding.shard_shape(leaf.shape)
        shard = shard[::-1] if entry.shape == leaf.shape[::-1] and "proj" in name else shard
        assert all(n % c == 0 for n, c in zip(shard, entry.chunks, strict=True)), name
    whole, sharded = (fetch.fetch(tmp_path / kind, 0, MODEL) for kind in ("whole", "sharded"))
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)
    assert publish.publish(placed, MODEL, tmp_path / "sharded", 0, dtype=dtype) == written
    with pytest.raises(ValueError, match="committed with other weights"):
        moved = jax.tree.map(lambda leaf: leaf + 1, placed)
        publish.publish(moved, MODEL, tmp_path / "sharded", 0, dtype=dtype)


def leaves(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield hf.hf_name("/".join(entry.key for entry in path)), leaf


def test_parameters_on_the_host_are_stored_as_those_on_devices_are(tmp_path, params):
    on_host = jax.tree.map(np.asarray, params)
    a = publish.publish(params, MODEL, tmp_path / "a", 0, dtype="bfloat16")
    assert publish.publish(on_host, MODEL, tmp_path / "b", 0, dtype="bfloat16").digest == a.digest


def test_a_reader_of_one_part_reads_no_chunk_beyond_it(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 0)
    whole = hf.to_hf(params, MODEL)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        entry, axis = written.tensors[name], manifest.cut_axis(name)
        for ranks in (1, 2, 4):
            for rank in range(ranks):
                box = list(manifest.whole(entry.shape))
                length = entry.shape[axis] // ranks
                box[axis] = slice(rank * length, (rank + 1) * length)
                reader = chunks.Reader(manifest.version_folder(tmp_path, 0), written)
                ((_, _, array),) = reader.read([(name, tuple(box))])
                np.testing.assert_array_equal(array, whole[name][tuple(box)])
                assert reader.bytes_read == whole[name].nbytes // ranks


def test_a_box_across_chunk_borders_is_put_together(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 0)
    name, box = "model.embed_tokens.weight", (slice(3, 300), slice(5, 77))
    reader = chunks.Reader(manifest.version_folder(tmp_path, 0), written)
    ((_, _, array),) = reader.read([(name, box)])
    np.testing.assert_array_equal(array, hf.to_hf(params, MODEL)[name][box])


def test_a_truncated_file_is_an_error_of_large_chunks_too(tmp_path):
    model = dataclasses.replace(MODEL, vocab_size=32768, layers=1)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), decoder.abstract_params(model))
    written = publish.publish(params, model, tmp_path, 0)
    entry = written.tensors["model.embed_tokens.weight"]
    assert entry.itemsize * math.prod(entry.chunks) >= 2**20
    # What stands behind the last chunk of a file may be an index that a later commit has replaced, which nobody misses.
    index = places.index(manifest.database(manifest.version_folder(tmp_path, 0), 0)).values()
    path = max((found for found in index if isinstance(found, places.Place)), key=len).path
    last = max((found for found in index if getattr(found, "path", None) == path), key=lambda found: found.offset)
    for length in (last.offset + len(last) - 1, last.offset, last.offset // 2, 4096):
        os.truncate(path, length)
        with pytest.raises(fetch.FetchError, match="tensor model"):
            fetch.fetch(tmp_path, 0, model)


@given(st.integers(0, 2**31), st.integers(1, 200_000))
@settings(deadline=None, max_examples=40)
def test_a_checksum_sees_a_flipped_bit_and_lines_that_changed_places(seed, size):
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, size, np.uint8)
    before = manifest.checksum(data)
    place = random.integers(size)
    data[place] ^= 1 << random.integers(8)
    assert manifest.checksum(data) != before
    data = random.integers(0, 256, (40, 4096), np.uint8)
    assert manifest.checksum(data) != manifest.checksum(data[[1, 0, *range(2, 40)]])
    assert manifest.checksum(data) == manifest.checksum(np.asfortranarray(data))


def test_a_chunk_with_another_checksum_is_named_by_its_tensor_and_others_are_still_read(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 0)
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    entry = written.tensors[name]
    wrong = dataclasses.replace(entry, checksums=(*entry.checksums[:-1], entry.checksums[-1] ^ 1))
    folder = manifest.version_folder(tmp_path, 0)
    manifest.write(folder, dataclasses.replace(written, tensors={**written.tensors, name: wrong}))
    reader = chunks.Reader(folder, manifest.read(folder))
    assert len(list(reader.read([(other, manifest.whole(entry.shape))]))) == 1
    with pytest.raises(chunks.StoreError, match=f"{name} does not match its checksum"):
        list(reader.read([(name, manifest.whole(entry.shape))]))
    with pytest.raises(fetch.FetchError, match=f"{name} does not match its checksum"):
        fetch.fetch(tmp_path, 0, MODEL)


FAMILIES = [
    MODEL,
    QWEN3_14B,
    dataclasses.replace(MODEL, family="qwen2", tie_embeddings=False),
    dataclasses.replace(MODEL, family="llama"),
]


@pytest.mark.parametrize("model", FAMILIES, ids=lambda m: f"{m.family}-{m.d_model}")
def test_the_loader_expects_of_a_config_what_the_trainer_publishes(model):
    config = types.SimpleNamespace(**hf.config_from_settings(model, hf.SpecialIds()))
    assert sglang_loader.expected_shapes(config) == hf.hf_shapes(model)


def test_the_loader_refuses_a_family_that_it_does_not_know():
    with pytest.raises(sglang_loader.LoadError, match="deepseek"):
        sglang_loader.expected_shapes(types.SimpleNamespace(model_type="deepseek"))


def test_the_loader_imports_neither_jax_nor_torch_nor_sglang():
    script = (
        "import sys, rstar2_jax.weights.sglang_loader\n"
        "print([m for m in ('jax', 'jaxlib', 'flax', 'torch', 'sglang', 'aiohttp') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ONE_OF_TWO = """
import sys, json
import numpy as np
process, port, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
from rstar2_jax.model import decoder, sharding
from rstar2_jax.settings import Model
from rstar2_jax.weights import publish
model = Model(**json.loads(sys.argv[4]))
placed = sharding.param_shardings(decoder.abstract_params(model), sharding.make_mesh((1, 2, 2)))
whole = jax.tree.map(np.asarray, decoder.init_params(model, jax.random.key(0)))
part = lambda leaf, where: jax.make_array_from_callback(leaf.shape, where, lambda index: leaf[index])
params = jax.tree.map(part, whole, placed)
written = publish.publish(params, model, root, 4, dtype="float32")
again = publish.publish(params, model, root, 4, dtype="float32")
assert again == written
print(sorted({w for entry in written.tensors.values() for w in entry.writers}))
"""


@pytest.mark.e2e
def test_two_processes_write_their_own_shards_of_one_version(tmp_path):
    port, model = str(free_port()), json.dumps(dataclasses.asdict(MODEL))
    # One device each, compiled as here, so that random weights have the same bits.
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")}
    environment |= {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sandbox'}", "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, str(n), port, str(tmp_path), model],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    try:
        said = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    assert [out.strip() for out, _ in said] == ["[0, 1]", "[0, 1]"], said
    assert sorted(p.name for p in (tmp_path / "0000000004" / manifest.TENSORS).iterdir()) == ["0", "1"]
    wanted = decoder.init_params(MODEL, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, fetch.fetch(tmp_path, 4, MODEL), wanted)
