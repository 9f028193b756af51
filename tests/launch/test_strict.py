"""What a configuration may say, and the one error that anything else gives. In process, on a RUN function made here."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
import textwrap

import pytest

from rstar2_jax import gin_source, gin_strict, settings

RUNS = '''
"""RUN functions of the tests."""
from rstar2_jax import settings

def go(*, run: settings.Run, learner: settings.Learner, roc: settings.Roc = settings.Roc(), samples: int = 4) -> int:
    """Returns 0."""
    return 0

def pair(*, first: settings.Roc, second: settings.Roc) -> int:
    """Returns 0."""
    return 0
'''

STAGE = """
from __gin__ import dynamic_registration
from rstar2_jax import settings
import strict_runs
include 'wiring.gin'

RUN = @strict_runs.go
LR = 1e-6
settings.Run:
    workdir = 'runs/x'
    steps = 300
settings.Optimizer.lr = %LR
settings.Learner.row_tokens = 128
"""

WIRING = """
from __gin__ import dynamic_registration
from rstar2_jax import settings
import strict_runs

strict_runs.go:
    run = @settings.Run()
    learner = @settings.Learner()
settings.Learner.optimizer = @settings.Optimizer()
settings.Optimizer.warmup_steps = 20
settings.Sandbox.slots = 8
"""


@pytest.fixture(scope="module", autouse=True)
def strict_runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "strict_runs.py"
    path.write_text(RUNS)
    spec = importlib.util.spec_from_file_location("strict_runs", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["strict_runs"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["strict_runs"]


@pytest.fixture
def stage(tmp_path):
    """Writes gin files beside each other; returns the path of the stage file with `extra` lines at its end."""

    def write(extra="", *, stage=STAGE, wiring=WIRING, **others):
        for name, text in {"wiring": wiring, **others}.items():
            (tmp_path / f"{name}.gin").write_text(textwrap.dedent(text))
        path = tmp_path / "stage.gin"
        path.write_text(stage + textwrap.dedent(extra))
        return str(path)

    return write


def overlay(tmp_path, name, text):
    path = tmp_path / f"{name}.gin"
    path.parent.mkdir(exist_ok=True)
    path.write_text("from __gin__ import dynamic_registration\nfrom rstar2_jax import settings\n" + text + "\n")
    return str(path)


def resolve(*files, flags=()):
    return gin_strict.resolve(files, [(text, f"--gin_bindings={text!r}") for text in flags])


def error_of(*files, flags=()):
    with pytest.raises(gin_source.ConfigError) as caught:
        gin_strict.build(resolve(*files, flags=flags))
    return str(caught.value)


def line_of(path, text):
    return 1 + next(n for n, line in enumerate(pathlib.Path(path).read_text().splitlines()) if text in line)


def test_a_stage_file_builds_the_settings_and_names_its_run_function(stage, strict_runs):
    function, arguments = gin_strict.build(resolve(stage()))
    assert function is strict_runs.go
    assert arguments["run"] == settings.Run(workdir="runs/x", steps=300)
    assert arguments["learner"].optimizer == settings.Optimizer(lr=1e-6, warmup_steps=20)
    assert arguments["roc"] == settings.Roc() and arguments["samples"] == 4


def test_the_resolved_text_holds_defaults_and_resolves_to_itself(stage, tmp_path):
    resolved = resolve(stage())
    assert "samples = 4" in resolved.text and "eps_high = 0.28" in resolved.text and "lr = 1e-06" in resolved.text
    again = tmp_path / "resolved.gin"
    again.write_text(resolved.text)
    repeated = resolve(str(again))
    assert repeated.text == resolved.text
    assert gin_strict.build(repeated)[1] == gin_strict.build(resolved)[1]


def test_a_default_that_no_file_binds_appears_with_its_value(stage):
    assert "max_grad_norm = 1.0" in resolve(stage()).text


@pytest.mark.parametrize(
    "binding, words",
    [
        ("settings.Run.steps = 300.0", "300.0 (float) where int is wanted: write 300"),
        ("settings.Optimizer.lr = '1e-6'", "'1e-6' (str) where float is wanted: write 1e-6 without quotes"),
        ("settings.Roc.reject_equal = 'False'", "'False' (str) where bool is wanted: write False without quotes"),
        ("settings.Learner.mesh = [1, 1, 1]", "where tuple[int, int, int] is wanted: write (1, 1, 1)"),
        ("settings.Learner.mesh = (1, 1)", "has 2 items; 3 are wanted"),
        ("settings.Learner.mesh = (1, 1, 1.0)", "1.0 (float) where int is wanted"),
        ("settings.Run.steps = True", "True (bool) where int is wanted"),
        ("settings.Run.seed = None", "None (NoneType) where int is wanted"),
        ("settings.Task.families = 'gcd'", "write ('gcd',)"),
        ("settings.Roc.positives = 'greedily'", "is none of 'inverse', 'greedy', 'uniform'; nearest: 'greedy'"),
        ("settings.Learner.loss = @settings.Roc()", "@Roc() where Loss is wanted: write @settings.Loss()"),
        ("settings.Learner.loss = @settings.Loss", "write @settings.Loss()"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_file_line_and_remedy(stage, binding, words):
    stage_text = "\n".join(line for line in STAGE.splitlines() if "steps = " not in line and "lr = %LR" not in line)
    path = stage(f"\n{binding}\n", stage=stage_text.replace("LR = 1e-6", ""))
    message = error_of(path)
    assert message.startswith(f"{path}:{line_of(path, binding)}: ")
    assert words in message


def test_an_int_is_taken_as_a_float_where_a_float_is_wanted(stage):
    assert "p_floor = 1.0" in resolve(stage("strict_runs.go.roc = @settings.Roc()\nsettings.Roc.p_floor = 1\n")).text


def test_a_wrong_type_behind_a_macro_names_the_macro(stage):
    path = stage(stage=STAGE.replace("LR = 1e-6", "LR = '1e-6'"))
    message = error_of(path)
    assert f"(%LR from {path}:{line_of(path, 'LR = ')})" in message


def test_an_unknown_field_names_the_nearest_one(stage):
    path = stage("settings.Run.step = 3\n")
    assert error_of(path) == (
        f"{path}:{line_of(path, 'Run.step ')}: settings.Run has no argument 'step'; nearest known name: steps"
    )


@pytest.mark.parametrize(
    "line, nearest",
    [
        ("settings.Rn.steps = 3", "nearest known name: Run"),
        ("setings.Run.steps = 3", "nearest known name: settings"),
        ("strict_runs.go.roc = @settings.Rok()", "nearest known name: Roc"),
        ("strict_runs.goo.samples = 3", "nearest known name: go"),
    ],
)
def test_an_unknown_owner_names_the_nearest_one(stage, line, nearest):
    message = error_of(stage(line + "\n"))
    assert nearest in message and "stage.gin:" in message


def test_an_unknown_module_names_the_nearest_one(stage):
    path = stage("from rstar2_jax import settngs\nsettngs.Run.seed = 3\n")
    assert "there is no module 'rstar2_jax.settngs'; nearest known name: settings" in error_of(path)


def test_a_mistyped_macro_is_an_error_with_the_nearest_name(stage):
    path = stage(stage=STAGE.replace("%LR", "%RL"))
    message = error_of(path)
    assert message == f"{path}:{line_of(path, '%RL')}: macro %RL is not defined; nearest known name: LR"


def test_a_macro_that_nothing_uses_is_an_error(stage):
    assert "macro STEPZ is not used by anything" in error_of(stage("STEPZ = 4\n"))


def test_a_macro_behind_something_that_the_run_does_not_take_is_an_error(stage):
    wiring = WIRING + "EVERY = 10\nHALF = %EVERY\nsettings.Exam.every_steps = %HALF\n"
    resolve(stage(wiring=wiring))  # a shared file speaks about other runs too
    complaint = r"macro (EVERY|HALF) is not used by anything that RUN = @strict_runs.go takes"
    assert re.search(complaint, error_of(stage("EVERY = 5\n", wiring=wiring)))
    assert re.search(complaint, error_of(stage(wiring=wiring), flags=["EVERY = 5"]))
    with pytest.raises(gin_source.ConfigError, match="macro HELD_OUT_EVERY is not used by anything that RUN = @eval"):
        resolve("eval.gin", flags=["HELD_OUT_EVERY = 5"])


def test_a_macro_whose_value_is_overridden_is_no_error(stage):
    assert resolve(stage(), flags=["settings.Optimizer.lr = 1e-5"]).origins["settings.Optimizer.lr"]


def test_a_macro_defined_through_itself_is_an_error(stage):
    assert "defined through itself" in error_of(stage("A = %B\nB = %A\nstrict_runs.go.samples = %A\n"))


def test_a_binding_that_the_run_does_not_take_is_an_error(stage):
    path = stage("settings.Rollout.group_size = 3\n")
    message = error_of(path)
    assert message.startswith(f"{path}:{line_of(path, 'group_size')}: settings.Rollout.group_size is not used")
    assert "settings.Learner" in message


def test_the_same_binding_in_an_included_file_is_idle(stage):
    assert resolve(stage()).idle == ("settings.Sandbox.slots",)


def test_a_class_that_is_not_wired_in_does_not_take_its_bindings_silently(stage):
    assert "settings.Loss.eps_low is not used" in error_of(stage("settings.Loss.eps_low = 0.1\n"))


@pytest.mark.parametrize("where", ["stage", "wiring"])
def test_a_scope_that_nothing_enters_is_an_error_even_in_an_included_file(stage, where):
    line = "evla/settings.Run.steps = 3\n"
    path = stage(line) if where == "stage" else stage(wiring=WIRING + line)
    assert "nothing enters the scope 'evla' of evla/settings.Run.steps" in error_of(path)


def test_scopes_that_are_entered_give_two_instances_of_one_class(stage, tmp_path):
    path = stage(
        stage="""
from __gin__ import dynamic_registration
from rstar2_jax import settings
import strict_runs
RUN = @strict_runs.pair
strict_runs.pair:
    first = @settings.Roc()
    second = @strict/settings.Roc()
settings.Roc.p_floor = 0.2
strict/settings.Roc.min_class = 2
"""
    )
    resolved = resolve(path)
    arguments = gin_strict.build(resolved)[1]
    assert arguments == {"first": settings.Roc(p_floor=0.2), "second": settings.Roc(p_floor=0.2, min_class=2)}
    again = tmp_path / "resolved.gin"
    again.write_text(resolved.text)
    assert gin_strict.build(resolve(str(again)))[1] == arguments
    assert "nearest known name: strict" in error_of(
        stage("strit/settings.Roc.p_floor = 0.3\n", stage=pathlib.Path(path).read_text())
    )


def test_a_missing_required_field_is_an_error_that_names_the_flag(stage):
    path = stage(stage=STAGE.replace("    workdir = 'runs/x'\n", ""))
    assert error_of(path) == "settings.Run.workdir is required and has no value: bind it (str) or pass --workdir"


def test_required_is_an_error_only_where_the_run_takes_it(stage):
    assert "required" in error_of(stage("strict_runs.go.samples = %gin.REQUIRED\n"))
    assert resolve(stage(wiring=WIRING.replace("slots = 8", "slots = %gin.REQUIRED"))).idle


def test_a_refused_value_names_the_binding_it_came_from(stage):
    path = stage("settings.Run.save_every_steps = 0\n")
    message = error_of(path)
    assert message == (f"{path}:{line_of(path, 'save_every')}: Run.save_every_steps = 0: must be above 0")


def test_no_run_function_is_an_error(stage):
    assert "no file binds the macro RUN" in error_of(stage(stage=STAGE.replace("RUN = @strict_runs.go", "")))
    assert "must be a function" in error_of(stage(stage=STAGE.replace("@strict_runs.go\n", "'go'\n")))


# Order: who overrides whom, and when that is said aloud.


def test_an_includer_overrides_its_include_silently(stage):
    resolved = resolve(stage("settings.Optimizer.warmup_steps = 3\n"))
    assert "warmup_steps = 3" in resolved.text and resolved.warnings == ()


def test_an_include_after_a_binding_overrides_it_with_a_warning_that_shows_the_winner(stage, tmp_path):
    header = "from __gin__ import dynamic_registration\nfrom rstar2_jax import settings\n"
    path = stage(
        "settings.Run.save_every_steps = 99\ninclude 'late.gin'\n", late=header + "settings.Run.save_every_steps = 11\n"
    )
    resolved = resolve(path)
    assert "save_every_steps = 11" in resolved.text
    (warning,) = resolved.warnings
    assert warning == (
        f"settings.Run.save_every_steps = 11 from {tmp_path / 'late.gin'}:3 overrides 99 "
        f"from {path}:{line_of(path, '= 99')}"
    )


def test_two_files_side_by_side_warn_and_overlays_do_not(stage, tmp_path):
    first = stage()
    beside = overlay(tmp_path, "beside", "settings.Run.steps = 5")
    scale = overlay(tmp_path, "scale/small", "settings.Run.steps = 5")
    assert len(resolve(first, beside).warnings) == 1
    assert resolve(first, scale).warnings == ()
    assert "steps = 5" in resolve(first, scale).text


def test_an_ablation_that_is_overridden_warns(stage, tmp_path):
    ablation = overlay(tmp_path, "ablation/short", "settings.Run.steps = 7")
    scale = overlay(tmp_path, "scale/small", "settings.Run.steps = 5")
    assert resolve(stage(), scale, ablation).warnings == ()
    (warning,) = resolve(stage(), ablation, scale).warnings
    assert "overrides 7" in warning


def test_an_ablation_that_changes_nothing_in_this_run_is_an_error_and_a_scale_is_not(stage, tmp_path):
    text = "settings.Rollout.oversample = 16"
    assert "is not used" in error_of(stage(), overlay(tmp_path, "ablation/no_roc", text))
    assert "settings.Rollout.oversample" in resolve(stage(), overlay(tmp_path, "scale/small", text)).idle


def test_a_flag_overrides_everything_and_the_last_flag_wins(stage):
    resolved = resolve(stage(), flags=["settings.Run.steps=5", "Run.steps=6"])
    assert "steps = 6" in resolved.text and resolved.warnings == ()
    assert resolved.origins["settings.Run.steps"] == "--gin_bindings='Run.steps=6'"


def test_one_key_twice_in_one_file_is_an_error(stage):
    assert "settings.Run.steps is bound twice, first in line" in error_of(stage("settings.Run.steps = 5\n"))


def test_a_file_read_twice_is_an_error(stage, tmp_path):
    assert "read twice" in error_of(stage(), str(tmp_path / "wiring.gin"))
    assert "read twice" in error_of(stage(wiring=WIRING + "\ninclude 'stage.gin'\n"))


@pytest.mark.parametrize(
    "text, hint",
    [
        ("settings.Run.workdir=/tmp/x", "--gin_bindings='settings.Run.workdir=\"/tmp/x\"'"),
        ("settings.Run.init_from=runs", "--gin_bindings='settings.Run.init_from=\"runs\"'"),
        ("settings.Roc.reject_equal=false", "write settings.Roc.reject_equal=False"),
        ("settings.Run.steps=60*5", "gin does no arithmetic: write the result"),
        ("settings.Run.steps", "a binding reads `owner.argument = value`"),
        ("settings.Learner.mesh=(1, 1", ""),
    ],
)
def test_an_unreadable_flag_gets_a_hint(stage, text, hint):
    message = error_of(stage(), flags=[text])
    assert "cannot read" in message and hint in message


def test_an_unreadable_line_of_a_file_is_named(stage):
    path = stage("settings.Run.seed = none\n")
    message = error_of(path)
    assert message == (
        f"{path}:{line_of(path, '= none')}: cannot read `settings.Run.seed = none`; write settings.Run.seed=None"
    )


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_a_number_that_is_too_large_is_one_clear_error(stage, text):
    path = stage(f"settings.Optimizer.lr = {text}\n")
    assert error_of(path).startswith(f"{path}:{line_of(path, text)}: a number is beyond 1.8e+308")


def test_an_unclosed_bracket_is_one_clear_error(stage):
    assert re.search(r"stage.gin:\d+: cannot read", error_of(stage("settings.Learner.mesh = (1, 1\n")))


def test_names_of_flags_may_leave_out_settings_and_names_in_files_may_not(stage):
    assert "steps = 9" in resolve(stage(), flags=["Run.steps=9"]).text
    assert "'Run.steps'" not in error_of(stage("Run.seed = 9\n"))
    assert "unknown name 'Run': 'Run' is not imported here" in error_of(stage("Run.seed = 9\n"))


def test_an_unknown_gin_file_names_the_nearest_that_exists():
    assert "nearest known name: stage1.gin" in error_of("stage_1.gin")
    assert "nearest known name: scale/box.gin" in error_of("scale/bx.gin")


def test_a_missing_include_is_one_clear_error_with_its_line(stage):
    path = stage("include 'bsae.gin'\n")
    message = error_of(path)
    assert message.startswith(f"{path}:{line_of(path, 'bsae')}: no gin file 'bsae.gin' (looked in ")
    assert "nearest known name: base.gin" in message


def test_one_import_name_for_two_modules_is_an_error(stage):
    assert "already means" in error_of(stage(wiring=WIRING + "import strict_runs as settings\n"))
