"""A model in the terminal, as a process of its own: calls shown, talks kept and forgotten, refusals survived."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from rstar2_jax import settings, sft

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = settings.Model(
    family="qwen3",
    vocab_size=320,
    d_model=32,
    d_mlp=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    rope_theta=100.0,
    max_positions=4096,
)
SIZES = (
    "d_model = 32",
    "d_mlp = 64",
    "layers = 1",
    "heads = 2",
    "kv_heads = 1",
    "head_dim = 16",
    "max_positions = 4096",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that answers in the format after some steps of direct demonstrations, mostly wrongly."""
    root = tmp_path_factory.mktemp("served")
    sft.sft(
        run=settings.Run(workdir=str(root / "sft"), steps=150),
        model=TINY,
        task=settings.Task(source="box", tokenizer="box", template="box", families=("gcd",)),
        demonstrations=settings.Demonstrations(count=256, tool_share=0.2, failing_share=0.0, batch_size=16),
        learner=settings.Learner(
            optimizer=settings.Optimizer(lr=1e-2, warmup_steps=5, b2=0.98), microbatch_rows=4, row_tokens=160
        ),
    )
    return root


def command(root, file, workdir, *more):
    files = (file, "model/box.gin", "scale/box.gin")
    bindings = [f"Model.{size}" for size in SIZES]
    bindings += [f"Run.init_from='{root / 'sft'}'", "Rollout.max_response_tokens=96", *more]
    words = [sys.executable, "-m", "rstar2_jax.launch", *(f"--gin_file={name}" for name in files)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox")])
    given = {"env": {**os.environ, "PYTHONPATH": path}, "cwd": ROOT, "text": True}
    return [*words, f"--workdir={workdir}", *(f"--gin_bindings={binding}" for binding in bindings)], given


def test_the_terminal_answers_line_by_line_and_shows_calls_and_how_it_ended(trained):
    words, given = command(trained, "chat.gin", trained / "chat", "Rollout.max_prompt_tokens=200")
    lines = "gcd(24,36)\ngcd(8,12)\n\ngcd(24,36)\n" + "gcd" * 200 + "\n"
    done = subprocess.run(words, input=lines, capture_output=True, timeout=300, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("turn 1:") == 3 and done.stdout.count(" tokens") >= 3
    assert "</reason>" in done.stdout and "max_prompt_tokens = 200" in done.stdout
