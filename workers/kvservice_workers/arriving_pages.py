"""The pages of sessions on their way here: taken, filled, and fetched again when they change."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import HOLE, LayerGeometry
from kvservice.core.moving import CopiedPages, GroupState, SessionState
from kvservice_workers.arena import slots_of
from kvservice_workers.arrival import NEVER, Arrival, ArrivalTable, Copied
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import as_numpy
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.page_table import PageTable
from kvservice_workers.pools import PoolSet, Room, by_pool
from kvservice_workers.provision import arena_of


@dataclass(frozen=True, slots=True)
class Missing:
    """Pages that are still to be fetched, by their numbers at the other worker.

    Fields:
        page_bytes: Of one page, in all layers.
    """

    window: int | None
    layers: tuple[int, ...]
    pages: tuple[int, ...]
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.pages)


class ArrivingPages:
    """Keeps the pages of an arrival those that the session has at the other worker by now."""

    def __init__(
        self,
        lock: threading.RLock,
        arriving: ArrivalTable,
        pools: PoolSet,
        counters: Counters,
    ) -> None:
        self._lock = lock  # the worker's
        self._arriving = arriving
        self._pools = pools
        self._counters = counters

    def sync(self, arrival: Arrival, state: SessionState) -> list[Missing]:
        """Take as many pages as the session has there now; return what they still lack.

        Raises:
            OutOfPages, QuotaExceeded: There is no room for them. Nothing has changed.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._arriving.check_copying(arrival)
            session = arrival.session
            by_window = {group.window: group for group in state.groups}
            if by_window.keys() != session.groups.keys():
                raise InvalidRequest("the windows of a session do not change")
            for layer in state.lengths:
                arena_of(self._pools, session, layer, state.geometries[layer])
            wanted = {window: _listed(group) for window, group in by_window.items()}
            self._make_room(arrival, wanted)
            for window, pages in wanted.items():
                self._hold(arrival, session.groups[window], arrival.copied[window], pages)
            return [_missing(arrival, group, state) for group in state.groups]

    def store(
        self, arrival: Arrival, missing: Missing, pages: Sequence[int], copied: CopiedPages
    ) -> None:
        """Store contents of pages as they were fetched.

        Raises:
            InvalidRequest: They are not what was asked for.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._arriving.check_copying(arrival)
            session = arrival.session
            group = session.groups[missing.window]
            held = [arrival.copied[missing.window][page].page for page in pages]
            at, offsets = slots_of(held, group.page_size)
            if len(copied.written) != len(held):
                raise InvalidRequest(f"{len(held)} pages were asked for")
            for layer, (k, v) in copied.layers.items():
                arena = group.pool.arenas[session.arena_index(layer)]
                geometry = LayerGeometry(k.shape[1], k.shape[2], v.shape[2], k.dtype)
                if geometry != arena.geometry or k.shape[0] != len(at):
                    raise InvalidRequest(f"pages of {arena.geometry} were asked for")
                with group.pool.lock:
                    arena.store(at, offsets, as_numpy(k), as_numpy(v))
            self._counters.moved_bytes += copied.num_bytes

    def stored(
        self, arrival: Arrival, missing: Missing, pages: Sequence[int], written: Sequence[int]
    ) -> None:
        """Note that all layers of pages are here, as they were written then."""
        with self._lock:
            copied = arrival.copied[missing.window]
            for page, at in zip(pages, written, strict=True):
                if page in copied:
                    copied[page].written = at

    # -- inside

    def _make_room(self, arrival: Arrival, wanted: Mapping[int | None, Collection[int]]) -> None:
        session = arrival.session
        rooms = [
            Room(session.groups[window].pool, len(pages) - len(arrival.copied[window]))
            for window, pages in wanted.items()
        ]
        grown = sum(room.num_pages for room in rooms)
        self._pools.usage.check_pages(session.tenant, grown, is_counted=True)
        for room in by_pool(rooms):
            self._pools.make_room(room, keep=session.pools())

    def _hold(
        self,
        arrival: Arrival,
        group: LayerGroup,
        copied: dict[int, Copied],
        wanted: Collection[int],
    ) -> None:
        """Give up the pages that the session has no more, and take one for each that is new."""
        pages = group.pool.pages
        gone = [page for page in copied if page not in wanted]
        freed = pages.release([copied.pop(page).page for page in gone])
        fresh = [page for page in wanted if page not in copied]
        for page, mine in zip(fresh, pages.take(len(fresh)), strict=True):
            copied[page] = Copied(mine)
        self._counters.page_frees["move"] += freed
        self._counters.page_allocations += len(fresh)
        self._pools.usage.change_pages(arrival.tenant, len(fresh) - freed)
        group.tables = [PageTable.holding(pages, [one.page for one in copied.values()])]


def _listed(group: GroupState) -> dict[int, None]:
    return {page: None for table in group.tables for page in table if page != HOLE}


def _missing(arrival: Arrival, group: GroupState, state: SessionState) -> Missing:
    session, copied = arrival.session, arrival.copied[group.window]
    mine = (layer for layer in state.lengths if session.window_of(layer) == group.window)
    layers = tuple(sorted(mine))
    size = session.groups[group.window].page_size
    if arrival.layers.get(group.window) != layers:
        # One that has come since may have been written before the others were copied.
        arrival.layers[group.window] = layers
        for one in copied.values():
            one.written = NEVER
    return Missing(
        group.window,
        layers,
        tuple(page for page, one in copied.items() if one.written < group.written.get(page, 0)),
        sum(size * state.geometries[layer].token_bytes for layer in layers),
    )
