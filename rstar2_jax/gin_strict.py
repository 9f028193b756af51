"""From gin statements to one resolved configuration, or to one clear error.

    statements -> winners (who overrides whom) -> checks (names, types) -> walk from RUN (what is used) -> resolved text

The resolved text holds every argument and every field that the run will see, defaults included. gin then builds the
settings from that text alone, so a run and a run started from its resolved.gin are the same by construction.

Who overrides whom: the last statement wins, as in gin. This is silent where it is meant: a file over what it included
before, an overlay named on the command line (model/, data/, scale/, ablation/), a flag. Otherwise (an include placed
after a binding, two files side by side, anything but a flag over an ablation) it is a warning that shows the winner.
One key bound twice in one file is an error.

What must be used: every binding and macro in a file named by --gin_file, in an ablation and in a flag; a macro is used
when a value that the run takes stands for it, or did until another one overrode it. Included files
and overlays speak about several RUN functions: what this run does not take in them is idle (recorded, no error), and a
settings binding is still checked for its name and type. A scope that nothing enters is always an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from rstar2_jax import gin_source, gin_types
from rstar2_jax.gin_source import Binding, ConfigError, Macro, Reference, Sources, Target, nearest

SETTINGS = "rstar2_jax.settings"
REQUIRED = Macro("gin.REQUIRED")
Key = tuple[str, Target | None, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """One checked configuration.

    Args:
        text: the whole of it as gin source; `build` makes the arguments from it.
        run: the RUN function's module and name.
        origins: left-hand side -> where its value was written, for what was bound (defaults have none).
        idle: left-hand sides of shared files that this run does not take.
        warnings: overrides that may not have been meant.
    """

    text: str
    run: Target
    origins: dict[str, str]
    idle: tuple[str, ...]
    warnings: tuple[str, ...]


def resolve(gin_files: Sequence[str], flags: Sequence[tuple[str, str]]) -> Resolved:
    """The configuration of a command line, checked.

    Args:
        gin_files: values of --gin_file, in order.
        flags: (binding text, flag it came from), applied last.

    Raises:
        ConfigError: anything that is not exactly right; see the module's docstring.
    """
    sources = gin_source.read(gin_files, flags)
    winners, warnings = _winners(sources.bindings)
    book = _Book(sources, winners)
    run = book.run_function()
    for binding in book.bindings_of_settings():
        book.check(binding)
    book.walk(run)
    for binding in book.other_bindings():
        book.check(binding)
    idle = book.idle_or_raise(run)
    return Resolved(text=book.text(run), run=run, origins=book.origins(), idle=idle, warnings=tuple(warnings))


def build(resolved: Resolved) -> tuple[Callable[..., int], dict[str, Any]]:
    """The RUN function and its arguments, made by gin from the resolved text. No JAX device is touched.

    Raises:
        ConfigError: a settings class refused its values (ranges, rules between fields).
    """
    gin.clear_config()
    gin.parse_config(resolved.text)
    function = getattr(_module(resolved.run.module, "resolved.gin"), resolved.run.name)
    try:
        arguments = gin.get_bindings(f"{resolved.run.module}.{resolved.run.name}")
    except ValueError as error:
        message = str(error).strip().splitlines()[0]
        field = re.match(r"(\w+\.\w+)", message)
        place = resolved.origins.get(f"settings.{field[1]}") if field else None
        raise ConfigError(f"{place}: {message}" if place else message) from error
    gin.finalize()
    _check_deadline(resolved, arguments)
    return function, arguments


def _check_deadline(resolved: Resolved, arguments: Mapping[str, Any]) -> None:
    """A run's turns can end before their deadline. No rule of the settings class: tests shorten deadlines at will."""
    rollout = arguments.get("rollout")
    if rollout is None or rollout.deadline_s >= rollout.longest_turn_s:
        return
    place = resolved.origins.get("settings.Rollout.deadline_s", "default")
    budget, longest = rollout.max_response_tokens, rollout.longest_turn_s
    raise ConfigError(
        f"{place}: Rollout.deadline_s = {rollout.deadline_s:g}, but a turn of max_response_tokens = {budget} takes "
        f"{longest:g} s at 10 tokens a second, and an episode beyond its deadline is lost: set deadline_s to "
        f"{longest:g} or more"
    )


def _winners(bindings: Sequence[Binding]) -> tuple[dict[Key, Binding], list[str]]:
    winners: dict[Key, Binding] = {}
    warnings = []
    for binding in bindings:
        key = (binding.scope, binding.target, binding.argument)
        loser = winners.get(key)
        winners[key] = binding
        if loser is None or (loser.origin.line == 0 and binding.origin.line == 0):
            continue
        if loser.origin.place == binding.origin.place:
            first = loser.origin.line
            raise ConfigError(f"{binding.origin}: {binding.label} is bound twice, first in line {first}; keep one")
        if not _override_is_meant(binding, loser):
            warnings.append(
                f"{binding.label} = {_spell(binding.value)} from {binding.origin} overrides {_spell(loser.value)} "
                f"from {loser.origin}"
            )
    return winners, warnings


def _macro_names(value: Any) -> set[str]:
    """Macros that a value as written refers to. One that only an overridden binding names is idle, not a mistake."""
    if isinstance(value, Macro):
        return {value.name}
    if isinstance(value, dict):
        return {name for pair in value.items() for part in pair for name in _macro_names(part)}
    if isinstance(value, (list, tuple)):
        return {name for part in value for name in _macro_names(part)}
    return set()


def _override_is_meant(winner: Binding, loser: Binding) -> bool:
    if winner.origin.line == 0:
        return True
    if loser.origin.overrides and not loser.origin.shared:  # an ablation that loses ablates nothing
        return False
    return winner.origin.overrides or winner.origin.place in loser.origin.parents


class _Book:
    """The winners, looked up by owner, with a record of which were used."""

    def __init__(self, sources: Sources, winners: dict[Key, Binding]) -> None:
        self.sources = sources
        self.macros = {b.argument: b for b in winners.values() if b.target is None}
        self.bindings = [b for b in winners.values() if b.target is not None]
        self.used: set[Key] = set()
        # A scope is known when any binding names it: shared files wire owners that this run may not take.
        named = (reference.scope for b in self.bindings for reference in _references(b.value))
        self.scopes: set[str] = {"", *named}
        self.nodes: dict[tuple[str, Target], dict[str, Any]] = {}

    def run_function(self) -> Target:
        """The function that the macro RUN names."""
        if "RUN" not in self.macros:
            raise ConfigError("nothing to run: no file binds the macro RUN (a stage file does: --gin_file=stage1.gin)")
        binding = self.macros["RUN"]
        value = binding.value
        if not isinstance(value, Reference) or value.evaluate or value.scope or value.target is None:
            raise ConfigError(f"{binding.origin}: RUN = {_spell(value)}: must be a function, as in RUN = @train.train")
        return value.target

    def bindings_of_settings(self) -> list[Binding]:
        """Bindings of settings classes: checked first, as their module needs no JAX and mistakes show at once."""
        return [b for b in self.bindings if b.target and b.target.module == SETTINGS]

    def other_bindings(self) -> list[Binding]:
        """All others, except what shared files bind in modules that this run does not import."""
        taken = {target.module for _, target in self.nodes} - {SETTINGS}
        others = [b for b in self.bindings if b.target and b.target.module != SETTINGS]
        return [b for b in others if b.target and (b.target.module in taken or not b.origin.shared)]

    def check(self, binding: Binding) -> None:
        """Raises unless the owner exists, has such an argument, and the value fits its annotation."""
        assert binding.target is not None
        parameters = gin_types.parameters(_owner(binding.target, str(binding.origin)))
        if binding.argument not in parameters:
            raise ConfigError(
                f"{binding.origin}: {binding.target.label} has no argument {binding.argument!r}"
                f"{nearest(binding.argument, parameters)}"
            )
        value = self.value(binding)
        if value != REQUIRED:
            self._fit(value, parameters[binding.argument], binding)

    def _fit(self, value: Any, parameter: gin_types.Parameter, binding: Binding) -> Any:
        def stand_in(item: Any) -> Any:
            if isinstance(item, Reference) and item.evaluate and item.target is not None:
                return gin_types.Built(_owner(item.target, str(binding.origin)))
            if isinstance(item, tuple | list):
                return type(item)(stand_in(each) for each in item)
            return item

        try:
            fitted = gin_types.fit(stand_in(value), parameter.annotation)
        except ValueError as error:
            via = ""
            if isinstance(binding.value, Macro):
                via = f" (%{binding.value.name} from {self.macros[binding.value.name].origin})"
            raise ConfigError(f"{binding.origin}: {binding.label}{via}: {error}") from error
        return value if isinstance(fitted, gin_types.Built) else fitted

    def value(self, binding: Binding) -> Any:
        """The binding's value with macros replaced (last definition wins, as in gin)."""
        return self._expand(binding.value, binding, ())

    def _expand(self, value: Any, binding: Binding, seen: tuple[str, ...]) -> Any:
        if value == REQUIRED:
            return value
        if isinstance(value, Macro):
            if value.name in seen:
                raise ConfigError(f"{binding.origin}: macro %{value.name} is defined through itself")
            if value.name not in self.macros:
                raise ConfigError(f"{binding.origin}: macro {value} is not defined{nearest(value.name, self.macros)}")
            return self._expand(self.macros[value.name].value, binding, (*seen, value.name))
        if isinstance(value, tuple | list):
            return type(value)(self._expand(item, binding, seen) for item in value)
        if isinstance(value, dict):
            return {key: self._expand(item, binding, seen) for key, item in value.items()}
        return value

    def walk(self, target: Target, scope: str = "") -> None:
        """Records the arguments of `target` under `scope`, and of all that it references."""
        if (scope, target) in self.nodes:
            return
        values = self.nodes[scope, target] = {}
        parts = scope.split("/") if scope else []
        prefixes = ["/".join(parts[:n]) for n in range(len(parts) + 1)]
        self.scopes.update(prefixes)
        for name, parameter in gin_types.parameters(_owner(target, "RUN")).items():
            value, bound = self._default(parameter), None
            for binding in (b for p in prefixes for b in self.bindings if b.scope == p):
                if binding.target == target and binding.argument == name:
                    self.used.add((binding.scope, target, name))
                    value, bound = self.value(binding), binding
            if value is gin_types.MISSING or value == REQUIRED:
                raise ConfigError(_required(target, name, parameter, bound))
            values[name] = self._fit(value, parameter, bound) if bound else value
            for reference in _references(value):
                assert reference.target is not None
                self.walk(reference.target, reference.scope or scope)

    def _default(self, parameter: gin_types.Parameter) -> Any:
        default = parameter.default
        if not dataclasses.is_dataclass(default) or isinstance(default, type):
            return default
        cls = type(default)
        symbol = next((s for s, module in self.sources.modules.items() if module == cls.__module__), None)
        label = f"{symbol}.{cls.__name__}"
        target = Target(cls.__module__, cls.__name__, label)
        # Written out as a reference so that the record is complete; with bindings of that class about, gin's own
        # meaning (an unwired class does not see them) must show, and they are reported as unused.
        if symbol is None or default != cls() or any(b.target == target for b in self.bindings):
            return default
        return Reference("", label, True, target)

    def idle_or_raise(self, run: Target) -> tuple[str, ...]:
        """Left-hand sides that shared files bind and this run does not take; raises for any other unused statement."""
        idle = []
        taken = sorted({target.label for _, target in self.nodes})
        for binding in self.bindings:
            if (binding.scope, binding.target, binding.argument) in self.used:
                continue
            if binding.scope not in self.scopes:
                raise ConfigError(
                    f"{binding.origin}: nothing enters the scope {binding.scope!r} of {binding.label}"
                    f"{nearest(binding.scope, self.scopes - {''})}; without a scope: "
                    f"{binding.target and binding.target.label}.{binding.argument}"
                )
            if not binding.origin.shared:
                raise ConfigError(
                    f"{binding.origin}: {binding.label} is not used: RUN = @{run.label} takes {', '.join(taken)}"
                )
            idle.append(binding.label)
        taken, overridden = self._macros_behind(self.bindings), self._macros_behind(self.sources.bindings)
        for name in self.macros.keys() - taken:
            if not self.macros[name].origin.shared and name not in overridden:
                raise ConfigError(
                    f"{self.macros[name].origin}: macro {name} is not used by anything that RUN = @{run.label} takes"
                    f"{nearest(name, taken)}"
                )
            idle.append(name)
        return tuple(sorted(idle))

    def _macros_behind(self, bindings: Sequence[Binding]) -> set[str]:
        """Macros that those of the bindings stand for whose arguments the run takes, and RUN."""
        taken: set[str] = {"RUN"}
        left = [b.value for b in bindings if (b.scope, b.target, b.argument) in self.used]
        while left:
            new = set(_macro_names(left.pop())) - taken
            taken |= new
            left += [b.value for b in self.sources.bindings if b.target is None and b.argument in new]
        return taken

    def text(self, run: Target) -> str:
        """Everything the run sees as gin source: imports, RUN, one block for each owner."""
        imports = {target.label.rpartition(".")[0]: target.module for _, target in self.nodes}
        lines = ["from __gin__ import dynamic_registration"]
        lines += [_import(symbol, module) for symbol, module in sorted(imports.items())]
        lines += ["", f"RUN = @{run.label}"]
        for (scope, target), values in sorted(self.nodes.items(), key=lambda node: (node[0][1] != run, str(node[0]))):
            written = {n: v for n, v in values.items() if _is_ours(v) or not dataclasses.is_dataclass(v)}
            if written:
                lines += ["", f"{scope}/{target.label}:" if scope else f"{target.label}:"]
                lines += [f"    {name} = {_spell(value)}" for name, value in written.items()]
        return "\n".join(lines) + "\n"

    def origins(self) -> dict[str, str]:
        """Left-hand side -> place, for all bindings that were used."""
        return {b.label: str(b.origin) for b in self.bindings if (b.scope, b.target, b.argument) in self.used}


def _is_ours(value: Any) -> bool:
    return isinstance(value, Reference | Macro)


def _references(value: Any) -> list[Reference]:
    if isinstance(value, Reference):
        return [value]
    if isinstance(value, tuple | list):
        return [reference for item in value for reference in _references(item)]
    return []


def _required(target: Target, name: str, parameter: gin_types.Parameter, bound: Binding | None) -> str:
    place = f"{bound.origin}: " if bound else ""
    flags = {"workdir": "--workdir", "steps": "--steps", "seed": "--seed"} if target.name == "Run" else {}
    wanted = gin_types.spell(parameter.annotation)
    remedy = f"bind it ({wanted})" + (f" or pass {flags[name]}" if name in flags else "")
    return f"{place}{target.label}.{name} is required and has no value: {remedy}"


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_spell(item) for item in value)}{',' if len(value) == 1 else ''})"
    return str(value) if _is_ours(value) else repr(value)


def _import(symbol: str, module: str) -> str:
    package, _, last = module.rpartition(".")
    if symbol == module:
        return f"import {module}"
    if symbol == last and package:
        return f"from {package} import {last}"
    return f"import {module} as {symbol}"


def _module(name: str, place: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        package, _, last = name.rpartition(".")
        parent = importlib.import_module(package) if package and error.name == name else None
        known = [module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", []))]
        raise ConfigError(f"{place}: there is no module {name!r}{nearest(last, known)}") from error


def _owner(target: Target, place: str) -> Any:
    module = _module(target.module, place)
    owner = getattr(module, target.name, None)
    if not callable(owner):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = nearest(target.name, public)
        raise ConfigError(f"{place}: {target.label} does not exist: {target.module} has no {target.name!r}{hint}")
    return owner
