"""Providing pages and arenas before anything is written: all that a call needs, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import HOLE, LayerGeometry
from kvservice.core.session import EvictBefore
from kvservice_workers.arena import Arena
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding
from kvservice_workers.page_table import PageNeed
from kvservice_workers.pools import PoolSet, Room, by_pool
from kvservice_workers.session_state import WorkerSession


@dataclass(frozen=True, slots=True)
class RowDemand:
    """Page indices of one row that are about to be written."""

    row: int
    indices: Sequence[int]


@dataclass(slots=True)
class Provision:
    """What one call does to the page tables of a session's groups, worked out beforehand."""

    session: WorkerSession
    needs: list[tuple[LayerGroup, int, PageNeed]] = field(default_factory=list)
    evictions: list[tuple[LayerGroup, int, int]] = field(default_factory=list)  # group, row, pages

    def add_pages(self, group: LayerGroup, demands: Iterable[RowDemand]) -> None:
        """Demand that pages can be written: present, and nobody else's."""
        for demand in demands:
            need = group.tables[demand.row].need(demand.indices)
            if need.num_pages:
                self.needs.append((group, demand.row, need))

    def add_eviction(self, group: LayerGroup, row: int, num_pages: int) -> None:
        """Demand that the first `num_pages` entries of a row become holes."""
        if num_pages * group.page_size > group.evicted[row]:
            self.evictions.append((group, row, num_pages))

    def add_evictions(self, evict_before: Iterable[EvictBefore]) -> None:
        """Demand that all pages wholly below these positions become holes."""
        for evict in evict_before:
            group = self.session.groups[evict.window]
            for row, position in enumerate(evict.positions):
                self.add_eviction(group, row, position // group.page_size)

    def evicted_after(self, group: LayerGroup) -> list[int]:
        """Return, by row, the position below which a group will hold nothing."""
        evicted = list(group.evicted)
        for other, row, num_pages in self.evictions:
            if other is group:
                evicted[row] = max(evicted[row], num_pages * group.page_size)
        return evicted

    def execute(self, pools: PoolSet, count: Callable[[int, int], None]) -> None:
        """Evict, take pages, copy shared ones, and zero new ones that would show old contents.

        Args:
            count: Told (pages taken, pages that eviction has freed).

        Raises:
            OutOfPages, QuotaExceeded: Nothing has changed.
        """
        if not self.needs and not self.evictions:
            return
        groups = {id(group): group for group, *_ in [*self.needs, *self.evictions]}
        promises = {key: self._promise_after(group) for key, group in groups.items()}
        grown = sum(promises[key] - group.promised for key, group in groups.items())
        pools.usage.check_pages(self.session.tenant, grown + self._most_taken())
        self._make_room(pools, groups.values(), promises)
        evicted = 0
        for group, row, num_pages in self.evictions:
            evicted += group.tables[row].evict(num_pages)
            group.evicted[row] = num_pages * group.page_size
            group.changed()
        for key, group in groups.items():
            change = promises[key] - group.promised
            if change:
                group.pool.pages.take(0, promise_change=change)
                group.promised = promises[key]
        taken = sum(self._fill(group, row, need) for group, row, need in self.needs)
        count(taken, evicted)
        pools.usage.change_pages(self.session.tenant, grown + taken - evicted)

    def _most_taken(self) -> int:
        """Return by how many pages the session grows at most: evicted ones are given up before."""
        taken = sum(need.num_pages for *_, need in self.needs)
        return taken - sum(
            group.tables[row].count_evictable(num) for group, row, num in self.evictions
        )

    def _make_room(
        self, pools: PoolSet, groups: Iterable[LayerGroup], promises: Mapping[int, int]
    ) -> None:
        rooms = []
        for group in groups:
            pages = sum(need.num_pages for other, _, need in self.needs if other is group)
            pages -= sum(
                group.tables[row].count_evictable(num)
                for other, row, num in self.evictions
                if other is group
            )
            rooms.append(Room(group.pool, pages, promises[id(group)] - group.promised))
        for room in by_pool(rooms):
            pools.make_room(room, keep=self.session.pools())

    def _promise_after(self, group: LayerGroup) -> int:
        """Return what will be promised to a group once the pages have been taken."""
        session = self.session
        if session.targets is None:
            return 0
        total = 0
        for row, table in enumerate(group.tables):
            needs = [need for other, r, need in self.needs if other is group and r == row]
            indices = [index for need in needs for index in (*need.new, *need.shared)]
            length = max([len(table.entries), *(index + 1 for index in indices)])
            shared = (
                bool(table.entries)
                and group.pool.pages.is_shared(table.entries[-1])
                and len(table.entries) - 1 not in indices
                and length == len(table.entries)
            )
            total += session.row_promise(group, row, length, shared)
        return total

    def _fill(self, group: LayerGroup, row: int, need: PageNeed) -> int:
        """Provide a row's pages; return how many were taken."""
        table = group.tables[row]
        # Rows of one session may share a page: whoever copies last keeps it.
        shared = [i for i in need.shared if group.pool.pages.is_shared(table.entries[i])]
        need = PageNeed(need.new, shared)
        pages = group.pool.pages.take(need.num_pages)
        copies = table.provide(need, pages)
        group.changed()
        group.wrote(pages)
        if copies:
            group.pool.copy_pages(copies)
        # A new page that some layer's length reaches into would show what a former owner left.
        longest = self.session.longest(row)
        stale = [
            page
            for index, page in zip(need.new, pages, strict=False)
            if index * group.page_size < longest
        ]
        if stale:
            group.pool.zero_pages(stale)
        return need.num_pages


def written_pages(
    group: LayerGroup, row: int, start: int, stop: int, padding: RowPadding
) -> RowDemand:
    """Return the pages that tokens at positions [start, stop) go to, as of `padding`.

    Pages that would hold only padding are left out.
    """
    size = group.page_size
    table = group.tables[row]
    return RowDemand(
        row,
        [
            index
            for index in range(start // size, -(-stop // size))
            if table.page_at(index) != HOLE
            or not padding.covers(index * size, min((index + 1) * size, stop))
        ],
    )


def check_evictions(session: WorkerSession, evict_before: Iterable[EvictBefore]) -> None:
    """Refuse evictions that `Provision.add_evictions` cannot carry out.

    Raises:
        InvalidRequest: No layer has such a window, or a position is out of a row's bounds.
    """
    for evict in evict_before:
        if session.groups.get(evict.window) is None:
            raise InvalidRequest(f"no layer of the session has a window of {evict.window}")
        session.check_rows(evict.positions, "evict_before")
        for row, position in enumerate(evict.positions):
            if not 0 <= position <= session.longest(row):
                raise InvalidRequest(
                    f"evict_before of row {row} must be between 0 and its length "
                    f"{session.longest(row)}, got {position}"
                )


def arena_of(pools: PoolSet, session: WorkerSession, layer: int, geometry: LayerGeometry) -> Arena:
    """Return a layer's arena, made if need be. The worker's lock is held.

    Raises:
        OutOfPages: Its bytes do not fit. Nothing has changed.
    """
    window = session.window_of(layer)
    return pools.make_arena(
        session.groups[window].pool,
        session.arena_index(layer),
        geometry,
        num_layers=sum(other.window == window for other in session.spec.layers),
        keep=session.pools(),
    )
