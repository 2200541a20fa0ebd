"""Whether a worker opens another session, and a tenant may have one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from kvservice.core.errors import Draining, TooManySessions
from kvservice.core.session import SessionSpec
from kvservice_workers.arrival import ArrivalTable
from kvservice_workers.counters import Counters
from kvservice_workers.session_state import SessionKey, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.usage import TenantUsage


class Admission:
    """Lets sessions in, whether they are opened here or come from elsewhere.

    The worker's lock is held by the caller.

    Fields:
        draining: The worker opens no more sessions.
        max_sessions: How many it may hold, those that are on their way here included.
    """

    def __init__(
        self,
        incarnation: str,
        max_sessions: int,
        sessions: SessionTable,
        arriving: ArrivalTable,
        usage: TenantUsage,
        counters: Counters,
    ) -> None:
        self.draining = False
        self._incarnation = incarnation
        self._numbers = itertools.count(1)  # of stays: none is ever given twice
        self.max_sessions = max_sessions
        self._sessions = sessions
        self._arriving = arriving
        self._usage = usage
        self._counters = counters

    def check(self) -> None:
        """Raise Draining or TooManySessions if the worker opens no more sessions."""
        if self.draining:
            self._counters.allocation_failures["draining"] += 1
            raise Draining("this worker is leaving and opens no sessions", retry_delay_s=1.0)
        if len(self._sessions) + len(self._arriving) >= self.max_sessions:
            self._counters.allocation_failures["too_many_sessions"] += 1
            raise TooManySessions(
                f"this worker holds {len(self._sessions)} sessions, the most it may",
                retry_delay_s=1.0,
                limit=self.max_sessions,
            )

    def admit(
        self, key: SessionKey, spec: SessionSpec, origin: Hashable, *, is_counted: bool = False
    ) -> WorkerSession:
        """Return a new session, which holds nothing yet.

        Args:
            origin: The request that opens it.
            is_counted: It is open on another worker already, and counts there.

        Raises:
            Draining, TooManySessions: As `check`.
            QuotaExceeded: Its tenant may have no other one, or none like this.
        """
        self.check()
        tenant, _ = key
        self._usage.check_sessions(tenant, spec, is_counted=is_counted)
        session = WorkerSession(key, spec, origin, self._usage.quota_of(tenant))
        session.stay = f"{self._incarnation}/{next(self._numbers)}"
        return session
