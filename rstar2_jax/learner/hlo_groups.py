"""Who exchanges with whom in a collective: groups of devices, as the text of a compiled module writes them.

    {{0,1},{2,3}}                       every group by its members
    [2,4]<=[4,2]T(1,0)                  numbers of a grid, transposed, cut into 2 groups of 4
    mesh['a'=2,'b'=4] {'b'}             along axes of a mesh; 'b':(2)2 is the part of size 2 after the first 2 of b
    source_target_pairs={{0,1},{1,0}}   pairs of sender and receiver

A mesh may carry device_ids=(...) when its devices are in another order.
"""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]
_WRITTEN = re.compile(r"(?:replica_groups|source_target_pairs)=(\{\}|\{\{.*?\}\}|\[[^ ]*|mesh\[.*?\})")
_GRID = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def read(line: str, devices: int) -> Groups:
    """Groups of the collective of this line; all devices of the program are one where it says nothing else.

    Raises:
        ValueError: groups in a notation that is not known.
    """
    found = _WRITTEN.search(line)
    if found is None and "replica_groups=" not in line and "source_target_pairs=" not in line:
        return (tuple(range(devices)),)
    text = found[1].rstrip(",") if found else ""
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))
    if text.startswith("[") and _GRID.match(text):
        return _listed(_grid(text))
    if mesh := _MESH.match(text):
        return _along(_axes(mesh[1]), mesh[2], _axes(mesh[3]))
    raise ValueError(f"groups of devices in an unknown notation: {line.strip()[:200]}")


def _along(mesh: list[re.Match], order: str | None, chosen: list[re.Match]) -> Groups:
    """Groups along axes of a mesh: every axis is split where a part of it is chosen, the chosen parts go last."""
    parts: dict[str, list[tuple[int, int]]] = {}  # of each axis (size before, size) of its parts
    sizes: list[int] = []
    places: dict[tuple[str, int], int] = {}
    for axis in mesh:
        whole = int(axis[2])
        cuts = {1, whole}
        for one in chosen:
            if one[1] == axis[1] and one[3]:
                cuts |= {int(one[3]), int(one[3]) * int(one[4])}
        steps = sorted(cuts)
        parts[axis[1]] = [(before, after // before) for before, after in zip(steps, steps[1:], strict=False)]
        for before, size in parts[axis[1]]:
            places[axis[1], before] = len(sizes)
            sizes.append(size)
    last = []
    for one in chosen:
        start, end = (int(one[3]), int(one[3]) * int(one[4])) if one[3] else (1, math.inf)
        last += [places[one[1], before] for before, _ in parts[one[1]] if start <= before < end]
    ids = np.arange(math.prod(sizes)) if not order else _order(order)
    first = [place for place in range(len(sizes)) if place not in last]
    grid = ids.reshape(sizes).transpose([*first, *last])
    return _listed(grid.reshape(-1, math.prod(sizes[place] for place in last)))


def _order(text: str) -> np.ndarray:
    return _grid(text).ravel() if text.startswith("[") else np.array(_numbers(text))


def _grid(text: str) -> np.ndarray:
    """Numbers of a grid, transposed; written with <= they take the shape before it."""
    found = _GRID.match(text)
    assert found
    dims = _numbers(found[2] or found[1])
    order = _numbers(found[3]) if found[3] else range(len(dims))
    grid = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return grid.reshape(_numbers(found[1])) if found[2] else grid


def _axes(text: str) -> list[re.Match]:
    return list(_AXIS.finditer(text))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _listed(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in rows)
