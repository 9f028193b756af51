"""The built-in families: right answers by brute force, rising stages, an evaluation side that never meets training."""

from __future__ import annotations

import re

import pytest

from rstar2_jax.data import box_problems
from rstar2_jax.data import tokenizer as tokenizers


def repeated_power(base: int, exponent: int) -> int:
    value = 1
    for _ in range(exponent):
        value = value * base % 1000
    return value


def smallest_common_multiple(a: int, b: int) -> int:
    return next(n for n in range(a, a * b + 1, a) if n % b == 0)


def remainder(value: int, modulus: int) -> int:
    return value - value // modulus * modulus


def divisors_added(n: int) -> int:
    return sum({d for k in range(1, int(n**0.5) + 1) if n % k == 0 for d in (k, n // k)})


# Each reads the numbers of the question alone and finds the answer another way than the generator does.
SOLVE = {
    "product_mod": lambda a, b, m: remainder(sum([a] * b), m),
    "gcd": lambda a, b: max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0),
    "divisor_sum": divisors_added,
    "power_mod": lambda a, b, m: repeated_power(a, b),
    "digit_sum": lambda a, b, m: sum(map(int, str(remainder(sum([a] * b), m)))),
    "lcm": smallest_common_multiple,
    "sum_product_mod": lambda a, b, c, m: remainder(a * c + b * c, m),
    "triple_product_mod": lambda a, b, c, m: remainder(remainder(a * b, m) * c, m),
    "divisor_sum_mod": lambda a, b, m: divisors_added(remainder(sum([a] * b), m)),
}


@pytest.mark.parametrize("family", box_problems.FAMILIES)
def test_answers_agree_with_an_independent_computation(family):
    for stage in (1, 2, 3):
        for index in range(40):
            problem = box_problems.draw(family, stage, (7, index), held_out=index % 2 == 0)
            numbers = [int(n) for n in re.findall(r"\d+", problem.question)]
            assert problem.answer == SOLVE[family](*numbers), problem


@pytest.mark.parametrize("family", box_problems.FAMILIES)
def test_the_code_uses_the_numbers_of_the_question_in_their_order(family):
    problem = box_problems.draw(family, 2, (1, 2), held_out=False)
    numbers = re.findall(r"\d+", problem.question)
    in_code = re.findall(r"\d+", problem.expression.replace("range(1,", "").replace("+1)", "").replace("==0", ""))
    assert list(dict.fromkeys(in_code)) == list(dict.fromkeys(numbers))
    assert problem.code == f"{problem.setup}print({problem.expression})"


def test_only_the_digit_sum_leaves_a_last_step_to_the_model():
    for family in box_problems.FAMILIES:
        pairs = [box_problems.draw(family, 1, (0, i), held_out=False) for i in range(20)]
        assert all(p.value == p.answer for p in pairs) == (family != "digit_sum")


@pytest.mark.parametrize("family", box_problems.TRAINED)
def test_stages_rise_in_length_and_in_answers(family):
    def mean(stage):
        drawn = [box_problems.draw(family, stage, (3, i), held_out=False) for i in range(100)]
        return sum(len(re.sub(r"\D", "", p.question)) for p in drawn) / 100

    assert mean(1) < mean(2) < mean(3)


def test_a_problem_is_a_pure_function_of_its_name():
    drawn = [box_problems.draw("gcd", 2, (5, 9), held_out=False) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert box_problems.draw("gcd", 2, (5, 10), held_out=False) != drawn[0]


def test_the_two_sides_share_no_problem_even_up_to_the_order_of_operands():
    for family in box_problems.TRAINED:
        sides = [{box_problems.draw(family, 1, (i,), held_out=side).key for i in range(300)} for side in (False, True)]
        assert not sides[0] & sides[1]
        assert len(sides[1]) >= 20


def test_trained_and_held_out_families_are_apart():
    assert not set(box_problems.TRAINED) & set(box_problems.HELD_OUT)
    assert set(box_problems.TRAINED) | set(box_problems.HELD_OUT) < set(box_problems.FAMILIES)


def test_questions_are_short_in_the_built_in_vocabulary():
    box = tokenizers.Tokenizer.box()
    for family in box_problems.TRAINED:
        for stage in (1, 2, 3):
            problem = box_problems.draw(family, stage, (0,), held_out=False)
            assert len(box.encode(problem.question)) <= 15 and len(box.encode(problem.code)) <= 20
