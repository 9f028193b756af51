"""What a compiled program communicates: collectives by kind, among whom, how often they run, how many bytes they give.

Reads the text of a compiled module. A collective inside a loop counts as often as the loop runs, where the compiler
knows that; a loop whose count it does not know counts once and is reported.

Deliberately not here: seconds (plan.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from rstar2_jax.learner import hlo_groups

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DEVICES = re.compile(r"num_partitions=(\d+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the program.

    Args:
        kind: one of KINDS.
        size: bytes of its result on one device.
        times: how often it runs in one call.
        groups: places in the mesh, flat, of the devices that exchange with each other; of a permutation its pairs of
            sender and receiver.
    """

    kind: str
    size: int
    times: int
    groups: hlo_groups.Groups

    @property
    def sent(self) -> float:
        """Bytes that one of n devices sends in one run, in rings: of a result of S bytes S (n - 1) / n to gather or to
        exchange all with all, twice that for a sum, S (n - 1) for a sum of which each keeps its part, S in a pair."""
        n = len(self.groups[0])
        if self.kind == "collective-permute":
            return float(self.size)
        return self.size * {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0}.get(self.kind, (n - 1) / n)


def collectives(text: str) -> list[Collective]:
    """Every collective that one call of the module runs.

    Args:
        text: `compiled.as_text()`.

    Raises:
        ValueError: the text holds no entry computation, or groups of devices in a notation that is not known.
    """
    bodies, entry = _computations(text)
    if entry is None:
        raise ValueError("no ENTRY computation: pass the text of a compiled module")
    devices = _DEVICES.search(text)
    return list(_walk(bodies, entry, 1, int(devices[1]) if devices else 1))


def array_sizes(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that the module names: what to search for a buffer that must not exist."""
    return set(_arrays(text))


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    bodies: dict[str, list[str]] = {}
    entry, current = None, None
    for line in text.splitlines():
        found = _COMPUTATION.match(line)
        if found:
            current = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies, entry


def _walk(bodies: dict[str, list[str]], name: str, times: int, devices: int) -> Iterator[Collective]:
    for line in bodies.get(name, ()):
        found = _COLLECTIVE.search(line)
        if found:
            size = _size(found[1], bool(found[3]))
            yield Collective(kind=found[2], size=size, times=times, groups=hlo_groups.read(line, devices))
            continue
        loop = _LOOP.search(line)
        if loop:
            trips = _TRIPS.search(line)
            yield from _walk(bodies, loop[2], times * (int(trips[1]) if trips else 1), devices)
            continue
        branches = _BRANCHES.search(line)
        called = _CALLED.findall(line) + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])
        for callee in called:
            yield from _walk(bodies, callee, times, devices)


def byte_size(kind: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array of this HLO type and shape."""
    return math.prod(dims) * _BYTES[kind]


def _size(shape: str, started: bool) -> int:
    """Bytes of a result; one that is only started carries its operand as well."""
    sizes = [byte_size(kind, dims) for kind, dims in _arrays(shape)]
    return max(sizes, default=0) if started else sum(sizes)


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _ARRAY.findall(text) if kind in _BYTES
    ]
