"""How long sessions stay: their leases are renewed, run out, or are given back."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from kvservice_workers.arrivals import Arrivals
from kvservice_workers.counters import Counters
from kvservice_workers.departures import Departures
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.structure import Structure

NO_STAYS: Final[Mapping[str, str]] = {}


class Leases:
    """RenewLease and Release, and what frees sessions that nobody renews. Thread-safe."""

    def __init__(
        self,
        lock: threading.RLock,
        sessions: SessionTable,
        arrivals: Arrivals,
        departures: Departures,
        structure: Structure,
        counters: Counters,
    ) -> None:
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._arrivals = arrivals
        self._departures = departures
        self._structure = structure
        self._counters = counters

    def renew(self, tenant: str, session_ids: Sequence[str]) -> list[str]:
        """Renew leases; return the ids of sessions that do not exist."""
        missing = []
        with self._lock:
            for session_id in session_ids:
                session = self._sessions.find(tenant, session_id)
                if session is None:
                    missing.append(session_id)
                    self._sessions.renew_moved((tenant, session_id))
                else:
                    self._sessions.renew(session)
        return missing

    def find_ttl_s(self, tenant: str, session_id: str) -> float | None:
        """Return how long a session's lease runs, in seconds; None if there is no such session."""
        with self._lock:
            session = self._sessions.find(tenant, session_id)
            return None if session is None else session.ttl_s

    def release(
        self,
        tenant: str,
        session_ids: Iterable[str] | Mapping[str, int],
        unsettled: Collection[str] = (),
        stays: Mapping[str, str] = NO_STAYS,
    ) -> int:
        """Free sessions; those that do not exist are skipped. Return how many were freed.

        Args:
            session_ids: With the epoch up to which each is to be freed, if that matters; 0: any. A
                later one is somebody else's, and skipped too.
            unsettled: Of which of them the next epoch counts too, unless it came by an Attach:
                their holder does not know whether its last change has arrived.
            stays: The stay here that is meant of each, if one is. Another one is skipped: this
                release was on its way while the session ended here, and came again.
        """
        epochs = session_ids if isinstance(session_ids, Mapping) else {}
        released = 0
        for session_id in session_ids:
            up_to, is_unsettled = epochs.get(session_id) or math.inf, session_id in unsettled
            stay = stays.get(session_id, "")
            with self._lock:
                session = self._sessions.find(tenant, session_id)
                moved = self._sessions.find_moved((tenant, session_id))
                if moved is not None and stay in ("", moved.stay):
                    moved.released = True
                self._arrivals.release((tenant, session_id), up_to, stay, unsettled=is_unsettled)
            if session is None:
                continue
            with session.lock, self._lock:
                is_theirs = session.ends_by_release(up_to, stay, unsettled=is_unsettled)
                if not session.closed and is_theirs:
                    self._remove(session, "release")
                    released += 1
        return released

    def expire(self) -> int:
        """Free the sessions whose lease is over; return how many. Costs O(expired).

        A session in the middle of a call is left for the next time.
        """
        count = self._arrivals.expire()
        with self._lock:
            self._departures.sweep()
            for session in self._sessions.expired():
                # The other order of locks, so only if nobody has it.
                if session.lock.acquire(blocking=False):
                    try:
                        self._remove(session, "lease_expired")
                        self._counters.lease_expirations += 1
                        count += 1
                    finally:
                        session.lock.release()
        return count

    def next_deadline(self) -> float | None:
        """Return when `expire` is worth calling next, in the clock's monotonic seconds."""
        with self._lock:
            return self._sessions.next_look()

    def close(self) -> None:
        """Free every session."""
        with self._lock:
            sessions = list(self._sessions.all())
        for session in sessions:
            with session.lock, self._lock:
                if not session.closed:
                    self._remove(session, "release")

    def _remove(self, session: WorkerSession, reason: str) -> None:
        self._counters.timings.session_pages.observe(session.num_pages)
        self._structure.free(session, reason)
        self._sessions.remove(session, expired=reason == "lease_expired")
