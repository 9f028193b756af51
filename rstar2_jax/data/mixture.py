"""The non-reasoning mixture: so many conversations of each published set, as demonstrations, and what was left out.

Which rows of a set are taken is a function of the seed and of the row's number alone: each usable row has a random key,
the smallest keys win. A set is read once and only the winners are held, so that 30 thousand of a million conversations
cost the memory of 30 thousand.

Deliberately not here: the notation of each set (talk_sets.py), ids and masks (talks.py), their order (sft.py).
"""

from __future__ import annotations

import hashlib
import heapq
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rstar2_jax import settings
from rstar2_jax.data import chat as chats
from rstar2_jax.data import tables, talk_sets, talks


def demonstrations(
    mix: settings.Demonstrations, chat: chats.Chat, python_tool: Mapping[str, Any], seed: int
) -> tuple[list[talks.Demo], list[str]]:
    """The demonstrations of mix.mixture, set after set, and one line for each set on what became of its rows.

    A set with fewer usable rows than its share gives all of them; the line says so.

    Args:
        python_tool: schema of the tool under which programs are called.

    Raises:
        ValueError: no such set, or none of its rows can be used.
    """
    demos, lines = [], []
    for name, count in mix.mixture:
        if name not in talk_sets.TALK_SETS:
            raise ValueError(f"Demonstrations.mixture names {name!r}: must be one of {', '.join(talk_sets.TALK_SETS)}")
        chosen, read, bad = choose(name, count, mix.folder, python_tool, seed)
        made = []
        for talk in chosen:
            try:
                made.append(talks.render(talk, chat))
            except tables.BadRowError as error:
                bad.add(str(error), talk.id)
        if not made:
            raise ValueError(f"set {name}: none of {read} rows can be used: {bad}")
        licences = ", ".join(sorted({talk.licence for talk in chosen}))
        left_out = f"; {bad.total} bad rows: {bad}" if bad.total else ""
        lines.append(f"{name}: {len(made)} of {count} wanted from {read} rows, licence {licences}{left_out}")
        demos += made
    return demos, lines


def choose(
    name: str, count: int, folder: str, python_tool: Mapping[str, Any], seed: int
) -> tuple[list[talks.Talk], int, tables.Rejects]:
    """The usable conversations of a set with the smallest keys, at most count, in the order of their rows.

    Returns:
        conversations, rows read, and the rows that could not be used.
    """
    bad, read = tables.Rejects(), 0
    held: list[tuple[int, int, talks.Talk]] = []
    for number, row in enumerate(_rows(name, folder)):
        read += 1
        key = -int.from_bytes(hashlib.sha256(f"{seed} {name} {number}".encode()).digest()[:8], "big")
        if len(held) == count and key < held[0][0]:
            continue
        try:
            talk = talk_sets.talk(name, row, number, python_tool)
        except tables.BadRowError as error:
            bad.add(str(error), f"{name}/{number}")
            continue
        (heapq.heappushpop if len(held) == count else heapq.heappush)(held, (key, number, talk))
    return [talk for _, _, talk in sorted(held, key=lambda item: item[1])], read, bad


def _rows(name: str, folder: str) -> Iterator[tables.Row]:
    known = talk_sets.TALK_SETS[name]
    columns = list(known.columns)
    if not folder:
        found = tables.from_hub(known.hub, known.split, columns)
    else:
        found = tables.from_files(_files(name, pathlib.Path(folder), known), columns)
    return tables.first_fits(found, known.columns, f"set {name}")


def _files(name: str, folder: pathlib.Path, known: talk_sets.TalkSet) -> Sequence[pathlib.Path]:
    single = [folder / f"{name}{suffix}" for suffix in tables.SUFFIXES if (folder / f"{name}{suffix}").is_file()]
    found = single or tables.split_files(folder / name, (known.split, "train", "data", "chat"))
    if not found:
        raise ValueError(
            f"Demonstrations.folder = {str(folder)!r}: holds neither {name}.jsonl (.json, .parquet) nor a folder "
            f"{name} with {known.split}.jsonl; download {known.hub} to there, or set folder = '' for the hub"
        )
    return found
