"""WORKSPACE.md is true: it names every file, all that it names is there, and its nine steps name real functions."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import subprocess

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "WORKSPACE.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^## (\d) .*\n([\s\S]*?)(?=^## |\Z)", PAGE, re.MULTILINE))
NAMED_TREES = (("rstar2_jax", "*.py"), ("rstar2_jax", "*.jinja"), ("sandbox/rstar2_sandbox", "*.py"), ("gin", "*.gin"))
NAMED_FOLDERS = ("launch", "benchmarks", "sandbox/deploy")
MADE_BY_A_RUN = ("resolved.gin",)
TOP = set(
    ".ci .gitignore CONTRIBUTING.md Makefile README.md WORKSPACE.md benchmarks constraints-3.11.txt "
    "constraints-3.12.txt gin launch pyproject.toml rstar2_jax sandbox setup.py tests".split()
)


def listed():
    """(name, what is said of it) of each line of part 2; a folder's own line stands for its __init__.py, if any."""
    folder, lines = "", []
    for line in PARTS["2"].splitlines():
        entry = re.fullmatch(r"( *)(\S+) {2,}(\S.*)", line)
        if entry is None:
            continue
        indent, name, words = entry.groups()
        if not indent:
            folder = name
        path = name if not indent else folder + name
        lines.append((path, words))
        if path.endswith("/") and (REPOSITORY / path / "__init__.py").is_file():
            lines.append((f"{path}__init__.py", words))
    return lines


def present():
    """Every file that the page must name."""
    found = [path for tree, pattern in NAMED_TREES for path in (REPOSITORY / tree).rglob(pattern)]
    found += [path for folder in NAMED_FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(REPOSITORY)) for path in found if "__pycache__" not in path.parts)


def names_defined(path):
    """Classes, functions and methods (as Class.method) of a module."""
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    top = [node for node in tree.body if isinstance(node, kinds)]
    methods = [
        f"{owner.name}.{node.name}"
        for owner in top
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, kinds)
    ]
    return {node.name for node in top} | set(methods)


def steps():
    return re.findall(r"^(\d)\. (.*(?:\n   .*)*)", PARTS["4"], re.MULTILINE)


def references(text):
    return re.findall(r"`([\w/]+\.py):([\w.]+)`", text)


def test_every_file_of_the_packages_and_of_gin_is_named_once():
    names = [name for name, _ in listed()]
    assert sorted(set(present()) - set(names)) == []
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_folder_of_tests_is_named():
    folders = {f"tests/{path.name}/" for path in (REPOSITORY / "tests").iterdir() if list(path.glob("*.py"))}
    assert sorted(folders - {name for name, _ in listed()}) == []


def test_every_path_named_anywhere_exists():
    roots = "rstar2_jax|sandbox|gin|launch|tests|benchmarks"
    whole = [word.rstrip(".") for word in re.findall(rf"(?<![\w/.])(?:{roots})/[\w./]*", PAGE)]
    absent = [name for name in {*whole, *(name for name, _ in listed())} if not (REPOSITORY / name).exists()]
    assert sorted(absent) == []


def test_every_file_named_in_passing_is_one_of_those_listed():
    names = [f"/{name}" for name in [*present(), "pyproject.toml", "Makefile"]]
    words = set(re.findall(r"[\w/]+\.(?:py|gin|jinja|sh|toml)\b", PAGE)) - set(MADE_BY_A_RUN)
    assert sorted(word for word in words if not any(name.endswith(f"/{word}") for name in names)) == []


def test_a_problem_takes_nine_hops_and_each_names_a_function_with_what_goes_in_and_out():
    assert [number for number, _ in steps()] == list("123456789")
    for _, text in steps():
        assert references(text) and " In: " in text.replace("\n  ", "") and "Out: " in text


@pytest.mark.parametrize(("path", "name"), sorted(set(references(PAGE))))
def test_a_function_that_the_page_names_is_there(path, name):
    assert (REPOSITORY / path).is_file() and name in names_defined(path)


def test_a_method_named_without_its_file_is_in_a_file_named_by_the_steps():
    known = set().union(*(names_defined(path) for path, _ in references(PARTS["4"])))
    assert sorted(set(re.findall(r"`(\w+\.\w+)`", PARTS["4"])) - known) == []


def test_the_import_rule_is_that_of_pyproject():
    stated = re.search(r"```text\n([\s\S]*?)```", PARTS["3"])
    held = re.search(r"layers = \[\n([\s\S]*?)\n\]", (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert stated and held
    layers = [set(re.findall(r"\w+", line)) for line in stated.group(1).splitlines()]
    optional = set(re.findall(r"\((\w+)\)", held.group(1)))
    assert layers == [set(re.findall(r"\w+", line)) - optional for line in held.group(1).splitlines()]


def test_every_make_target_named_is_one():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(itertools.chain(re.findall(r"`make ([a-z-]+)`", PAGE)))
    assert named and named <= targets


def test_nothing_else_is_committed_at_the_top():
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a clone")
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {path.split("/")[0] for path in done.stdout.splitlines()} <= TOP
