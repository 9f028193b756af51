"""Which problems are fit to train on, by their text and answer alone: huge answers, contamination, near duplicates.

Contaminated is a problem that shares eight words in a row with an evaluation problem (or is one, where that is
shorter). Near duplicates have equal answers and word trigrams that overlap by 0.8 or more (Jaccard); the first one
stays. Candidates are found by MinHash bands and then compared exactly, so a pair is never dropped by chance. Short
problems that differ in a number are different problems and stay.

Pure. Deliberately not here: what a model makes of the problems (curate.py), exact duplicates (sources.py).

Source: rStar2-Agent paper, data curation; the 8-gram rule is the paper's, the near duplicates are ours.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np

_GRAM = 8
_SHINGLE = 3
_SIMILAR = 0.8
_BANDS, _ROWS = 20, 4  # finds a pair of similarity 0.8 with chance 0.99997
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, lower case, typography and markup left out.

    >>> words(r"Let $x=3$. Find \\\\frac{1}{x}!")
    ['let', 'x', '3', 'find', 'frac', '1', 'x']
    """
    return _WORD.findall(text.lower())


def _grams(listed: list[str], length: int) -> set[tuple[str, ...]]:
    """The runs of so many words; of a shorter text its only one."""
    return {tuple(listed[i : i + length]) for i in range(max(1, len(listed) - length + 1))}


class Contamination:
    """The evaluation problems that training must not see."""

    def __init__(self, evaluation: Iterable[tuple[str, str]]) -> None:
        """Args: evaluation gives (name, question) of each problem."""
        self._known: dict[tuple[str, ...], str] = {}
        for name, question in evaluation:
            for gram in _grams(words(question), _GRAM):
                self._known.setdefault(gram, name)

    def of(self, question: str) -> str | None:
        """The evaluation problem that the question overlaps with, or None."""
        listed = words(question)
        found = (self._known.get(gram) for gram in _grams(listed, _GRAM))
        return next((name for name in found if name is not None), None)


class NearDuplicates:
    """Problems seen so far, by their answers and shingles."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._factors = generator.integers(1, 2**63, _BANDS * _ROWS, dtype=np.uint64) | np.uint64(1)
        self._masks = generator.integers(0, 2**63, _BANDS * _ROWS, dtype=np.uint64)
        self._buckets: dict[tuple[str, int, bytes], list[int]] = {}
        self._seen: list[tuple[str, set[tuple[str, ...]]]] = []

    def add(self, name: str, question: str, answer: str) -> str | None:
        """The earlier problem that this one nearly repeats, or None, and then this one is remembered."""
        shingles = _grams(words(question), _SHINGLE)
        keys = [(answer, band, part) for band, part in enumerate(self._signature(shingles))]
        for index in sorted({i for key in keys for i in self._buckets.get(key, ())}):
            other, others = self._seen[index]
            if len(shingles & others) >= _SIMILAR * len(shingles | others):
                return other
        for key in keys:
            self._buckets.setdefault(key, []).append(len(self._seen))
        self._seen.append((name, shingles))
        return None

    def _signature(self, shingles: set[tuple[str, ...]]) -> list[bytes]:
        hashed = [hashlib.blake2b("\0".join(s).encode(), digest_size=8).digest() for s in shingles]
        codes = np.frombuffer(b"".join(hashed), np.uint64)
        mixed = (codes[:, None] ^ self._masks) * self._factors
        lowest = (mixed ^ (mixed >> np.uint64(29))).min(axis=0).reshape(_BANDS, _ROWS)
        return [row.tobytes() for row in lowest]


def is_huge(answer: str, max_digits: int) -> bool:
    """Whether an integer answer has more digits than allowed: one that no reasoning but only a program can state."""
    return len(answer.lstrip("-")) > max_digits
