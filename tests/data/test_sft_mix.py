"""Demonstrations: exact shares, the agent loop's own contexts, trained ids only where the assistant speaks."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from rstar2_jax import settings
from rstar2_jax.data import files, prompts, sft_mix, worked

TASK = settings.Task(source="box", tokenizer="box", template="box", difficulty=3)
MIX = settings.Demonstrations(count=200, tool_share=0.6, failing_share=0.5, doubled_answer_share=0.1)


def made(task=TASK, mix=MIX, seed=0):
    chat = files.load_chat(task)
    return chat, sft_mix.demonstrations(task, mix, chat, seed), sft_mix.kinds(mix, seed)


def runs(mask) -> int:
    return int(np.sum(np.diff(np.concatenate([[0], mask.astype(int)])) == 1))


def test_shares_are_exact():
    listed = sft_mix.kinds(MIX, 0)
    assert sum(k.tool for k in listed) == 120
    assert [sum(k.mistake == m for k in listed) for m in sft_mix.MISTAKES] == [15] * 4
    assert sum(k.doubled for k in listed) == 20
    assert not any(k.mistake and not k.tool for k in listed)
    assert {k.tool for k in listed if k.doubled} == {True, False}


def test_demonstrations_are_a_pure_function_of_the_seed():
    texts = [[d.token_ids.tolist() for d in made(seed=seed)[1]] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_demonstrations_longer_than_a_row_are_left_out_and_none_left_is_an_error():
    _, demos, _ = made()
    longest = max(len(demo.token_ids) for demo in demos)
    kept = sft_mix.fitting(demos, longest - 1, 4096)
    assert 0 < len(kept) < len(demos) and max(len(demo.token_ids) for demo in kept) < longest
    assert sft_mix.fitting(demos, 4096, longest) == demos
    with pytest.raises(ValueError, match=r"Learner.row_tokens = 3: the shortest has \d+ tokens; raise it"):
        sft_mix.fitting(demos, 3, 4096)
    with pytest.raises(ValueError, match=r"Model.max_positions = 2: the shortest has \d+ tokens; raise it"):
        sft_mix.fitting(demos, 3, 2)


def test_each_assistant_turn_is_one_trained_run():
    # F08: direct 1, tool 2, mended mistake 3.
    _, demos, kinds = made()
    for demo, kind in zip(demos, kinds, strict=True):
        assert runs(demo.mask) == 1 + kind.tool + bool(kind.mistake)


def test_ids_equal_the_rendering_of_the_whole_conversation_and_the_mask_covers_assistant_text_alone():
    # F04, F05
    chat, demos, _ = made()
    for demo in demos[:60]:
        text = chat.tokenizer.decode(demo.token_ids)
        assert demo.token_ids.tolist() == chat.tokenizer.encode(text)
        said = "".join(re.findall(r"(?<=assistant\n<reason>).*?<\|im_end\|>", text, re.DOTALL))
        assert chat.tokenizer.decode(demo.token_ids[demo.mask]) == said
        assert demo.token_ids[-1] == chat.end_ids[0] and demo.mask[-1]


def test_contexts_are_those_of_the_agent_loop():
    chat = files.load_chat(TASK)
    row = prompts.make_source(TASK).solved(0, 0, 1)[0]
    demo = sft_mix.build(chat, row.prompt, [sft_mix.working_call(row)], TASK.tool_name)
    prompt, reply = chat.prompt_ids(row.prompt.question), chat.reply_ids([row.value])
    ids = demo.token_ids.tolist()
    assert ids[: len(prompt)] == prompt
    at = next(i for i in range(len(ids)) if ids[i : i + len(reply)] == reply)
    assert ids[at - 1] == chat.end_ids[0] and demo.mask[at - 1] and not demo.mask[at : at + len(reply)].any()
    assert demo.mask[at + len(reply)]


def test_the_final_answer_is_the_gold_one_once_or_twice():
    chat, demos, kinds = made()
    for demo, kind in zip(demos, kinds, strict=True):
        answers = re.findall(r"<answer>\\boxed\{(-?\d+)\}</answer>", chat.tokenizer.decode(demo.token_ids))
        assert len(answers) == 1 + kind.doubled and len(set(answers)) == 1


def test_calls_are_the_json_of_the_protocol_and_the_answer_is_what_the_tool_said():
    chat, demos, kinds = made()
    demo = next(d for d, k in zip(demos, kinds, strict=True) if k.tool and not k.mistake)
    text = chat.tokenizer.decode(demo.token_ids)
    call = json.loads(re.search(r"<tool_call>\n(.*)\n</tool_call>", text).group(1))
    assert call["name"] == TASK.tool_name and call["arguments"]["code"].startswith(("print(", "import math;"))
    said = re.search(r"<tool_response>\n(.*)\n</tool_response>", text).group(1)
    assert f"\\boxed{{{said}}}" in text


def test_a_mistake_comes_first_and_is_mended_second():
    chat, demos, kinds = made()
    for mistake, error in zip(sft_mix.MISTAKES, ("Name", "Syntax", "ZeroDivision", "Type"), strict=True):
        demo = next(d for d, k in zip(demos, kinds, strict=True) if k.mistake == mistake)
        replies = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", chat.tokenizer.decode(demo.token_ids), re.S)
        assert len(replies) == 2 and f"{error}Error: " in replies[0] and replies[1].isdigit()


def test_all_stages_up_to_the_difficulty_are_shown():
    one, three = (made(task=dataclasses.replace(TASK, difficulty=difficulty))[1] for difficulty in (1, 3))
    prompt_tokens = [np.mean([np.argmax(demo.mask) for demo in demos]) for demos in (one, three)]
    assert prompt_tokens[0] + 0.5 < prompt_tokens[1]


def test_episodes_of_the_box_task_take_few_ids():
    _, demos, kinds = made()
    longest = {"direct": 0, "tool": 0, "mended": 0}
    for demo, kind in zip(demos, kinds, strict=True):
        name = "mended" if kind.mistake else "tool" if kind.tool else "direct"
        longest[name] = max(longest[name], len(demo.token_ids))
    assert longest["direct"] <= 40 and longest["tool"] <= 75 and longest["mended"] <= 115


def test_word_problems_with_worked_solutions_give_tool_demonstrations(tmp_path):
    worked = [(f"Add {i} and {i}?", f"It is {i} + {i} = {2 * i} in all.\n#### {2 * i}") for i in range(9)]
    bare = [(f"Guess {i}", f"#### {i}") for i in range(9)]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in worked + bare]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    task = settings.Task(source="gsm8k", tokenizer="box", path=str(tmp_path))
    chat, demos, kinds = made(task, settings.Demonstrations(count=12, tool_share=0.5, failing_share=0.5))
    for demo, kind in zip(demos, kinds, strict=True):
        said = chat.tokenizer.decode(demo.token_ids[demo.mask])
        assert ("print(" in said) == kind.tool and ("+" in said) == kind.tool


def test_a_source_without_code_cannot_teach_the_tool(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "Guess", "answer": "4"}\n')
    task = settings.Task(source="jsonl", tokenizer="box", path=str(tmp_path))
    with pytest.raises(ValueError, match="set tool_share = 0"):
        made(task)
    assert len(made(task, settings.Demonstrations(count=3, tool_share=0.0))[1]) == 3


def test_an_unknown_mistake_is_refused():
    row = worked.Solved(prompt=prompts.make_source(TASK).batch(0, 0, 1)[0], expression="1")
    with pytest.raises(ValueError, match="must be one of wrong_name"):
        sft_mix.mistaken_call("typo", row)


def test_demonstrations_use_training_problems_only():
    chat, demos, _ = made()
    shown = {re.search(r"user\n(.*?)<", chat.tokenizer.decode(d.token_ids)).group(1) for d in demos}
    for stage in (1, 2, 3):
        held = prompts.eval_prompts(dataclasses.replace(TASK, difficulty=stage), 100, 0)
        assert not shown & {prompt.question for prompt in held}
