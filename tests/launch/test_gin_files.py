"""Every file in gin/ and every combination that its comments promise parses strictly; the numbers are the paper's."""

from __future__ import annotations

import inspect
import itertools
import os
import pathlib
import re

import pytest

from rstar2_jax import gin_source, gin_strict, gin_types, launch, settings

GIN = pathlib.Path(launch.__file__).resolve().parents[1] / "gin"
RL = ("stage1.gin", "stage2.gin", "stage3.gin")
RUNS = ("sft.gin", *RL, "eval.gin", "curate.gin", "endpoint.gin", "export.gin", "chat.gin")
SCALES = sorted(str(path.relative_to(GIN)) for path in (GIN / "scale").glob("*.gin"))
MODELS = sorted(str(path.relative_to(GIN)) for path in (GIN / "model").glob("*.gin"))
DATA = sorted(str(path.relative_to(GIN)) for path in (GIN / "data").glob("*.gin"))
ABLATIONS = sorted(str(path.relative_to(GIN)) for path in (GIN / "ablation").glob("*.gin"))
REDIS = "settings.Sandbox.redis_url='redis://127.0.0.1:6379'"


def resolve(*files, flags=()):
    return gin_strict.resolve([str(GIN / name) for name in files], [(flag, f"--gin_bindings={flag}") for flag in flags])


def flags_for(run, scale):
    """The cluster's address, where the scale asks for it and the run has a sandbox."""
    return [REDIS] if scale == "scale/mi300x_64.gin" and run not in ("sft.gin", "export.gin") else []


def arguments_of(*files, flags=()):
    return gin_strict.build(resolve(*files, flags=flags))[1]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_file_alone_parses_strictly_and_gives_a_run_function_all_its_arguments(run):
    resolved = resolve(run)
    function, arguments = gin_strict.build(resolved)
    assert resolved.warnings == ()
    parameters = inspect.signature(function).parameters
    assert list(parameters) == list(arguments)
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    for name, parameter in gin_types.parameters(function).items():
        assert isinstance(arguments[name], parameter.annotation)
        wanted = {"samples": int, "dtype": str, "port": int}.get(name) or getattr(settings, name.capitalize())
        assert type(arguments[name]) is wanted


WITH = {
    "scale/box.gin": ["model/box.gin", "scale/box.gin"],
    "scale/study.gin": ["model/box.gin", "scale/box.gin", "scale/study.gin"],
    "scale/study_hard.gin": ["model/box_2m.gin", "scale/box.gin", "scale/study.gin", "scale/study_hard.gin"],
    "scale/box_real.gin": ["model/smollm2_135m.gin", "scale/box_real.gin"],
}


@pytest.mark.parametrize("run, scale", list(itertools.product(RUNS, SCALES)))
def test_a_run_file_goes_with_every_scale(run, scale):
    resolved = resolve(run, *WITH.get(scale, [scale]), flags=flags_for(run, scale))
    gin_strict.build(resolved)
    assert resolved.warnings == ()


@pytest.mark.parametrize("run, model", list(itertools.product(RUNS, MODELS)))
def test_a_run_file_goes_with_every_model(run, model):
    if model in (GIN / run).read_text():
        with pytest.raises(gin_source.ConfigError, match="read twice"):
            resolve(run, model)
        return
    resolved = resolve(run, model)
    gin_strict.build(resolved)
    assert resolved.warnings == ()


@pytest.mark.parametrize("stage, ablation", list(itertools.product(RL, ABLATIONS)))
def test_a_stage_goes_with_every_ablation_at_both_ends_of_the_scale(stage, ablation):
    own_engines = ablation == "ablation/engine_processes.gin"  # there are none where servers are named
    for scale in ("scale/box.gin", "scale/mi300x_1.gin" if own_engines else "scale/mi300x_8.gin"):
        plain = resolve(stage, scale)
        changed = resolve(stage, scale, ablation)
        gin_strict.build(changed)
        assert changed.warnings == () and changed.text != plain.text


@pytest.mark.parametrize("data", DATA)
def test_every_data_overlay_goes_with_a_run_that_reads_it(data):
    run = {
        "data/sft_222k.gin": "sft.gin",
        "data/openmath_42k.gin": "eval.gin",
        "data/raw_labels.gin": "curate.gin",
        "data/raw_text.gin": "curate.gin",
    }.get(data, "stage1.gin")
    if data in (GIN / run).read_text():
        assert resolve(run).warnings == ()
    else:
        resolved = resolve(run, data)
        gin_strict.build(resolved)
        assert resolved.warnings == ()


@pytest.mark.parametrize("overlay", [*MODELS, *DATA, *SCALES, *ABLATIONS])
def test_an_overlay_includes_nothing_and_says_what_it_is(overlay):
    lines = (GIN / overlay).read_text().splitlines()
    assert lines[0].startswith("# ") and len(lines[0]) > 30
    assert not any(line.startswith("include") for line in lines)


@pytest.mark.parametrize("path", sorted(GIN.rglob("*.gin")), ids=lambda path: str(path.relative_to(GIN)))
def test_a_gin_file_registers_dynamically_and_keeps_its_lines_short(path):
    lines = path.read_text().splitlines()
    assert "from __gin__ import dynamic_registration" in lines
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("run", RUNS)
def test_a_run_file_opens_with_command_hardware_time_and_score_and_stays_under_25_lines(run):
    text = (GIN / run).read_text()
    comment = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    assert len(text.splitlines()) <= 25
    assert all(f"{word}:" in comment for word in ("Command", "Hardware", "Time", "Expected"))
    (line,) = re.findall(r"# Command: +(.*)", comment)
    assert f"--gin_file={run}" in line or re.fullmatch(
        rf"(SCALE=\w+ )?sbatch --nodes=\d launch/slurm/train.sh {run}", line
    )
    named = re.findall(r"--gin_file=(\S+)", line) + [f"scale/{name}.gin" for name in re.findall(r"SCALE=(\w+)", line)]
    assert all((GIN / name).is_file() for name in named)


def test_nothing_in_a_shared_file_is_idle_in_every_run():
    everywhere = set.intersection(
        *(set(resolve(run, scale, flags=flags_for(run, scale)).idle) for run in RUNS for scale in SCALES)
    )
    assert everywhere == set()


@pytest.mark.parametrize("run, scale", list(itertools.product(RUNS, SCALES)))
def test_a_turn_of_the_whole_budget_meets_its_deadline(run, scale):
    rollout = arguments_of(run, *WITH.get(scale, [scale]), flags=flags_for(run, scale)).get("rollout")
    assert rollout is None or rollout.deadline_s >= rollout.max_response_tokens / settings.SLOWEST_TOKENS_PER_S


def test_a_deadline_that_loses_long_episodes_is_refused_with_the_one_that_does_not():
    with pytest.raises(
        gin_source.ConfigError, match=r"eval\.gin.*deadline_s = 3600.*set deadline_s to 13107\.2 or more"
    ):
        arguments_of("eval.gin", flags=["Rollout.max_response_tokens=131072"])
    arguments_of("eval.gin", flags=["Rollout.max_response_tokens=131072", "Rollout.deadline_s=14000.0"])


def test_raw_sets_are_curated_whole_and_the_hard_problems_out_of_as_many_as_the_stages_have():
    for rules, samples, least in (("raw_labels", 16, 2), ("raw_text", 0, 0)):
        found = arguments_of("curate.gin", "data/openmath_reasoning.gin", f"data/{rules}.gin")
        assert found["rollout"].prompts_per_step == 10**6  # OpenMathReasoning has 3.1e5 problems
        assert (found["curation"].samples, found["curation"].min_solved) == (samples, least)
    found = arguments_of("curate.gin")
    assert (found["rollout"].prompts_per_step, found["curation"].samples, found["curation"].max_solved) == (42000, 8, 7)


def test_the_paper_s_stages_have_its_numbers():
    table = {  # steps, response tokens, turns, what becomes of the optimizer, first weights
        "stage1.gin": (300, 8192, 10, "reset", "runs/sft"),
        "stage2.gin": (85, 12288, 10, "restart", "runs/stage1"),
        "stage3.gin": (125, 12288, 15, "reset", "runs/stage2"),
    }
    for stage, wanted in table.items():
        a = arguments_of(stage)
        run, rollout, optimizer, loss = a["run"], a["rollout"], a["learner"].optimizer, a["learner"].loss
        got = (run.steps, rollout.max_response_tokens, rollout.max_turns, run.optimizer_start, run.init_from)
        assert got == wanted
        assert (rollout.prompts_per_step, rollout.oversample, rollout.group_size) == (512, 32, 16)
        assert rollout.temperature == 1.0
        assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule) == (1e-6, 20, "constant")
        assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.01, 1.0)
        assert (loss.eps_low, loss.eps_high, loss.kl_coef, loss.entropy_coef) == (0.2, 0.28, 0.0, 0.0)
        assert (a["roc"].positives, a["roc"].p_floor) == ("inverse", 0.1)
        assert a["learner"].row_tokens >= rollout.max_prompt_tokens + rollout.max_response_tokens
        assert a["model"].family == "qwen3" and a["model"].layers == 40


def test_sft_evaluation_and_curation_have_the_paper_s_numbers():
    sft = arguments_of("sft.gin")
    demonstrations, optimizer = sft["demonstrations"], sft["learner"].optimizer
    assert demonstrations.batch_size == 128
    assert sft["run"].steps == 3 * demonstrations.count // demonstrations.batch_size
    assert (optimizer.lr, optimizer.schedule) == (5e-6, "cosine")
    assert optimizer.warmup_steps == round(0.04 * sft["run"].steps)

    evaluation = arguments_of("eval.gin")
    rollout = evaluation["rollout"]
    assert (rollout.max_response_tokens, rollout.max_turns, rollout.temperature) == (30720, 30, 0.6)
    assert evaluation["samples"] == 16
    assert rollout.max_prompt_tokens + rollout.max_response_tokens <= evaluation["model"].max_positions

    hard = arguments_of("curate.gin")["curation"]
    assert (hard.samples, hard.min_solved, hard.max_solved) == (8, 0, 7)
    labels = arguments_of("curate.gin", "data/openmath_reasoning.gin", "data/raw_labels.gin")["curation"]
    assert (labels.samples, labels.min_solved, labels.max_solved) == (16, 2, 16)
    assert {name for name, _ in labels.against} == {"aime24", "aime25", "math_500", "hmmt25"}


def test_the_study_s_arms_differ_in_what_they_are_named_after_alone():
    study = ("stage1.gin", *WITH["scale/study.gin"])
    plain = arguments_of(*study)
    assert (plain["rollout"].oversample, plain["rollout"].group_size, plain["rollout"].prompts_per_step) == (32, 16, 8)
    assert plain["task"].families[-1] == "digit_sum" and plain["exam"].every_steps == 0
    changed = {
        "no_roc": {"rollout"},
        "random_half": {"roc"},
        "greedy": {"roc"},
        "penalty_blind": {"roc"},
        "no_tool": {"task", "rollout"},
    }
    for arm, wanted in changed.items():
        other = arguments_of(*study, f"ablation/{arm}.gin")
        assert {name for name, value in other.items() if value != plain[name]} - {"exam"} == wanted
        assert other["rollout"].group_size == 16 and other["rollout"].oversample == (16 if "no_" in arm else 32)


def test_a_harder_study_leaves_room_for_one_failed_call_of_a_larger_model():
    import jax

    from rstar2_jax.model import decoder

    hard = arguments_of("stage1.gin", *WITH["scale/study_hard.gin"])
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract_params(hard["model"]))) == 2_148_288
    assert hard["rollout"].max_turns == 3 and hard["rollout"].oversample == 32
    assert hard["task"].difficulty == 3 and "divisor_sum_mod" in hard["task"].families


def test_the_difficulty_of_a_generated_source_rises_with_the_stage():
    box = ("scale/box.gin", "model/box.gin")
    assert [arguments_of(stage, *box)["task"].difficulty for stage in RL] == [1, 2, 3]
    assert all(arguments_of(run, *box)["task"].source == "box" for run in ("sft.gin", *RL, "eval.gin"))


def test_the_box_keeps_half_of_its_rollouts_and_the_ablation_keeps_all():
    box = ("stage1.gin", "scale/box.gin", "model/box.gin")
    rollout = arguments_of(*box)["rollout"]
    assert rollout.oversample == 2 * rollout.group_size
    assert arguments_of(*box, "ablation/no_roc.gin")["rollout"].oversample == rollout.group_size


def test_the_box_with_real_weights_asks_real_problems_and_an_episode_fits_into_a_row():
    for run in ("sft.gin", "stage1.gin"):
        a = arguments_of(run, "model/smollm2_135m.gin", "scale/box_real.gin")
        assert a["task"].source == "gsm_symbolic" and a["task"].template == "rstar2"
        assert a["task"].tokenizer == "models/SmolLM2-135M-Instruct"
        assert a["learner"].optimizer.warmup_steps == 0
    rollout, learner = a["rollout"], a["learner"]
    assert rollout.max_prompt_tokens + rollout.max_response_tokens <= learner.row_tokens
    assert rollout.oversample > rollout.group_size and a["roc"].max_refills > 0


def test_the_models_have_the_sizes_of_their_checkpoints():
    import jax

    from rstar2_jax.model import decoder

    sizes = {"qwen3_14b": 14_768_307_200, "qwen2_5_32b": 32_763_876_352, "smollm2_135m": 134_515_008}
    for name, count in sizes.items():
        overlays = [] if name == "qwen3_14b" else [f"model/{name}.gin"]
        model = arguments_of("stage1.gin", *overlays)["model"]
        assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract_params(model))) == count


@pytest.mark.parametrize("run", RUNS)
def test_a_dry_run_of_the_box_says_what_would_run(run, capsys, monkeypatch, tmp_path):
    for name in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, os.environ.get(name, "cpu" if name == "JAX_PLATFORMS" else "1"))
    files = [f"--gin_file={GIN / name}" for name in (run, "scale/box.gin", "model/box.gin")]
    code = launch.main(["launch", *files, f"--workdir={tmp_path / 'run'}", "--steps=3", "--seed=5", "--dry_run"])
    printed = capsys.readouterr()
    assert code == 0 and printed.err == ""
    assert "steps = 3" in printed.out and "seed = 5" in printed.out and "parameters: 3" in printed.out
    assert not (tmp_path / "run").exists()


def test_a_flag_may_override_a_field_whose_macro_the_stage_binds():
    flags = [("Task.difficulty=2", "--gin_bindings"), ("Rollout.prompts_per_step=8", "--gin_bindings")]
    resolved = gin_strict.resolve(["stage1.gin", "model/box.gin", "scale/box.gin"], flags)
    assert {"STAGE", "PROMPTS"} <= set(resolved.idle)
    with pytest.raises(gin_source.ConfigError, match="macro STGAE is not used"):
        gin_strict.resolve(["stage1.gin", "model/box.gin", "scale/box.gin"], [("STGAE=2", "--gin_bindings")])
