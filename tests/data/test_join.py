"""Curated sets joined: every problem once, from the first set that has it, and none whose label is in dispute."""

from __future__ import annotations

import json

from rstar2_jax import settings
from rstar2_jax.data import join, prompts

LONG = "Let a sequence begin with one and each later term be the sum of the squares of all digits before it: what is"


def row(name, question, answer="4", **more):
    return {"id": name, "question": question, "answer": answer, "source": name.split("/")[0], **more}


def write(folder, *rows):
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(folder)


def test_sets_become_one_that_a_task_reads_whole(tmp_path, capsys):
    first = write(
        tmp_path / "first",
        row("a/1", "Two  and two?", licence="mit"),
        row("a/2", "In dispute?"),
        row("a/3", LONG + " it?"),
    )
    second = write(
        tmp_path / "second",
        row("b/1", "Two and two?"),
        row("b/2", "In dispute?", "5"),
        row("b/3", LONG + " that?"),
        *(row(f"b/{n}", f"Number {n}?", str(n)) for n in range(10, 40)),
    )
    out = tmp_path / "out"
    assert join.main([str(out), first, second]) == 0
    told = json.loads((out / "joined.json").read_text())
    assert {why: entry["count"] for why, entry in told["left_out"].items()} == {
        "in another set as well": 1,
        "answered differently by another set": 2,
        "near duplicate": 1,
    }
    assert told["kept"] == 32 and told["sources"] == {"a": 2, "b": 30} and told["licences"]["mit"] == 1
    read = prompts.make_source(settings.Task(source="jsonl", path=str(out), tokenizer="box"))
    assert isinstance(read, prompts.FiniteSource) and read.size == 32  # no share of them is kept for evaluation
    assert join.main([str(out), first, second]) == 0 and "is there already" in capsys.readouterr().out


def test_a_curation_that_has_not_ended_is_named(tmp_path, capsys):
    first = write(tmp_path / "first", row("a/1", "One?"))
    assert join.main([str(tmp_path / "out"), first, str(tmp_path / "second")]) == 1
    assert "second hold no train.jsonl" in capsys.readouterr().err and not (tmp_path / "out").exists()
