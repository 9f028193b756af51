"""RUN/best: one version at a time, whole, and a place to start from."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rstar2_jax import begin, settings
from rstar2_jax.model import decoder
from rstar2_jax.weights import best, fetch, publish

TINY = settings.Model(
    family="qwen3", vocab_size=64, d_model=16, d_mlp=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=32
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    for version in (3, 4):
        publish.publish(decoder.init_params(TINY, jax.random.key(version)), TINY, str(root), version, keep=5)
    return root


def test_the_best_version_outlives_the_store_and_starts_a_run(store, tmp_path):
    folder = tmp_path / "run" / best.FOLDER
    assert best.read(folder) is None
    best.keep(store, folder, 3, {"accuracy": 0.5, "scored": 8.0})
    best.keep(store, folder, 4, {"accuracy": 0.6, "scored": 8.0})
    assert best.read(folder) == {"step": 4, "accuracy": 0.6, "scored": 8.0}
    assert fetch.latest_version(folder) == 4 and not (folder / "0000000003").exists()
    found = begin.load_params(str(folder), TINY, seed=0)
    wanted = decoder.init_params(TINY, jax.random.key(4))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))


def test_keeping_the_same_step_again_changes_its_record_alone(store, tmp_path):
    best.keep(store, tmp_path, 3, {"accuracy": 0.5})
    best.keep(store, tmp_path, 3, {"accuracy": 0.7})
    assert best.read(tmp_path) == {"step": 3, "accuracy": 0.7}
    fetch.check(tmp_path, 3, TINY)


def test_a_version_that_the_store_has_not_is_an_error_and_what_was_kept_stays(store, tmp_path):
    best.keep(store, tmp_path, 3, {"accuracy": 0.5})
    with pytest.raises(FileNotFoundError):
        best.keep(store, tmp_path, 9, {"accuracy": 0.9})
    assert best.read(tmp_path) == {"step": 3, "accuracy": 0.5} and fetch.latest_version(tmp_path) == 3


def test_other_weights_of_the_same_step_take_the_place_of_what_a_killed_life_kept(store, tmp_path):
    best.keep(store, tmp_path / "best", 3, {"accuracy": 0.5})
    again = tmp_path / "again"
    publish.publish(decoder.init_params(TINY, jax.random.key(9)), TINY, str(again), 3)
    best.keep(again, tmp_path / "best", 3, {"accuracy": 0.9})
    found, wanted = fetch.fetch(tmp_path / "best", 3, TINY), decoder.init_params(TINY, jax.random.key(9))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
