"""Parts in C: compiled once, made again when they were cut short, done without where there is no compiler."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax.model import attention, attention_native, native, pages, pages_native

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SOURCE = "pages_native.c"


def unregistered(names=("rstar2_pages_step",)):
    return not native.registered.__wrapped__(SOURCE, names, "slow")


def test_a_library_that_was_cut_short_is_made_again(tmp_path):
    whole = native.build(SOURCE, tmp_path)
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    assert native.build(SOURCE, tmp_path).read_bytes() == content


def test_each_part_has_a_library_of_its_own(tmp_path):
    names = [native.build(source, tmp_path).name for source in (SOURCE, "attention_native.c")]
    assert [name.split("-")[0] for name in names] == ["pages_native", "attention_native"]
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_a_user_without_a_home_goes_on_without_the_part_in_c(monkeypatch, caplog):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", nobody)
    with caplog.at_level(logging.WARNING):
        assert unregistered()
    assert "slow: Could not determine home directory" in caplog.text


def test_a_library_that_lacks_a_function_is_not_used(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert unregistered(("rstar2_pages_step", "rstar2_no_such_function"))
    assert "rstar2_no_such_function" in caplog.text


def test_without_a_compiler_the_log_says_so_and_the_portable_forms_are_used(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert unregistered()
    assert "no C compiler was found (Debian: apt-get install gcc libc6-dev)" in caplog.text
    for part in (pages_native, attention_native):
        monkeypatch.setattr(part, "available", lambda: False)
    rng = np.random.default_rng(0)
    q, new, pool = (jnp.asarray(rng.normal(size=size)) for size in ((2, 4, 8), (2, 2, 8), (2, 2, 8, 8)))
    tables, positions = np.arange(2, dtype=np.int32)[:, None], np.array([3, 5], np.int32)
    found, cache = pages.step(q, (new, new), (pool, pool), positions, tables)
    np.testing.assert_array_equal(found, pages.attention(q, *cache, positions, tables))
    q, k = (rng.normal(size=(1, 20, heads, 8)).astype(np.float32) for heads in (4, 2))
    args = q, k, k, np.ones((1, 20), np.int32)
    text = str(jax.make_jaxpr(attention.causal)(*args))
    assert "ffi_call" not in text
    np.testing.assert_array_equal(attention.causal(*args), attention.portable(*args))


def test_a_compiler_that_fails_is_an_error_with_its_words(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="no such header"):
        native.build(SOURCE, tmp_path / "native")
    assert list((tmp_path / "native").iterdir()) == []


def test_processes_that_compile_at_once_all_get_it(tmp_path):
    code = (
        "import pathlib, sys; from rstar2_jax.model import native; "
        "print(native.build(sys.argv[1], pathlib.Path(sys.argv[2])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, SOURCE, str(tmp_path)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(said) == 1 and [str(path) for path in tmp_path.iterdir()] == list(said)
