"""Every error that a caller can meet: one class, one reason, one gRPC code, one thing to do.

Raised by every layer of the service, carried as `google.rpc.ErrorInfo` with domain `kvservice`,
and rebuilt by the client from the reason, never from the message. What each tells the caller to
do is in the README's table of errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

DOMAIN = "kvservice"


class Code(Enum):
    """The gRPC status codes in use; values are the canonical numbers."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class KVServiceError(Exception):
    """The root of all errors of the service. Not raised itself.

    Args:
        message: What was expected and what was got, with numbers.
        retry_delay_s: When to try again, in seconds; travels as RetryInfo. None: not stated.
        **metadata: Everything dynamic in the message, for programs. Turned into strings.
    """

    reason: ClassVar[str]
    code: ClassVar[Code]

    def __init__(
        self, message: str, *, retry_delay_s: float | None = None, **metadata: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_delay_s = retry_delay_s
        self.metadata: dict[str, str] = {name: str(value) for name, value in metadata.items()}

    def __str__(self) -> str:
        return self.message


class InvalidRequest(KVServiceError, ValueError):
    """The call is wrong as it stands: fix it."""

    reason = "INVALID_REQUEST"
    code = Code.INVALID_ARGUMENT


class GeometryMismatch(InvalidRequest):
    """Shapes or dtypes differ from those the session or layer has."""

    reason = "GEOMETRY_MISMATCH"


class PositionOutOfRange(InvalidRequest):
    """A position beyond the session's bound or length, or one that a window has evicted."""

    reason = "POSITION_OUT_OF_RANGE"
    code = Code.OUT_OF_RANGE


class TooLarge(InvalidRequest):
    """The call exceeds a limit, which is in the metadata: split it."""

    reason = "TOO_LARGE"


class NotFound(KVServiceError, LookupError):
    """Something named in the call does not exist."""

    reason = "NOT_FOUND"
    code = Code.NOT_FOUND


class SessionNotFound(NotFound):
    """The session was released or has expired, or is another tenant's: recompute."""

    reason = "SESSION_NOT_FOUND"


class WorkerNotFound(NotFound):
    """No such worker: refresh the routes."""

    reason = "WORKER_NOT_FOUND"


class AlreadyExists(KVServiceError):
    """The id is in use for another request."""

    reason = "ALREADY_EXISTS"
    code = Code.ALREADY_EXISTS


class CapacityError(KVServiceError):
    """No room just now: back off for `retry_delay_s`. Not raised itself."""

    code = Code.RESOURCE_EXHAUSTED


class OutOfPages(CapacityError):
    """Too few free pages, or bytes for an arena."""

    reason = "OUT_OF_PAGES"


class TooManySessions(CapacityError):
    """The worker holds as many sessions as it may."""

    reason = "TOO_MANY_SESSIONS"


class QuotaExceeded(CapacityError):
    """The tenant's own limit: free something."""

    reason = "QUOTA_EXCEEDED"


class Overloaded(CapacityError):
    """The server has as many calls or streams as it may: back off, or use those that are open."""

    reason = "OVERLOADED"


class Conflict(KVServiceError):
    """The caller's picture of the session is not the service's: re-read, redo the whole step."""

    reason = "CONFLICT"
    code = Code.ABORTED


class OutOfOrder(Conflict):
    """An append not at the stored length, which is in the metadata."""

    reason = "OUT_OF_ORDER"


class StaleEpoch(Conflict):
    """Somebody popped, reset, selected or took over meanwhile."""

    reason = "STALE_EPOCH"


class StaleWorker(Conflict):
    """Another incarnation of the worker answers: refresh the extents."""

    reason = "STALE_WORKER"


class SessionMoved(Conflict):
    """Another worker holds the session: go on there. The client does so by itself."""

    reason = "SESSION_MOVED"


class Unauthenticated(KVServiceError):
    """Present valid credentials."""

    reason = "UNAUTHENTICATED"
    code = Code.UNAUTHENTICATED


class PermissionDenied(KVServiceError):
    """The credentials do not allow this."""

    reason = "PERMISSION_DENIED"
    code = Code.PERMISSION_DENIED


class Unavailable(KVServiceError, ConnectionError):
    """Nobody answers. The client retries within the deadline."""

    reason = "UNAVAILABLE"
    code = Code.UNAVAILABLE


class WorkerLost(Unavailable):
    """A worker does not answer; it is not yet known what is lost."""

    reason = "WORKER_LOST"


class Draining(Unavailable):
    """The worker is leaving: ask the manager for another one."""

    reason = "DRAINING"


class Moving(Unavailable):
    """The session is between two workers for a moment. The client repeats the call by itself."""

    reason = "MOVING"


class DeadlineExceeded(KVServiceError, TimeoutError):
    """Outcome unknown: only the same bytes may be sent again."""

    reason = "DEADLINE_EXCEEDED"
    code = Code.DEADLINE_EXCEEDED


class PagesLost(KVServiceError):
    """Stored tokens are gone: recompute from `metadata["from_position"]`."""

    reason = "PAGES_LOST"
    code = Code.DATA_LOSS


class Unimplemented(KVServiceError, NotImplementedError):
    """This server does not have the verb or the feature."""

    reason = "UNIMPLEMENTED"
    code = Code.UNIMPLEMENTED


class InternalError(KVServiceError):
    """A bug of the service. The id in the message is explained by the server's log."""

    reason = "INTERNAL"
    code = Code.INTERNAL


def all_errors() -> Iterator[type[KVServiceError]]:
    """Yield every class of the tree that can be raised, in definition order."""
    pending: list[type[KVServiceError]] = [KVServiceError]
    while pending:
        cls = pending.pop(0)
        if "reason" in vars(cls):
            yield cls
        pending[:0] = cls.__subclasses__()


def error_class(reason: str) -> type[KVServiceError]:
    """Return the class of a reason.

    Raises:
        KeyError: No class has this reason (a newer server's, perhaps).
    """
    return _BY_REASON[reason]


_BY_REASON: dict[str, type[KVServiceError]] = {cls.reason: cls for cls in all_errors()}
