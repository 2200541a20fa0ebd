"""Who answers requests, about whose session, and what rights the answers give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvservice.core.access import Rights
from kvservice.core.caller import Caller
from kvservice.core.errors import StaleWorker
from kvservice.core.session import SessionInfo
from kvservice.v1 import types_pb2
from kvservice.wire.convert import session_id_from_pb, session_to_pb
from kvservice_workers.worker_config import WorkerConfig

Issue = Callable[[Caller, str, float, Rights, str], bytes]
"""Returns the capability of a caller for a session: its id, its ttl in seconds, what it allows, and
the incarnation of the worker that it is for; empty: this one."""


class AboutSession(Protocol):
    """A request that is about one session, and may be meant for one life of a worker."""

    incarnation: str
    session_id: str


class Answers:
    """What the answers of one life of a worker have in common. Thread-safe."""

    def __init__(self, config: WorkerConfig, issue: Issue | None) -> None:
        """
        Args:
            issue: Makes capabilities. None: nobody wants any.
        """
        self._config = config
        self._issue = issue

    @property
    def issues(self) -> bool:
        """Whether callers need capabilities."""
        return self._issue is not None

    def check_incarnation(self, incarnation: str) -> None:
        """Raise StaleWorker if a request is meant for another life of this worker."""
        if incarnation and incarnation != self._config.incarnation:
            raise StaleWorker(
                "another incarnation of this worker answers: what the old one held is gone",
                incarnation=self._config.incarnation,
                worker_id=self._config.worker_id,
            )

    def about(self, request: AboutSession, caller: Caller) -> tuple[str, str]:
        """Return the tenant and the id of the session that a request is about.

        Raises:
            StaleWorker, InvalidRequest.
        """
        self.check_incarnation(request.incarnation)
        return caller.tenant, session_id_from_pb(request.session_id)

    def capability(
        self,
        caller: Caller,
        session_id: str,
        ttl_s: float,
        rights: Rights = Rights.WRITE,
        incarnation: str = "",
    ) -> bytes:
        """Return the right to a session at a worker; empty: nobody wants any.

        Args:
            incarnation: Of the worker that it is for; empty: this one.
        """
        if self._issue is None:
            return b""
        return self._issue(caller, session_id, ttl_s, rights, incarnation)

    def session(
        self, info: SessionInfo, caller: Caller, rights: Rights = Rights.WRITE
    ) -> types_pb2.Session:
        """Return a session as it is told, with the right to it."""
        session = session_to_pb(info)
        capability = self.capability(caller, info.session_id, info.spec.ttl_s, rights)
        for extent in session.extents:
            extent.capability = capability
        return session
