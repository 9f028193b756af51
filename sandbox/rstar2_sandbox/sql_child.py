"""Runs SQL on a fresh SQLite database in memory, inside the jail: statements one after another, rows as text."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator

MAX_ROWS = 10_000


def warm() -> None:
    """Go once through the usual path, so that forked children start warm."""
    for _ in _run("create table t(x); insert into t values (1); select x from t;"):
        pass


def run(source: bytes) -> int:
    """Run a script and print what its queries give; return the exit code."""
    try:
        for line in _run(source.decode("utf-8", "surrogatepass")):
            sys.stdout.write(line + "\n")
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        return 1
    sys.stdout.flush()
    return 0


def _run(script: str) -> Iterator[str]:
    with sqlite3.connect(":memory:", isolation_level=None) as database:
        for statement in statements(script):
            cursor = database.execute(statement)
            if cursor.description is None:
                continue
            yield "|".join(str(column[0]) for column in cursor.description)
            for count, row in enumerate(cursor):
                if count == MAX_ROWS:
                    yield f"... (only the first {MAX_ROWS} rows are shown)"
                    break
                yield "|".join("NULL" if value is None else str(value) for value in row)


def statements(script: str) -> Iterator[str]:
    """The statements of a script, split where SQLite itself sees their ends (not inside strings, not inside triggers).

    >>> list(statements("select ';'; select 2"))
    ["select ';';", ' select 2']
    """
    start = at = 0
    while (end := script.find(";", at)) >= 0:
        at = end + 1
        if sqlite3.complete_statement(script[start:at]):
            yield script[start:at]
            start = at
    if script[start:].strip():
        yield script[start:]
