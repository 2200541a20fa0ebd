"""The pages of one sequence on one worker, in position order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.core.geometry import HOLE
from kvservice_workers.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy all layers of page `src` to page `dst`, before anything is written to `dst`."""

    src: int
    dst: int


@dataclass(slots=True)
class PageNeed:
    """What is missing before given page indices of a table can be written."""

    new: list[int] = field(default_factory=list)  # indices without a page
    shared: list[int] = field(default_factory=list)  # indices whose page somebody else sees too

    @property
    def num_pages(self) -> int:
        return len(self.new) + len(self.shared)


class PageTable:
    """Entry i is the page of positions [i * page_size, (i + 1) * page_size), or HOLE.

    Pure bookkeeping: lengths live with the session's layers, bytes in the arenas. What must be
    copied or zeroed is returned.

    Invariants (asserted by `check`):
      1. The table owns exactly one reference to each page that it lists, and lists none twice.
      2. `num_held` entries are not holes.
      3. The last entry, if any, is not a hole.
    """

    __slots__ = ("_entries", "_num_held", "_pool")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: list[int] = []
        self._num_held = 0

    @classmethod
    def holding(cls, pool: PagePool, entries: Iterable[int]) -> PageTable:
        """Return a table of these entries, which owns one reference to each of its pages."""
        table = cls(pool)
        table._entries = list(entries)
        table._num_held = sum(page != HOLE for page in table._entries)
        table._strip()
        return table

    @property
    def entries(self) -> Sequence[int]:
        """The table itself, to be read only."""
        return self._entries

    @property
    def num_held(self) -> int:
        """Pages in the table, holes not counted."""
        return self._num_held

    def page_at(self, index: int) -> int:
        """Return the page at an index, or HOLE."""
        return self._entries[index] if index < len(self._entries) else HOLE

    def need(self, indices: Iterable[int]) -> PageNeed:
        """Return what must be provided before the pages at `indices` can be written."""
        need = PageNeed()
        for index in indices:
            page = self.page_at(index)
            if page == HOLE:
                need.new.append(index)
            elif self._pool.is_shared(page):
                need.shared.append(index)
        return need

    def provide(self, need: PageNeed, pages: Sequence[int]) -> list[PageCopy]:
        """Fill in what `need` said, with fresh pages, one for each.

        Args:
            need: As returned by `need`, with nothing changed since.
            pages: Pages of the pool, taken for this; the table owns their references from now on.

        Returns:
            The copies to make. The sources may be unused by then, so make them before the next
            page is taken from the pool.
        """
        assert len(pages) == need.num_pages, "as many pages as needed"
        copies = []
        for index, page in zip(need.new, pages, strict=False):
            if index >= len(self._entries):
                self._entries.extend([HOLE] * (index + 1 - len(self._entries)))
            self._entries[index] = page
        self._num_held += len(need.new)
        for index, page in zip(need.shared, pages[len(need.new) :], strict=True):
            copies.append(PageCopy(src=self._entries[index], dst=page))
            self._entries[index] = page
        self._pool.release([copy.src for copy in copies])
        return copies

    def evict(self, num_pages: int) -> int:
        """Make holes of the first `num_pages` entries; return how many pages became unused."""
        first = min(num_pages, len(self._entries))
        pages = [page for page in self._entries[:first] if page != HOLE]
        if not pages:
            return 0
        self._entries[:first] = [HOLE] * first
        self._num_held -= len(pages)
        self._strip()
        return self._pool.release(pages)

    def count_evictable(self, num_pages: int) -> int:
        """Return how many pages `evict(num_pages)` would make unused."""
        entries = self._entries[:num_pages]
        return sum(page != HOLE and not self._pool.is_shared(page) for page in entries)

    def cut(self, num_pages: int) -> int:
        """Drop all but the first `num_pages` entries; return how many pages became unused."""
        pages = self._held(num_pages, None)
        del self._entries[num_pages:]
        self._num_held -= len(pages)
        self._strip()
        return self._pool.release(pages)

    def share(self, num_pages: int | None = None) -> PageTable:
        """Return a new table with the first `num_pages` entries (None: all), sharing the pages."""
        child = PageTable(self._pool)
        child._entries = self._entries[:num_pages]
        child._strip()
        held = self._held(0, num_pages)
        child._num_held = len(held)
        self._pool.retain(held)
        return child

    def check(self) -> None:
        held = [page for page in self._entries if page != HOLE]
        assert len(set(held)) == len(held), "a page is listed twice"
        assert self._num_held == len(held), "num_held is off"
        assert not self._entries or self._entries[-1] != HOLE, "a hole at the end"

    def _held(self, start: int, stop: int | None) -> list[int]:
        """Return the pages among some entries; mostly there are no holes to look for."""
        entries = self._entries[start:stop]
        if self._num_held == len(self._entries):
            return entries
        return [page for page in entries if page != HOLE]

    def _strip(self) -> None:
        while self._entries and self._entries[-1] == HOLE:
            self._entries.pop()
