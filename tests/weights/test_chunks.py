"""Reading by place: TensorStore's index as it is, chunks of any kind, and memory that outlives a reading."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts

from rstar2_jax.model import decoder, hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import chunks, manifest, places, publish

MODEL = Model(
    family="qwen3", vocab_size=512, d_model=128, d_mlp=256, layers=2, heads=8, kv_heads=4, head_dim=32, max_positions=64
)
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def params():
    return decoder.init_params(MODEL, jax.random.key(0))


def opened(root, version):
    folder = manifest.version_folder(root, version)
    return chunks.Reader(folder, manifest.read(folder))


def boxes(reader):
    return [(name, manifest.whole(entry.shape)) for name, entry in reader.manifest.tensors.items()]


def read(reader, memory):
    return {name: array for name, _, array in reader.read(boxes(reader), memory)}


def assert_holds(arrays, params):
    wanted = hf.to_hf(params, MODEL)
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])


def test_every_value_is_where_the_index_says_in_a_tree_of_any_height(tmp_path):
    values = {f"model.layers.{i}/c/{i % 3}": bytes([i]) * (40 + 20 * i) for i in range(60)}
    config = {"max_decoded_node_bytes": 200}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    with ts.Transaction() as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value
    found = places.index(tmp_path)
    assert found.keys() == values.keys()
    assert {type(place) for place in found.values()} == {bytes, places.Place}
    for key, place in found.items():
        if isinstance(place, places.Place):
            place = place.path.read_bytes()[place.offset : place.offset + place.length]
        assert place == values[key]


def test_chunks_of_zeros_small_ones_and_cut_off_ones_are_read_as_tensorstore_reads_them(tmp_path):
    folder = manifest.version_folder(tmp_path, 0)
    kinds = {"cut": ((5, 7), (2, 4)), "zeros": ((4, 64), (2, 32)), "small": ((6,), (3,)), "scalar": ((), ())}
    tensors, wanted = {}, {}
    for name, (shape, chunk) in kinds.items():
        values = np.zeros(shape, np.float32)
        values[...] = np.arange(values.size).reshape(shape) + 1 if name != "zeros" else 0
        entry = manifest.Entry(shape=shape, dtype="float32", chunks=chunk, checksums=())
        ts.open(manifest.array_spec(folder, name, entry), create=True).result().write(values).result()
        count = int(np.prod(entry.grid, dtype=int))
        sums = tuple(manifest.checksum(values[entry.box(i)]) for i in range(count))
        tensors[name], wanted[name] = dataclasses.replace(entry, checksums=sums), values
    written = manifest.Manifest(version=0, parent=-1, tensors=tensors)
    reader = chunks.Reader(folder, written)
    for name, array in read(chunks.Reader(folder, written), None).items():
        np.testing.assert_array_equal(array, wanted[name])
    ((_, _, part),) = reader.read([("cut", (slice(1, 5), slice(3, 7)))])
    np.testing.assert_array_equal(part, wanted["cut"][1:5, 3:7])
    for name in kinds:
        entry = tensors[name]
        wrong = dataclasses.replace(entry, checksums=(*entry.checksums[:-1], entry.checksums[-1] ^ 1))
        broken = dataclasses.replace(written, tensors={**tensors, name: wrong})
        with pytest.raises(chunks.StoreError, match=f"tensor {name} does not match its checksum"):
            read(chunks.Reader(folder, broken), None)


def test_a_second_reading_fills_the_same_memory_after_the_first_version_is_gone(tmp_path, params):
    memory, arrays = chunks.Memory(), {}
    for version in range(3):
        shifted = jax.tree.map(lambda leaf, by=version: leaf + by, params)
        publish.publish(shifted, MODEL, tmp_path, version, keep=1)
        assert manifest.committed_versions(tmp_path) == [version]
        before, arrays = arrays, read(opened(tmp_path, version), memory)
        assert_holds(arrays, shifted)
        assert all(arrays[name] is array for name, array in before.items())


def test_a_reading_without_memory_touches_no_array_that_it_gave_before(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 0)
    publish.publish(jax.tree.map(lambda leaf: leaf + 1, params), MODEL, tmp_path, 1)
    first = read(opened(tmp_path, 0), None)
    read(opened(tmp_path, 1), None)
    assert_holds(first, params)


def test_a_box_of_another_shape_or_dtype_gets_new_memory_and_what_is_not_wanted_goes():
    memory, box = chunks.Memory(), (slice(0, 4), slice(0, 2))
    array = memory.array(NAME, box, np.dtype(np.float32))
    assert memory.array(NAME, box, np.dtype(np.float32)) is array
    other = memory.array(NAME, (slice(0, 4), slice(0, 3)), np.dtype(np.float32))
    assert other.shape == (4, 3) and other is not array
    assert memory.array(NAME, box, np.dtype(np.float16)).dtype == np.float16
    kept = memory.array(NAME, box, np.dtype(np.float16))
    memory.keep([(NAME, box)])
    assert memory.array(NAME, box, np.dtype(np.float16)) is kept
    assert memory.array(NAME, (slice(0, 4), slice(0, 3)), np.dtype(np.float32)) is not other


def test_a_reading_that_failed_leaves_memory_that_the_next_one_fills_right(tmp_path, params):
    memory = chunks.Memory()
    publish.publish(params, MODEL, tmp_path, 0)
    before = read(opened(tmp_path, 0), memory)
    shifted = jax.tree.map(lambda leaf: leaf + 1, params)
    written = publish.publish(shifted, MODEL, tmp_path, 1)
    folder = manifest.version_folder(tmp_path, 1)
    path = max((folder / manifest.TENSORS).rglob("*"), key=lambda p: p.stat().st_size)
    content = path.read_bytes()
    os.truncate(path, len(content) // 2)
    with pytest.raises(chunks.StoreError, match="cannot be"):
        read(opened(tmp_path, 1), memory)
    path.write_bytes(content)
    entry = written.tensors[NAME]
    wrong = dataclasses.replace(entry, checksums=(*entry.checksums[:-1], entry.checksums[-1] ^ 1))
    with pytest.raises(chunks.StoreError, match="does not match"):
        read(chunks.Reader(folder, dataclasses.replace(written, tensors={**written.tensors, NAME: wrong})), memory)
    after = read(opened(tmp_path, 1), memory)
    assert_holds(after, shifted)
    assert all(after[name] is array for name, array in before.items())


def test_a_version_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 0)
    reader = opened(tmp_path, 0)
    found, arrays = reader.read(boxes(reader)), {}
    name, _, arrays[name] = next(found)
    shutil.rmtree(manifest.version_folder(tmp_path, 0))
    arrays |= {name: array for name, _, array in found}
    assert_holds(arrays, params)
    with pytest.raises(chunks.StoreError, match="cannot be read"):
        list(reader.read(boxes(reader)))


def test_a_chunk_of_another_length_is_refused(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 0)
    reader = opened(tmp_path, 0)
    key = reader.manifest.tensors[NAME].key(NAME, 0)
    found = reader._places[0][key]
    reader._places[0][key] = dataclasses.replace(found, length=found.length - 8)
    with pytest.raises(chunks.StoreError, match=f"tensor {NAME} cannot be read: a chunk of"):
        read(reader, None)


def test_an_index_that_says_nothing_known_is_an_error_of_the_store(tmp_path, params, monkeypatch):
    publish.publish(params, MODEL, tmp_path, 0)

    class Said:
        def result(self):
            return json.loads('{"versions": []}')

    monkeypatch.setattr(ts.ocdbt, "dump", lambda *args: Said())
    with pytest.raises(chunks.StoreError, match="in a way unknown here"):
        opened(tmp_path, 0)
