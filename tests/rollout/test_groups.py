"""A step's groups depend on seeds and prompts alone, whatever the order in which episodes end."""

import asyncio
import dataclasses
import json
import re

import numpy as np
import pytest

from rstar2_jax import ask, settings
from rstar2_jax.data import files
from rstar2_jax.report import console
from rstar2_jax.rollout import engine, groups, pool
from rstar2_jax.tools import protocol
from rstar2_jax.types import CallStatus, FinishReason, Prompt, StopReason, ToolResult, Verdict
from rstar2_sandbox import protocol as sandbox_protocol

TOOL = "execute_python_code_with_standard_io"
ROLLOUT = settings.Rollout(
    prompts_per_step=3,
    group_size=4,
    oversample=8,
    max_prompt_tokens=100,
    max_response_tokens=300,
    max_turns=4,
    deadline_s=5.0,
)
ROC = settings.Roc(max_refills=4)


class SeededEngine:
    """A policy that reads `rate N` in the question and is right in N of 100 samples, after a call in half of them.

    Every choice follows from the request's seed. `hurry` is a generator of delays, so that the order of arrival can be
    changed without changing anything else.
    """

    caps = engine.Caps(name="seeded", vocab_size=10_000, max_context_tokens=4096, kv_tokens=100_000)
    weights_version = 0

    def __init__(self, tokenizer, hurry=0, drop=()):
        self.tokenizer = tokenizer
        self.delays = np.random.default_rng(hurry)
        self.drop = drop
        self.seen = []

    async def generate(self, request):
        self.seen.append(request)
        await asyncio.sleep(float(self.delays.uniform(0, 0.01)))
        if any(request.rid.startswith(name) for name in self.drop):
            await asyncio.Event().wait()
        rng = np.random.default_rng(request.seed)
        text = self.tokenizer.decode(list(request.prompt_ids))
        filler = "".join(rng.choice(list("abcdefgh"), 12))
        if "<tool_response>" not in text and rng.random() < 0.5:
            call = json.dumps({"name": TOOL, "arguments": {"code": filler}})
            ids = self.tokenizer.encode(f"{filler}</reason><tool_call>{call}</tool_call><|im_end|>")
        else:
            right = rng.uniform(0, 100) < int(re.findall(r"rate (\d+)", text)[0])
            answer = f"<answer>\\boxed{{{42 if right else 41}}}</answer>"
            ids = self.tokenizer.encode(f"{filler}</reason>{answer}<|im_end|>")
        return engine.Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=-rng.random(len(ids)).astype(np.float32),
            weights_versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
        )


class EchoTool:
    name = TOOL
    schema = {"type": "function", "function": {"name": TOOL}}

    async def run(self, call, *, key):
        failed = call.arguments["code"].startswith("a")
        return ToolResult(status=CallStatus.ERROR if failed else CallStatus.OK, stdout="done")


class BoxReader:
    """Compares the last box with the gold answer; keys that hold one of `broken` meet a fault of the service."""

    def __init__(self, broken=()):
        self.broken = broken

    async def verify(self, *, text, gold, key):
        await asyncio.sleep(0)
        if any(part in key for part in self.broken):
            return sandbox_protocol.Verification(verdict=sandbox_protocol.Verdict.INFRA, reason="node lost")
        found = re.findall(r"\\boxed\{(\d+)\}", text)[-1]
        right = found == gold
        verdict = sandbox_protocol.Verdict.CORRECT if right else sandbox_protocol.Verdict.WRONG
        return sandbox_protocol.Verification(verdict=verdict, answer=found)


@pytest.fixture(scope="module")
def chat():
    return files.load_chat(settings.Task(source="box", tokenizer="box", template="box"))


def make_sampler(chat, *, rollout=ROLLOUT, roc=ROC, hurry=0, drop=(), broken=(), seed=5):
    return groups.Sampler(
        engine=pool.Pool([SeededEngine(chat.tokenizer, hurry, drop)], settings.Fleet(probe_s=0)),
        chat=chat,
        tools=protocol.Registry([EchoTool()]),
        grader=BoxReader(broken),
        rollout=rollout,
        roc=roc,
        seed=seed,
    )


def draw_rates(*rates):
    """A source whose prompt number i has rate rates[i], the last one for ever."""

    def draw(offset, count):
        numbers = range(offset, offset + count)
        picked = [(i, rates[min(i, len(rates) - 1)]) for i in numbers]
        return [Prompt(id=f"p{i:03}", question=f"rate {rate}", answer="42", source="s") for i, rate in picked]

    return draw


def collect(sampler, draw, **more):
    return asyncio.run(groups.collect(sampler, draw, **{"step": 7, **more}))


def test_a_problem_that_cannot_be_asked_leaves_no_other_running(chat):
    sampler = make_sampler(chat, drop=("p000", "p001"))
    problems = [*draw_rates(50, 50)(0, 2), Prompt(id="long", question="1+" * 200, answer="1", source="s")]

    async def act():
        with pytest.raises(ValueError, match="prompt 'long' has"):
            await ask.ask(sampler, problems, 0, "problems", console.Console(0, "test"))
        return len(asyncio.all_tasks())

    assert asyncio.run(act()) == 1


def test_problems_that_share_an_id_are_all_asked(chat):
    problems = [dataclasses.replace(problem, id="0") for problem in draw_rates(100, 0)(0, 2)]
    sampler, screen = make_sampler(chat), console.Console(0, "test")
    first, second = asyncio.run(ask.ask(sampler, problems, 0, "problems", screen))
    indices = [trajectory.sample_index for group in (first, second) for trajectory in group.trajectories]
    assert indices == list(range(16)) and first.rewards.all() and not second.rewards.any()


def picture(collection):
    """All that a collection says, comparable."""

    def rows(some):
        return [(group.prompt.id, group.p_err, group.p_format, [_row(t) for t in group.trajectories]) for group in some]

    parts = [rows(collection.groups), rows(collection.surplus), rows(collection.rejected)]
    return parts, collection.prompts_used, collection.refills, collection.faults, collection.unscored


def _row(trajectory):
    turns = [(turn.token_ids.tobytes(), turn.behavior_logprobs.tobytes(), turn.results) for turn in trajectory.turns]
    return trajectory.seed, trajectory.sample_index, trajectory.verdict, trajectory.answer, turns


def names(some):
    return [group.prompt.id for group in some]


def test_each_prompt_gets_all_its_episodes_graded_and_in_order(chat):
    collection = collect(make_sampler(chat), draw_rates(50))
    assert names(collection.groups) == ["p000", "p001", "p002"]
    for group in collection.groups:
        assert [t.sample_index for t in group.trajectories] == list(range(8))
        assert [t.verdict is Verdict.CORRECT for t in group.trajectories] == (group.rewards == 1).tolist()
        assert group.valid.all() and {t.answer for t in group.trajectories} == {"41", "42"}
    assert collection.episodes == 24 and collection.unscored_share == 0.0 and not collection.faults


def test_the_outcome_is_the_same_whatever_order_the_episodes_end_in(chat):
    draw = draw_rates(50, 0, 100, 50, 50, 0, 40)
    first = picture(collect(make_sampler(chat, hurry=1, broken=("p003",)), draw))
    for hurry in (2, 3):
        assert picture(collect(make_sampler(chat, hurry=hurry, broken=("p003",)), draw)) == first


def test_members_of_a_group_differ_and_a_rerun_is_identical(chat):
    draw = draw_rates(50)
    one, again = (collect(make_sampler(chat), draw) for _ in range(2))
    assert picture(one) == picture(again)
    assert all(group.unique_frac == 1.0 for group in one.groups)
    for changed in (collect(make_sampler(chat, seed=6), draw), collect(make_sampler(chat), draw, step=8)):
        ours = {t.seed for group in one.groups for t in group.trajectories}
        assert not ours & {t.seed for group in changed.groups for t in group.trajectories}


def test_a_prompt_met_twice_in_one_step_is_not_sampled_twice_the_same(chat):
    prompt = draw_rates(50)(0, 1)[0]
    collection = collect(make_sampler(chat), lambda offset, count: [prompt] * count)
    episodes = [t for group in collection.groups for t in group.trajectories]
    assert [t.sample_index for t in episodes] == list(range(24))
    assert len({t.seed for t in episodes}) == 24
    rids = [request.rid for request in make_and_keep(chat, prompt)]
    assert len(set(rids)) == len(rids)


def make_and_keep(chat, prompt):
    sampler = make_sampler(chat)
    collect(sampler, lambda offset, count: [prompt] * count)
    return sampler.engine.engine(0).seen


def test_groups_with_equal_outcomes_are_set_aside_and_replaced_by_further_prompts(chat):
    collection = collect(make_sampler(chat), draw_rates(100, 50, 0, 50, 50))
    assert names(collection.groups) == ["p001", "p003", "p004"]
    assert names(collection.rejected) == ["p000", "p002"]
    assert collection.refills >= 1
    assert all(group.is_live for group in collection.groups)


def test_only_the_outcome_decides_whether_a_group_is_live_not_its_penalties(chat):
    collection = collect(make_sampler(chat), draw_rates(0))
    assert all(len(set(group.penalties.tolist())) > 1 for group in collection.rejected)
    assert collection.groups == ()


def test_a_source_of_equal_groups_only_ends_after_the_allowed_rounds(chat):
    collection = collect(make_sampler(chat), draw_rates(100))
    assert collection.groups == () and collection.refills == ROC.max_refills
    assert collection.prompts_used == 3 * (1 + ROC.max_refills) == len(collection.rejected)
    none = collect(make_sampler(chat, roc=settings.Roc(max_refills=0)), draw_rates(100))
    assert none.refills == 0 and none.prompts_used == 3


def test_without_rejection_every_group_is_kept(chat):
    roc = settings.Roc(reject_equal=False, max_refills=4)
    collection = collect(make_sampler(chat, roc=roc), draw_rates(100, 0, 50))
    assert names(collection.groups) == ["p000", "p001", "p002"] and collection.refills == 0
    assert [group.is_live for group in collection.groups] == [False, False, True]


def test_live_groups_beyond_the_need_appear_in_the_next_step(chat):
    draw = draw_rates(100, 100, 50, *[50] * 20)
    first = collect(make_sampler(chat), draw)
    # Round one: one live group of three, two missing, so that a share of a third asks for a whole step's prompts.
    assert names(first.groups) == ["p002", "p003", "p004"] and names(first.surplus) == ["p005"]
    assert first.prompts_used == 6

    def later(offset, count):
        return draw(first.prompts_used + offset, count)

    second = collect(make_sampler(chat), later, step=8, carried=first.surplus)
    assert names(second.groups) == ["p005", "p006", "p007"] and second.groups[0] is first.surplus[0]
    assert second.prompts_used == 2 and second.episodes == 16
    plenty = first.groups + first.surplus + second.groups
    third = collect(make_sampler(chat), draw, step=9, carried=plenty)
    assert names(third.groups) == ["p002", "p003", "p004"] and names(third.surplus) == ["p005", "p005", "p006", "p007"]
    assert third.prompts_used == third.episodes == 0 and third.unscored_share == 0.0


def test_an_episode_that_is_lost_is_counted_named_and_left_out_of_its_group(chat):
    rollout = dataclasses.replace(ROLLOUT, deadline_s=0.5)
    collection = collect(make_sampler(chat, rollout=rollout, drop=("p001/2/",)), draw_rates(50))
    (fault,) = collection.faults
    assert fault.lost and (fault.prompt_id, fault.sample_index) == ("p001", 2) and "p001/2/0" in fault.message
    group = collection.groups[1]
    assert group.trajectories[2].stop_reason is StopReason.LOST
    assert group.trajectories[2].verdict is Verdict.UNSCORED
    assert group.valid.tolist() == [True, True, False, True, True, True, True, True]
    assert collection.unscored == 1 and collection.unscored_share == 1 / 24


def test_an_episode_without_a_verdict_never_makes_a_group_live(chat):
    collection = collect(make_sampler(chat, broken=("p000",)), draw_rates(50))
    assert names(collection.rejected) == ["p000"] and not collection.rejected[0].valid.any()
    assert collection.unscored == 8 and names(collection.groups) == ["p001", "p002", "p003"]


def test_penalties_come_from_the_record_of_each_episode(chat):
    collection = collect(make_sampler(chat), draw_rates(50))
    expected = {None: 0.5, CallStatus.OK: 0.0, CallStatus.ERROR: 1.0}
    for group in collection.groups:
        for trajectory, p_err in zip(group.trajectories, group.p_err, strict=True):
            first = trajectory.turns[0].results
            assert p_err == expected[first[0].status if first else None]
        assert set(group.p_format) == {0.0}
        assert group.penalties.dtype == np.float32


def test_over_issue_ends_a_step_without_its_slowest_groups_and_counts_them(chat):
    rollout = dataclasses.replace(ROLLOUT, over_issue=1.0)
    sampler = make_sampler(chat, rollout=rollout, drop=["p001/", "p004/"])
    started = []
    found = collect(sampler, draw_rates(50, 50, 100, 50, 50, 50), on_progress=lambda done, total: started.append(total))
    # Six were asked for three; two never end, one of the others is not live, and nobody waited for the two.
    assert names(found.groups) == ["p000", "p003", "p005"] and found.dropped == 2
    assert found.prompts_used == 6 and found.episodes == 4 * 8 and found.unscored == 0 and max(started) == 48


def test_over_issue_waits_for_as_many_live_groups_as_are_missing_and_no_longer(chat):
    rollout = dataclasses.replace(ROLLOUT, over_issue=0.5)
    found = collect(make_sampler(chat, rollout=rollout, drop=["p000/"]), draw_rates(50, 50, 50, 50, 50))
    assert len(found.groups) == 3 and found.dropped >= 1 and found.prompts_used == 5
    assert found.dropped + len(found.sampled) == 5
    left_alone = collect(make_sampler(chat, rollout=ROLLOUT), draw_rates(50, 50, 50))
    assert left_alone.dropped == 0 and left_alone.prompts_used == 3


def test_progress_counts_every_episode_of_every_round(chat):
    seen = []
    collection = collect(
        make_sampler(chat), draw_rates(0, 50), on_progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(1, collection.episodes + 1))
    assert seen[0] == (1, 24) and seen[-1] == (collection.episodes, collection.episodes)


def test_cancelling_a_step_leaves_no_task_behind(chat):
    async def cancel_midway():
        sampler = make_sampler(chat, drop=("p",))
        task = asyncio.create_task(groups.collect(sampler, draw_rates(50), step=0))
        while len(sampler.engine.engine(0).seen) < 24:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancel_midway())


def test_an_error_of_the_data_ends_the_step_at_once_and_leaves_no_task_behind(chat):
    rollout = dataclasses.replace(ROLLOUT, max_prompt_tokens=40)

    def draw(offset, count):
        prompts = draw_rates(50)(offset, count)
        return [*prompts[:-1], dataclasses.replace(prompts[-1], question="rate 50 " * 40)]

    async def fail():
        with pytest.raises(ValueError, match=r"'p002' has \d+ ids, above Rollout.max_prompt_tokens = 40"):
            await groups.collect(make_sampler(chat, rollout=rollout), draw, step=0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(fail())


def test_a_source_that_gives_another_number_of_prompts_is_an_error(chat):
    with pytest.raises(ValueError, match="step 7: the source gave 2 prompts, 3 were asked for"):
        collect(make_sampler(chat), lambda offset, count: draw_rates(50)(offset, 2))


def test_groups_and_collections_print_in_one_line(chat):
    collection = collect(make_sampler(chat), draw_rates(50, 50, 50))
    assert repr(collection) == "Collection(3 groups, 0 surplus, 0 rejected, 0 of 24 episodes unscored)"
    assert set(repr(collection.groups[0])) <= set("Group('p000': cw)")


def test_a_group_of_ungraded_or_foreign_episodes_is_refused(chat):
    group = collect(make_sampler(chat), draw_rates(50)).groups[0]
    ungraded = tuple(dataclasses.replace(t, verdict=None) for t in group.trajectories)
    with pytest.raises(ValueError, match="has verdict None"):
        dataclasses.replace(group, trajectories=ungraded)
    with pytest.raises(ValueError, match="of prompt 'p000'"):
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, id="other"))
    with pytest.raises(ValueError, match="equal lengths"):
        dataclasses.replace(group, p_err=group.p_err[:-1])
