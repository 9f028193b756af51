"""Published sets: small files in their real columns become problems; what does not fit is counted, with examples."""

from __future__ import annotations

import json

import pytest

from rstar2_jax import settings
from rstar2_jax.data import catalog, prompts, sources, tables

BEFORE = 'Work on this task. End with one line "Answer: $Answer", nothing after it. Answer: $Answer is the result.'
AFTER = 'The result stands alone behind "Answer:".'


def dapo(index, question, truth="7", **changed):
    content = f"{BEFORE}\n\n{question}\n\n{AFTER}"
    return {
        "data_source": "made_here",
        "prompt": [{"role": "user", "content": content}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index},
        **changed,
    }


def openmath(problem, answer="3", **changed):
    return {
        "expected_answer": answer,
        "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4_high_school_math",
        "generation_model": "none",
        "pass_rate_72b_tir": "0.5",
        "problem": problem,
        "generated_solution": "long text",
        "inference_mode": "cot",
        "used_in_kaggle": False,
        **changed,
    }


def euler(number, answer):
    return {"id": number, "title": "T", "problem": f"Sum of the first {number} cubes?", "numerical_answer": answer}


ROWS = {
    "dapo_17k": [dapo("a", "How many?\n\nCount twice."), dapo("b", "And now?", "12")],
    "openmath_reasoning": [openmath("Find $x$."), openmath("Find $y$.", "-4")],
    "project_euler": [euler(2, "9"), euler(3, 36)],
    "gsm8k": [
        {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
        {"question": "Five apples, each 1,000?", "answer": "5*1000=5000\n#### 5,000"},
    ],
    "math_500": [
        {"problem": "Half?", "solution": "s", "answer": "\\frac{1}{2}", "subject": "A", "level": 1, "unique_id": "t/1"},
        {"problem": "Six?", "solution": "s", "answer": "6", "subject": "A", "level": 1, "unique_id": "t/2"},
    ],
    "aime24": [
        {"id": 60, "problem": "One?", "solution": "s", "answer": "025", "url": "u", "year": "2024"},
        {"id": 61, "problem": "Two?", "solution": "s", "answer": "3", "url": "u", "year": "2024"},
    ],
    "aime25": [{"problem_idx": i, "problem": f"P{i}?", "answer": 70 + i, "problem_type": ["Algebra"]} for i in (1, 2)],
    "aime26": [{"problem_idx": i, "problem": f"P{i}?", "answer": 70 + i} for i in (1, 2)],
    "hmmt25": [
        {"problem_idx": 1, "problem": "Root?", "answer": "\\sqrt{2}", "problem_type": ["Geometry"]},
        {"problem_idx": 2, "problem": "Count?", "answer": "103", "problem_type": ["Combinatorics"]},
    ],
}
ANSWERS = {
    "dapo_17k": ["7", "12"],
    "openmath_reasoning": ["3", "-4"],
    "project_euler": ["9", "36"],
    "gsm8k": ["4", "5000"],
    "math_500": ["\\frac{1}{2}", "6"],
    "aime24": ["25", "3"],
    "aime25": ["71", "72"],
    "aime26": ["71", "72"],
    "hmmt25": ["\\sqrt{2}", "103"],
}


def side(name):
    return "eval" if catalog.PUBLISHED[name].use == "eval" else "train"


def split(name):
    known = catalog.PUBLISHED[name]
    return known.eval_split if side(name) == "eval" else known.train_split


def write_jsonl(path, listed):
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))


def write_parquet(path, listed):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(listed), path)


def task(name, path):
    return settings.Task(source=name, path=str(path), tokenizer="box")


def test_every_published_set_is_tried_here():
    assert set(ROWS) == set(ANSWERS) == set(catalog.PUBLISHED)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_folder_as_the_hub_lays_it_out_becomes_problems_with_their_source_and_licence(tmp_path, name, write):
    (tmp_path / "data").mkdir()
    suffix = "jsonl" if write is write_jsonl else "parquet"
    for part, row in enumerate(ROWS[name]):
        write(tmp_path / "data" / f"{split(name)}-0000{part}-of-00002.{suffix}", [row])
    kept, report = sources.solved_rows(task(name, tmp_path), side(name))
    assert [row.prompt.answer for row in kept] == ANSWERS[name]
    assert {row.prompt.source for row in kept} == {name} and len({row.prompt.id for row in kept}) == 2
    licence = catalog.PUBLISHED[name].licence
    assert {row.licence for row in kept} == {licence} and f"licences: {licence} (2)" in str(report)
    assert (report.rows, report.kept, report.bad.total) == (2, 2, 0)


def test_the_question_is_freed_of_the_sentences_on_how_to_answer(tmp_path):
    write_jsonl(
        tmp_path / "train.jsonl", [*ROWS["dapo_17k"], dapo("c", "x", prompt=[{"role": "user", "content": "Bare?"}])]
    )
    found = sources.solved_rows(task("dapo_17k", tmp_path), "train")[0]
    assert [row.prompt.question for row in found] == ["How many?\n\nCount twice.", "And now?", "Bare?"]
    assert found[0].prompt.id == "dapo_17k/a"


def test_a_set_that_holds_every_row_a_hundred_times_is_read_once(tmp_path):
    # F64
    write_jsonl(tmp_path / "train.jsonl", ROWS["dapo_17k"] * 100)
    kept, report = sources.solved_rows(task("dapo_17k", tmp_path), "train")
    assert len(kept) == 2 and (report.rows, report.exact_duplicates) == (200, 198)


def test_bad_rows_are_left_out_and_counted_by_reason_with_examples(tmp_path):
    bad = [
        openmath("Prove it.", "none", problem_type="converted_proof"),
        openmath("Prove that.", "none", problem_type="converted_proof"),
        openmath("Old.", problem_source="MATH_training_set"),
        openmath(None),
        openmath("  "),
        openmath("Half?", "1/2"),
        openmath("Twice?", "5"),
        openmath("Twice?", "6"),
        openmath("Twice?", "5"),
    ]
    write_jsonl(tmp_path / "cot.jsonl", [*ROWS["openmath_reasoning"], *bad])
    kept, report = sources.solved_rows(task("openmath_reasoning", tmp_path), "train")
    assert [row.prompt.question for row in kept] == ["Find $x$.", "Find $y$."]
    assert report.bad.counts == {
        "problem_type is converted_proof": 2,
        "problem_source is MATH_training_set, not AoPS": 1,
        "problem is NoneType, not str": 1,
        "problem is empty": 1,
        "one question with several answers": 1,
    }
    assert report.bad.examples["problem_type is converted_proof"] == ["row 2", "row 3"]
    assert report.not_integer == 1
    assert "2 x problem_type is converted_proof (such as row 2, row 3)" in str(report)
    assert str(tables.Rejects()) == "none"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prompt": [{"role": "system", "content": "s"}]}, "prompt is not one user message"),
        ({"prompt": []}, "prompt is not one user message"),
        ({"prompt": "text"}, "prompt is str, not list"),
        ({"reward_model": {"style": "rule"}}, "reward_model has no ground_truth"),
        ({"extra_info": None}, "extra_info is NoneType, not dict"),
    ],
)
def test_a_row_of_another_shape_says_what_is_wrong(tmp_path, changed, reason):
    write_jsonl(tmp_path / "train.jsonl", [*ROWS["dapo_17k"], dapo("x", "Odd?", **changed)])
    assert sources.solved_rows(task("dapo_17k", tmp_path), "train")[1].bad.counts == {reason: 1}


def test_floats_that_are_no_exact_integers_are_no_answers(tmp_path):
    listed = [euler(1, "1"), euler(2, 9.0), euler(3, 36.5), euler(4, 1e20), euler(5, True)]
    write_jsonl(tmp_path / "train.jsonl", listed)
    kept, report = sources.solved_rows(task("project_euler", tmp_path), "train")
    assert [row.prompt.answer for row in kept] == ["1", "9"]
    assert report.bad.counts == {
        "numerical_answer is a float that is no exact integer": 2,
        "numerical_answer is bool, not str or int or float": 1,
    }


def test_a_file_of_another_set_is_refused_with_both_lists_of_columns(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS["gsm8k"])
    with pytest.raises(ValueError, match=r"columns \['answer', 'question'\] lack \['prompt', 'reward_model'"):
        sources.solved_rows(task("dapo_17k", tmp_path), "train")


@pytest.mark.parametrize("name", catalog.EVALUATION_ONLY)
def test_a_contest_is_never_trained_on(tmp_path, name):
    write_jsonl(tmp_path / "test.jsonl", ROWS[name])
    with pytest.raises(ValueError, match=f"{name}' is for evaluation only; train on one of .*dapo_17k"):
        prompts.make_source(task(name, tmp_path))
    assert len(prompts.eval_prompts(task(name, tmp_path), 9, 0)) == 2


@pytest.mark.parametrize("name", catalog.TRAINING_ONLY)
def test_a_training_set_has_no_evaluation_side_and_trains_on_all_of_itself(tmp_path, name):
    write_jsonl(tmp_path / "set.jsonl", ROWS[name])
    given = task(name, tmp_path / "set.jsonl")
    assert prompts.make_source(given).size == 2
    with pytest.raises(ValueError, match=f"{name}' has no evaluation side; evaluate on one of .*aime24"):
        prompts.eval_prompts(given, 9, 0)


def test_a_json_list_is_read_like_json_lines_and_a_broken_one_names_its_place(tmp_path):
    path = tmp_path / "set.json"
    path.write_text(json.dumps(ROWS["gsm8k"]))
    assert list(tables.from_files([path])) == ROWS["gsm8k"]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [row["a"] for row in tables.from_files([path])] == [1, 2]
    for text, said in (("[{}, 3]", "item 1: 3 is no JSON object"), ("[{},", "not JSON"), ("3", "line 1: 3 is no JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            list(tables.from_files([path]))


def test_of_parquet_only_the_wanted_columns_are_read(tmp_path):
    write_parquet(tmp_path / "train.parquet", ROWS["openmath_reasoning"])
    columns = ["problem", "not_there"]
    assert list(tables.from_files([tmp_path / "train.parquet"], columns)) == [
        {"problem": "Find $x$."},
        {"problem": "Find $y$."},
    ]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"broken\.parquet is no Parquet file"):
        list(tables.from_files([tmp_path / "broken.parquet"]))


def test_parquet_without_its_library_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="pip install pyarrow, or give JSON lines"):
        list(tables.from_files([tmp_path / "set.parquet"]))


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_the_hub_s_own_library_reads_a_set_by_its_name(tmp_path, suffix, write, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    write(tmp_path / f"train.{suffix}", ROWS["openmath_reasoning"])
    found = list(tables.from_hub(str(tmp_path), "train", ["problem", "expected_answer"]))
    assert found == [{k: row[k] for k in ("problem", "expected_answer")} for row in ROWS["openmath_reasoning"]]
