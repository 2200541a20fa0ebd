"""The way to one server: over gRPC, or by direct calls inside this process.

Nothing above `Transport` can tell them apart. The way over gRPC is in `_transport_grpc`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from google.protobuf.message import Message

from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import (
    InternalError,
    KVServiceError,
    NotFound,
    Unavailable,
)
from kvservice.v1 import worker_pb2
from kvservice.wire import status
from kvservice.wire.names import WORKER, snake_case
from kvservice_client._steady_call import SteadyAnswer, SteadyCall

AnyCall = worker_pb2.AttendCall | SteadyCall
AnyResult = worker_pb2.AttendResult | SteadyAnswer


class AttendStream(Protocol):
    """A session's way to one worker for Attend. One call at a time, by one thread at a time.

    A `SteadyCall` may be answered in either form. After any error that is not the service's
    answer, the next call goes over a new connection.
    """

    def attend(self, call: AnyCall, *, timeout_s: float) -> AnyResult:
        """Send a call and return its result. Raises KVServiceError."""

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        """Send a call, to `receive` its result later."""

    def receive(self) -> AnyResult:
        """Return the result of the call sent. Raises KVServiceError."""

    def close(self) -> None:
        """Give up on a call in flight, if there is one."""


class Transport(Protocol):
    """The way to one server. Thread-safe. Every method raises KVServiceError and nothing else."""

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        """Make a unary call and return the response message."""

    def open_stream(self) -> AttendStream:
        """Return a stream; nothing is sent yet. Workers only."""

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> worker_pb2.WriteResponse:
        """Store keys and values. Workers only."""

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> worker_pb2.ReadResult:
        """Return keys and values. Workers only."""

    def close(self) -> None:
        """End everything in flight. Calls afterwards raise Unavailable."""


Dial = Callable[[str], Transport]
"""Makes the way to an address. Does not connect."""


# -- inside this process


class InProcessTransport:
    """Direct calls of service objects, with the same messages and errors as over a network.

    Args:
        services: By full name, objects with a method per RPC: `allocate(request, caller)` and so
            on. `attend`, `write` and `read` take and return whole messages.
    """

    def __init__(self, services: Mapping[str, object], caller: Caller = ANONYMOUS) -> None:
        self._services = services
        self._caller = caller
        self._closed = False

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        del timeout_s  # nothing to wait for
        if self._closed:
            raise Unavailable("the client is closed")
        target = self._services.get(service)
        if target is None:
            raise NotFound(f"{service} is not served here")
        try:
            return getattr(target, snake_case(method))(request, self._caller)
        except KVServiceError:
            raise
        except Exception as error:
            raise InternalError(f"{method} failed: {type(error).__name__}: {error}") from error

    def open_stream(self) -> AttendStream:
        return _InProcessStream(self)

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> worker_pb2.WriteResponse:
        response: worker_pb2.WriteResponse = self.call(
            WORKER.full_name, "Write", call, timeout_s=timeout_s
        )
        return response

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> worker_pb2.ReadResult:
        result: worker_pb2.ReadResult = self.call(
            WORKER.full_name, "Read", request, timeout_s=timeout_s
        )
        return result

    def close(self) -> None:
        self._closed = True


class _InProcessStream:
    def __init__(self, transport: InProcessTransport) -> None:
        self._transport = transport
        self._sent: AnyCall | None = None

    def attend(self, call: AnyCall, *, timeout_s: float) -> worker_pb2.AttendResult:
        result: worker_pb2.AttendResult = self._transport.call(
            WORKER.full_name, "Attend", as_message(call), timeout_s=timeout_s
        )
        return checked(result, call.call_id)

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        del timeout_s
        self._sent = call

    def receive(self) -> worker_pb2.AttendResult:
        call, self._sent = self._sent, None
        assert call is not None, "nothing was sent"
        return self.attend(call, timeout_s=0.0)

    def close(self) -> None:
        self._sent = None


def as_message(call: AnyCall) -> worker_pb2.AttendCall:
    """Return a call as a message."""
    return call.message() if isinstance(call, SteadyCall) else call


def checked(result: worker_pb2.AttendResult, call_id: int) -> worker_pb2.AttendResult:
    """Return a result that is the call's and no error.

    Raises:
        InternalError: It answers another call.
        KVServiceError: The error that it carries.
    """
    if result.call_id != call_id:
        raise InternalError(f"expected the answer to call {call_id}, got that to {result.call_id}")
    if result.HasField("error"):
        raise status.from_status(result.error)
    return result
