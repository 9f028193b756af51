"""Raw rows of a data set in the order in which they were published: JSON lines, a JSON list, Parquet, the hub by name.

Rows come one at a time, and of Parquet and of the hub only the columns that are asked for, since a published set may
hold a hundred gigabytes of solutions beside a few megabytes of problems. A row that its schema does not fit is a bad
row, with the reason in words; the callers count them and keep examples.

Deliberately not here: what a row means (catalog.py, talks.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, tuple[type, ...]]

SUFFIXES = (".jsonl", ".parquet", ".json")
_EXAMPLES = 3
_PARQUET_ROWS = 1024


class BadRowError(ValueError):
    """A row that cannot be used; the message is the reason that the report counts it under."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Rejects:
    """Bad rows by reason: how many, and the first few of them by name."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        """Count one more row under a reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        known = self.examples.setdefault(reason, [])
        if len(known) < _EXAMPLES:
            known.append(example)

    @property
    def total(self) -> int:
        """All bad rows."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        told = [f"{count} x {reason} (such as {', '.join(self.examples[reason])})" for reason, count in ordered]
        return ", ".join(told) or "none"


def check(row: Row, columns: Columns) -> None:
    """Hold a row against its declared columns.

    Raises:
        BadRowError: a column is missing or is of another type.
    """
    for name, wanted in columns.items():
        if name not in row:
            raise BadRowError(f"no column {name}")
        value = row[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise BadRowError(f"{name} is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in wanted)}")


def first_fits(rows: Iterable[Row], columns: Columns, where: str) -> Iterator[Row]:
    """The same rows; a set whose very first row lacks a declared column is not the set that was declared.

    Raises:
        ValueError: which columns there are and which were wanted.
    """
    for number, row in enumerate(rows):
        if number == 0 and (lacking := [name for name in columns if name not in row]):
            raise ValueError(f"{where}: columns {sorted(row)} lack {lacking}; this is another set or another version")
        yield row


def split_files(folder: pathlib.Path, splits: Sequence[str]) -> list[pathlib.Path]:
    """Files of the first of these splits that a folder holds, in the order of their names; none where it has none.

    A file belongs to a split when it is named after it (train.jsonl, train-00000-of-00002.parquet), in the folder
    itself or in its subfolder data/, as the hub lays sets out.
    """
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    for split in splits:
        for place in places:
            named = [path for path in place.iterdir() if path.suffix in SUFFIXES and path.is_file()]
            found = sorted(
                path for path in named if path.stem == split or path.stem.startswith((f"{split}-", f"{split}_"))
            )
            if found:
                return found
    return []


def from_files(paths: Sequence[pathlib.Path], columns: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of files one after another.

    Args:
        paths: .jsonl, .json or .parquet.
        columns: of Parquet, those that are read, as far as the file has them; empty reads all.

    Raises:
        ValueError: a file cannot be read, with file and line.
    """
    for path in paths:
        yield from _parquet(path, columns) if path.suffix == ".parquet" else _json(path)


def from_hub(name: str, split: str, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a data set by its hub name, `owner/name` or `owner/name:config`, streamed.

    Raises:
        ValueError: the library is missing.
    """
    library = hub_library(name)
    name, _, config = name.partition(":")
    found = library.load_dataset(name, config or None, split=split, streaming=True)
    yield from found.select_columns(list(columns)) if columns else found


def hub_library(name: str) -> Any:
    """The `datasets` library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hub data set {name!r}: pip install datasets or give a path to its JSONL or Parquet files"
        ) from error


def _parquet(path: pathlib.Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: Parquet needs the package pyarrow: pip install pyarrow, or give JSON lines"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    with file:
        wanted = [name for name in columns if name in file.schema_arrow.names] or None
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
            yield from batch.to_pylist()


def _json(path: pathlib.Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _list(path, file.read()) if path.suffix == ".json" else _lines(path, file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error


def _list(path: pathlib.Path, text: str) -> Iterator[Row]:
    """Rows of a .json file: one list of objects, or JSON lines in spite of the name."""
    if not text.lstrip().startswith("["):
        yield from _lines(path, text.split("\n"))
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, item {number}: {str(row)[:40]} is no JSON object")
        yield row


def _lines(path: pathlib.Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {line.strip()[:40]} is no JSON object with question and answer")
        yield row
