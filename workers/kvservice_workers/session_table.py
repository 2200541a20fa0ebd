"""The sessions of a worker: found by tenant and id, held by lease, reported by change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

from kvservice.clock import Clock
from kvservice.core.errors import AlreadyExists
from kvservice.core.lease import LeaseTable
from kvservice.core.session import EndedSession
from kvservice_workers.session_state import SessionKey, WorkerSession, session_not_found

# Ended sessions that heartbeats can still report: those of a full worker at once. A worker
# without a manager reports none, and keeps no more than these.
MAX_ENDED = 20_000


class SessionTable:
    """Every open session, and what has changed since when. The worker's lock is held by the caller.

    Invariants (asserted by `check`):
      1. Exactly the sessions in the table have a lease.
      2. Every session has a place in the order of changes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[SessionKey, WorkerSession] = {}
        self._leases: LeaseTable[SessionKey] = LeaseTable()
        self._serial = 0
        self._changed: dict[SessionKey, int] = {}  # oldest first
        self._ended: deque[tuple[int, EndedSession]] = deque(maxlen=MAX_ENDED)

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> Collection[WorkerSession]:
        """Return all sessions, oldest first."""
        return self._sessions.values()

    def use(self, tenant: str, session_id: str) -> WorkerSession:
        """Return a session whose lease holds, and renew it.

        Raises:
            SessionNotFound
        """
        session = self.find(tenant, session_id)
        if session is None:
            raise session_not_found()
        self.renew(session)
        return session

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
            AlreadyExists: Another request has opened a session with this id.
        """
        existing = self._sessions.get(key)
        if existing is not None and existing.origin != origin:
            raise AlreadyExists("this session id is in use for another request")
        return existing

    def renew(self, session: WorkerSession, now: float | None = None) -> None:
        """Let the lease run from now."""
        if now is None:
            now = self._clock.monotonic()
        self._leases.renew(session.key, now + session.ttl_s)

    def add(self, session: WorkerSession) -> None:
        """Begin a session's lease."""
        self._sessions[session.key] = session
        self._leases.grant(session.key, self._clock.monotonic() + session.ttl_s)
        self.changed(session)

    def remove(self, session: WorkerSession, *, expired: bool) -> None:
        """End a session, because its lease was over, or somebody wants it."""
        session.closed = True
        del self._sessions[session.key]
        self._leases.revoke(session.key)
        del self._changed[session.key]
        self._serial += 1
        self._ended.append((self._serial, EndedSession(*session.key, expired)))

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
