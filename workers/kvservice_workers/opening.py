"""Opening sessions: new ones, extents of others, and forks."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace

from kvservice.core.errors import AlreadyExists, InvalidRequest, SessionMoved
from kvservice.core.session import MAX_TOKENS, SessionInfo, SessionSpec, check_session_id
from kvservice_workers.admission import Admission
from kvservice_workers.session_access import SessionAccess
from kvservice_workers.session_state import SessionKey, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.structure import Structure


class Opening:
    """Allocate and Fork. Thread-safe."""

    def __init__(
        self,
        lock: threading.RLock,
        access: SessionAccess,
        sessions: SessionTable,
        admission: Admission,
        structure: Structure,
    ) -> None:
        self._lock = lock  # the worker's
        self._access = access
        self._sessions = sessions
        self._admission = admission
        self._structure = structure

    def allocate(
        self,
        tenant: str,
        session_id: str,
        spec: SessionSpec,
        *,
        extent_starts: Sequence[int] = (),
        epoch: int = 0,
        group: int = 0,
    ) -> SessionInfo:
        """Open a session, or the extent of one.

        Repeat-safe: the same id and request return the session as it stands.

        Args:
            extent_starts: Per row, the first position held here. Empty: 0, or open (the first
                stored tokens decide) where `spec.spread` is above 1.
            epoch: The epoch that the session is at, for an extent; 0 for a new session.
            group: Extents of the same group, on other workers, are copies of this one; 0: none.

        Raises:
            AlreadyExists: The id is in use for another request.
            OutOfPages: The reservation does not fit. Nothing has changed.
            InvalidRequest: It can never fit, or something is out of range.
            TooManySessions, Draining: Nothing has changed.
        """
        check_session_id(session_id)
        if extent_starts and len(extent_starts) != spec.num_rows:
            raise InvalidRequest(f"extent_starts must have {spec.num_rows} entries")
        if any(not 0 <= start <= MAX_TOKENS for start in extent_starts) or epoch < 0:
            raise InvalidRequest("extent_starts and epoch must not be negative")
        key = (tenant, session_id)
        origin = ("allocate", spec, tuple(extent_starts), epoch)
        with self._lock, self._access.counting_refusals():
            if (existing := self._access.find_repeat("Allocate", key, origin)) is not None:
                return self._access.info(existing)
            session = self._admission.admit(key, spec, origin, is_counted=bool(epoch))
            session.epoch, session.group = epoch or 1, group
            if extent_starts:
                session.starts = list(extent_starts)
            elif spec.spread == 1:
                session.begins_at_zero = True
                session.starts = [0] * spec.num_rows
            self._structure.open(session)
            self._sessions.add(session)
            return self._access.info(session)

    def fork(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        new_session_id: str,
        *,
        token_count: int | None = None,
        ttl_s: float | None = None,
        clip: bool = False,
    ) -> SessionInfo:
        """Open a session that shares another's pages, or the leading `token_count` of each row.

        Repeat-safe by the new id. Args as in `ForkRequest`.

        Raises:
            SessionNotFound, StaleEpoch, AlreadyExists, TooManySessions, Draining.
            PositionOutOfRange: `token_count` exceeds a row's length (not with `clip`), or the
                child would see what a window has evicted.
            OutOfPages: The parent's reservation needs a page more per row once pages are shared.
            After any of them nothing has changed.
        """
        check_session_id(new_session_id)
        if token_count is not None and token_count < 1:
            raise InvalidRequest(f"token_count must be at least 1, got {token_count}")
        key = (tenant, new_session_id)
        origin = ("fork", session_id, epoch, token_count, ttl_s)
        with self._access.changing(tenant, session_id) as parent:
            if (existing := self._find_fork(key, origin)) is not None:
                return self._access.info(existing, with_padding=True)
            parent.check_epoch(epoch)
            keep = self._structure.fork_lengths(parent, token_count, clip=clip)
            spec = replace(
                parent.spec,
                num_rows=parent.num_rows,
                reserve_tokens=None,
                ttl_s=ttl_s or parent.ttl_s,
            )
            child = self._admission.admit(key, spec, origin)
            self._structure.fork(parent, child, keep, token_count)
            self._sessions.add(child)
            return self._access.info(child, with_padding=True)

    def _find_fork(self, key: SessionKey, origin: Hashable) -> WorkerSession | None:
        """Return the child that the same request has opened before; None if there is none.

        Raises:
            AlreadyExists: Another request has opened it, or it is not here any more.
        """
        try:
            return self._access.find_repeat("Fork", key, origin)
        except SessionMoved as error:  # which is said of the session that a call is about
            raise AlreadyExists("the fork has been made, and has moved since") from error
