"""Sessions that other workers copy, and take over: what the worker that holds them does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvservice.clock import Clock
from kvservice.core.errors import Conflict, InvalidRequest
from kvservice.core.failpoints import Failpoints
from kvservice.core.geometry import HostTensor
from kvservice.core.moving import CopiedPages, MovedTo, SessionState
from kvservice_workers.arena import slots_of
from kvservice_workers.host_tensors import from_numpy
from kvservice_workers.moved_state import state_of
from kvservice_workers.session_state import Copy, Freeze, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.structure import Structure
from kvservice_workers.worker_config import WorkerConfig

FREEZE_S: Final = 0.5
"""How long a session waits for who wants to take it over."""

COPY_IDLE_S: Final = 10.0
"""A copy that nobody goes on with for so long may be replaced by another one."""


@dataclass(frozen=True, slots=True)
class Successor:
    """Who holds a session instead of this worker, or besides it.

    Fields:
        ttl_s: The session's, in seconds.
        copied_at_epoch: Both hold it since this epoch began. 0: it has moved.
        copied_from_epoch: Since when nothing has happened but copies, of which the holder has not
            heard: it is still the holder at this epoch, and later ones.
    """

    to: MovedTo
    ttl_s: float
    copied_at_epoch: int = 0
    copied_from_epoch: int = 0


class Departures:
    """Tells what sessions are made of, and hands them over.

    A copy of a session is made while it is used: pages are numbered, and it is told when each was
    written last, so that whoever copies fetches again what has changed. At the end the session is
    frozen, for half a second at most, by a ticket. Handing it over by that ticket is the one moment
    at which it stops being this worker's, and is somebody else's: who is in doubt asks here.
    Neither renews a lease: that is its holder's.
    """

    def __init__(
        self,
        config: WorkerConfig,
        lock: threading.RLock,
        sessions: SessionTable,
        structure: Structure,
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self._config = config
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._structure = structure
        self._clock = clock
        self._failpoints = failpoints
        self._numbers = itertools.count(1)  # of copies and tickets: none is ever given twice
        self._copied: dict[int, WorkerSession] = {}  # by the number of the copy

    def state(
        self, tenant: str, session_id: str, copier: str, copy: int, *, freeze: bool
    ) -> tuple[int, int, SessionState]:
        """Return the number of a copy, a ticket, and what the session is made of now.

        Args:
            copier: Who copies.
            copy: 0: begin, or go on with what the same copier has begun.
            freeze: Let nothing change the session for a while. The ticket is 0 otherwise, and what
                was frozen before thaws.

        Raises:
            SessionNotFound, SessionMoved.
            Conflict: Somebody else makes a copy of it, or this one was given up.
        """
        with self._using(tenant, session_id) as session:
            now = self._clock.monotonic()
            mine = self._begin(session, copier, now) if not copy else self._go_on(session, copy)
            mine.used_at = now
            session.frozen = Freeze(next(self._numbers), now + FREEZE_S) if freeze else None
            ticket = 0 if session.frozen is None else session.frozen.ticket
            return mine.number, ticket, state_of(session, self._sessions.left_s(session))

    def pages(
        self,
        tenant: str,
        session_id: str,
        copy: int,
        window: int | None,
        layers: Sequence[int],
        pages: Sequence[int],
    ) -> CopiedPages:
        """Return pages of a layer group, with all that they hold of some layers.

        Raises:
            SessionNotFound, SessionMoved.
            Conflict: The copy was given up, or a page is no longer there.
            InvalidRequest: The session has no such layers.
        """
        with self._using(tenant, session_id) as session:
            self._go_on(session, copy).used_at = self._clock.monotonic()
            group = session.groups.get(window)
            if group is None or any(session.window_of(layer) != window for layer in layers):
                raise InvalidRequest(f"layers {list(layers)} are not of a window of {window}")
            pool = group.pool
            if any(not 0 <= page < pool.pages.total for page in pages):
                raise Conflict("a page is no longer there: look at the session again")
            at, offsets = slots_of(pages, group.page_size)
            found: dict[int, tuple[HostTensor, HostTensor]] = {}
            with pool.lock:
                for layer in layers:
                    arena = pool.arenas.get(session.arena_index(layer))
                    if arena is None:
                        raise InvalidRequest(f"layer {layer} has stored nothing")
                    k, v = arena.load(at, offsets)
                    dtype = arena.geometry.dtype
                    found[layer] = from_numpy(k, dtype), from_numpy(v, dtype)
            written = group.written or {}
            return CopiedPages(tuple(written.get(page, 0) for page in pages), found)

    def share(self, tenant: str, session_id: str, to: MovedTo) -> None:
        """Let another worker hold a session too: both go on at the next epoch. Repeat-safe by the
        ticket.

        Raises:
            SessionNotFound: It has ended.
            SessionMoved: Somebody else has taken it.
            Conflict: It is not frozen by this ticket (any more), or is about to be changed.
        """
        with self._using(tenant, session_id) as session:
            known = None if session.copied is None else session.copied[0]
            # Other workers, on which the session was, have given the same tickets for other stays.
            if known is not None and (known.ticket, known.stay) == (to.ticket, to.stay):
                return
            self._check_frozen(session, to.ticket)
            if self._clock.monotonic() < session.change_due_by:
                raise Conflict("the session is about to be changed", retry_delay_s=1.0)
            if session.unheard_from and session.is_in_parts:
                # The others are at the epoch of the holder, and would count as left behind.
                raise Conflict("the holder has not heard of the last copy", retry_delay_s=1.0)
            self._end_copy(session)
            session.frozen = None
            session.go_on_with_copy()
            session.copied = to, session.epoch
            self._sessions.changed(session)
        self._failpoints.passed("move.handed_over")

    def hand_over(
        self, tenant: str, session_id: str, to: MovedTo, *, confirmed: bool = False
    ) -> None:
        """Let another worker hold a session from now on. Repeat-safe by the ticket.

        Args:
            confirmed: It serves the session.

        Raises:
            SessionNotFound: It has ended.
            SessionMoved: Somebody else has taken it.
            Conflict: It is not frozen by this ticket (any more). Nothing has changed.
        """
        key = (tenant, session_id)
        with self._lock:
            moved = self._sessions.find_moved(key)
            if moved is not None and moved.to.ticket == to.ticket:
                moved.confirmed |= confirmed
                return
        with self._using(tenant, session_id) as session:
            self._check_frozen(session, to.ticket)
            self._end_copy(session)
            self._structure.free(session, "move")
            self._sessions.hand_over(session, to)
        self._failpoints.passed("move.handed_over")

    def moved_among(self, tenant: str, session_ids: Iterable[str]) -> list[str]:
        """Return those sessions that were moved from here to other workers."""
        with self._lock:
            return [
                session_id
                for session_id in session_ids
                if self._sessions.find_moved((tenant, session_id)) is not None
            ]

    def find_successor(self, tenant: str, session_id: str) -> Successor | None:
        """Return where a session went from here, or where a copy of it was made with which its
        epoch began, which may be the one that is here; None if it did not, and there was none."""
        with self._lock:
            moved = self._sessions.find_moved((tenant, session_id))
            if moved is not None:
                return Successor(moved.to, moved.ttl_s)
            session = self._sessions.find(tenant, session_id)
            if session is None:
                return None
            if session.copied is not None and session.copied[1] == session.epoch:
                to = session.copied[0]
            elif session.unheard_from:  # it is that copy
                here = self._config
                to = MovedTo(here.worker_id, here.address, here.incarnation, 0, session.stay)
            else:
                return None
            holder_at = session.unheard_from or session.epoch - 1
            return Successor(to, session.ttl_s, session.epoch, holder_at)

    def waits_for_takers(self, linger_s: float) -> bool:
        """Whether a session went so lately that somebody may still have to be told where to."""
        with self._lock:
            last = self._sessions.moved_last_at()
            if last is None:
                return False
            now = self._clock.monotonic()
            return now - last < linger_s or self._sessions.is_unconfirmed(now - 10 * linger_s)

    def sweep(self) -> None:
        """Forget copies that nobody goes on with. The worker's lock is held."""
        since = self._clock.monotonic() - 3 * COPY_IDLE_S
        for session in list(self._copied.values()):
            idle = session.copy is None or session.copy.used_at < since
            # The other order of locks, so only if nobody has it.
            if (session.closed or idle) and session.lock.acquire(blocking=False):
                try:
                    self._end_copy(session)
                finally:
                    session.lock.release()

    # -- inside

    def _check_frozen(self, session: WorkerSession, ticket: int) -> None:
        frozen = session.frozen
        if frozen is None or frozen.ticket != ticket:
            raise Conflict("the session is not frozen by this ticket")
        if self._clock.monotonic() >= frozen.until:
            raise Conflict("the session has waited long enough, and goes on here")

    @contextmanager
    def _using(self, tenant: str, session_id: str) -> Iterator[WorkerSession]:
        """Hold a session and the worker, without renewing the lease."""
        with self._lock:
            session = self._sessions.use(tenant, session_id, renew=False)
        with session.lock, self._lock:
            session.check_open()
            yield session

    def _begin(self, session: WorkerSession, copier: str, now: float) -> Copy:
        current = session.copy
        if current is not None:
            if current.copier == copier:
                return current
            if now < current.used_at + COPY_IDLE_S:
                raise Conflict("the session is being copied by somebody else", retry_delay_s=1.0)
            self._end_copy(session)
        session.copy = Copy(next(self._numbers), copier, now)
        self._copied[session.copy.number] = session
        for group in session.groups.values():
            group.written = {}
        return session.copy

    def _go_on(self, session: WorkerSession, copy: int) -> Copy:
        if session.copy is None or session.copy.number != copy:
            raise Conflict("this copy of the session was given up: begin another one")
        return session.copy

    def _end_copy(self, session: WorkerSession) -> None:
        if session.copy is not None:
            self._copied.pop(session.copy.number, None)
            session.copy = None
        for group in session.groups.values():
            group.written = None
