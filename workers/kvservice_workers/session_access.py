"""How calls get at their sessions: found, renewed, held while the call lasts, and told of."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from kvservice.clock import Clock
from kvservice.core.errors import KVServiceError, OutOfPages, QuotaExceeded, StaleEpoch
from kvservice.core.session import SessionInfo
from kvservice_workers.arrival import ArrivalTable
from kvservice_workers.counters import Counters
from kvservice_workers.session_state import SessionKey, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.snapshot import session_info
from kvservice_workers.worker_config import WorkerConfig


class SessionAccess:
    """GetSession, and what all other calls on a session begin and end with. Thread-safe.

    A session's lock is taken before the worker's.
    """

    def __init__(
        self,
        config: WorkerConfig,
        lock: threading.RLock,
        sessions: SessionTable,
        arriving: ArrivalTable,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._config = config
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._arriving = arriving
        self._counters = counters
        self._clock = clock

    def get(self, tenant: str, session_id: str, *, renew: bool = True) -> SessionInfo:
        """Return where a session stands.

        Args:
            renew: Whether this is a call on the session, as any of its holder's.

        Raises:
            SessionNotFound, SessionMoved, Moving.
        """
        with self._lock:
            self._arriving.check_not_arriving((tenant, session_id))
            session = self._sessions.use(tenant, session_id, renew=renew)
        with session.lock, self._lock:
            session.check_open()
            return self.info(session, with_padding=True)

    def use(self, tenant: str, session_id: str) -> WorkerSession:
        """Find a session whose lease holds, and renew it."""
        with self._lock:
            if len(self._arriving):
                self._arriving.check_not_arriving((tenant, session_id))
            return self._sessions.use(tenant, session_id)

    def find_repeat(self, verb: str, key: SessionKey, origin: Hashable) -> WorkerSession | None:
        """Return the session that the same request has opened before, and count that it came
        again; None if there is none. The worker's lock is held.

        Raises:
            Moving: A session by this id is on its way here.
            AlreadyExists, SessionMoved: See `SessionTable.find_repeat`.
        """
        self._arriving.check_id_is_free(key)
        existing = self._sessions.find_repeat(key, origin)
        if existing is not None:
            self._counters.replays[verb] += 1
        return existing

    @contextmanager
    def changing(self, tenant: str, session_id: str) -> Iterator[WorkerSession]:
        """Hold a session and the worker, for something that is done at one moment."""
        session = self.use(tenant, session_id)
        with session.lock, self._lock, self.counting_refusals():
            session.check_open()
            session.check_thawed(self._clock.monotonic())
            yield session

    @contextmanager
    def storing(self, tenant: str, session_id: str) -> Iterator[WorkerSession]:
        """Hold a session for a call that stores tokens. The lease counts from its end: it may take
        long."""
        session = self.use(tenant, session_id)
        with session.lock:
            session.check_open()
            session.check_thawed(self._clock.monotonic())
            try:
                yield session
            except KVServiceError as error:
                self._count_refusal(error)
                raise
            finally:
                with self._lock:
                    self._sessions.renew(session)

    @contextmanager
    def reading(self, tenant: str, session_id: str) -> Iterator[WorkerSession]:
        """Hold a session for a call that changes nothing."""
        session = self.use(tenant, session_id)
        with session.lock, self.counting_refusals():
            session.check_open()
            yield session

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what is refused for lack of room, or because somebody has changed the session."""
        try:
            yield
        except KVServiceError as error:
            self._count_refusal(error)
            raise

    def info(self, session: WorkerSession, *, with_padding: bool = False) -> SessionInfo:
        """Return what callers are told of a session. The worker's lock is held."""
        return session_info(self._config, session, with_padding=with_padding)

    # -- inside

    def _count_refusal(self, error: KVServiceError) -> None:
        with self._lock:
            if isinstance(error, (OutOfPages, QuotaExceeded)):
                self._counters.allocation_failures[error.reason.lower()] += 1
            elif isinstance(error, StaleEpoch):
                self._counters.stale_epochs += 1
