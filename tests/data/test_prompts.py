"""Sources: a pure function of seed and cursor, epochs without a seam, duplicates and overlap found, sides apart."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import types as python_types

import hypothesis
import pytest
from hypothesis import strategies as st

from rstar2_jax import settings
from rstar2_jax.data import box_problems, prompts, sources, worked

BOX = settings.Task(source="box", tokenizer="box", template="box")


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count: int, start: int = 0) -> list[dict[str, object]]:
    return [{"id": f"r{i}", "question": f"Add {i} and one.", "answer": str(i + 1)} for i in range(start, start + count)]


def folder_task(folder, train, test) -> settings.Task:
    write(folder / "train.jsonl", train)
    write(folder / "test.jsonl", test)
    return settings.Task(source="jsonl", tokenizer="box", path=str(folder))


@hypothesis.given(st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.lists(st.integers(1, 5), max_size=4))
def test_generated_prompts_do_not_depend_on_how_they_are_batched(seed, cursor, sizes):
    source = prompts.make_source(BOX)
    whole = source.batch(seed, cursor, sum(sizes))
    parts, at = [], cursor
    for size in sizes:
        parts += source.batch(seed, at, size)
        at += size
    assert parts == whole


@hypothesis.given(st.integers(0, 100), st.integers(0, 60), st.lists(st.integers(1, 9), max_size=6))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_resumed_run_over_a_finite_set_sees_what_the_uninterrupted_one_sees(tmp_path, seed, cursor, sizes):
    # F57, F58: also when it resumes exactly at the end of an epoch.
    source = prompts.make_source(folder_task(tmp_path, rows(12), rows(3, 100)))
    whole = source.batch(seed, 0, cursor + sum(sizes))
    for size in sizes:
        assert source.batch(seed, cursor, size) == whole[cursor : cursor + size]
        cursor += size


def test_each_epoch_holds_each_problem_once_in_an_order_of_its_own(tmp_path):
    source = prompts.make_source(folder_task(tmp_path, rows(12), rows(3, 100)))
    epochs = [[p.id for p in source.batch(4, 12 * e, 12)] for e in range(3)]
    assert all(sorted(epoch) == sorted(r["id"] for r in rows(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs != [[p.id for p in source.batch(5, 12 * e, 12)] for e in range(3)]


def test_the_end_of_an_epoch_is_the_start_of_the_next(tmp_path):
    # F58: 4 batches of 3 are saved at step 4; the fifth exists and opens epoch 1.
    source = prompts.make_source(folder_task(tmp_path, rows(12), rows(3, 100)))
    assert source.batch(0, 12, 3) == source.batch(0, 9, 6)[3:]
    assert len(source.batch(0, 12, 3)) == 3


def test_a_negative_cursor_is_refused():
    with pytest.raises(ValueError, match="cursor = -1"):
        prompts.make_source(BOX).batch(0, -1, 2)


def test_repeats_up_to_spacing_and_evaluation_rows_are_left_out_and_reported(tmp_path):
    # F64: ten rows, three repeats with other spacing, one letter-by-letter repeat, one row of the evaluation set.
    train = rows(6) + [{**r, "id": f"again{i}", "question": f" {r['question']}  "} for i, r in enumerate(rows(3))]
    train += [{**rows(1)[0], "id": "twin"}] + rows(1, 100)
    task = folder_task(tmp_path, train, rows(2, 100))
    kept, report = sources.solved_rows(task, "train")
    assert [row.prompt.id for row in kept] == [f"r{i}" for i in range(6)]
    assert (report.rows, report.kept, report.overlap) == (11, 6, 1)
    assert (report.exact_duplicates, report.normalised_duplicates) == (1, 3)
    assert "1 exact and 3 normalised duplicates, 1 also in the evaluation set" in prompts.make_source(task).report
    prompts.check_disjoint(prompts.make_source(task).batch(0, 0, 6), prompts.eval_prompts(task, 9, 0))


def test_one_question_with_two_answers_is_refused(tmp_path):
    twice = [*rows(2), {"id": "x", "question": "Add  0 and one.", "answer": "7"}]
    with pytest.raises(ValueError, match="'r0' and 'x' pose one question with two answers, 1 and 7"):
        prompts.make_source(folder_task(tmp_path, twice, rows(1, 100)))


def test_two_problems_with_one_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two different problems have the id 'r0'"):
        prompts.make_source(folder_task(tmp_path, [*rows(2), {**rows(1, 5)[0], "id": "r0"}], rows(1, 100)))


def test_lists_that_share_a_problem_are_refused():
    shared = prompts.make_source(BOX).batch(0, 0, 2)
    other = [dataclasses.replace(shared[1], id="other", question=f" {shared[1].question} ")]
    with pytest.raises(ValueError, match="1 training problems are evaluation problems too"):
        prompts.check_disjoint(shared, other)


@pytest.mark.parametrize("source", prompts.GENERATED)
def test_evaluation_problems_never_occur_in_training(source):
    if source == "gsm_symbolic":
        pytest.importorskip("reasoning_gym")
    task = dataclasses.replace(BOX, source=source)
    train = [p for seed in (0, 1) for p in prompts.make_source(task).batch(seed, 0, 400)]
    prompts.check_disjoint(train, prompts.eval_prompts(task, 120, 0))


def test_evaluation_lists_are_fixed_and_without_repeats():
    listed = prompts.eval_prompts(BOX, 60, 3)
    assert listed == prompts.eval_prompts(BOX, 60, 3) and listed[:50] == prompts.eval_prompts(BOX, 50, 3)
    assert len({p.question for p in listed}) == len({p.id for p in listed}) == 60


def test_evaluation_goes_on_where_the_held_out_side_is_exhausted():
    few = dataclasses.replace(BOX, families=("divisor_sum",))
    assert len(prompts.eval_prompts(few, 60, 0)) == 60


def test_all_families_of_a_task_take_equal_parts():
    listed = [p.source for p in prompts.make_source(BOX).batch(0, 0, 40)]
    assert all(listed.count(family) == 10 for family in box_problems.TRAINED)


def test_held_out_families_are_for_evaluation_only():
    task = dataclasses.replace(BOX, families=("lcm",))
    assert {p.source for p in prompts.eval_prompts(task, 5, 0)} == {"lcm"}
    with pytest.raises(ValueError, match=r"\['lcm'\] are for evaluation only"):
        prompts.make_source(task)
    with pytest.raises(ValueError, match="not among product_mod"):
        prompts.make_source(dataclasses.replace(BOX, families=("algebra",)))


def test_a_single_file_keeps_a_fixed_part_for_evaluation(tmp_path):
    path = write(tmp_path / "all.jsonl", rows(200))
    task = settings.Task(source="jsonl", tokenizer="box", path=path)
    train = {p.id for p in prompts.make_source(task).batch(0, 0, 200)}
    held = {p.id for p in prompts.eval_prompts(task, 1000, 0)}
    assert not train & held and train | held == {r["id"] for r in rows(200)} and 10 <= len(held) <= 45


def test_a_draw_from_a_finite_evaluation_set_is_without_replacement(tmp_path):
    task = folder_task(tmp_path, rows(3), rows(20, 100))
    some = prompts.eval_prompts(task, 8, 1)
    assert len({p.id for p in some}) == 8 and some == prompts.eval_prompts(task, 8, 1)


def test_worked_solutions_of_the_grade_school_format_are_read(tmp_path):
    train = [
        {"question": "48, 1/2?", "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72.\n#### 72"},
        {"question": "$1,200 for 2?", "answer": "She made $1,200 * 2 = $<<1200*2=2400>>2,400 in all.\n#### 2,400"},
        {"question": "Half?", "answer": "It is half.\n#### 0.5"},
    ]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "test.jsonl", [{"question": "Other?", "answer": "#### 3"}])
    task = settings.Task(source="gsm8k", tokenizer="box", path=str(tmp_path))
    kept, report = sources.solved_rows(task, "train")
    assert [(r.prompt.answer, r.expression) for r in kept] == [("72", "round(48+(48/2))"), ("2400", "1200*2")]
    assert report.not_integer == 1 and kept[0].prompt.id == "gsm8k/0"


@pytest.mark.parametrize(
    ("numbers", "working", "answer", "expression"),
    [
        ("53 18 12", "They have 53 - 18 = 35 minutes, then 35 - 12 = 23 minutes.", "23", "(53-18)-12"),
        ("774.9 1.35 40 $32", "He earned 40 x $32 = $1280, and 774.9 / 1.35 = 574 so", "574", "round(774.9/1.35)"),
        ("40 20", "He spent $40 + $20 = $60.", "60", "40+20"),
        ("1,200 25", "That is 1200*25/100 = 300.", "300", "round(1200*25/100)"),
        ("53 12", "They have 35 minutes, then 35 - 12 = 23 minutes.", "23", None),
        ("17 6 12", "17-6-12 is wrong: 17-6-12 = 41", "41", None),
        ("0900 0130", "so 0900-0130 = 730", "730", None),
        ("5", "nothing", "5", None),
    ],
)
def test_the_computation_that_gives_the_answer_becomes_code_in_numbers_of_the_question(
    numbers, working, answer, expression
):
    prompt = prompts.Prompt(id="p", question=f"Given {numbers}?", answer=answer, source="s")
    assert worked.with_expression(prompt, working).expression == expression


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("1,234", "1234"),
        ("$18", "18"),
        ("033", "33"),
        ("-0", "0"),
        ("\N{MINUS SIGN}8", "-8"),
        ("17.0", "17"),
        (12, "12"),
        ("17.5", None),
        ("12,34", None),
        ("1/2", None),
        ("", None),
        ("\u0663", None),
        (True, None),
    ],
)
def test_only_integers_are_answers(answer, text):
    assert sources.integer_text(answer) == text


def test_missing_or_malformed_files_are_named(tmp_path):
    task = settings.Task(source="jsonl", tokenizer="box", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"holds no train\.jsonl"):
        prompts.make_source(task)
    with pytest.raises(ValueError, match="is no file or folder"):
        prompts.make_source(dataclasses.replace(task, path=str(tmp_path / "none.jsonl")))
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question"\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: not JSON"):
        prompts.make_source(task)
    write(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"row 0: columns \['text'\]"):
        prompts.make_source(task)
    with pytest.raises(ValueError, match="must be one of box"):
        prompts.make_source(dataclasses.replace(task, source="math"))


def test_contest_sets_are_for_evaluation_only_and_name_their_package():
    task = settings.Task(source="aime24", tokenizer="box")
    with pytest.raises(ValueError, match="for evaluation only"):
        prompts.make_source(task)
    if importlib.util.find_spec("sgl_eval") is None:
        with pytest.raises(ValueError, match="pip install sgl-eval"):
            prompts.eval_prompts(task, 30, 0)
    else:
        listed = prompts.eval_prompts(task, 30, 0)
        assert len({p.id for p in listed}) == 30 and all(0 <= int(p.answer) <= 999 for p in listed)


def test_a_hub_set_is_read_by_name_through_its_library(monkeypatch):
    asked = []
    library = python_types.ModuleType("datasets")
    library.get_dataset_split_names = lambda name, config: ["train", "test"]

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return [{"problem": f"{split} problem", "expected_answer": 4}]

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    task = settings.Task(source="hub:some/set:main", tokenizer="box")
    assert [p.question for p in prompts.make_source(task).batch(0, 0, 1)] == ["train problem"]
    assert [p.question for p in prompts.eval_prompts(task, 1, 0)] == ["test problem"]
    assert ("some/set", "main", "train", True) in asked


def test_a_hub_set_without_its_library_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets or give a path"):
        prompts.make_source(settings.Task(source="gsm8k", tokenizer="box"))


def test_prompts_that_are_too_long_are_left_out_and_counted_and_the_order_stays_a_function_of_the_cursor(tmp_path):
    made = [{**row, "question": row["question"] + "x" * i} for i, row in enumerate(rows(40))]
    source = prompts.make_source(folder_task(tmp_path, made, rows(3, start=100)))
    limit = sorted(len(prompt.question) for prompt in source.batch(0, 0, source.size))[20]
    short = source.within(lambda prompt: len(prompt.question), limit)
    assert 0 < short.size < source.size and f"{source.size - short.size} longer than {limit} tokens" in short.report
    assert all(len(prompt.question) <= limit for prompt in short.batch(0, 0, 2 * short.size))
    assert short.batch(3, 0, 8)[3:] == short.batch(3, 3, 5)
    with pytest.raises(ValueError, match=r"longer than Rollout.max_prompt_tokens = 0: the shortest has \d+"):
        source.within(lambda prompt: len(prompt.question), 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"question": "1+1", "answer": "2"}\n[1]\n', r"line 2: \[1\] is no JSON object"),
        (b"null\n", "line 1: null is no JSON object"),
        (b'{"question": "\xff", "answer": "2"}\n', "is not UTF-8"),
    ],
)
def test_a_file_that_holds_no_problems_says_where(tmp_path, content, said):
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        prompts.make_source(dataclasses.replace(folder_task(tmp_path, rows(1), rows(1, 5)), path=str(path)))


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "set.jsonl"
    made = [json.dumps(row) for row in rows(40)]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(made).encode())
    source = prompts.make_source(dataclasses.replace(folder_task(tmp_path, rows(1), rows(1, 5)), path=str(path)))
    assert source.size > 20


def test_a_folder_of_training_problems_alone_trains_on_all_of_them(tmp_path):
    task = folder_task(tmp_path, rows(40), rows(1, 100))
    for path in tmp_path.rglob("*.jsonl"):
        if path.name != "train.jsonl":
            path.unlink()
    assert prompts.make_source(task).size == 40
    with pytest.raises(ValueError, match="holds no"):
        prompts.eval_prompts(task, 1, 0)
