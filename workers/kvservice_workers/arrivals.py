"""Sessions that are on their way here from other workers: begun, completed, here, or given up."""

from __future__ import annotations

import threading

from kvservice.clock import Clock
from kvservice.core.errors import AlreadyExists, Conflict, KVServiceError
from kvservice.core.moving import SessionState, stay_by
from kvservice_workers.admission import Admission
from kvservice_workers.arrival import Arrival, ArrivalTable
from kvservice_workers.moved_state import become, set_tables
from kvservice_workers.page_table import PageTable
from kvservice_workers.promises import Promises
from kvservice_workers.session_state import SessionKey
from kvservice_workers.session_table import SessionTable
from kvservice_workers.structure import Structure


class Arrivals:
    """Takes sessions over, from the first page until the worker that holds one lets go of it.

    What is on its way is no session yet: nobody can use it, it is not reported, and it is dropped
    as a whole. Its pages (`ArrivingPages`) count as used all the same.
    """

    def __init__(
        self,
        lock: threading.RLock,
        sessions: SessionTable,
        arriving: ArrivalTable,
        promises: Promises,
        structure: Structure,
        admission: Admission,
        clock: Clock,
    ) -> None:
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._arriving = arriving
        self._promises = promises
        self._structure = structure
        self._admission = admission
        self._clock = clock

    def check_admitted(self, tenant: str, session_id: str) -> None:
        """Refuse what cannot be taken over.

        Raises:
            AlreadyExists: It is here, or a part of it, be it that its lease is over.
            Conflict: It is on its way here already.
            Draining, TooManySessions.
        """
        with self._lock:
            self._check_is_not_here((tenant, session_id))
            self._admission.check()

    def begin(
        self,
        tenant: str,
        session_id: str,
        state: SessionState,
        source: str,
        *,
        keeps: bool = False,
    ) -> Arrival:
        """Begin to take a session over from an incarnation of another worker.

        Args:
            keeps: That one will hold it too.

        Raises:
            As `check_admitted`, and QuotaExceeded.
        """
        with self._lock:
            key = (tenant, session_id)
            self._check_is_not_here(key)
            session = self._admission.admit(key, state.spec, state.origin, is_counted=True)
            self._structure.open_groups(session)
            arrival = Arrival(session, source, keeps)
            for window, group in session.groups.items():
                group.tables, group.evicted = [PageTable(group.pool.pages)], [0]
                arrival.copied[window] = {}
            self._arriving.add(arrival)
            return arrival

    def complete(self, arrival: Arrival, state: SessionState, ticket: int) -> None:
        """Make it the session that was frozen there, for whoever will say that it is ours.

        Args:
            state: As frozen, with no page missing.

        Raises:
            OutOfPages, QuotaExceeded: What is promised to it does not fit. Nothing has changed.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._arriving.check_copying(arrival)
            become(arrival.session, state, arrival.source)
            for group in state.groups:
                copies = {page: one.page for page, one in arrival.copied[group.window].items()}
                set_tables(arrival.session.groups[group.window], group, copies)
            arrival.session.stay = stay_by(arrival.source, ticket)
            arrival.complete, arrival.ticket = True, ticket
            arrival.ends_at = self._clock.monotonic() + state.left_s
            try:
                self._promises.promise(arrival.session, state.targets)
            except KVServiceError:
                self._reopen(arrival)
                raise

    def reopen(self, arrival: Arrival) -> None:
        """Go on copying: the session goes on where it was."""
        with self._lock:
            if arrival.complete and not (arrival.gone or arrival.here):
                self._reopen(arrival)

    def arrive(self, arrival: Arrival) -> bool:
        """Serve a session from now on: it has been handed over. Return False if it has been given
        up meanwhile."""
        with self._lock:
            if not arrival.gone and not arrival.here:
                assert arrival.complete, "it is not known what it is"
                self._arriving.remove(arrival)
                arrival.here = True
                if arrival.keeps:
                    arrival.session.go_on_with_copy()
                left_s = max(0.0, arrival.ends_at - self._clock.monotonic())
                self._sessions.add(arrival.session, left_s)
            return arrival.here

    def arrive_by(self, tenant: str, session_id: str, ticket: int) -> None:
        """Take somebody's word, who shows the ticket, that a session has been handed over."""
        with self._lock:
            key = (tenant, session_id)
            arrival = self._arriving.find(key)
            if arrival is None:
                self._sessions.has_come_again(key, ticket)
            elif arrival.complete and arrival.ticket == ticket:
                self.arrive(arrival)

    def drop(self, arrival: Arrival) -> None:
        """Give up what is on its way, and its pages."""
        with self._lock:
            if not arrival.gone and not arrival.here:
                self._arriving.remove(arrival)
                arrival.gone = True
                if arrival.complete and not arrival.keeps:
                    self._sessions.gave_up(arrival.key, arrival.ticket)
                self._structure.free(arrival.session, "move")

    def release(self, key: SessionKey, up_to: float, stay: str, *, unsettled: bool) -> None:
        """Give up a session that its holder wants no more; see `WorkerSession.ends_by_release`."""
        with self._lock:
            arrival = self._arriving.find(key)
            if arrival is not None and arrival.session.ends_by_release(
                up_to, stay, unsettled=unsettled
            ):
                self.drop(arrival)

    def expire(self) -> int:
        """Give up those whose lease is over while nobody knows whose they are; return how many."""
        with self._lock:
            now = self._clock.monotonic()
            over = [one for one in self._arriving.all() if one.complete and one.ends_at <= now]
            for arrival in over:
                self.drop(arrival)
            return len(over)

    def close(self) -> None:
        """Give up everything."""
        with self._lock:
            for arrival in list(self._arriving.all()):
                self.drop(arrival)

    # -- inside

    def _check_is_not_here(self, key: SessionKey) -> None:
        if self._sessions.peek(*key) is not None:  # until it is freed, its id is taken
            raise AlreadyExists("this worker holds the session, or a part of it")
        if self._arriving.find(key) is not None:
            raise Conflict("the session is on its way here already", retry_delay_s=1.0)

    def _reopen(self, arrival: Arrival) -> None:
        """Undo `complete`: pages without an order again."""
        session = arrival.session
        self._promises.promise(session, None)
        for window, group in session.groups.items():
            pages = group.pool.pages
            mine = [one.page for one in arrival.copied[window].values()]
            pages.retain(mine)
            for table in group.tables:
                table.cut(0)
            group.tables, group.evicted = [PageTable.holding(pages, mine)], [0]
        arrival.complete = False
