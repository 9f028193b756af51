"""Where in its files one database of a version holds each chunk, as TensorStore's own index of it says.

A chunk is stored as it lies in memory, so whoever knows its place reads it with a plain read, straight to where it is
wanted: through TensorStore each chunk would cost more than its bytes.

Deliberately not here: the reading (chunks.py).
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import tensorstore as ts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Part of a file."""

    path: pathlib.Path
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length


def index(database: pathlib.Path) -> dict[str, Place | bytes]:
    """Where the value of each key lies; a value of some bytes lies in the index itself.

    Raises:
        ValueError, OSError: what is there is not a whole index.
    """
    base = ts.KvStore.open(f"file://{database.absolute()}/").result()
    try:
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"].get("location")
        found: dict[str, Place | bytes] = {}
        waiting = [(root, b"")] if root else []
        while waiting:
            location, prefix = waiting.pop()
            node = ts.ocdbt.dump(base, location).result()
            for entry in node["entries"]:
                if node["height"]:  # below an inner node, keys come without what they have in common
                    waiting.append((entry["location"], prefix + entry["subtree_common_prefix"]))
                else:
                    found[(prefix + entry["key"]).decode()] = _value(database, entry)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{database}: TensorStore describes its index in a way unknown here ({error!r})") from error
    return found


def _value(database: pathlib.Path, entry: dict[str, Any]) -> Place | bytes:
    if "inline_value" in entry:
        return entry["inline_value"]
    _, base, path, offset, length = entry["indirect_value"].split(":")
    return Place(path=database / f"{base}{path}", offset=int(offset), length=int(length))
