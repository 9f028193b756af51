"""The weight store: what is committed is whole, what is broken is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest

from rstar2_jax.model import decoder, hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import fetch, manifest, publish

MODEL = Model(
    family="qwen3", vocab_size=37, d_model=16, d_mlp=24, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64
)
UNTIED = dataclasses.replace(MODEL, family="qwen2", tie_embeddings=False)


@pytest.fixture(scope="module")
def params():
    return decoder.init_params(MODEL, jax.random.key(0))


def shifted(params, by):
    return jax.tree.map(lambda leaf: leaf + by, params)


def entries(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied with biases"])
def test_fetched_parameters_are_the_published_ones_bit_for_bit(tmp_path, model):
    params = decoder.init_params(model, jax.random.key(1))
    publish.publish(params, model, tmp_path, 3)
    fetched = fetch.fetch(tmp_path, 3, model)
    assert jax.tree.structure(fetched) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, fetched, params)


def test_the_store_holds_hugging_face_names_and_orientation(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 0)
    assert written.tensors["model.layers.0.mlp.down_proj.weight"].shape == (MODEL.d_model, MODEL.d_mlp)
    assert "lm_head.weight" not in written.tensors
    assert (written.version, written.parent) == (0, -1)


def test_bfloat16_is_stored_at_half_size_and_fetched_as_rounded_float32(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 0, dtype="bfloat16")
    assert {entry.dtype for entry in written.tensors.values()} == {"bfloat16"}
    fetched = fetch.fetch(tmp_path, 0, MODEL)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, fetched, rounded)


def test_an_unknown_dtype_is_refused(tmp_path, params):
    with pytest.raises(ValueError, match="float16.*float32 or bfloat16"):
        publish.publish(params, MODEL, tmp_path, 0, dtype="float16")


def test_latest_version_is_none_without_a_store_and_the_highest_committed_one_with_it(tmp_path, params):
    assert fetch.latest_version(tmp_path / "absent") is None
    assert fetch.latest_version(tmp_path) is None
    for version in (9, 10):
        publish.publish(params, MODEL, tmp_path, version)
    (tmp_path / f"{manifest.WRITING}0000000011-1").mkdir()
    (tmp_path / "0000000012").mkdir()  # no manifest: not committed
    assert fetch.latest_version(tmp_path) == 10


def test_the_newest_versions_stay_and_those_in_use_as_well(tmp_path, params):
    for version in range(5):
        publish.publish(params, MODEL, tmp_path, version, keep=2, in_use=(1,))
    assert manifest.committed_versions(tmp_path) == [1, 3, 4]
    publish.publish(params, MODEL, tmp_path, 5, keep=2)
    assert manifest.committed_versions(tmp_path) == [4, 5]
    assert entries(tmp_path) == ["0000000004", "0000000005"]


def test_publishing_the_same_content_again_changes_nothing(tmp_path, params):
    first = publish.publish(params, MODEL, tmp_path, 1)
    before = (tmp_path / "0000000001" / manifest.FILE).stat().st_mtime_ns
    assert publish.publish(params, MODEL, tmp_path, 1) == first
    assert (tmp_path / "0000000001" / manifest.FILE).stat().st_mtime_ns == before


def test_publishing_other_content_under_a_committed_version_is_an_error(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    with pytest.raises(ValueError, match=r"committed with other weights.*newest=0"):
        publish.publish(shifted(params, 1.0), MODEL, tmp_path, 1)


def test_prepare_removes_leftovers_and_versions_that_will_be_made_again(tmp_path, params):
    for version in (1, 2, 3):
        publish.publish(params, MODEL, tmp_path, version, keep=9)
    (tmp_path / f"{manifest.WRITING}0000000004-77").mkdir()
    (tmp_path / f"{manifest.DELETING}0000000000-77").mkdir()
    assert publish.prepare(tmp_path, newest=1) == [2, 3]
    assert entries(tmp_path) == ["0000000001"]
    publish.publish(shifted(params, 1.0), MODEL, tmp_path, 2)
    assert publish.prepare(tmp_path, newest=-1) == [1, 2]


def test_an_absent_version_is_named_with_those_that_exist(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    with pytest.raises(fetch.FetchError, match=r"version 7 .* holds \[1\]"):
        fetch.fetch(tmp_path, 7, MODEL)
    with pytest.raises(fetch.FetchError, match="holds no version"):
        fetch.fetch(tmp_path / "absent", 7, MODEL)


def test_another_models_weights_are_refused_before_a_tensor_is_read(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    with pytest.raises(fetch.FetchError, match=r"embed_tokens.weight is \(37, 16\), the model needs \(38, 16\)"):
        fetch.fetch(tmp_path, 1, dataclasses.replace(MODEL, vocab_size=38))
    with pytest.raises(fetch.FetchError, match=r"missing \['lm_head.weight'\]"):
        fetch.fetch(tmp_path, 1, dataclasses.replace(MODEL, tie_embeddings=False))


def edit_manifest(folder, edit):
    path = folder / manifest.FILE
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def test_a_manifest_that_was_edited_or_torn_is_refused(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    edit_manifest(tmp_path / "0000000001", lambda raw: raw["tensors"].pop("model.norm.weight"))
    with pytest.raises(fetch.FetchError, match="digest does not match"):
        fetch.fetch(tmp_path, 1, MODEL)
    (tmp_path / "0000000001" / manifest.FILE).write_text('{"format": "rstar2-wei')
    with pytest.raises(fetch.FetchError, match="not a weight manifest"):
        fetch.fetch(tmp_path, 1, MODEL)


def test_a_version_of_the_format_before_is_read_held_to_its_own_checksums_and_published_again(tmp_path, params):
    written = publish.publish(params, MODEL, tmp_path, 1)
    whole = hf.to_hf(params, MODEL)

    def older(raw):
        raw["format"] = manifest.OLDER
        for name, entry in raw["tensors"].items():
            del entry["checksums"]
            boxes = map(written.tensors[name].box, range(math.prod(written.tensors[name].grid)))
            entry["crc32"] = [zlib.crc32(np.ascontiguousarray(whole[name][box]).data) for box in boxes]
        rows = [(n, e["shape"], e["dtype"], e["chunks"], e["crc32"]) for n, e in sorted(raw["tensors"].items())]
        raw["digest"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    edit_manifest(tmp_path / "0000000001", older)
    jax.tree.map(np.testing.assert_array_equal, fetch.fetch(tmp_path, 1, MODEL), params)
    assert publish.publish(params, MODEL, tmp_path, 1).format == manifest.OLDER
    with pytest.raises(ValueError, match="committed with other weights"):
        publish.publish(shifted(params, 1.0), MODEL, tmp_path, 1)


def test_a_tensor_missing_from_the_manifest_is_named(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    folder = tmp_path / "0000000001"
    whole = manifest.read(folder)
    less = {name: entry for name, entry in whole.tensors.items() if name != "model.norm.weight"}
    manifest.write(folder, dataclasses.replace(whole, tensors=less))
    with pytest.raises(fetch.FetchError, match=r"missing \['model.norm.weight'\]"):
        fetch.fetch(tmp_path, 1, MODEL)


def data_files(folder):
    return sorted(path for path in (folder / manifest.TENSORS).rglob("*") if path.is_file() and path.stat().st_size)


def test_any_truncated_or_deleted_file_is_an_error_and_never_a_wrong_tensor(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    folder, refused = tmp_path / "0000000001", 0
    for path in data_files(folder):
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], content[:-1], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            try:
                found = fetch.fetch(tmp_path, 1, MODEL)
            except fetch.FetchError as error:
                assert "tensor model" in str(error)
                refused += 1
            else:  # the writer may leave an unused node at the end of a file: cutting it off does no harm
                jax.tree.map(np.testing.assert_array_equal, found, params)
            path.write_bytes(content)
    assert refused >= 2 * len(data_files(folder))
    fetch.fetch(tmp_path, 1, MODEL)


def test_a_flipped_bit_of_the_largest_file_is_an_error(tmp_path, params):
    publish.publish(params, MODEL, tmp_path, 1)
    path = max(data_files(tmp_path / "0000000001"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(fetch.FetchError, match="tensor model"):
        fetch.fetch(tmp_path, 1, MODEL)


def test_chunks_are_halved_until_they_are_small_enough():
    limit = manifest.MAX_CHUNK_BYTES
    assert manifest.chunk_shape((100, 96), 4) == (100, 96)
    assert manifest.chunk_shape((24,), 4) == (24,)
    assert manifest.chunk_shape((), 4) == ()
    rows, columns = manifest.chunk_shape((151936, 5120), 2)
    assert 151936 % rows == 0 and columns == 5120 and rows * columns * 2 <= limit


def test_a_version_below_zero_is_refused(tmp_path, params):
    with pytest.raises(ValueError, match="version = -1"):
        publish.publish(params, MODEL, tmp_path, -1)


PUBLISH_FOREVER = """
import sys
sys.path.insert(0, {source!r})
import jax
import numpy as np
from rstar2_jax.model import decoder, hf
from rstar2_jax.settings import Model
from rstar2_jax.weights import publish
model = Model(family="qwen3", vocab_size=37, d_model=16, d_mlp=24, layers=2, heads=4, kv_heads=2, head_dim=8,
              max_positions=64)
params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), decoder.abstract_params(model))
version = 0
while True:
    publish.publish(params, model, {root!r}, version)
    print(version, flush=True)
    version += 1
"""


@pytest.mark.slow
def test_a_publisher_killed_at_any_moment_leaves_only_whole_versions(tmp_path):
    source = str(pathlib.Path(publish.__file__).parents[2])
    for round_ in range(2):
        root = tmp_path / str(round_)
        child = subprocess.Popen(
            [sys.executable, "-c", PUBLISH_FOREVER.format(source=source, root=str(root))], stdout=subprocess.PIPE
        )
        try:
            for _ in range(2 + round_):
                assert child.stdout.readline()
            time.sleep(0.003 * (round_ + 1))
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
        versions = manifest.committed_versions(root)
        assert versions
        for version in versions:
            fetch.fetch(root, version, MODEL)
        publish.prepare(root, newest=versions[-1])
        assert entries(root) == [f"{version:010d}" for version in versions]


def test_a_file_system_that_fails_and_a_chunk_of_nothing_are_errors_of_the_store(tmp_path, monkeypatch):
    publish.publish(decoder.init_params(MODEL, jax.random.key(0)), MODEL, tmp_path, 0)
    path = manifest.version_folder(tmp_path, 0) / manifest.FILE
    whole = path.read_text()
    raw = json.loads(whole)
    entry = next(iter(raw["tensors"].values()))
    entry["chunks"] = [0] * len(entry["chunks"])
    path.write_text(json.dumps(raw))
    with pytest.raises(fetch.FetchError, match="version 0 of"):
        fetch.check(tmp_path, 0, MODEL)
    path.write_text(whole)

    def stale(root):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(manifest, "committed_versions", stale)
    with pytest.raises(fetch.FetchError, match="Stale file handle"):
        fetch.check(tmp_path, 0, MODEL)
