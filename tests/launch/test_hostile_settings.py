"""Every field of every settings class against values that nobody should write: a clear error or a sound object."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

from rstar2_jax import gin_types, settings

HOSTILE = (None, True, -1, 0, 10**30, -0.5, math.nan, math.inf, -math.inf, "", "x", "none ", b"x", (), ("a",), [1], 1j)
SOUND = {
    "Run": dict(workdir="w", steps=3),
    "Model": dict(
        family="qwen3", vocab_size=8, d_model=8, d_mlp=8, layers=1, heads=2, kv_heads=1, head_dim=4, max_positions=8
    ),
    "Task": dict(source="box", tokenizer="box"),
    "Rollout": dict(
        prompts_per_step=1, group_size=1, oversample=1, max_prompt_tokens=1, max_response_tokens=1, max_turns=1
    ),
    "Optimizer": dict(lr=1e-3),
    "Learner": dict(optimizer=settings.Optimizer(lr=1e-3), row_tokens=8),
    "Demonstrations": dict(count=1),
    "Curation": dict(samples=4, max_solved=3),
    "Device": dict(
        memory_bytes=1.0, flops=1.0, memory_bytes_per_s=1.0, node_devices=1, node_bytes_per_s=1.0, link_bytes_per_s=1.0
    ),
    "Exam": dict(task=settings.Task(source="box", tokenizer="box")),
}  # fmt: skip
CLASSES = [
    value for _, value in inspect.getmembers(settings, inspect.isclass)
    if dataclasses.is_dataclass(value)
]  # fmt: skip
CASES = [(owner, field.name) for owner in CLASSES for field in dataclasses.fields(owner)]


def build(owner, name, value):
    """The object with one field set as gin would set it: the value is fitted to the annotation first."""
    fitted = gin_types.fit(value, gin_types.parameters(owner)[name].annotation)
    return owner(**(SOUND.get(owner.__name__, {}) | {name: fitted}))


def test_the_sound_values_are_sound():
    assert len(CLASSES) > 10
    for owner in CLASSES:
        assert dataclasses.is_dataclass(owner(**SOUND.get(owner.__name__, {})))


@pytest.mark.parametrize("owner, name", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_hostile_value_is_a_clear_error_or_a_sound_object(owner, name):
    for value in HOSTILE:
        try:
            made = build(owner, name, value)
        except ValueError as error:
            said = str(error)
            assert said and (name in said or "wanted" in said or repr(value) in said), f"{value!r}: {said}"
        else:
            kept = getattr(made, name)
            assert not (isinstance(kept, float) and math.isnan(kept)), f"{owner.__name__}.{name} took NaN"
            assert hash(made) == hash(build(owner, name, value))


@pytest.mark.parametrize("temperature", [0.0, 2e-38, 9e-7])
def test_a_temperature_that_log_probabilities_do_not_survive_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature = {temperature}: must be 1e-06 or more"):
        build(settings.Rollout, "temperature", temperature)
    assert build(settings.Rollout, "temperature", 1e-6).temperature == 1e-6
