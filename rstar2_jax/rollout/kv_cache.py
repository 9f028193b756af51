"""Pages of the key-value pool as the host sees them: who holds which, what stands in them, what may be shared.

The pool on the device is a row of pages of `page_tokens` entries each. A sequence holds a lease: a table of pages whose
first `filled` entries stand for its ids. What a page holds is named by a digest of all ids up to its end, so that
sequences that begin alike meet in the same pages, whoever computed them and however long ago:

- a full page is never written again and may be held by any number of leases (references are counted);
- a page that is not full has one writer. Another sequence that begins with the same ids gets a copy of it (copy on
  write), or the page itself when nobody holds it;
- a page that nobody holds keeps its entries until space is wanted; the one left alone for longest goes first, the end
  of a sequence before its beginning.

The names belong to one version of the weights: `restart` forgets them all.

Copies that `open` asks for read the pool as it was before the device call that they belong to: a caller performs those
of one call together, all reads before any write, and before anything else that the call writes.

Deliberately not here: arrays (device.py), requests and their order (slots.py).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Copy(NamedTuple):
    """Page `source` is to be copied to page `target` before the next writes."""

    source: int
    target: int


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """What one sequence holds: its pages in order, the names of the full ones (keys[i] names the ids before page i),
    and how many entries stand for ids of the sequence."""

    pages: list[int]
    keys: list[bytes]
    filled: int


@dataclasses.dataclass(eq=False, slots=True)
class _Page:
    """references: leases that hold it; ids: what stands in its first entries; parent: name of the ids before it, None
    while the page is on no offer."""

    references: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    parent: bytes | None = None


class KvCache:
    """The account of a pool.

    Args:
        pages: of the pool.
        page_tokens: entries of a page.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        for what, value in {"pages": pages, "page_tokens": page_tokens}.items():
            if value < 1:
                raise ValueError(f"{what} = {value}: must be above 0")
        self.page_tokens = page_tokens
        self._pages = [_Page() for _ in range(pages)]
        self.restart(-1)

    def restart(self, version: int) -> None:
        """Forget what every page holds: the weights are now those of `version`. No lease may be open."""
        assert not any(page.references for page in self._pages), "a lease of the old weights is still open"
        self._root = hashlib.blake2b(b"%d" % version, digest_size=16).digest()
        self._pages = [_Page() for _ in self._pages]
        self._free = list(range(len(self._pages)))[::-1]
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._full: dict[bytes, int] = {}  # name -> the page that ends with it
        self._children: dict[bytes, dict[int, None]] = {}  # name -> pages on offer that go on from it

    def forget(self) -> None:
        """Offer nothing of what was written so far; open leases keep what they hold."""
        self._free += self._idle
        for number in self._free:
            self._pages[number] = _Page()
        for page in self._pages:
            page.parent = None
        self._idle.clear()
        self._full.clear()
        self._children.clear()

    @property
    def available_pages(self) -> int:
        """Pages that no lease holds."""
        return len(self._free) + len(self._idle)

    @property
    def held_pages(self) -> int:
        """Pages that leases hold; a shared one counts once."""
        return len(self._pages) - self.available_pages

    def keys(self, ids: np.ndarray) -> list[bytes]:
        """Names of all beginnings of the ids that end with a page, the empty one first."""
        names, size = [self._root], self.page_tokens
        for start in range(0, len(ids) - size + 1, size):
            names.append(_name(names[-1], ids[start : start + size]))
        return names

    def open(
        self, ids: np.ndarray, keys: Sequence[bytes], entries: int, spare: int = 0
    ) -> tuple[Lease, list[Copy]] | None:
        """A lease that holds what is known of the ids and room for `entries` entries; None when the pool lacks pages.

        Args:
            ids: i32[n], whose entries the sequence will need.
            keys: of the ids.
            entries: at least n.
            spare: pages that must be left for others.
        """
        shared, beyond, common = self._match(ids, keys)
        adopted = beyond is not None and not self._pages[beyond].references and common == len(self._pages[beyond].ids)
        reused = [*shared, beyond] if adopted else shared
        wanted = -(-entries // self.page_tokens) - len(reused)
        if wanted + spare > self.available_pages - sum(not self._pages[page].references for page in reused):
            return None
        for page in reused:
            self._hold(page)
        if beyond in self._idle:
            self._idle.move_to_end(beyond)
        fresh = [self._take() for _ in range(wanted)]
        copies = []
        if beyond is not None and not adopted:
            self._pages[fresh[0]].ids = ids[len(shared) * self.page_tokens :][:common].tolist()
            copies.append(Copy(beyond, fresh[0]))
        filled = len(shared) * self.page_tokens + common
        return Lease([*reused, *fresh], list(keys[: len(shared) + 1]), filled), copies

    def known(self, ids: np.ndarray, keys: Sequence[bytes]) -> int:
        """How many of the ids `open` would find."""
        shared, _, common = self._match(ids, keys)
        return len(shared) * self.page_tokens + common

    def name(self, ids: np.ndarray, keys: Sequence[bytes]) -> bytes:
        """Name of all of the ids, whether or not they end with a page."""
        rest = ids[(len(keys) - 1) * self.page_tokens :]
        return _name(keys[-1], rest) if len(rest) else keys[-1]

    def reserve(self, lease: Lease, entries: int) -> bool:
        """Give the lease room for `entries` entries; False, and nothing changed, when the pool lacks pages."""
        wanted = -(-entries // self.page_tokens) - len(lease.pages)
        if wanted > self.available_pages:
            return False
        lease.pages += [self._take() for _ in range(wanted)]
        return True

    def write(self, lease: Lease, ids: Sequence[int]) -> None:
        """The next entries of the lease hold these ids (or will, once the call that is being planned has run)."""
        size, done = self.page_tokens, 0
        while done < len(ids):
            number = lease.pages[lease.filled // size]
            page, parent = self._pages[number], lease.keys[lease.filled // size]
            assert page.references == 1 and len(page.ids) == lease.filled % size, "a page has one writer"
            more = ids[done : done + size - len(page.ids)]
            page.ids += map(int, more)
            done, lease.filled = done + len(more), lease.filled + len(more)
            self._offer(number, parent)
            if len(page.ids) == size:
                lease.keys.append(_name(parent, page.ids))
                if self._full.setdefault(lease.keys[-1], number) != number:
                    self._withdraw(number)  # another page says the same: one of them is enough

    def close(self, lease: Lease) -> None:
        """The sequence holds nothing any more; what was written stays on offer while space lasts."""
        for number in reversed(lease.pages):
            page = self._pages[number]
            page.references -= 1
            assert page.references >= 0, "a lease is closed once"
            if page.references:
                continue
            if page.parent is None:
                page.ids = []
                self._free.append(number)
            else:
                self._idle[number] = None
        lease.pages, lease.keys, lease.filled = [], [self._root], 0

    def _match(self, ids: np.ndarray, keys: Sequence[bytes]) -> tuple[list[int], int | None, int]:
        """(full pages that hold the beginning, the page that holds most of what follows, how much of that)."""
        shared = []
        for key in keys[1:]:
            if key not in self._full:
                break
            shared.append(self._full[key])
        rest = ids[len(shared) * self.page_tokens :][: self.page_tokens].tolist()
        best, most = None, 0
        for number in self._children.get(keys[len(shared)], {}) if rest else ():
            common = _common(self._pages[number].ids, rest)
            if common > most:
                best, most = number, common
        return shared, best, most

    def _offer(self, number: int, parent: bytes) -> None:
        if self._pages[number].parent is None:
            self._pages[number].parent = parent
            self._children.setdefault(parent, {})[number] = None

    def _withdraw(self, number: int) -> None:
        parent, self._pages[number].parent = self._pages[number].parent, None
        assert parent is not None
        siblings = self._children[parent]
        del siblings[number]
        if not siblings:
            del self._children[parent]

    def _hold(self, number: int) -> None:
        self._pages[number].references += 1
        self._idle.pop(number, None)

    def _take(self) -> int:
        """An empty page, held once; the longest idle one forgets what it held when none is free."""
        if self._free:
            number = self._free.pop()
        else:
            number, _ = self._idle.popitem(last=False)
            page = self._pages[number]
            if len(page.ids) == self.page_tokens:
                assert page.parent is not None
                del self._full[_name(page.parent, page.ids)]
            self._withdraw(number)
        self._pages[number] = _Page(references=1)
        return number


def _name(parent: bytes, ids: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16, key=parent).digest()


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common beginning."""
    if not held or held[0] != ids[0]:
        return 0
    return next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
