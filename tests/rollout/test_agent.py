"""An episode is a list of ids that only grows, and every fault in it has a name."""

import asyncio
import dataclasses
import json
import logging
import time

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from rstar2_jax.data import chat as chats
from rstar2_jax.data import files
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.rollout import agent, engine, pool
from rstar2_jax.settings import Fleet, Rollout, Task
from rstar2_jax.tools import protocol
from rstar2_jax.types import CallStatus, FinishReason, Prompt, StopReason, ToolCall, ToolResult, Turn

TOOL = "execute_python_code_with_standard_io"
PROMPT = Prompt(id="sum/17", question="6*7", answer="42", source="sum")
SETTINGS = Rollout(
    prompts_per_step=1,
    group_size=1,
    oversample=1,
    max_prompt_tokens=200,
    max_response_tokens=2000,
    max_turns=5,
    max_calls_per_turn=2,
    max_reply_tokens=100,
    deadline_s=5.0,
)
ANSWER = "so</reason>\n<answer>\\boxed{42}</answer><|im_end|>"
# A template without line ends, so that the worked example's lengths come out: prompt 5, tool turn 6.
TERSE = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}
        {{- ('<reason>' if message.role == 'assistant' and not message.content.startswith('<reason>') else '') }}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<reason>' }}
{%- endif %}"""


class ScriptedEngine:
    """An engine whose policy is a list of turns; every id has log-probability -0.5 and is of weights version 3."""

    caps = engine.Caps(name="scripted", vocab_size=10_000, max_context_tokens=4096, kv_tokens=100_000)
    weights_version = 3

    def __init__(self, tokenizer, turns):
        self.turns = [tokenizer.encode(turn) if isinstance(turn, str) else turn for turn in turns]
        self.requests = []

    async def ready(self, limit_s):
        """There is always room."""

    async def generate(self, request):
        self.requests.append(request)
        turn = self.turns[len(self.requests) - 1]
        if isinstance(turn, Exception):
            raise turn
        if turn is None:
            await asyncio.Event().wait()
        ids = list(turn)[: request.sampling.max_new_tokens]
        cut = len(ids) == request.sampling.max_new_tokens and ids[-1] not in request.sampling.stop_ids
        return generation(ids, FinishReason.LENGTH if cut else FinishReason.STOP)


def generation(ids, finish_reason):
    return engine.Generation(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        weights_versions=np.full(len(ids), 3, np.int32),
        finish_reason=finish_reason,
    )


class EchoTool:
    """Prints its code; `sleep N` waits first, and the words below break it in the ways in which a tool can break."""

    name = TOOL
    schema = {"type": "function", "function": {"name": TOOL}}

    def __init__(self):
        self.keys = []
        self.running = 0
        self.most_running = 0

    async def run(self, call: ToolCall, *, key: str) -> ToolResult:
        self.keys.append(key)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            code = call.arguments["code"]
            if code.startswith("sleep"):
                await asyncio.sleep(float(code.split()[1]))
            if code == "raise":
                raise KeyError("a bug in the tool")
            if code == "closed":
                raise ConnectionResetError("connection closed midway")
            if code == "none":
                return None  # type: ignore[return-value]
            await asyncio.sleep(0)
            return ToolResult(status=CallStatus.OK, stdout=code)
        finally:
            self.running -= 1


@pytest.fixture(scope="module")
def chat():
    return files.load_chat(Task(source="box", tokenizer="box", template="box"))


def call_text(*codes):
    calls = [json.dumps({"name": TOOL, "arguments": {"code": code}}) for code in codes]
    return "x</reason>\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + "<|im_end|>"


def run(chat, turns, settings=SETTINGS, tool=None, seed=11):
    """(trajectory, engine, faults) of one episode of a scripted policy."""
    scripted, faults = ScriptedEngine(chat.tokenizer, turns), []
    registry = protocol.Registry([tool or EchoTool()])
    coroutine = agent.run_episode(
        scripted, chat, registry, PROMPT, sample_index=3, seed=seed, settings=settings, on_fault=faults.append
    )
    return asyncio.run(coroutine), scripted, faults


def with_(**changes):
    return dataclasses.replace(SETTINGS, **changes)


def marks(trajectory):
    return " ".join("".join("01"[int(m)] for m in turn.mask) for turn in trajectory.turns)


def statuses(turn):
    return [result.status.value for result in turn.results]


def reply_text(chat, turn):
    return chat.tokenizer.decode(turn.token_ids[~turn.mask].tolist())


@pytest.fixture(scope="module")
def terse():
    return chats.Chat(tokenizers.Tokenizer.box(), TERSE)


def test_the_worked_example_has_the_mask_that_it_must_have(terse):
    turns = ['<tool_call>\n{"name": "' + TOOL + '", "arguments": {"code": "123"}}\n</tool_call>', "ab<|im_end|>"]
    turns[0] = terse.tokenizer.encode(turns[0].replace("123", "1")) + list(terse.end_ids)

    class Tool123(EchoTool):
        async def run(self, call, *, key):
            return ToolResult(status=CallStatus.OK, stdout="123")

    prompt = dataclasses.replace(PROMPT, question="abc")
    registry = protocol.Registry([Tool123()])

    def episode(budget):
        scripted = ScriptedEngine(terse.tokenizer, turns)
        settings = with_(max_response_tokens=budget)
        coroutine = agent.run_episode(scripted, terse, registry, prompt, sample_index=0, seed=1, settings=settings)
        return asyncio.run(coroutine)

    whole = episode(16)
    assert len(whole.prompt_ids) == 5 and len(turns[0]) == 4
    assert marks(whole) == "1111000000 111"
    assert whole.num_sampled_tokens == 7 and whole.stop_reason is StopReason.ANSWERED

    short = episode(10)
    assert marks(short) == "1111" and short.stop_reason is StopReason.BUDGET
    assert marks(episode(11)) == "1111000000 1"


def test_an_answer_without_a_call_ends_the_episode(chat):
    trajectory, scripted, faults = run(chat, [ANSWER])
    assert trajectory.stop_reason is StopReason.ANSWERED and not faults
    assert trajectory.turns[0].mask.all() and trajectory.turns[0].calls == ()
    assert trajectory.engine == "scripted" and trajectory.sample_index == 3 and trajectory.seed == 11
    assert scripted.requests[0].prompt_ids == chat.prompt_ids(PROMPT.question) == trajectory.prompt_ids.tolist()


def test_every_request_is_the_ids_so_far_and_nothing_is_encoded_again(chat):
    trajectory, scripted, _ = run(chat, [call_text("1"), call_text("2"), ANSWER])
    grown = trajectory.prompt_ids.tolist()
    for request, turn in zip(scripted.requests, trajectory.turns, strict=True):
        assert list(request.prompt_ids) == grown
        grown += turn.token_ids.tolist()
    text = chat.tokenizer.decode(grown)
    assert text.count("<|im_end|>\n<|im_start|>user\n<tool_response>\n") == 2
    assert text.count("<tool_response>\n1\n</tool_response>") == 1


def test_three_turns_have_three_runs_of_trained_ids_and_each_reply_stands_once(chat):
    trajectory, _, _ = run(chat, [call_text("111"), call_text("222"), ANSWER])
    mask = np.concatenate([turn.mask for turn in trajectory.turns])
    assert int(mask[0]) + int((np.diff(mask.astype(int)) == 1).sum()) == 3
    replies = "".join(reply_text(chat, turn) for turn in trajectory.turns)
    assert replies.count("111") == replies.count("222") == 1
    for turn in trajectory.turns:
        assert (turn.behavior_logprobs[turn.mask] == -0.5).all() and (turn.behavior_logprobs[~turn.mask] == 0).all()
        assert (turn.weights_versions[turn.mask] == 3).all() and (turn.weights_versions[~turn.mask] == -1).all()


def test_ids_that_would_be_encoded_otherwise_are_trained_as_they_were_sampled():
    """A vocabulary with merges: 1, 2, 3 sampled one by one reads as one id when encoded, and so does }}."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    for piece in ("12", "123", "}}"):
        vocabulary[piece] = len(vocabulary)
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2"), ("12", "3"), ("}", "}")]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = tokenizers.Tokenizer(raw.to_str(), {"eos_token": "<|im_end|>"}, ["<|im_end|>"])
    merging = chats.Chat(tokenizer, files.read_template("box"))
    sampled = [i for char in call_text("123").removesuffix("<|im_end|>") for i in tokenizer.encode(char)]
    sampled += list(merging.end_ids)
    assert sampled != tokenizer.encode(call_text("123"))
    trajectory, scripted, _ = run(merging, [sampled, ANSWER])
    assert trajectory.turns[0].sampled_ids.tolist() == sampled
    assert list(scripted.requests[1].prompt_ids)[len(trajectory.prompt_ids) :][: len(sampled)] == sampled
    assert trajectory.turns[0].results[0].stdout == "123"


def test_a_missing_end_token_is_forced_and_not_trained(chat):
    bare = chat.tokenizer.encode(call_text("1").removesuffix("<|im_end|>"))
    trajectory, _, _ = run(chat, [bare, ANSWER])
    turn = trajectory.turns[0]
    assert turn.sampled_ids.tolist() == bare
    assert tuple(turn.token_ids[~turn.mask][:1]) == chat.end_ids
    ended, _, _ = run(chat, [call_text("1"), ANSWER])
    assert ended.turns[0].token_ids.tolist() == turn.token_ids.tolist()
    assert ended.num_sampled_tokens == trajectory.num_sampled_tokens + 1


def test_overlong_is_what_the_engine_says_and_any_end_id_ends_a_turn(tmp_path):
    built_in = tokenizers.Tokenizer.box()
    built_in.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    other, end = built_in.token_to_id("<|endoftext|>"), built_in.token_to_id("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, other]}))
    both = chats.Chat(tokenizers.Tokenizer.load(str(tmp_path)), files.read_template("box"))
    assert both.tokenizer.eos_ids[0] == other
    trajectory, scripted, _ = run(both, [ANSWER])
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert set(scripted.requests[0].sampling.stop_ids) == {other, end}
    text = call_text("1").removesuffix("<|im_end|>") + "<|endoftext|>"
    called, _, _ = run(both, [text, ANSWER])
    assert statuses(called.turns[0]) == ["ok"]
    assert called.turns[0].token_ids[called.turns[0].mask][-1] == other
    assert end not in called.turns[0].token_ids[~called.turns[0].mask][:1]
    cut, _, _ = run(both, [ANSWER], with_(max_response_tokens=4))
    assert cut.stop_reason is StopReason.LENGTH


def test_nothing_of_a_turn_that_met_the_token_limit_is_executed(chat):
    tool = EchoTool()
    length = len(chat.tokenizer.encode(call_text("1"))) - 1
    trajectory, _, _ = run(chat, [call_text("1")], with_(max_response_tokens=length), tool)
    assert trajectory.stop_reason is StopReason.LENGTH
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH
    assert trajectory.turns[0].calls == () and tool.keys == []
    assert trajectory.turns[0].mask.all() and trajectory.num_response_tokens == length


def test_a_call_in_the_last_allowed_turn_is_not_executed(chat):
    tool = EchoTool()
    trajectory, scripted, _ = run(chat, [call_text("1"), call_text("2", "3")], with_(max_turns=2), tool)
    assert trajectory.stop_reason is StopReason.TURNS and len(scripted.requests) == 2 and len(tool.keys) == 1
    assert statuses(trajectory.turns[1]) == ["not_executed"] * 2
    answered, _, _ = run(chat, [call_text("1"), ANSWER], with_(max_turns=2))
    assert answered.stop_reason is StopReason.ANSWERED


def test_a_tool_turn_that_does_not_fit_is_left_out_as_a_whole(chat):
    first = len(chat.tokenizer.encode(call_text("1")))
    whole, _, _ = run(chat, [call_text("1"), ANSWER])
    needed = len(whole.turns[0].token_ids)
    for budget in (first + 1, needed - 1, needed):
        trajectory, _, _ = run(chat, [call_text("1"), ANSWER], with_(max_response_tokens=budget))
        assert trajectory.stop_reason is StopReason.BUDGET
        assert len(trajectory.turns) == 1 and trajectory.turns[0].mask.all()
        assert statuses(trajectory.turns[0]) == ["ok"]
    room, _, _ = run(chat, [call_text("1"), ANSWER], with_(max_response_tokens=needed + 1))
    assert room.stop_reason is StopReason.LENGTH and len(room.turns) == 2
    exact, _, _ = run(chat, [call_text("1"), ANSWER], with_(max_response_tokens=first))
    assert exact.stop_reason is StopReason.BUDGET and statuses(exact.turns[0]) == ["not_executed"]


def test_an_answer_that_ends_exactly_at_the_budget_is_an_answer(chat):
    trajectory, _, _ = run(chat, [ANSWER], with_(max_response_tokens=len(chat.tokenizer.encode(ANSWER))))
    assert trajectory.stop_reason is StopReason.ANSWERED


def test_what_remains_is_the_budget_less_all_that_was_appended_however_often_it_was_cut():
    def piece(sampled, forced):
        return Turn(
            token_ids=np.zeros(sampled + forced, np.int32),
            mask=np.arange(sampled + forced) < sampled,
            behavior_logprobs=np.zeros(sampled + forced, np.float32),
            weights_versions=np.where(np.arange(sampled + forced) < sampled, 0, -1).astype(np.int32),
            finish_reason=FinishReason.ABORT,
        )

    settings = with_(max_response_tokens=100)
    assert agent.remaining_tokens(settings, []) == 100
    assert agent.remaining_tokens(settings, [piece(30, 0)]) == 70
    assert agent.remaining_tokens(settings, [piece(30, 0), piece(20, 10)]) == 40
    assert agent.remaining_tokens(settings, [piece(90, 20)]) == 0


def test_every_turn_may_use_all_that_is_left_and_no_more(chat):
    trajectory, scripted, _ = run(chat, [call_text("1"), call_text("2"), ANSWER])
    left = SETTINGS.max_response_tokens
    for request, turn in zip(scripted.requests, trajectory.turns, strict=True):
        assert request.sampling.max_new_tokens == left
        left -= len(turn.token_ids)


def test_calls_of_a_turn_run_at_once_and_are_answered_in_their_order(chat):
    tool = EchoTool()
    begin = time.monotonic()
    text = call_text("sleep 0.2 a", "sleep 0.01 b", "c")
    trajectory, _, _ = run(chat, [text, ANSWER], tool=tool)
    assert time.monotonic() - begin < 2.0 and tool.most_running == 2
    turn = trajectory.turns[0]
    assert statuses(turn) == ["ok", "ok", "not_executed"]
    assert [call.arguments["code"][-1] for call in turn.calls] == ["a", "b", "c"]
    text = reply_text(chat, turn)
    assert text.count("<tool_response>") == 3
    assert text.index("sleep 0.2 a") < text.index("sleep 0.01 b") < text.index("at most 2 calls")


def test_a_call_that_does_not_parse_is_answered_and_the_episode_goes_on(chat):
    broken = "x</reason>\n<tool_call>\n{'name': 1}\n</tool_call>\n<tool_call>{}</tool_call><|im_end|>"
    trajectory, _, faults = run(chat, [broken, call_text("1"), ANSWER])
    assert trajectory.stop_reason is StopReason.ANSWERED and not faults
    assert statuses(trajectory.turns[0]) == ["parse_error", "parse_error"]
    text = reply_text(chat, trajectory.turns[0])
    assert "double quotes" in text and "'name' is missing" in text
    assert statuses(trajectory.turns[1]) == ["ok"]


def test_a_call_to_a_tool_that_is_not_there_is_answered(chat):
    unknown = 'x<tool_call>{"name": "search", "arguments": {}}</tool_call><|im_end|>'
    trajectory, _, _ = run(chat, [unknown, ANSWER])
    assert statuses(trajectory.turns[0]) == ["unknown_tool"] and trajectory.stop_reason is StopReason.ANSWERED
    assert "'search'" in reply_text(chat, trajectory.turns[0])


@pytest.mark.parametrize("code", ["raise", "none", "closed"])
def test_a_tool_that_breaks_ends_the_episode_as_lost_with_its_status_on_record_and_a_named_fault(chat, code, caplog):
    with caplog.at_level(logging.WARNING):
        trajectory, _, faults = run(chat, [call_text(code, "1"), ANSWER])
    assert trajectory.stop_reason is StopReason.LOST
    assert statuses(trajectory.turns[0]) == ["infra", "ok"] and len(trajectory.turns) == 1
    assert bool(trajectory.turns[0].mask.all())
    (fault,) = faults
    assert fault.kind == "tool" and fault.lost and fault.prompt_id == PROMPT.id and fault.turn == 0
    assert TOOL in fault.waiting_for and "sum/17/3/0" in fault.waiting_for


def test_a_reply_that_the_engine_drops_ends_the_episode_as_lost_and_is_named(chat):
    trajectory, _, (fault,) = run(chat, [call_text("1"), None], with_(deadline_s=0.1))
    assert trajectory.stop_reason is StopReason.LOST
    assert len(trajectory.turns) == 1 and statuses(trajectory.turns[0]) == ["ok"]
    assert fault.kind == "deadline" and fault.lost and fault.turn == 1 and fault.sample_index == 3
    for word in ("0.1 s", "'scripted'", "sum/17/3/1", "prompt sum/17", "turn 1"):
        assert word in fault.message


def test_a_tool_that_never_answers_ends_the_episode_as_lost_and_is_named(chat):
    trajectory, _, faults = run(chat, [call_text("1"), call_text("sleep 60")], with_(deadline_s=0.2))
    assert trajectory.stop_reason is StopReason.LOST and len(trajectory.turns) == 1
    assert faults[-1].kind == "deadline" and f"tool {TOOL!r}" in faults[-1].message and "turn 1" in faults[-1].message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (engine.EngineError("the replica died"), "engine"),
        (engine.LimitError("too many open files"), "limit"),
        (RuntimeError("out of memory"), "unexpected"),
    ],
)
def test_an_engine_that_fails_ends_the_episode_as_lost_with_the_finished_turns(chat, error, kind):
    trajectory, _, (fault,) = run(chat, [call_text("1"), error])
    assert trajectory.stop_reason is StopReason.LOST and len(trajectory.turns) == 1
    assert fault.kind == kind and fault.lost and str(error) in fault.message


def test_an_aborted_or_malformed_generation_is_a_fault_and_never_a_turn(chat):
    class Odd(ScriptedEngine):
        result = generation([1, 2], FinishReason.ABORT)

        async def generate(self, request):
            return self.result

    class TooLong(Odd):
        result = generation([1] * 3000, FinishReason.STOP)

    class Skewed(Odd):
        result = dataclasses.replace(generation([1, 2], FinishReason.STOP), logprobs=np.zeros(3, np.float32))

    for kind in (Odd, TooLong, Skewed):
        faults = []
        coroutine = agent.run_episode(
            kind(chat.tokenizer, []),
            chat,
            protocol.Registry([EchoTool()]),
            PROMPT,
            sample_index=0,
            seed=0,
            settings=SETTINGS,
            on_fault=faults.append,
        )
        trajectory = asyncio.run(coroutine)
        assert trajectory.stop_reason is StopReason.LOST and trajectory.turns == () and len(faults) == 1


def test_cancellation_is_not_swallowed_and_reaches_the_tool(chat):
    tool = EchoTool()

    async def cancel_midway():
        scripted = ScriptedEngine(chat.tokenizer, [call_text("sleep 60")])
        episode = agent.run_episode(
            scripted, chat, protocol.Registry([tool]), PROMPT, sample_index=0, seed=0, settings=SETTINGS
        )
        task = asyncio.create_task(episode)
        while not tool.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    assert tool.running == 0


def test_prompts_and_episodes_that_cannot_fit_are_refused_before_anything_is_generated(chat):
    with pytest.raises(ValueError, match=r"'sum/17' has \d+ ids, above Rollout.max_prompt_tokens = 5"):
        run(chat, [ANSWER], with_(max_prompt_tokens=5))
    with pytest.raises(ValueError, match="above the 4096 context tokens of engine 'scripted'"):
        run(chat, [ANSWER], with_(max_response_tokens=4000))


def test_seeds_are_stable_and_differ_by_run_step_prompt_sample_and_turn(chat):
    places = [(run_, step, prompt, i) for run_ in (0, 1) for step in (0, 1) for prompt in ("a", "b") for i in range(32)]
    seeds = [agent.episode_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) and all(0 <= seed < 2**31 for seed in seeds)
    assert agent.episode_seed(0, 0, "a", 0) == 1067047109
    turns = [agent.turn_seed(seed, turn) for seed in seeds[:32] for turn in range(10)]
    assert len(set(turns)) == len(turns)
    _, scripted, _ = run(chat, [call_text("1"), ANSWER], seed=7)
    assert [request.seed for request in scripted.requests] == [agent.turn_seed(7, 0), agent.turn_seed(7, 1)]


def test_executions_have_keys_of_their_own_that_come_back_in_a_replay(chat):
    first, again, other = EchoTool(), EchoTool(), EchoTool()
    for tool, seed in ((first, 1), (again, 1), (other, 2)):
        run(chat, [call_text("1", "1"), call_text("1"), ANSWER], tool=tool, seed=seed)
    assert len(set(first.keys)) == 3 and all(len(key) <= 64 for key in first.keys)
    assert first.keys == again.keys and not set(first.keys) & set(other.keys)


def test_a_policy_that_repeats_one_call_shows_in_the_repeat_share(chat):
    looping, _, _ = run(chat, [call_text("1")] * 5)
    assert looping.stop_reason is StopReason.TURNS and agent.repeat_call_frac(looping) == 1.0
    varied, _, _ = run(chat, [call_text("1"), call_text("2"), ANSWER])
    assert agent.repeat_call_frac(varied) == 0.0


class Mortal(ScriptedEngine):
    """A scripted engine that a pool can hold: its first turn may be its last."""

    def __init__(self, tokenizer, turns, *, name, dies=False):
        super().__init__(tokenizer, turns)
        self.caps = dataclasses.replace(self.caps, name=name, kv_tokens=2200)
        self.dies = dies

    async def generate(self, request):
        if self.dies:
            raise engine.EngineError(f"{self.caps.name} is dead")
        return await super().generate(request)

    async def alive(self):
        return not self.dies

    async def close(self):
        """Nothing is held."""


def test_waiting_for_room_after_an_engine_died_does_not_count_against_the_turn(chat):
    engines = [Mortal(chat.tokenizer, [], name="a", dies=True), Mortal(chat.tokenizer, [ANSWER], name="b")]
    settings, sizes, faults = with_(deadline_s=0.2), {"family": "", "prompt_tokens": 200, "budget_tokens": 2000}, []

    async def main():
        shared = pool.Pool(engines, Fleet(expected_quantile=0, probe_s=0))
        registry = protocol.Registry([EchoTool()])

        async def hold():
            async with shared.seat("other", **sizes) as other:
                await other.ready()
                await asyncio.sleep(0.5)

        async with shared.seat("mine", **sizes) as mine:
            await mine.ready()
            holder = asyncio.create_task(hold())
            await asyncio.sleep(0)
            trajectory = await agent.run_episode(
                mine, chat, registry, PROMPT, sample_index=0, seed=1, settings=settings, on_fault=faults.append
            )
            await holder
            return trajectory

    trajectory = asyncio.run(main())
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.engine == "b" and not faults


def test_an_episode_that_gets_no_room_ends_with_a_fault_that_says_so(chat):
    settings, sizes, faults = with_(deadline_s=0.05, max_turns=2), {"family": "", "prompt_tokens": 200}, []

    async def main():
        shared = pool.Pool([Mortal(chat.tokenizer, [], name="a")], Fleet(expected_quantile=0, probe_s=0))
        async with shared.seat("other", **sizes, budget_tokens=2000) as other:
            await other.ready()
            async with shared.seat("mine", **sizes, budget_tokens=2000) as mine:
                return await agent.run_episode(
                    mine, chat, protocol.Registry([EchoTool()]), PROMPT, sample_index=0, seed=1, settings=settings,
                    on_fault=faults.append,
                )  # fmt: skip

    assert asyncio.run(main()).stop_reason is StopReason.LOST
    (fault,) = faults
    assert fault.kind == "room" and fault.waiting_for.startswith("room in an engine, request sum/17/0/0")
    assert "nobody was given a place for 0.2 s: 1 of 1 engines in service, 1 waiting" in fault.message
