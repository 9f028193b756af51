"""Gin files and flag bindings as a list of statements, each with its file and line.

Only the syntax of gin is used here (its parser); names, types and values are judged in gin_strict.py. Reading the
statements ourselves gives what gin 0.5.0 does not: includes found beside the including file from any working directory,
the origin of every binding, and a hint with each syntax error.

Deliberately not here: gin's registry and its global state.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util  # noqa: F401  (gin 0.5.0 uses importlib.util without importing it)
import io
import math
import os
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Sequence
from typing import Any

try:
    from gin import config_parser
except ImportError as error:  # a folder named gin/ on sys.path makes the bare `import gin` succeed
    raise ImportError("gin-config is not installed: pip install gin-config") from error

PACKAGE = pathlib.Path(__file__).resolve().parent
OVERLAY_FOLDERS = ("model", "data", "scale", "ablation")


class ConfigError(ValueError):
    """A configuration that cannot be run: the message names the place, what is wrong and what to write instead."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a binding was written.

    Args:
        place: file, or the flag as it was typed.
        line: line in that file; 0 for a flag.
        shared: the file speaks about several RUN functions (it was included, or is an overlay other than ablation/), so
            what this run does not use in it is idle instead of an error.
        overrides: a flag or an overlay named on the command line: meant to override.
        parents: files whose include led here, outermost first.
    """

    place: str
    line: int = 0
    shared: bool = False
    overrides: bool = False
    parents: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}:{self.line}" if self.line else self.place


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A class or function by module and name; `label` is how the file wrote it."""

    module: str
    name: str
    label: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """`@scope/target` or, with `evaluate`, `@scope/target()`."""

    scope: str
    selector: str
    evaluate: bool
    target: Target | None = None

    def __str__(self) -> str:
        scope = f"{self.scope}/" if self.scope else ""
        return f"@{scope}{self.selector}{'()' if self.evaluate else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Macro:
    """`%name`."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """`scope/target.argument = value`, or the macro `argument = value` where target is None."""

    scope: str
    target: Target | None
    argument: str
    value: Any
    origin: Origin

    @property
    def label(self) -> str:
        """The left-hand side as a reader would write it."""
        scope = f"{self.scope}/" if self.scope else ""
        return f"{scope}{self.target.label}.{self.argument}" if self.target else self.argument


class _Delegate(config_parser.ParserDelegate):
    """Keeps references and macros as plain values; nothing is looked up while parsing."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_configurable_name.rpartition("/")
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def nearest(name: str, known: Iterable[str]) -> str:
    """'; nearest known name: x', or the short list of what is known, or nothing when nothing is known."""
    names = sorted(set(known))
    by_lower = {n.lower(): n for n in reversed(names)}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    if close:
        return f"; nearest known name: {by_lower[close[0]]}"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 24 else ""


def config_roots() -> list[pathlib.Path]:
    """Folders that hold configurations: ./gin, the wheel's rstar2_jax/configs, gin/ beside a checked-out package."""
    roots = [pathlib.Path("gin"), PACKAGE / "configs", PACKAGE.parent / "gin"]
    return [root for root in roots if root.is_dir()]


def find_file(name: str, folders: Sequence[pathlib.Path], wanted_by: str) -> pathlib.Path:
    """The first file `name` in `folders`.

    Raises:
        ConfigError: there is none; the message names the folders and the nearest file that exists.
    """
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    known = {str(path.relative_to(root)) for root in folders for path in root.glob("*.gin")}
    known |= {str(path.relative_to(root)) for root in config_roots() for path in root.rglob("*.gin")}
    looked_in = ", ".join(dict.fromkeys(str(folder) or "." for folder in folders))
    raise ConfigError(f"{wanted_by}: no gin file {name!r} (looked in {looked_in}){nearest(name, known)}")


def syntax_hint(text: str, flag: bool) -> str:
    """What the writer of an unreadable binding probably meant; empty when no guess is safe."""
    left, equals, value = text.partition("=")
    left, value = left.strip(), value.split("#")[0].strip()
    if not equals:
        return "a binding reads `owner.argument = value`"
    spelled = {"true": "True", "false": "False", "none": "None", "null": "None", "yes": "True", "no": "False"}
    if value.lower() in spelled:
        return f"write {left}={spelled[value.lower()]}"
    if re.fullmatch(r"[\d.e+\-*/() _]+", value) and re.search(r"\d\s*[*/+\-]", value):
        return "gin does no arithmetic: write the result"
    if value and not value.startswith(("'", '"')):
        quoted = f'{left}="{value}"'
        if flag:
            return f"a string needs quotes that the shell leaves alone: --gin_bindings='{quoted}'"
        return f"a string needs quotes: {quoted}"
    return ""


@dataclasses.dataclass
class Sources:
    """Statements in the order in which they take effect. Made by `read`."""

    bindings: list[Binding] = dataclasses.field(default_factory=list)
    modules: dict[str, str] = dataclasses.field(default_factory=dict)  # symbol -> module, over all files
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # resolved path -> who asked for it

    def read_file(self, path: pathlib.Path, origin: Origin, wanted_by: str) -> None:
        """Appends the statements of one file and of all that it includes."""
        real = str(path.resolve())
        if real in self.files:
            raise ConfigError(
                f"{wanted_by}: {path} is read twice (first for {self.files[real]}), which would undo what was bound "
                "since; name it once"
            )
        self.files[real] = wanted_by
        symbols: dict[str, str] = {}
        for statement in self._parse(path.read_text(encoding="utf-8"), str(path), flag=False):
            here = dataclasses.replace(origin, line=statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                folders = [path.parent, *_root_of(path), *config_roots()]
                found = find_file(statement.filename, folders, str(here))
                parents = (*origin.parents, origin.place)
                self.read_file(found, Origin(place=str(found), shared=True, parents=parents), str(here))
            else:
                self._take(statement, here, symbols)

    def read_flag(self, text: str, flag: str) -> None:
        """Appends one binding given on the command line; `settings.` may be left out there."""
        short = {"": self.modules.get("settings", "rstar2_jax.settings")}
        for statement in self._parse(text, flag, flag=True):
            if not isinstance(statement, config_parser.BindingStatement):
                raise ConfigError(f"{flag}: expected one binding `owner.argument=value`")
            self._take(statement, Origin(place=flag, overrides=True), {**self.modules, **short})

    def _parse(self, text: str, place: str, flag: bool) -> list[Any]:
        reader = io.StringIO(text)
        try:
            return list(config_parser.ConfigParser(reader, _Delegate()))
        except (SyntaxError, tokenize.TokenError, ValueError) as error:
            line = getattr(error, "lineno", None) or 0
            lines = text.splitlines() or [""]
            if isinstance(error, tokenize.TokenError):
                line = min(error.args[1][0], len(lines))
            content = lines[line - 1] if 0 < line <= len(lines) else text
            hint = syntax_hint(content, flag)
            where = place if flag or not line else f"{place}:{line}"
            raise ConfigError(f"{where}: cannot read `{content.strip()}`" + (f"; {hint}" if hint else "")) from error

    def _take(self, statement: Any, origin: Origin, symbols: dict[str, str]) -> None:
        if isinstance(statement, config_parser.ImportStatement):
            self._take_import(statement, origin, symbols)
        elif isinstance(statement, config_parser.BlockDeclaration):
            _target(statement.selector, symbols, origin)
        else:
            scope, target = statement.scope, None
            argument = statement.arg_name
            if argument:
                target = _target(statement.selector, symbols, origin)
            else:
                argument = f"{scope}/{statement.selector}" if scope else statement.selector
                scope = ""
            value = _with_targets(statement.value, symbols, origin)
            self.bindings.append(Binding(scope, target, argument, value, origin))

    def _take_import(self, statement: Any, origin: Origin, symbols: dict[str, str]) -> None:
        if statement.module.startswith("__gin__."):
            if statement.module != "__gin__.dynamic_registration":
                raise ConfigError(f"{origin}: unknown gin feature {statement.module!r}")
            return
        bound = statement.bound_name() if statement.is_from or statement.alias else statement.module
        known = self.modules.setdefault(bound, statement.module)
        if known != statement.module:
            raise ConfigError(f"{origin}: {bound!r} already means {known}; import {statement.module} as another name")
        symbols[bound] = statement.module


def read(gin_files: Sequence[str], flags: Sequence[tuple[str, str]]) -> Sources:
    """All statements of a command line.

    Args:
        gin_files: values of --gin_file in order; each is looked up as given, then in `config_roots()`.
        flags: (binding text, the flag it came from), applied after all files.

    Raises:
        ConfigError: a file or include that is not there, is read twice, or cannot be parsed; an unknown import symbol.
    """
    sources = Sources()
    for name in gin_files:
        found = find_file(name, [pathlib.Path(), *config_roots()], f"--gin_file={name}")
        folder = found.resolve().parent.name
        overlay = folder in OVERLAY_FOLDERS
        origin = Origin(place=str(found), shared=overlay and folder != "ablation", overrides=overlay)
        sources.read_file(found, origin, f"--gin_file={name}")
    for text, flag in flags:
        sources.read_flag(text, flag)
    return sources


def _root_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The configuration root above a file in one of the known sub-folders."""
    folder = path.resolve().parent
    return [path.parent / os.pardir] if folder.name in OVERLAY_FOLDERS else []


def _target(selector: str, symbols: dict[str, str], origin: Origin) -> Target:
    owner, _, name = selector.rpartition(".")
    if owner not in symbols:
        hint = nearest(owner or name, [symbol for symbol in symbols if symbol])
        raise ConfigError(f"{origin}: unknown name {selector!r}: {owner or selector!r} is not imported here{hint}")
    # The empty symbol stands for the settings module in flags; the label is the full form that files use.
    label = selector if owner else f"settings.{name}"
    return Target(symbols[owner], name, label)


def _with_targets(value: Any, symbols: dict[str, str], origin: Origin) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: a number is beyond {sys.float_info.max:.1e}, the largest that can be kept")
    if isinstance(value, Reference):
        return dataclasses.replace(value, target=_target(value.selector, symbols, origin))
    if isinstance(value, tuple | list):
        return type(value)(_with_targets(item, symbols, origin) for item in value)
    if isinstance(value, dict):
        return {key: _with_targets(item, symbols, origin) for key, item in value.items()}
    return value
