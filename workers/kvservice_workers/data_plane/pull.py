"""One session that is to be taken over: what was asked, how far it is, how it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.errors import (
    Conflict,
    DeadlineExceeded,
    Draining,
    InternalError,
    KVServiceError,
    Moving,
    PagesLost,
    SessionMoved,
    Unavailable,
)
from kvservice.core.session import SessionInfo
from kvservice.v1 import worker_pb2


@dataclass(eq=False, slots=True)
class Pull:
    """One session that is being taken over, and how that has ended."""

    request: worker_pb2.PullSessionRequest
    source_is_dead: bool = False
    copied_bytes: int = 0
    copying_s: float = 0.0
    info: SessionInfo | None = None
    error: KVServiceError | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.request.tenant, self.request.session_id

    @property
    def ended(self) -> bool:
        return self.info is not None or self.error is not None


def told(error: KVServiceError) -> KVServiceError:
    """Return how a failure is told to the manager, to whom `Unavailable` would say that this worker
    does not answer, when it is the other one."""
    if isinstance(error, (Unavailable, DeadlineExceeded)) and not isinstance(error, Draining):
        return Conflict(f"the worker that holds it cannot be reached: {error}", retry_delay_s=1.0)
    return error


def outcome(error: KVServiceError) -> str:
    """Return what a failure counts as."""
    if isinstance(error, PagesLost):
        return "lost"
    if isinstance(error, (SessionMoved, Conflict, Moving)):
        return "conflict"
    if isinstance(error, (Unavailable, DeadlineExceeded, InternalError)) and not isinstance(
        error, Draining
    ):
        return "unavailable"
    return "refused"
