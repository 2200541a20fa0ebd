"""Who is told what happens at a server's calls: the shell hands these to whoever measures."""

from __future__ import annotations

from typing import Protocol


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

    def handled(self, code: str, seconds: float) -> None:
        """A call has ended, with a status code by its name (`NOT_FOUND`)."""


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

    def handled(self, code: str, seconds: float) -> None:
        del code, seconds


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
