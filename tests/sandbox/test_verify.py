"""Grading: every vector, the traps of other graders, and bounds on what a hostile answer can cost."""

import asyncio
import concurrent.futures
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_sandbox import client, exact, vectors, verify
from rstar2_sandbox.protocol import Verdict

RULES = "2-d3ea4fcd6cb1"


@pytest.mark.parametrize(("shown", "gold", "right"), vectors.VECTORS)
def test_the_rules_alone_agree_with_every_vector(shown, gold, right):
    verdict = verify.judge(vectors.full_text(shown), gold)
    assert verdict.verdict is (Verdict.CORRECT if right else Verdict.WRONG), verdict


def test_the_rules_carry_a_version_that_changes_with_the_vectors():
    assert verify.RULES == RULES
    assert verify.judge(r"<answer>\boxed{1}</answer>", "1").rules == RULES


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"<answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        (r"<answer>\boxed{\{1,2\}}</answer>", r"\{1,2\}"),
        (r"<answer>\boxed{a\}b}</answer>", r"a\}b"),
        (r"<answer>\boxed{5</answer>", None),
        (r"<answer>\boxed{4} then \boxed{5</answer>", None),
        (r"<answer>\boxed 42 apples</answer>", "42"),
        (r"<answer>$\boxed5$</answer>", "5"),
        (r"<answer>\boxed  {7}</answer>", "7"),
        (r"<answer>\fbox{\boxed{9}}</answer>", "9"),
        (r"<answer>\boxedx{5}</answer>", None),
        (r"<answer>\boxed{1}</answer><answer>none</answer>", None),
        (r"<answer>\boxed{1}</answer><answer>\boxed{2}", "1"),
        (r"<answer><answer>\boxed{3}</answer>", "3"),
        ("", None),
    ],
)
def test_the_box_is_the_last_one_of_the_last_closed_answer(text, box):
    assert verify.extract(text) == box


@given(st.integers(), st.integers())
def test_integers_are_equal_exactly_when_their_digits_are(left, right):
    verdict = verify.judge(rf"<answer>\boxed{{{left}}}</answer>", str(right))
    assert (verdict.verdict is Verdict.CORRECT) == (left == right)
    grouped = f"{left:,}"
    assert verify.judge(rf"<answer>\boxed{{{grouped}}}</answer>", str(left)).verdict is Verdict.CORRECT


def test_integers_of_any_length_are_compared_without_conversion():
    digits = "9" * 15_000
    assert verify.judge(rf"<answer>\boxed{{{digits}}}</answer>", digits).verdict is Verdict.CORRECT
    assert verify.judge(rf"<answer>\boxed{{{digits[:-1]}8}}</answer>", digits).verdict is Verdict.WRONG


@given(st.text(max_size=200), st.text(max_size=30))
def test_no_text_makes_the_rules_fail(text, gold):
    verify.judge(f"<answer>\\boxed{{{text}}}</answer>", gold)
    verify.judge(text, gold)


@given(st.text(alphabet="0123456789+-*/^!(){}.,= \\fracpmod", max_size=60))
def test_no_arithmetic_like_text_makes_the_rules_fail_or_hang(text):
    verify.judge(f"<answer>\\boxed{{{text}}}</answer>", "17")
    exact.value(text)


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}", "1000000!", r"\binom{1000000}{500000}", r"5^{(5^{(5^{(5^5)})}-4)}", "(" * 390 + "1" + ")" * 390,
        "9" * 400 + "^" + "9" * 400, "1/" * 199 + "0", "-" * 399 + "1", "{" * 5000, "\\boxed{" * 2000, "$" * 20_000,
        "3" + "!" * 300, "\\text{" * 3000 + "}" * 3000, "1," * 9000, "a " * 9000, "0" * 19_000 + "x",
        "{" * 9000 + "}" * 9000, "\\boxed{" * 2000 + "}" * 2000, "=" * 19_000, " " * 19_000 + "x", "a " * 9000 + "1",
    ],
)  # fmt: skip
def test_a_pathological_answer_costs_the_rules_next_to_nothing(answer):
    started = time.process_time()
    assert verify.judge(f"<answer>\\boxed{{{answer}}}</answer>", "17").verdict is Verdict.WRONG
    assert verify.judge("<answer>\\boxed{17}</answer>", answer).verdict is Verdict.WRONG
    assert time.process_time() - started < 0.5


@pytest.fixture(scope="module")
def ask(sandbox):
    """Grade (text, gold) pairs through the queue, all at once."""

    def ask_all(*pairs):
        async def together():
            async with client.Client(sandbox.redis_url, run="verify") as grader:
                return await asyncio.gather(*(grader.verify(text=text, gold=gold) for text, gold in pairs))

        return asyncio.run(together())

    return ask_all


def test_every_vector_has_its_verdict_through_the_queue(ask):
    pairs = [(vectors.full_text(shown), gold) for shown, gold, _ in vectors.VECTORS]
    for (_, _, right), found in zip(vectors.VECTORS, ask(*pairs), strict=True):
        assert found.verdict is (Verdict.CORRECT if right else Verdict.WRONG), found
        assert found.rules.startswith(f"{verify.RULES}+math-verify-")


def test_a_pathological_expression_is_wrong_in_bounded_time_and_holds_nobody_up(ask):
    hard = [r"10^{10^{10}}", "1000000!", r"\binom{1000000}{500000}"]
    started = time.monotonic()
    *bad, good = ask(*((rf"<answer>\boxed{{{text}}}</answer>", "17") for text in (*hard, "17")))
    assert [found.verdict for found in bad] == [Verdict.WRONG] * 3
    assert good.verdict is Verdict.CORRECT
    assert good.run_s < 0.5
    assert time.monotonic() - started < 20


def test_the_verdict_is_the_same_from_a_thread_and_from_a_task(ask):
    pair = (r"<answer>\boxed{\sqrt{289}}</answer>", "17")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        (from_thread,) = pool.submit(ask, pair).result()
    (from_task,) = ask(pair)
    assert from_thread.verdict is from_task.verdict is Verdict.CORRECT
    assert from_thread.library is True


def test_a_disagreement_of_rules_and_library_is_recorded_and_the_rules_win(ask):
    (found,) = ask((r"<answer>\boxed{\frac{1}{2006!}}</answer>", r"\frac{1}{2004!}"))
    assert (found.verdict, found.exact, found.library, found.disagree) == (Verdict.WRONG, False, True, True)
    (agreed,) = ask((r"<answer>\boxed{\frac{3}{6}}</answer>", r"\frac{1}{2}"))
    assert (agreed.verdict, agreed.exact, agreed.library, agreed.disagree) == (Verdict.CORRECT, True, True, False)


def test_the_client_counts_disagreements(sandbox):
    async def scene():
        async with client.Client(sandbox.redis_url, run="disagree") as grader:
            await grader.verify(text=r"<answer>\boxed{\frac{1}{2006!}}</answer>", gold=r"\frac{1}{2004!}")
            await grader.verify(text=r"<answer>\boxed{7}</answer>", gold="7")
            return dict(grader.statistics)

    assert asyncio.run(scene()) == {"wrong": 1, "correct": 1, client.DISAGREE: 1}


def test_equations_are_never_left_to_the_library(ask):
    (found,) = ask((r"<answer>\boxed{3x-y+13=0}</answer>", "3x+4y+14=0"))
    assert (found.verdict, found.library) == (Verdict.WRONG, None)


def test_the_gold_answer_is_the_librarys_first_argument(ask):
    (found,) = ask((r"<answer>\boxed{0<x<12.5}</answer>", "(0,12.5)"))
    assert found.library is False
