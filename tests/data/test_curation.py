"""What is unfit to train on: 8-grams of evaluation, near duplicates beside a plain loop, huge answers."""

from __future__ import annotations

import itertools

import numpy as np

from rstar2_jax.data import curation

EVALUATION = [
    ("e1", "Let $N$ be the number of ordered pairs of positive integers below one hundred."),
    ("e2", "Find x."),
]


def test_eight_words_in_a_row_make_a_problem_contaminated_and_seven_do_not():
    found = curation.Contamination(EVALUATION)
    assert found.of("Suppose N be the NUMBER of ordered pairs of -- positive things") == "e1"
    assert found.of("Suppose be the number of ordered pairs of positive things") == "e1"
    assert found.of("Suppose the number of ordered pairs of positive things") is None
    assert found.of("find  $x$") == "e2" and found.of("Find x and y.") is None


def test_a_near_duplicate_has_the_same_answer_and_nearly_the_same_words():
    seen = curation.NearDuplicates()
    text = "A train leaves the station at noon and travels at sixty miles an hour for three hours. How far does it go?"
    assert seen.add("a", text, "180") is None
    assert seen.add("b", text.replace("A train", "The train"), "180") == "a"
    assert seen.add("c", text.replace("A train", "The train"), "181") is None
    assert seen.add("d", text.replace("sixty", "ninety").replace("three", "two").replace("noon", "six"), "180") is None


def test_the_bands_find_what_a_plain_loop_over_all_pairs_finds():
    rng = np.random.default_rng(0)
    base = [[f"w{rng.integers(200)}" for _ in range(30)] for _ in range(40)]
    texts = []
    for words in base:
        texts.append(" ".join(words))
        changed = list(words)
        changed[int(rng.integers(30))] = "other"
        texts.append(" ".join(changed))
    grams = [{tuple(t.split()[i : i + 3]) for i in range(28)} for t in texts]
    close = {
        b for a, b in itertools.combinations(range(80), 2) if len(grams[a] & grams[b]) >= 0.8 * len(grams[a] | grams[b])
    }
    seen = curation.NearDuplicates()
    assert {i for i, text in enumerate(texts) if seen.add(str(i), text, "1") is not None} == close and close


def test_problems_of_the_box_that_differ_in_a_number_stay():
    seen = curation.NearDuplicates()
    assert [seen.add(str(i), f"12*34 mod {i}", "6") for i in range(50, 60)] == [None] * 10
    assert seen.add("again", "12 * 34  MOD 50", "6") == "50"


def test_huge_is_counted_in_digits_without_the_sign():
    assert not curation.is_huge("-123", 3) and curation.is_huge("1234", 3)
