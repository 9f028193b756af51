"""The house rules: how large a thing may be, and what the tree never holds."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for room in ("rstar2_jax", "sandbox/rstar2_sandbox", "benchmarks")
    for path in sorted((REPOSITORY / room).rglob("*.py"))
]
FILE_LINES = 400
FILE_LINES_OF = {"rstar2_jax/model/decoder.py": 600}
FUNCTION_LINES = 60
ARGUMENTS = 8
LINE_LENGTH = 120
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|manager|misc|v2)(_|$)")


def name_of(path):
    return str(path.relative_to(REPOSITORY))


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def argument_count(function):
    spec = function.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + (spec.vararg is not None) + (spec.kwarg is not None)


def public(tree, prefix=""):
    """Public classes, functions and methods of a module with their dotted names."""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def overrides_documented_protocol(tree, name):
    """True for a method of a class with bases: what it means is said once, where it is declared."""
    owner, _, _ = name.rpartition(".")
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return bool(owner) and bool(classes[owner.rpartition(".")[2]].bases)


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_keeps_the_budgets(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    over = []
    limit = FILE_LINES_OF.get(name_of(path), FILE_LINES)
    if len(lines) > limit:
        over.append(f"{len(lines)} lines, at most {limit}")
    over += [f"line {n} is {len(line)} wide" for n, line in enumerate(lines, 1) if len(line) > LINE_LENGTH]
    for function in functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > FUNCTION_LINES:
            over.append(f"{function.name} has {length} lines, at most {FUNCTION_LINES}")
        if argument_count(function) > ARGUMENTS:
            over.append(f"{function.name} takes {argument_count(function)} arguments, at most {ARGUMENTS}")
    assert over == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_uses_no_global_and_leaves_nothing_to_do(path):
    text = path.read_text(encoding="utf-8")
    assert not [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Global)]
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    marked = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING) and words.search(token.string)
    ]
    assert marked == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_and_each_public_name_has_a_docstring(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [] if ast.get_docstring(tree) else ["the module"]
    for name, node in public(tree):
        if not ast.get_docstring(node) and not overrides_documented_protocol(tree, name):
            missing.append(name)
    assert missing == []


def test_files_are_named_by_what_they_are():
    assert [name_of(path) for path in SOURCES if FORBIDDEN_NAMES.search(path.stem)] == []


def test_the_gin_folder_holds_gin_files_only():
    """One .py file there would make `import gin` mean this folder."""
    assert [name_of(path) for path in (REPOSITORY / "gin").rglob("*") if path.is_file() and path.suffix != ".gin"] == []


def test_tests_have_no_packages_and_sentences_for_names():
    tests = REPOSITORY / "tests"
    assert list(tests.rglob("__init__.py")) == []
    short = [
        f"{name_of(path)}::{function.name}"
        for path in tests.rglob("test_*.py")
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if function.name.startswith("test_") and function.name.count("_") < 3
    ]
    assert short == []
