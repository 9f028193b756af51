"""A tier as a whole, with the real sandbox: whoever opens it leaves a timeline, however the work ends."""

from __future__ import annotations

import asyncio

import jax
import pytest

from rstar2_jax import ask, begin, settings
from rstar2_jax.data import prompts
from rstar2_jax.io import timeline
from rstar2_jax.model import decoder
from rstar2_jax.report import console

pytestmark = pytest.mark.e2e

TINY = settings.Model(
    family="qwen3", vocab_size=320, d_model=16, d_mlp=32, layers=1, heads=2, kv_heads=1, head_dim=8, max_positions=128
)
TASK = settings.Task(source="box", tokenizer="box", template="box", families=("gcd",))
ROLLOUT = settings.Rollout(
    prompts_per_step=2, group_size=2, oversample=2, max_prompt_tokens=100, max_response_tokens=12, max_turns=1,
    engine_slots=4, prefill_chunk_tokens=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    monkeypatch.setattr(begin, "load_params", lambda *_: decoder.init_params(TINY, jax.random.key(0)))


def with_room(folder, use, said=None):
    """What `use(room, screen)` returns."""
    run = settings.Run(workdir=str(folder), steps=0, init_from="model")
    folder.mkdir(exist_ok=True)

    async def work():
        screen = console.Console(0, "test")
        if said is not None:
            screen.note = said.append
        async with ask.open_room(run, TINY, TASK, ROLLOUT, settings.Sandbox(), screen) as room:
            return await use(room, screen)

    return asyncio.run(asyncio.wait_for(work(), 300))


async def ask_all(room, screen):
    return await ask.ask(room.sampler, prompts.eval_prompts(TASK, 2, 0), 0, "problems", screen)


def test_who_asks_a_model_leaves_one_line_a_start_and_keeps_none_of_it_in_memory(tmp_path):
    folder = tmp_path / "asked"
    for start in range(1, 3):
        assert len(with_room(folder, ask_all)) == 2
        lines, starts = timeline.in_a_row(timeline.read_timeline(folder))
        assert len(lines) == start and len(starts) == start - 1
        for kind in ("generate", "grade"):
            assert sum(lines[-1]["busy"][kind]) > 0


def test_work_that_ends_in_an_error_leaves_its_timeline_and_a_full_disk_hides_no_error(tmp_path, monkeypatch):
    async def fails(room, screen):
        await ask_all(room, screen)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        with_room(tmp_path / "failed", fails)
    assert len(timeline.read_timeline(tmp_path / "failed")) == 1

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeline.Timeline, "flush", full)
    said = []
    assert len(with_room(tmp_path / "full", ask_all, said)) == 2
    assert "! the end of the timeline was not written: [Errno 28] No space left on device" in said
