"""What structural changes do to a session's tables, lengths and padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvservice.core.errors import KVServiceError, PositionOutOfRange
from kvservice.core.geometry import LayerGeometry, cdiv
from kvservice.core.session import SessionSpec
from kvservice_workers.counters import Counters
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.pools import PoolSet
from kvservice_workers.promises import Promises
from kvservice_workers.session_state import WorkerSession


class Structure:
    """Gives sessions their layer groups, and cuts, selects, forks and frees what these hold.

    The locks of worker and session are held by the caller. Epochs are the caller's business too.
    """

    def __init__(self, pools: PoolSet, promises: Promises, counters: Counters) -> None:
        self._pools = pools
        self._promises = promises
        self._counters = counters
        self._private_keys = itertools.count()

    def open(self, session: WorkerSession) -> None:
        """Give a new session its layer groups, and promise it the room that it reserves.

        Raises:
            OutOfPages, QuotaExceeded, InvalidRequest: There is not, the tenant may not have, or
                there never is so much. The session holds nothing.
        """
        self.open_groups(session)
        try:
            self._promises.promise(session, self._promises.reserved_targets(session))
        except KVServiceError:
            self.free(session, "release")
            raise

    def open_groups(self, session: WorkerSession, parent: WorkerSession | None = None) -> None:
        """Give a session its layer groups: a parent's pools, shared ones where it states its
        layers, else private ones. From now until `free` it counts as its tenant's."""
        spec = session.spec
        windows = dict.fromkeys(layer.window for layer in spec.layers)
        if not spec.states_geometry:
            windows.setdefault(None)  # for layers that nobody has mentioned
        for window in windows:
            if parent is not None:
                key = parent.groups[window].pool.key
            elif spec.states_geometry:
                key = (spec.page_size, _geometries(spec, window))
            else:
                key = ("private", next(self._private_keys))
            private = not spec.states_geometry
            pool = self._pools.open(key, spec.page_size, private=private)
            group = LayerGroup(window, pool, session.num_rows)
            group.in_use = any(layer.window == window for layer in spec.layers)
            session.groups[window] = group
        self._pools.usage.change_sessions(session.tenant, 1)

    def free(self, session: WorkerSession, reason: str) -> None:
        """Give back all that a session holds, because of `reason`."""
        freed = sum(table.cut(0) for group in session.groups.values() for table in group.tables)
        self._count_freed(session, freed, reason)
        self._promises.promise(session, None)
        for group in session.groups.values():
            self._pools.close(group.pool)
        self._pools.usage.change_sessions(session.tenant, -1)

    def cut(self, session: WorkerSession, keep: Sequence[int], reason: str) -> None:
        """Cut every layer of row r to at most `keep[r]`, and free what becomes empty."""
        was_followed = bool(session.followed_by)
        if all(k <= stop for k, stop in zip(keep, session.longest_of_all(), strict=True)):
            session.followed_by = ""  # nothing is left behind what this worker holds
        for group in session.groups.values():
            for row, table in enumerate(group.tables):
                freed = table.cut(_num_entries(session, row, keep[row], group.page_size))
                self._count_freed(session, freed, reason)
                reach = cdiv(keep[row], group.page_size) * group.page_size
                group.evicted[row] = min(group.evicted[row], reach) if keep[row] else 0
            group.changed()
        session.lengths = {
            layer: tuple(map(min, lengths, keep)) for layer, lengths in session.lengths.items()
        }
        for row, padding in enumerate(session.padding):
            padding.cut(keep[row])
        self._settle_starts(session, keep)
        targets = session.targets
        if targets is None and was_followed and not session.followed_by:
            targets = self._promises.reserved_targets(session)  # the tail is here again
        self._promises.promise_again(session, targets)

    def select(self, session: WorkerSession, rows: Sequence[int]) -> None:
        """Let new row i share the pages of old row `rows[i]`.

        Raises:
            OutOfPages: A reservation does not fit the new rows. Nothing has changed.
        """
        self._promises.hold_room_for_rows(session, rows)
        targets = session.targets
        for group in session.groups.values():
            old = group.tables
            # A row that goes on keeps its table: only what it is besides takes references.
            firsts = {row: new for new, row in reversed(list(enumerate(rows)))}
            group.tables = [
                old[row] if firsts[row] == new else old[row].share() for new, row in enumerate(rows)
            ]
            group.evicted = [group.evicted[row] for row in rows]
            group.changed()
            gone = [table for row, table in enumerate(old) if row not in firsts]
            self._count_freed(session, sum(table.cut(0) for table in gone), "select")
        session.padding = [session.padding[row].copy() for row in rows]
        if session.starts is not None:
            session.starts = [session.starts[row] for row in rows]
        session.lengths = {
            layer: tuple([lengths[row] for row in rows])
            for layer, lengths in session.lengths.items()
        }
        if targets is not None:
            session.targets = [targets[row] for row in rows]
            self._promises.promise(session, session.targets)

    def fork(
        self,
        parent: WorkerSession,
        child: WorkerSession,
        keep: Sequence[int],
        token_count: int | None,
    ) -> None:
        """Let a new session share the first `keep[r]` tokens of each of its parent's rows.

        Args:
            token_count: How many were asked for, over all workers of the session; None: all.

        Raises:
            OutOfPages: The parent's reservation needs a page more per row once pages are shared.
                The child holds nothing, the parent is unchanged.
        """
        child.begins_at_zero, child.group = parent.begins_at_zero, parent.group
        if token_count is None or any(token_count > stop for stop in parent.longest_of_all()):
            child.followed_by = parent.followed_by
        child.starts = None if parent.starts is None else list(parent.starts)
        child.geometries = dict(parent.geometries)
        child.lengths = {
            layer: tuple(map(min, lengths, keep)) for layer, lengths in parent.lengths.items()
        }
        child.padding = [padding.copy() for padding in parent.padding]
        for row, padding in enumerate(child.padding):
            padding.cut(keep[row])
        self.open_groups(child, parent)
        for window, group in parent.groups.items():
            size = group.page_size
            mine = child.groups[window]
            mine.in_use = group.in_use
            mine.tables = [
                table.share(_num_entries(parent, row, length, size))
                for row, (table, length) in enumerate(zip(group.tables, keep, strict=True))
            ]
            mine.evicted = [
                min(gone, cdiv(length, size) * size)
                for gone, length in zip(group.evicted, keep, strict=True)
            ]
            mine.changed()
        self._settle_starts(child, keep)
        try:
            self._promises.promise(parent, parent.targets)
        except KVServiceError:
            self.free(child, "release")  # every page of it is shared: none is freed
            raise

    def fork_lengths(
        self, parent: WorkerSession, token_count: int | None, *, clip: bool
    ) -> list[int]:
        """Return how much of each row a fork shares.

        Raises:
            PositionOutOfRange: A row is shorter than `token_count` (not with `clip`), or the
                child would see what a window has evicted.
        """
        longest = parent.longest_of_all()
        if token_count is None:
            return longest
        for row, length in enumerate(longest):
            if length < token_count and not clip:
                raise PositionOutOfRange(
                    f"row {row} has {length} tokens, {token_count} were asked for",
                    row=row,
                    length=length,
                )
            for group in parent.groups.values():
                if token_count < length:
                    parent.check_visible_after_cut(group, row, token_count)
        return [min(length, token_count) for length in longest]

    def _count_freed(self, session: WorkerSession, num_pages: int, reason: str) -> None:
        self._counters.page_frees[reason] += num_pages
        self._pools.usage.change_pages(session.tenant, -num_pages)

    def _settle_starts(self, session: WorkerSession, keep: Sequence[int]) -> None:
        """Let an extent that was cut below its start begin where the row ends now; if the cut has
        emptied it, let its next tokens decide."""
        if session.starts is None or session.begins_at_zero:
            return
        below = any(length < start for length, start in zip(keep, session.starts, strict=True))
        session.starts = [min(pair) for pair in zip(keep, session.starts, strict=True)]
        # One that never had tokens stays where it was opened, unless that is gone.
        if (below or session.lengths) and session.longest_of_all() == session.starts:
            session.starts = None
            session.lengths.clear()


def _num_entries(session: WorkerSession, row: int, length: int, page_size: int) -> int:
    """Return the page table's entries for a row that is cut to `length` tokens.

    A page in the middle of which the extent begins is none of the row's once nothing is left.
    """
    return length // page_size if length <= session.start_of(row) else cdiv(length, page_size)


def _geometries(spec: SessionSpec, window: int | None) -> tuple[LayerGeometry | None, ...]:
    return tuple(layer.geometry for layer in spec.layers if layer.window == window)
