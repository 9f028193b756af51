"""A small part of the million inputs of `make fuzz`."""

from tests.sandbox import fuzz


def test_mutated_inputs_crash_no_reader():
    fuzz.run(8_000, seed=1)
