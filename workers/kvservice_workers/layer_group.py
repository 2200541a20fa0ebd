"""The layers of a session that share a window: page tables, evictions, and what is written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import HOLE
from kvservice_workers.page_table import PageTable
from kvservice_workers.pools import Pool


class LayerGroup:
    """The layers of a session that share one window, with one page table a row.

    Invariants (asserted by `check`):
      1. `evicted[row]` positions are gone at the front of a row: whole pages, never more than the
         row's length.
    """

    def __init__(self, window: int | None, pool: Pool, num_rows: int) -> None:
        self.window = window
        self.pool = pool
        self.tables = [PageTable(pool.pages) for _ in range(num_rows)]
        self.evicted = [0] * num_rows
        self.in_use = True  # a layer is stated or has stored something: else no page is taken
        self.promised = 0  # pages
        self.version = 0  # changes whenever a table does
        # While the session is copied: page -> when it was written last. None: nobody copies it.
        self.written: dict[int, int] | None = None
        self._num_writes = 0
        self._array: npt.NDArray[np.int32] | None = None
        self._array_version = -1

    @property
    def page_size(self) -> int:
        return self.pool.pages.page_size

    def table_array(self) -> npt.NDArray[np.int32]:
        """Return i32[num_rows, max_pages] of all tables, HOLE behind each one's end."""
        if self._array is None or self._array_version != self.version:
            width = max((len(table.entries) for table in self.tables), default=0)
            array = np.full((len(self.tables), max(1, width)), HOLE, np.int32)
            for row, table in enumerate(self.tables):
                array[row, : len(table.entries)] = table.entries
            self._array, self._array_version = array, self.version
        return self._array

    def changed(self) -> None:
        """Note that a table has changed."""
        self.version += 1

    def wrote(self, pages: Iterable[int]) -> None:
        """Note that pages are written now, for whoever copies the session. To be said whenever
        contents change, by whoever holds the session's lock."""
        if self.written is not None:
            self._num_writes += 1
            self.written.update(dict.fromkeys(pages, self._num_writes))

    def wrote_slots(self, pages: npt.NDArray[np.int64]) -> None:
        """As `wrote`, of the pages of slots."""
        if self.written is not None:
            self.wrote(np.unique(pages).tolist())

    def check(self) -> None:
        for table, evicted in zip(self.tables, self.evicted, strict=True):
            table.check()
            assert evicted % self.page_size == 0, "part of a page is evicted"
            gone = table.entries[: evicted // self.page_size]
            assert all(page == HOLE for page in gone), "an evicted page is still listed"
