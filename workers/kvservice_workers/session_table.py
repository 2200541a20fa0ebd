"""The sessions of a worker: found by tenant and id, held by lease, reported by change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

from kvservice.clock import Clock
from kvservice.core.errors import AlreadyExists, KVServiceError
from kvservice.core.lease import LeaseTable
from kvservice.core.moving import MovedTo
from kvservice.core.session import EndedSession
from kvservice_workers.session_state import SessionKey, WorkerSession, session_not_found

# Ended sessions that heartbeats can still report: those of a full worker at once. A worker
# without a manager reports none, and keeps no more than these.
MAX_ENDED = 20_000

MAX_MOVED: Final = 20_000
MOVED_FOR_S: Final = 3600.0
"""How long it is remembered where a session went: whoever holds it renews its lease before."""


LATE_S: Final = 10.0
"""So long a copy of a request may be on its way."""


@dataclass(slots=True)
class Moved:
    """A session that another worker has taken over.

    Fields:
        origin: The request that opened it.
        at: When it went, in the clock's monotonic seconds.
        known_until: So long it is told where to.
        confirmed: The other worker has said that it serves it.
        released: Its holder wants it no more: its id may be used again.
        stay: That has ended here when it went.
        given_up_ticket: It was to come again by this one, and its lease was over before it was
            known whether it has. Who shows the ticket knows that it has: then it has ended here.
    """

    to: MovedTo
    origin: Hashable
    ttl_s: float
    at: float
    known_until: float
    confirmed: bool = False
    released: bool = False
    stay: str = ""
    given_up_ticket: int = 0


class Expired(NamedTuple):
    """A session whose lease was over.

    Fields:
        origin: The request that opened it.
        at: When it was ended, in the clock's monotonic seconds.
    """

    origin: Hashable
    at: float


class SessionTable:
    """Every open session, and what has changed since when. The worker's lock is held by the caller.

    Invariants (asserted by `check`):
      1. Exactly the sessions in the table have a lease.
      2. Every session has a place in the order of changes.
      3. No session that is here counts as moved away.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[SessionKey, WorkerSession] = {}
        self._leases: LeaseTable[SessionKey] = LeaseTable()
        self._serial = 0
        self._changed: dict[SessionKey, int] = {}  # oldest first
        self._ended: deque[tuple[int, EndedSession]] = deque(maxlen=MAX_ENDED)
        self._moved: dict[SessionKey, Moved] = {}  # oldest first
        self._expired: dict[SessionKey, Expired] = {}  # lately; oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> Collection[WorkerSession]:
        """Return all sessions, oldest first."""
        return self._sessions.values()

    def use(self, tenant: str, session_id: str, *, renew: bool = True) -> WorkerSession:
        """Return a session whose lease holds, and (unless told not to) renew it.

        Raises:
            SessionNotFound, SessionMoved.
        """
        session = self.find(tenant, session_id)
        if session is None:
            raise self.missing((tenant, session_id))
        if renew:
            self.renew(session)
        return session

    def missing(self, key: SessionKey) -> KVServiceError:
        """Return the error for a session that is not here: it has moved, or is nowhere."""
        moved = self.find_moved(key)
        return session_not_found() if moved is None else moved.to.error()

    def find(self, tenant: str, session_id: str) -> WorkerSession | None:
        """Return a session whose lease holds; None if there is none."""
        session = self._sessions.get((tenant, session_id))
        if session is None or self.holds(session, self._clock.monotonic()):
            return session
        if not session.lock.acquire(blocking=False):  # in the middle of a call
            return session
        session.lock.release()
        return None

    def peek(self, tenant: str, session_id: str) -> WorkerSession | None:
        """Return a session whatever its lease. For hints: the worker's lock is not needed."""
        return self._sessions.get((tenant, session_id))

    def holds(self, session: WorkerSession, now: float) -> bool:
        """Whether the lease of a session that is not closed holds, at a monotonic time.

        Who has the session's lock needs not the worker's: a session is removed under both.
        """
        return self._leases.deadline(session.key) >= now

    def find_repeat(self, key: SessionKey, origin: Hashable) -> WorkerSession | None:
        """Return the session that the same request has opened before; None if there is none.

        Raises:
            AlreadyExists: Another request has opened a session with this id; or this one has, and
                its lease was over a moment ago: its holder may not know yet, and is not to find an
                empty one.
            SessionMoved: This one has, and another worker holds it by now.
        """
        existing = self._sessions.get(key)
        if existing is not None:
            if existing.origin != origin:
                raise AlreadyExists("this session id is in use for another request")
            return existing
        # Later than this it is no late copy of that request, but another session by its id.
        now = self._clock.monotonic()
        moved = self._moved.get(key)
        late_until = 0.0 if moved is None or moved.released else moved.at + LATE_S
        if moved is not None and moved.origin == origin and now < late_until:
            raise moved.to.error()
        expired = self._expired.get(key)
        if expired is not None and expired.origin == origin and now < expired.at + LATE_S:
            raise AlreadyExists("the session that this request had opened has expired")
        return None

    def renew(self, session: WorkerSession, now: float | None = None) -> None:
        """Let the lease run from now."""
        if now is None:
            now = self._clock.monotonic()
        self._leases.renew(session.key, now + session.ttl_s)

    def add(self, session: WorkerSession, left_s: float | None = None) -> None:
        """Begin a session's lease; `left_s`: with so much of it left."""
        self._sessions[session.key] = session
        self._moved.pop(session.key, None)
        left_s = session.ttl_s if left_s is None else left_s
        self._leases.grant(session.key, self._clock.monotonic() + left_s)
        self.changed(session)

    def left_s(self, session: WorkerSession) -> float:
        """Return how much of a session's lease is left, in seconds."""
        return self._leases.deadline(session.key) - self._clock.monotonic()

    def hand_over(self, session: WorkerSession, to: MovedTo) -> None:
        """End a session here: another worker holds it from now on."""
        now = self._clock.monotonic()
        _forget_old(self._moved, now - MOVED_FOR_S, MAX_MOVED)
        known_until = now + max(session.ttl_s, LATE_S)
        self._moved[session.key] = Moved(
            to, session.origin, session.ttl_s, now, known_until, stay=session.stay
        )
        session.moved_to = to
        self.remove(session, expired=False)

    def find_moved(self, key: SessionKey) -> Moved | None:
        """Return where a session went from here; None if it did not, or so long ago that its holder
        has followed or is no more: nobody has renewed its lease here since."""
        moved = self._moved.get(key)
        if moved is None:
            return None
        return moved if self._clock.monotonic() < moved.known_until else None

    def gave_up(self, key: SessionKey, ticket: int) -> None:
        """Note that a session was given up that was to come again by a ticket."""
        moved = self._moved.get(key)
        if moved is not None:
            moved.given_up_ticket = ticket

    def has_come_again(self, key: SessionKey, ticket: int) -> None:
        """Forget where a session went from here, if it was given up that has come by this ticket:
        where it went it is told that it is here, and whoever follows would never arrive."""
        moved = self._moved.get(key)
        if moved is not None and ticket and moved.given_up_ticket == ticket:
            del self._moved[key]

    def renew_moved(self, key: SessionKey) -> None:
        """Remember for another ttl where a session went: who renews it here has not followed."""
        moved = self.find_moved(key)
        if moved is not None:
            moved.known_until = max(moved.known_until, self._clock.monotonic() + moved.ttl_s)

    def is_unconfirmed(self, since: float) -> bool:
        """Whether a session that went after this time may not be served yet where it is."""
        recent = takewhile(lambda moved: moved.at > since, reversed(self._moved.values()))
        return any(not moved.confirmed for moved in recent)

    def moved_last_at(self) -> float | None:
        """Return when a session went last, in the clock's monotonic seconds; None: none did."""
        return next(reversed(self._moved.values())).at if self._moved else None

    def remove(self, session: WorkerSession, *, expired: bool) -> None:
        """End a session, because its lease was over, or somebody wants it."""
        session.closed = True
        del self._sessions[session.key]
        self._leases.revoke(session.key)
        del self._changed[session.key]
        self._serial += 1
        self._ended.append((self._serial, EndedSession(*session.key, expired)))
        if expired:
            self._remember(session)

    def expired(self) -> list[WorkerSession]:
        """Return the sessions whose lease is over."""
        return [self._sessions[key] for key in self._leases.expired(self._clock.monotonic())]

    def next_look(self) -> float | None:
        """Return when `expired` is worth calling next, in monotonic seconds."""
        return self._leases.next_look()

    def changed(self, session: WorkerSession) -> None:
        """Note a change that heartbeats report."""
        self._serial += 1
        self._changed.pop(session.key, None)
        self._changed[session.key] = self._serial

    def changes_since(self, cursor: int) -> tuple[int, list[WorkerSession], list[EndedSession]]:
        """Return a new cursor, the sessions changed since the old one, and those ended since.

        What ended before the old cursor is forgotten: whoever has that was told.
        """
        changed = []
        for key in reversed(self._changed):
            if self._changed[key] <= cursor:
                break
            changed.append(self._sessions[key])
        while self._ended and self._ended[0][0] <= cursor:
            self._ended.popleft()
        return self._serial, changed[::-1], [one for _, one in self._ended]

    def check(self) -> None:
        self._leases.check()
        assert len(self._leases) == len(self._sessions) == len(self._changed)
        assert self._moved.keys().isdisjoint(self._sessions), "here, and moved away"

    # -- inside

    def _remember(self, session: WorkerSession) -> None:
        now = self._clock.monotonic()
        _forget_old(self._expired, now - LATE_S)
        self._expired.pop(session.key, None)  # so that the order is that of the times
        self._expired[session.key] = Expired(session.origin, now)


def _forget_old(
    table: dict[SessionKey, Moved] | dict[SessionKey, Expired],
    until: float,
    max_size: float = math.inf,
) -> None:
    """Drop what is of no later than `until` from a table, oldest first, and what leaves no room in
    it for one more."""
    while table:
        oldest = next(iter(table))
        if len(table) < max_size and table[oldest].at > until:
            return
        del table[oldest]
