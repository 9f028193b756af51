"""Values against annotations, at bind time: what a parameter accepts and why a value does not fit.

gin itself checks no types: `steps = 300.0`, `lr = '1e-6'` and `use_roc = 'False'` (which is true) would all pass.

Deliberately not here: ranges and rules between fields; settings.py checks those at birth.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import types
import typing
from typing import Any

from rstar2_jax import gin_source

MISSING = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a RUN function or one field of a settings class; `default` is MISSING where it is required."""

    annotation: Any
    default: Any


@functools.cache
def parameters(owner: Any) -> dict[str, Parameter]:
    """The parameters of a function or class, by name, with their annotations evaluated."""
    hints = typing.get_type_hints(owner)
    return {
        name: Parameter(hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def fit(value: Any, annotation: Any) -> Any:
    """`value` as the annotation wants it: itself, or a float for an int where a float is wanted.

    A value `Built(cls)` stands for `@cls()`.

    Raises:
        ValueError: it does not fit; the message says what is wanted and, where one is clear, what to write.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, arguments, annotation)
    if origin is typing.Literal:
        return _fit_literal(value, arguments)
    if annotation is None or annotation is type(None):
        if value is not None:
            raise _misfit(value, annotation)
        return value
    if origin in (tuple, list, dict, collections.abc.Sequence, collections.abc.Mapping):
        return _fit_container(value, origin, arguments, annotation)
    return _fit_plain(value, annotation)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """Stands for the instance that `@cls()` will build."""

    cls: Any

    def __repr__(self) -> str:
        return f"@{self.cls.__name__}()"


def _fit_plain(value: Any, annotation: Any) -> Any:
    if isinstance(value, Built):
        if not (inspect.isclass(value.cls) and inspect.isclass(annotation) and issubclass(value.cls, annotation)):
            raise _misfit(value, annotation)
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if annotation in (int, float, str, bool, tuple, list, dict):
        if type(value) is not annotation:
            raise _misfit(value, annotation)
        return value
    if not isinstance(value, annotation):
        raise _misfit(value, annotation)
    return value


def _fit_union(value: Any, choices: tuple[Any, ...], annotation: Any) -> Any:
    for choice in choices:
        try:
            return fit(value, choice)
        except ValueError:
            continue
    raise _misfit(value, annotation)


def _fit_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        close = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in choices], n=1, cutoff=0.4)
        hint = f"; nearest: {close[0]!r}" if close else ""
        raise ValueError(f"{value!r} is none of {', '.join(repr(choice) for choice in choices)}{hint}")
    return value


def _fit_container(value: Any, origin: Any, arguments: tuple[Any, ...], annotation: Any) -> Any:
    wanted = {collections.abc.Sequence: (tuple, list), collections.abc.Mapping: (dict,)}.get(origin, (origin,))
    if type(value) not in wanted:
        raise _misfit(value, annotation)
    if isinstance(value, dict):
        keys, values = arguments or (Any, Any)
        return {fit(key, keys): fit(item, values) for key, item in value.items()}
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ValueError(f"{value!r} has {len(value)} items; {len(arguments)} are wanted: {spell(annotation)}")
        return tuple(fit(item, wanted_item) for item, wanted_item in zip(value, arguments, strict=True))
    return type(value)(fit(item, arguments[0] if arguments else Any) for item in value)


def spell(annotation: Any) -> str:
    """The annotation as a reader writes it."""
    if annotation is None or annotation is type(None):
        return "None"
    return annotation.__name__ if inspect.isclass(annotation) and not typing.get_args(annotation) else str(annotation)


def _misfit(value: Any, annotation: Any) -> ValueError:
    return ValueError(f"{_describe(value)} where {spell(annotation)} is wanted{_remedy(value, annotation)}")


def _describe(value: Any) -> str:
    if isinstance(value, Built):
        return repr(value)
    if isinstance(value, gin_source.Reference | gin_source.Macro):
        return str(value)
    return f"{value!r} ({type(value).__name__})"


def _remedy(value: Any, annotation: Any) -> str:
    origin = typing.get_origin(annotation) or annotation
    if isinstance(value, gin_source.Reference) and not value.evaluate:
        return f": write {value}()"
    if annotation is int and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if annotation in (int, float, bool) and isinstance(value, str):
        wanted = value.strip().capitalize() if annotation is bool else value.strip()
        if _reads_as(wanted, annotation):
            return f": write {wanted} without quotes"
    if origin is tuple and isinstance(value, list):
        inner = ", ".join(repr(item) for item in value)
        return f": write ({inner}{',' if len(value) == 1 else ''})"
    if origin is tuple and not isinstance(value, tuple):
        return f": write ({value!r},) for a single item"
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        return f": write @settings.{annotation.__name__}()"
    return ""


def _reads_as(text: str, annotation: type) -> bool:
    if annotation is bool:
        return text in ("True", "False")
    try:
        annotation(text)
    except ValueError:
        return False
    return True
