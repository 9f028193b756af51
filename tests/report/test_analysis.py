"""The analysis of a run from its folder: entropies of the policy that sampled, a page that holds together, curves."""

from __future__ import annotations

import asyncio
import dataclasses
import html.parser
import json

import jax
import numpy as np
import pytest

from rstar2_jax import run_record, settings
from rstar2_jax.data import tokenizer as tokenizers
from rstar2_jax.io import trajectories
from rstar2_jax.model import decoder
from rstar2_jax.report import analysis, coloured, tokens
from rstar2_jax.rollout.engine import Request, Sampling
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.types import CallStatus, Prompt, StopReason, ToolCall, ToolResult, Trajectory, Turn, Verdict
from rstar2_jax.weights import publish

BOX = tokenizers.Tokenizer.box()
MODEL = settings.Model(
    family="qwen3", vocab_size=320, d_model=32, d_mlp=64, layers=2, heads=2, kv_heads=1, head_dim=16, max_positions=256
)
TASK = settings.Task(source="box", tokenizer="box", template="box", families=("gcd",))
ROLLOUT = settings.Rollout(
    prompts_per_step=1, group_size=1, oversample=1, temperature=0.7, max_prompt_tokens=64, max_response_tokens=128,
    max_turns=3,
)  # fmt: skip
VOID = {"img", "meta", "br"}


class Page(html.parser.HTMLParser):
    """Checks that every element is closed in order; collects texts, titles and classes."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.titles, self.counts, self.sources = [], [], [], {}, []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        values = dict(attrs)
        self.titles += [values["title"]] if "title" in values else []
        self.sources += [values[name] for name in ("src", "href") if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(text):
    page = Page()
    page.feed(text)
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A store and trajectories that a real engine sampled from it: two steps of four."""
    store = tmp_path_factory.mktemp("run") / "weights"
    publish.publish(decoder.init_params(MODEL, jax.random.key(0)), MODEL, store, 0, keep=1)

    async def sample():
        engine = JaxEngine(MODEL, slots=4, context_tokens=200, prefill_chunk_tokens=32)
        try:
            await engine.update_weights(str(store), 0)
            return await asyncio.gather(*(one(engine, seed) for seed in range(8)))
        finally:
            await engine.close()

    async def one(engine, seed):
        prompt = BOX.encode(f"gcd({seed + 12}, 18)")
        limits = Sampling(temperature=ROLLOUT.temperature, max_new_tokens=20 + seed, stop_ids=())
        made = await engine.generate(Request(rid=str(seed), prompt_ids=prompt, seed=seed, sampling=limits))
        call = seed % 2 == 0
        status = CallStatus.ERROR if seed == 0 else CallStatus.OK
        turn = Turn(
            token_ids=made.token_ids, mask=np.ones(len(made.token_ids), bool), behavior_logprobs=made.logprobs,
            weights_versions=made.weights_versions, finish_reason=made.finish_reason,
            calls=(ToolCall(name="f", arguments={}),) if call else (),
            results=(ToolResult(status=status),) if call else (),
        )  # fmt: skip
        trajectory = Trajectory(
            prompt_id=str(seed), prompt_ids=np.asarray(prompt, np.int32), seed=seed, sample_index=0, turns=(turn,),
            stop_reason=StopReason.LENGTH, verdict=Verdict.CORRECT if seed < 3 else Verdict.WRONG,
        )  # fmt: skip
        prompt = Prompt(id=str(seed), question="<script>alert(1)</script> & co", answer="6", source="gcd")
        return trajectories.Record(prompt=prompt, group=0, trajectory=trajectory, p_err=0.0, p_format=0.0)

    return store, asyncio.run(sample())


@pytest.fixture
def run(sampled, tmp_path):
    """A run's folder as training leaves it."""
    store, records = sampled
    (tmp_path / "weights").symlink_to(store)
    arguments = run_record.plain({"model": MODEL, "task": TASK, "rollout": ROLLOUT})
    (tmp_path / "resolved.json").write_text(json.dumps({"arguments": arguments}))
    trajectories.write_step(tmp_path, 0, records[:4])
    trajectories.write_step(tmp_path, 1, records[4:])
    return tmp_path


def test_entropies_are_those_of_the_policy_that_sampled(run, sampled):
    numbers = analysis.analyse(run, step=0)
    assert numbers["max_logprob_gap"] < 1e-4 and "the weights that sampled them (version 0)" in numbers["weights"]
    variables, model, width = {"params": decoder.init_params(MODEL, jax.random.key(0))}, decoder.Decoder(MODEL), 200

    @jax.jit
    def table(row, length):
        at = np.arange(width)[None]
        hidden = model.apply(variables, row[None], at, (at < length).astype(np.int32))
        return model.apply(variables, hidden, method=decoder.Decoder.logits)[0]

    plain = []
    for record in sampled[1][:4]:
        trajectory = record.trajectory
        row = np.concatenate([trajectory.prompt_ids, trajectory.turns[0].token_ids])
        logits = np.asarray(table(np.pad(row, (0, width - len(row))), len(row)))
        for place in range(len(trajectory.prompt_ids), len(row)):
            scaled = logits[place - 1].astype(np.float64) / ROLLOUT.temperature
            p = np.exp(scaled - scaled.max())
            p /= p.sum()
            plain.append(-sum(float(x) * np.log(float(x)) for x in p if x > 0))
    every = numbers["table"][-1]
    assert every["tokens"] == len(plain) and every["entropy_mean"] == pytest.approx(np.mean(plain), abs=1e-4)
    assert numbers["high_entropy_from"] == pytest.approx(np.quantile(plain, 0.8), abs=1e-4)


def test_the_page_holds_together_escapes_what_models_wrote_and_needs_no_other_file(run):
    analysis.analyse(run)
    text = (run / "analysis" / "index.html").read_text(encoding="utf-8")
    page = parsed(text)
    assert "script" not in page.counts and "<script>alert(1)</script> & co" in "".join(page.texts)
    assert page.counts["details"] == 4 and page.counts["table"] >= 1
    assert all(source.startswith("data:image/png;base64,") for source in page.sources) and len(page.sources) == 1
    assert sum(title.startswith("thought: entropy") for title in page.titles) > 20
    assert (run / "analysis" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "analysis" / "analysis.json").read_text())["trajectories"] == 4


def test_curves_follow_from_the_trajectories_of_each_step(run):
    first, second = analysis.curve_lines(run)
    assert (first["step"], first["reward_mean"], second["reward_mean"]) == (0, 0.75, 0.0)
    assert first["call_error_rate"] == 0.5 and first["call_error_rate_correct"] == 0.5
    assert second["call_error_rate"] == 0.0 and second["call_error_rate_correct"] is None
    assert first["response_tokens_mean"] == np.mean([20, 21, 22, 23])


def test_fewer_trajectories_are_spread_over_all(run):
    assert analysis.analyse(run, step=1, count=2)["trajectories"] == 2


def test_other_weights_are_named_and_show_in_the_gap(run, tmp_path_factory):
    store = tmp_path_factory.mktemp("later") / "weights"
    publish.publish(decoder.init_params(MODEL, jax.random.key(1)), MODEL, store, 7, keep=1)
    (run / "weights").unlink()
    (run / "weights").symlink_to(store)
    numbers = analysis.analyse(run, step=0)
    assert "read by weights 7, while [0] sampled them" in numbers["weights"] and numbers["max_logprob_gap"] > 1e-3


def test_a_log_probability_that_is_not_finite_is_no_agreement(run, sampled):
    good, bad = sampled[1][:2]
    (turn,) = bad.trajectory.turns
    torn = dataclasses.replace(turn, behavior_logprobs=np.full_like(turn.behavior_logprobs, np.nan))
    broken = dataclasses.replace(bad, trajectory=dataclasses.replace(bad.trajectory, turns=(torn,)))
    trajectories.write_step(run, 0, [good, broken])
    with pytest.raises(ValueError, match="a log-probability of 1, sample 0, is not finite .*another step"):
        analysis.analyse(run, step=0)


@pytest.mark.parametrize(
    "missing, words",
    [
        ("resolved.json", "name the folder of a run"),
        ("weights", "holds no weights"),
        ("trajectories", "no trajectories"),
    ],
)
def test_a_folder_without_what_is_needed_is_refused_with_words(run, missing, words, capsys):
    (run / missing).rename(run / "elsewhere")
    assert analysis.main([str(run)]) == 2
    assert words in capsys.readouterr().err
    assert analysis.main([str(run), "--step", "9"]) == 2


def test_the_command_prints_the_table_and_where_the_page_is(run, capsys):
    assert analysis.main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "thought" in printed and str(run / "analysis" / "index.html") in printed


def test_colours_grow_with_entropy_and_high_tokens_are_marked():
    low, high = (tokens.Token(text="x", kind=tokens.Kind.CODE, entropy=e, logprob=-1, high=e > 1) for e in (0.5, 2.0))
    shown = [coloured._token(token, 2.0) for token in (low, high)]
    assert "0.38)" in shown[0] and "0.75)" in shown[1]  # half as strong at a quarter of the entropy
    assert 'class="call"' in shown[0] and 'class="call high"' in shown[1]
    assert coloured._token(dataclasses.replace(low, text=""), 2.0) == ""
