"""Curation end to end on a tiny model and the real sandbox: reasons by hand, a kill between chunks, one file a run."""

from __future__ import annotations

import json

import pytest

from rstar2_jax import curate, settings
from rstar2_jax.data import sources

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TINY = settings.Model(
    family="qwen3", vocab_size=320, d_model=16, d_mlp=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=128
)
LONG = "Here is a problem of rather many words so that eight in a row can be found, number"


def arguments(tmp_path, folder, **changed):
    path = tmp_path / "raw" / "train.jsonl"
    return {
        "run": settings.Run(workdir=str(tmp_path / folder), steps=0, init_from=str(tmp_path / "sft")),
        "model": TINY,
        "task": settings.Task(source="jsonl", path=str(path), tokenizer="box", template="box"),
        "rollout": settings.Rollout(
            prompts_per_step=200, group_size=1, oversample=1, max_prompt_tokens=110, max_response_tokens=12,
            max_turns=1, engine_slots=8, prefill_chunk_tokens=16,
        ),
        "sandbox": settings.Sandbox(),
        "curation": settings.Curation(samples=2, max_solved=1, **changed),
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model after one step of fine-tuning, and 90 raw problems with one of each kind that text tells."""
    from rstar2_jax import sft

    root = tmp_path_factory.mktemp("curate")
    how = settings.Learner(optimizer=settings.Optimizer(lr=1e-3), microbatch_rows=2, row_tokens=128)
    sft.sft(
        run=settings.Run(workdir=str(root / "sft"), steps=1),
        model=TINY,
        task=settings.Task(source="box", tokenizer="box", template="box"),
        demonstrations=settings.Demonstrations(count=8, batch_size=4),
        learner=how,
    )
    (root / "raw").mkdir()
    rows = [{"id": f"r{i}", "question": f"{i}+{i}", "answer": str(2 * i), "licence": "mit"} for i in range(100)]
    rows += [
        {"id": "huge", "question": "2^99", "answer": "9" * 30},
        {"id": "seen", "question": f"{LONG} 7", "answer": "1"},
    ]
    (root / "raw" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "against").mkdir()
    (root / "against" / "test.jsonl").write_text(json.dumps({"id": "e", "question": f"{LONG} 8", "answer": "3"}) + "\n")
    return root


def test_a_curation_that_is_cut_short_goes_on_and_ends_as_if_it_had_not_been(made, monkeypatch, capsys):
    given = arguments(made, "whole", against=(("jsonl", str(made / "against")),))
    assert curate.curate(**given) == 0
    told = json.loads((made / "whole" / "curation.json").read_text())
    trained = [row for row in range(100) if not sources.is_held_out(f"{row}+{row}")]
    names = {"answer above 18 digits": "2^99", "8-gram overlap with evaluation": f"{LONG} 7"}
    expected = {reason for reason, question in names.items() if not sources.is_held_out(question)}
    assert set(told["left_out"]) == expected and expected
    assert told["kept"] == told["asked"] == len(trained) and told["solved"]["0"] == len(trained)
    kept = [json.loads(line) for line in (made / "whole" / "train.jsonl").read_text().splitlines()]
    assert {row["licence"] for row in kept} == {"mit"} and {row["id"] for row in kept} == {f"r{i}" for i in trained}
    page = (made / "whole" / "curation.md").read_text()
    assert f"Kept {len(trained)} of" in page and all(f"| {reason} | 1 |" in page for reason in expected)

    judged = (made / "whole" / "judged.jsonl").read_text()
    (made / "cut").mkdir()
    (made / "cut" / "judged.jsonl").write_text(judged[: judged.index("\n", len(judged) // 2) + 9])
    given = arguments(made, "cut", against=(("jsonl", str(made / "against")),))
    asked = []
    real = curate.ask.ask

    async def counting(sampler, problems, *rest):
        asked.extend(problems)
        return await real(sampler, problems, *rest)

    monkeypatch.setattr(curate.ask, "ask", counting)
    assert curate.curate(**given) == 0 and 0 < len(asked) < len(trained)
    for name in ("train.jsonl", "curation.json", "curation.md", "judged.jsonl"):
        assert (made / "cut" / name).read_text() == (made / "whole" / name).read_text()
    assert curate.curate(**given) == 0 and "is there already" in capsys.readouterr().out


def test_labels_that_no_answer_confirms_are_left_out_and_other_settings_are_refused(made):
    given = arguments(made, "labels", min_solved=1)
    with pytest.raises(ValueError, match="problems is left .* label not confirmed"):
        curate.curate(**given)
    other = {**given, "run": settings.Run(workdir=given["run"].workdir, steps=0, init_from=str(made / "sft"), seed=5)}
    with pytest.raises(ValueError, match=r"judged\.jsonl holds answers of .*'seed': 0.*'seed': 5"):
        curate.curate(**other)
