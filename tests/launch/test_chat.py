"""What the terminal sends of a conversation: answers as sampled, ended once, and none that a fault cut off."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import types

import numpy as np

from rstar2_jax import ask, chat, settings
from rstar2_jax.data import files
from rstar2_jax.rollout import engine, groups, pool
from rstar2_jax.tools import protocol
from rstar2_jax.types import FinishReason

TASK = settings.Task(source="box", tokenizer="box", template="box")
ROLLOUT = settings.Rollout(
    prompts_per_step=1, group_size=1, oversample=1, max_prompt_tokens=400, max_response_tokens=200, max_turns=2
)
MODEL = settings.Model(
    family="qwen3", vocab_size=320, d_model=8, d_mlp=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_positions=700
)


class Script:
    """Says one line after another; None is a fault."""

    caps = engine.Caps(name="script", vocab_size=320, max_context_tokens=700, kv_tokens=7000)
    weights_version = 0

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines, self.prompts = tokenizer, lines, []

    async def generate(self, request):
        self.prompts.append(self.tokenizer.decode(list(request.prompt_ids)))
        line = self.lines.pop(0)
        if line is None:
            raise engine.LimitError("the way there is closed")
        ids = np.asarray(self.tokenizer.encode(line + "<|im_end|>"), np.int32)
        return engine.Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )


def talk(tmp_path, monkeypatch, typed, lines):
    """The prompts that the model was sent."""
    protocol_of_chat = files.load_chat(TASK)
    script = Script(protocol_of_chat.tokenizer, list(lines))

    @contextlib.asynccontextmanager
    async def open_room(*_):
        sampler = groups.Sampler(
            engine=pool.Pool([script], settings.Fleet(probe_s=0)), chat=protocol_of_chat,
            tools=protocol.Registry([]), grader=None, rollout=ROLLOUT, roc=settings.Roc(), seed=0,
        )  # fmt: skip
        yield types.SimpleNamespace(tier=types.SimpleNamespace(chat=protocol_of_chat), sampler=sampler)

    monkeypatch.setattr(ask, "open_room", open_room)
    (tmp_path / "typed").write_text(typed)
    run = settings.Run(workdir=str(tmp_path), steps=0, init_from="model")
    given = {"run": run, "model": MODEL, "task": TASK, "rollout": ROLLOUT, "sandbox": settings.Sandbox()}
    with (tmp_path / "typed").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert chat.chat(**given) == 0
    return script.prompts


def test_an_answer_goes_into_the_next_prompt_as_it_was_sampled_and_ends_once(tmp_path, monkeypatch):
    first, second = talk(tmp_path, monkeypatch, "1+1\n2+2\n", ["so</reason>two", "well</reason>four"])
    assert (
        second == first + "so</reason>two<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<reason>"
    )


def test_a_question_that_a_fault_left_without_an_answer_is_no_part_of_the_next_prompt(tmp_path, monkeypatch):
    prompts = talk(tmp_path, monkeypatch, "1+1\n3+3\n2+2\n", ["so</reason>two", None, "well</reason>four"])
    assert "1+1" in prompts[2] and "3+3" not in prompts[2] and prompts[2].count("<reason>") == 2


def test_an_interrupted_terminal_ends_without_one_more_line():
    code = (
        "import asyncio\n"
        "from rstar2_jax import chat\n"
        "async def main():\n"
        "    assert await chat._read_line() == '1+1\\n'\n"
        "    print('asked', flush=True)\n"
        "    await chat._read_line()\n"
        "asyncio.run(main())\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "sandbox")])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("1+1\n")
        process.stdin.flush()
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
            assert "KeyboardInterrupt" in process.stderr.read()
        finally:
            process.kill()
