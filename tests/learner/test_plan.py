"""Plans: exact bytes, what must not be in the program, verdicts with remedies; the paper's models on its machines."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

import jax
import pytest

from rstar2_jax import gin_strict, hardware, launch, settings
from rstar2_jax.learner import forecast, objective, plan, update
from rstar2_jax.model import decoder

GIN = pathlib.Path(launch.__file__).resolve().parents[1] / "gin"
TINY = settings.Model(
    family="qwen3", vocab_size=512, d_model=64, d_mlp=128, layers=3, heads=4, kv_heads=2, head_dim=16,
    max_positions=4096, tie_embeddings=False,
)  # fmt: skip
MI300X = hardware.Device(
    memory_bytes=192e9, flops=1307e12, memory_bytes_per_s=5.3e12, node_devices=8, node_bytes_per_s=448e9,
    link_bytes_per_s=50e9,
)  # fmt: skip


def learner(**changes):
    table = hardware.Sharding(sequence=("tensor",))
    fields = dict(microbatch_rows=8, row_tokens=256, mesh=(2, 2, 2), remat="full", device=MI300X, sharding=table)
    return settings.Learner(optimizer=settings.Optimizer(lr=1e-3), **(fields | changes))


def environment():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def configured(*files):
    flag = ("settings.Sandbox.redis_url='redis://127.0.0.1:6379'", "--gin_bindings")
    flags = [flag] if "scale/mi300x_64.gin" in files else []
    arguments = gin_strict.build(gin_strict.resolve([str(GIN / name) for name in files], flags))[1]
    return arguments["model"], arguments["learner"], arguments["rollout"]


@pytest.fixture(scope="module")
def tiny():
    return plan.in_child(TINY, learner(), environment())


def test_bytes_of_the_state_are_those_of_its_layout(tiny):
    leaves = jax.tree.leaves(decoder.abstract_params(TINY))
    split = sum(4 * leaf.size // (4 if leaf.ndim == 2 else 1) for leaf in leaves)  # fsdp * tensor; norms are whole
    assert tiny.parameters == sum(leaf.size for leaf in leaves) and tiny.devices == 8
    assert (tiny.params, tiny.gradients) == (split, split)
    assert tiny.moments == 2 * split + 8  # and two counters
    assert tiny.batch == 2 * 256 * (5 * 4 + 1)  # two of eight rows: five fields of four bytes, one of one


def test_the_child_plans_what_this_process_does(tiny):
    here = plan.measure(TINY, learner())
    assert dataclasses.replace(here, micro_step=0, optimizer_step=0) == dataclasses.replace(
        tiny, micro_step=0, optimizer_step=0
    )
    assert here.micro_step == pytest.approx(tiny.micro_step, rel=0.05)


def test_what_only_this_machine_has_is_no_part_of_a_plan():
    one = learner(mesh=(1, 1, 1), remat="none", microbatch_rows=2)
    trainer = update.Learner(TINY, one, objective.grpo(one.loss), total_steps=1)
    here = trainer.lower_micro_step().compile()
    assert "rstar2_attention_forward" in here.as_text()  # as it would run on this CPU
    weights = TINY.layers * 2 * TINY.heads * (128 * 128 + 128 * 256) * 4  # of blocks of queries; only "portable" keeps
    planned = plan.measure(TINY, one).micro_step
    assert planned > here.memory_analysis().temp_size_in_bytes + weights / 2


def test_the_table_of_a_mesh_says_what_its_devices_exchange(tiny):
    kinds = {one.kind for one in tiny.traffic}
    assert "all-gather" in kinds and kinds & {"all-reduce", "reduce-scatter"}
    assert "all-to-all" not in kinds  # activations stay where they are, but for the residual stream's gathers
    page = "\n".join(forecast.lines(tiny, TINY, learner()))
    assert "fits: " in page and "parameters (float32)" in page and "all-gather" in page


@pytest.mark.parametrize(
    "groups, seconds",
    [
        ([range(8), range(8, 16)], (448 / 448, 0)),  # inside nodes: seven links of 64
        ([range(0, 8, 4), range(1, 8, 4)], (448 / 64, 0)),  # a pair has one of them
        ([range(0, 64, 8)], (0, 448 / 50)),  # one of each of eight nodes: its own card
        ([range(0, 16, 2), range(1, 16, 2)], (0, 448 / 192)),  # four of each node: three links, and four cards
        ([range(64)], (0, 448 / 400)),
        ([(0, 1), (7, 8)], (0, 448 / 50)),  # the pair that leaves its node sets the pace
    ],
)
def test_what_leaves_a_node_goes_over_the_cards_of_all_who_send(groups, seconds):
    one = plan.Traffic(kind="all-gather", groups=tuple(map(tuple, groups)), count=1, size=1, sent=448e9)
    found = forecast.wire_seconds(dataclasses.replace(BASE, traffic=(one,)), MI300X)
    assert found == pytest.approx(seconds)
    page = "\n".join(forecast.lines(dataclasses.replace(BASE, traffic=(one,)), TINY, learner()))
    inside, between = seconds
    assert f"overlaps {inside:.2f} inside nodes at 448 GB/s, {between:.2f} between them at 50 a card" in page


def test_moments_on_the_host_are_on_the_device_for_two_parameters_at_a_time(tiny):
    how = learner(offload="moments")
    far = plan.measure(TINY, how)
    assert (far.moments, far.offloaded) == (0, tiny.moments)
    assert far.arguments == tiny.arguments - tiny.moments
    head = 4 * TINY.vocab_size * TINY.d_model // 4  # a device's share of the largest parameter
    assert far.optimizer_step >= 2 * 2 * head and far.micro_step == pytest.approx(tiny.micro_step, rel=0.05)
    assert "in its host's memory" in "\n".join(forecast.lines(far, TINY, how))


def test_inputs_of_layers_on_the_host_are_not_on_the_device(tiny):
    how = learner(remat="offload")
    far = plan.measure(TINY, how)
    assert far.inputs_away == 3 * (8 // 4) * (256 // 2) * 64 * 4  # layers, rows and tokens of a device, width, float32
    assert far.micro_step == pytest.approx(tiny.micro_step - far.inputs_away, rel=0.02)
    assert (far.arguments, far.offloaded) == (tiny.arguments, 0)
    page = "\n".join(forecast.lines(far, TINY, how))
    assert "layers' inputs" in page and "0.20 MB  in its host's memory" in page
    assert "layers' inputs" not in "\n".join(forecast.lines(tiny, TINY, learner()))


def test_a_chunk_of_as_many_tokens_as_the_model_is_wide_is_still_found_among_the_logits():
    chunk, head, states = "%a = f32[4096,18992] exp(", "%b = bf16[18992,4096] convert(", "%c = f32[8,14336,4096] add("
    widest = plan._widest("\n".join([chunk, head, states]), (151936, 18992), (4096,))
    assert widest == (4 * 4096 * 18992, "f32[4096, 18992]")
    assert plan._widest("\n".join(["%d = f32[512,18992] exp(", head]), (18992,), (4096,))[1] == "f32[512, 18992]"
    whole = "%e = bf16[4096,18992] all-gather("
    assert plan._widest("\n".join(["%d = f32[512,18992] exp(", whole]), (18992,), (4096, 512))[1] == "f32[512, 18992]"


def test_a_mesh_that_cannot_be_made_is_said_with_its_reason():
    with pytest.raises(plan.PlanError, match="Model.kv_heads = 2 cannot be split over 8 devices"):
        plan.in_child(TINY, learner(mesh=(1, 1, 8)), environment())


BASE = plan.Plan(
    parameters=10**9, devices=8, params=10**9, moments=2 * 10**9, offloaded=0, inputs_away=0, gradients=10**9,
    batch=10**6, micro_step=10**9, optimizer_step=10**8, traffic=(), widest=(1, "f32[1]"), widest_logits=(1, "f32[1]"),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes, how, words",
    [
        ({}, {}, "fits: "),
        ({"params": 10**11, "moments": 2 * 10**11}, {}, "does not fit: .*raise fsdp in Learner.mesh"),
        ({"params": 10**11, "moments": 2 * 10**11}, {}, "does not fit: .*or set Learner.offload = 'moments'"),
        ({"micro_step": 3 * 10**11}, {"remat": "none"}, "does not fit: .*set Learner.remat = 'full'"),
        ({"micro_step": 15 * 10**10}, {}, "does not fit safely: .*lower Learner.microbatch_rows = 8 to 4"),
        (
            {"micro_step": 3 * 10**11},
            {"microbatch_rows": 4, "sharding": hardware.Sharding()},
            r"does not fit: .*set Sharding.sequence = \('tensor',\)",
        ),
        ({"micro_step": 3 * 10**11}, {"microbatch_rows": 4}, "does not fit: .*set Learner.remat = 'offload'"),
        (
            {"micro_step": 3 * 10**11},
            {"microbatch_rows": 4, "remat": "offload"},
            "does not fit: .*raise tensor in Learner.mesh",
        ),
    ],
)
def test_a_verdict_names_the_setting_to_change(changes, how, words):
    assert re.match(words, forecast.verdict(dataclasses.replace(BASE, **changes), learner(**how)))


def test_without_a_known_device_there_is_no_verdict():
    assert forecast.verdict(BASE, learner(device=hardware.Device())) == ""


def test_an_engine_inside_the_trainer_that_does_not_fit_on_its_device_is_said_with_the_remedy():
    for name, fits in (("qwen3_0_6b", True), ("qwen3_4b", True), ("qwen2_5_32b", False)):
        model, how, rollout = configured("stage3.gin", "scale/mi300x_1.gin", f"model/{name}.gin")
        said = "\n".join(forecast.rollout_lines(model, rollout, how))
        assert ("does not fit" in said) == (not fits), said
        assert fits or "or name servers in Fleet.engines" in said
    model, how, rollout = configured("stage3.gin", "scale/mi300x_1.gin", "model/qwen3_4b.gin")
    said = "\n".join(forecast.rollout_lines(model, dataclasses.replace(rollout, engine_slots=500), how))
    room = int(re.search(r"lower Rollout.engine_slots to (\d+), or", said)[1])
    for slots, fits in ((room, True), (room + 1, False)):
        page = forecast.rollout_lines(model, dataclasses.replace(rollout, engine_slots=slots), how)
        assert any("does not fit" in line for line in page) == (not fits)
    model, how, rollout = configured("stage3.gin", "scale/mi300x_1.gin", "model/llama3_70b.gin")
    big = dataclasses.replace(how.device, memory_bytes=100e9)
    said = forecast.rollout_lines(model, rollout, dataclasses.replace(how, device=big))
    assert "do not fit on 1 device each: name servers of more devices" in said[-1]
    model, how, rollout = configured("stage3.gin", "scale/mi300x_8.gin")
    assert rollout.fleet.engines and "does not fit" not in "\n".join(forecast.rollout_lines(model, rollout, how))


def test_work_without_recomputation_is_about_six_operations_a_parameter_and_token():
    model, how, _ = configured("stage1.gin", "scale/mi300x_64.gin")
    how = dataclasses.replace(how, remat="none", row_tokens=4096)
    wanted = 6 * 14_768_307_200 * 4096 * how.microbatch_rows
    assert forecast.micro_step_flops(model, how) == pytest.approx(wanted, rel=0.05)
    again = forecast.micro_step_flops(model, dataclasses.replace(how, remat="full"))
    assert again == pytest.approx(wanted * 4 / 3, rel=0.05)
    assert forecast.kv_bytes(model) == 2 * 40 * 8 * 128 * 2


def on(machine, model, parameters, name):
    """A plan that takes a minute: not of the suite that every change runs. Without a model it is the stage's own."""
    files = ("stage2.gin", f"scale/mi300x_{machine}.gin", *((f"model/{model}.gin",) if model else ()))
    return pytest.param(files, parameters, marks=pytest.mark.long, id=name)


GOLDEN = [
    pytest.param(("stage2.gin", "scale/mi300x_64.gin"), 14_768_307_200, id="14b-64"),
    on(64, "qwen2_5_32b", 32_763_876_352, "32b-64"),
    on(8, "", 14_768_307_200, "14b-8"),
    on(8, "qwen3_0_6b", 596_049_920, "0.6b-8"),
    on(8, "qwen3_1_7b", 1_720_574_976, "1.7b-8"),
    on(8, "qwen3_4b", 4_022_468_096, "4b-8"),
    on(8, "qwen3_8b", 8_190_735_360, "8b-8"),
    on(64, "llama3_70b", 70_553_706_496, "70b-64"),
]


@pytest.mark.slow
@pytest.mark.parametrize("files, parameters", GOLDEN)
def test_the_paper_s_models_and_others_fit_on_its_machines(files, parameters):
    model, how, rollout = configured(*files)
    found = plan.in_child(model, how, environment())
    assert found.parameters == parameters
    shards = how.mesh[1] * how.mesh[2]
    assert 1 <= found.params / (4 * parameters / shards) < 1.003  # norms and biases are whole on every device
    assert 1 <= found.moments / (8 * parameters / shards) < 1.003
    rows = how.microbatch_rows // (how.mesh[0] * how.mesh[1])
    logits = 4 * rows * how.row_tokens * model.vocab_size // how.mesh[2]
    assert found.widest_logits[0] < logits / 4, found.widest_logits  # no [B, T, V], whole or a share of it
    reduced = sum(one.count for one in found.traffic if one.kind == "reduce-scatter")
    # The only two: the gradients of head and embedding, once for all chunks and rows. (With tensor > 1 two more: the
    # first states, looked up in shares of the vocabulary, and the gradient of the last ones.)
    assert reduced == 2, found.traffic
    assert found.peak < 0.75 * how.device.memory_bytes, "\n".join(forecast.lines(found, model, how))
    assert forecast.verdict(found, how).startswith("fits")
    inside, between = forecast.wire_seconds(found, how.device)
    work = forecast.micro_step_flops(model, how) / found.devices / how.device.flops / forecast.EFFICIENCY
    assert inside + between < work, "\n".join(forecast.lines(found, model, how))  # so that work can hide it
    page = forecast.rollout_lines(model, rollout, how)
    assert f"alone on {found.devices} x 1 devices" in page[-1] and "episodes of full length at once" in page[-1]


@pytest.mark.slow
def test_memory_of_a_step_grows_by_the_same_bytes_for_each_token():
    # Wide enough that what grows outweighs the blocks that do not, and would hide in them at 2,048 tokens.
    model = dataclasses.replace(TINY, max_positions=32768, layers=3, d_model=256, d_mlp=512, head_dim=32)

    def temporaries(tokens):
        how = learner(mesh=(1, 1, 1), microbatch_rows=1, row_tokens=tokens)
        program = update.Learner(model, how, objective.grpo(how.loss), total_steps=1).lower_micro_step()
        return program.compile().memory_analysis().temp_size_in_bytes

    assert_linear({tokens: temporaries(tokens) for tokens in (2048, 8192, 32768)})


@pytest.mark.long
def test_memory_of_the_paper_s_model_grows_by_the_same_bytes_for_each_token():
    model, how, _ = configured("stage2.gin", "scale/mi300x_64.gin")
    # With whole rows on each device 16 GB that do not grow (each has the whole head) hide what 2,048 tokens add.
    how = dataclasses.replace(how, mesh=(1, 8, 8))

    def temporaries(tokens):
        return plan.in_child(model, dataclasses.replace(how, row_tokens=tokens), environment()).micro_step

    assert_linear({tokens: temporaries(tokens) for tokens in (2048, 8192, 32768)})


def assert_linear(at):
    """Bytes by tokens of a row: the same growth a token from the first to the second as from there to the third."""
    first, second, third = sorted(at)
    early = (at[second] - at[first]) / (second - first)
    late = (at[third] - at[second]) / (third - second)
    print(f"temporaries {at}, bytes a token {early:,.0f} and {late:,.0f}")
    assert late == pytest.approx(early, rel=0.15), at
