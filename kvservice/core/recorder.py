"""Where durations go: the shell hands a recorder to whoever measures."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Receives what counters of state cannot tell. Must be fast and thread-safe."""

    def attention(self, seconds: float, num_rows: int) -> None:
        """Note one attention call: seconds of compute, and rows in the batch."""


class NullRecorder:
    """Forgets everything."""

    def attention(self, seconds: float, num_rows: int) -> None:
        del seconds, num_rows


class MethodRecorder(Protocol):
    """Receives what happens at one RPC method. Must be fast and thread-safe."""

    def started(self) -> None:
        """A call has arrived."""

    def received(self) -> None:
        """A message of a call has arrived."""

    def sent(self) -> None:
        """A message of an answer goes out."""

    def handled(self, code: str, seconds: float) -> None:
        """A call has ended, with a status code by its name (`NOT_FOUND`)."""


class RpcRecorder(Protocol):
    """Makes the recorders of methods."""

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        """Return a method's recorder. `kind`: unary, client_stream, server_stream, bidi_stream."""


class NullMethodRecorder:
    """Forgets everything."""

    def started(self) -> None:
        pass

    def received(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def handled(self, code: str, seconds: float) -> None:
        del code, seconds


class NullRpcRecorder:
    """Makes recorders that forget everything."""

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        del kind, service, method
        return NullMethodRecorder()
