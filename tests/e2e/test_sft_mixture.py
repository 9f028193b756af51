"""Fine-tuning on the published mixture: two steps of the real RUN function on small files of every set."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rstar2_jax import settings, sft
from rstar2_jax.io import metrics
from tests.data import test_talks

pytestmark = pytest.mark.slow

TINY = settings.Model(
    family="qwen3", vocab_size=320, d_model=16, d_mlp=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=2048
)


def test_two_steps_of_the_mixture_train_on_the_assistants_ids_and_say_what_was_left_out(tmp_path, capsys):
    for name, row in test_talks.ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "odd": 1}) + "\n")
    mix = settings.Demonstrations(
        count=12,
        mixture=tuple((name, 2) for name in test_talks.ROWS),
        folder=str(tmp_path),
        batch_size=12,
    )
    how = settings.Learner(
        optimizer=settings.Optimizer(lr=1e-2, warmup_steps=0, schedule="cosine"), microbatch_rows=2, row_tokens=2048
    )
    workdir = tmp_path / "run"
    code = sft.sft(
        run=settings.Run(workdir=str(workdir), steps=2),
        model=TINY,
        task=settings.Task(source="openmath_reasoning", tokenizer="box", template="rstar2"),
        demonstrations=mix,
        learner=how,
    )
    said = capsys.readouterr().out
    assert code == 0 and "toolace: 2 of 2 wanted from 2 rows, licence apache-2.0" in said
    told = metrics.read_metrics(workdir)
    assert np.isfinite(told["learner/loss"]).all() and told["learner/loss"][1] < told["learner/loss"][0]
    assert (told["learner/tokens"] > 500).all()
