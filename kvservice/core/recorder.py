"""Who is told what happens at a server's calls: the shell hands these to whoever measures."""

from __future__ import annotations

from typing import Final, Protocol

from kvservice.core.errors import KVServiceError, PermissionDenied, Unauthenticated

AUTH_REASONS: Final = ("missing", "invalid", "expired", "forbidden")
"""Why callers are turned away: no credentials, bad ones, old ones, or ones that do not allow it."""


def auth_reason(error: KVServiceError) -> str | None:
    """Return why an error turns a caller away; None if it does not.

    `Unauthenticated` may say so in its metadata, as `cause`.
    """
    if isinstance(error, PermissionDenied):
        return "forbidden"
    if isinstance(error, Unauthenticated):
        cause = error.metadata.get("cause", "invalid")
        return cause if cause in AUTH_REASONS else "invalid"
    return None


class MethodRecorder(Protocol):
    """Receives what happens at one RPC method. Must be fast and thread-safe."""

    def started(self) -> None:
        """A call has arrived."""

    def received(self) -> None:
        """A message of a call has arrived."""

    def sent(self) -> None:
        """A message of an answer goes out."""

    def first_sent(self, seconds: float) -> None:
        """The first message of a stream goes out, so long after the stream began."""

    def answered(self, code: str, seconds: float) -> None:
        """One of the calls that a stream carries has been answered."""

    def carried(self, seconds: float) -> None:
        """As `received`, `sent` and `answered`, together, of a call that went well."""

    def handled(self, code: str, seconds: float) -> None:
        """A call has ended, with a status code by its name (`NOT_FOUND`)."""

    def turned_away(self, reason: str) -> None:
        """A caller was not let in, or not to this: one of `AUTH_REASONS`."""


class QueueRecorder(Protocol):
    """Receives what happens to calls that wait for a thread. Must be fast and thread-safe."""

    def entered(self) -> None:
        """A call begins to wait."""

    def left(self, seconds: float) -> None:
        """A call has got a thread, after so long."""


class RpcRecorder(Protocol):
    """Makes the recorders of methods."""

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        """Return a method's recorder. `kind`: unary, client_stream, server_stream, bidi_stream."""

    @property
    def queue(self) -> QueueRecorder:
        """The recorder of the server's queue."""


class NullMethodRecorder:
    """Forgets everything."""

    def started(self) -> None:
        pass

    def received(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def first_sent(self, seconds: float) -> None:
        del seconds

    def answered(self, code: str, seconds: float) -> None:
        del code, seconds

    def carried(self, seconds: float) -> None:
        del seconds

    def handled(self, code: str, seconds: float) -> None:
        del code, seconds

    def turned_away(self, reason: str) -> None:
        del reason


class NullQueueRecorder:
    """Forgets everything."""

    def entered(self) -> None:
        pass

    def left(self, seconds: float) -> None:
        del seconds


class NullRpcRecorder:
    """Makes recorders that forget everything."""

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        del kind, service, method
        return NullMethodRecorder()

    @property
    def queue(self) -> QueueRecorder:
        return NullQueueRecorder()
