"""Room that is promised to sessions: reservations, and what Append asks for."""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.core.errors import InvalidRequest, KVServiceError
from kvservice_workers.pools import Pool, PoolSet, Room, by_pool
from kvservice_workers.provision import arena_of
from kvservice_workers.session_state import WorkerSession


class Promises:
    """Keeps what pools hold back in step with what sessions were promised.

    The worker's lock is held by the caller.
    """

    def __init__(self, pools: PoolSet) -> None:
        self._pools = pools

    def promise(self, session: WorkerSession, targets: Sequence[int] | None) -> None:
        """Promise a session room for rows of these lengths, instead of what it was promised.

        Raises:
            OutOfPages, QuotaExceeded, InvalidRequest: There is not, the tenant may not have, or
                there never is so much. Nothing has changed.
        """
        if targets is None and session.targets is None:
            return
        before = session.targets
        session.targets = None if targets is None else list(targets)
        rooms = [
            Room(group.pool, promise_change=session.promise_of(group) - group.promised)
            for group in session.groups.values()
        ]
        try:
            grown = sum(room.promise_change for room in rooms)
            self._pools.usage.check_pages(session.tenant, grown)
            self._make_stated_arenas(session)
            for room in by_pool(rooms):
                self._check_satisfiable(room.pool, room.promise_change)
                self._pools.make_room(room, keep=session.pools())
        except KVServiceError:
            session.targets = before
            raise
        for group in session.groups.values():
            promise = session.promise_of(group)
            group.pool.pages.take(0, promise_change=promise - group.promised)
            self._pools.usage.change_pages(session.tenant, promise - group.promised)
            group.promised = promise

    def promise_again(self, session: WorkerSession, targets: Sequence[int] | None) -> None:
        """Promise room after pages were given up. Where a fork still holds them and there is no
        room for others, the promise lapses: giving up pages never fails."""
        try:
            self.promise(session, targets)
        except KVServiceError:
            self.promise(session, None)

    def hold_room_for_rows(self, session: WorkerSession, rows: Sequence[int]) -> None:
        """Make sure that a reservation holds for new rows, all of whose pages may be shared.

        The room is held for them until the session's next call: on several workers all are asked
        before the first one changes anything, and none may fail afterwards.

        Raises:
            OutOfPages, QuotaExceeded: Nothing has changed.
        """
        if session.targets is None:
            return
        groups = list(session.groups.values())
        changes: list[int] = []
        for group in groups:
            entries = [len(table.entries) for table in group.tables]
            most = sum(
                session.row_promise(group, row, entries[row], entries[row] > 0) for row in rows
            )
            changes.append(max(0, most - group.promised))
        self._pools.usage.check_pages(session.tenant, sum(changes))
        rooms = [
            Room(group.pool, promise_change=change)
            for group, change in zip(groups, changes, strict=True)
        ]
        for room in by_pool(rooms):
            self._pools.make_room(room, keep=session.pools())
        for group, change in zip(groups, changes, strict=True):
            group.pool.pages.take(0, promise_change=change)
            self._pools.usage.change_pages(session.tenant, change)
            group.promised += change

    def _make_stated_arenas(self, session: WorkerSession) -> None:
        """Make all arenas of a session that states its layers, so that its bytes are counted."""
        if session.targets is None or not session.spec.states_geometry:
            return
        for layer, geometry in session.geometries.items():
            arena_of(self._pools, session, layer, geometry)

    def _check_satisfiable(self, pool: Pool, num_pages: int) -> None:
        if num_pages * pool.page_bytes > self._pools.budget_bytes:
            raise InvalidRequest(
                f"{num_pages} pages of {pool.page_bytes} bytes can never fit into this worker's "
                f"{self._pools.budget_bytes} bytes",
                budget_bytes=self._pools.budget_bytes,
            )

    def reserved_targets(self, session: WorkerSession) -> list[int] | None:
        """Return the lengths that a session was opened with room for.

        Of a session that spreads over several workers any may become the tail, and so must have
        room up to there; those that have not, give it back (`lapse`).
        """
        reserved = session.spec.reserve_tokens
        if reserved is None:
            return None
        if session.spec.spread > 1:
            return [reserved] * session.num_rows
        return [session.start_of(row) + reserved for row in range(session.num_rows)]

    def lapse(self, session: WorkerSession) -> None:
        """Promise nothing more to a session whose next tokens go to another worker."""
        self.promise(session, None)
