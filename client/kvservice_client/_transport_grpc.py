"""The way to one server over gRPC. The client's only file that knows gRPC."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message

from kvservice.clock import Clock
from kvservice.core.errors import DeadlineExceeded, NotFound, Unavailable, Unimplemented
from kvservice.v1 import worker_pb2
from kvservice.wire import fragments, status
from kvservice.wire.handshake import Shown, find_refusal
from kvservice.wire.names import MANAGER, WORKER
from kvservice.wire.tracing import Tracer
from kvservice_client._framing import join
from kvservice_client._steady_call import SteadyAnswer, SteadyCall
from kvservice_client._transport import AnyCall, AnyResult, AttendStream, checked
from kvservice_client._watchdog import NEVER, Watchdog

KEEPALIVE_TIME_S: Final = 2.0
KEEPALIVE_TIMEOUT_S: Final = 1.0
MAX_IDLE_STREAMS: Final = 4
_FRAME_HEADROOM: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Tls:
    """What a TLS connection needs. Files are PEM, read when a connection is made.

    Fields:
        ca_file: Whom to trust. None: the system's roots.
        cert_file, key_file: The client's own certificate, for mutual TLS.
        server_name: The name in the server's certificate, where it is not the address's.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


class GrpcTransport:
    """One channel to one server. Streams for Attend are shared by all sessions, one at a time.

    Args:
        address: host:port, [IPv6]:port, unix:PATH, or any other target that gRPC knows.
        token: Presented as a bearer token with every call.
        tracer: Makes spans of unary calls, Write and Read. None: there are none.
    """

    def __init__(
        self,
        address: str,
        *,
        clock: Clock,
        watchdog: Watchdog,
        token: str | None = None,
        tls: Tls | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.address = address
        self._clock = clock
        self._watchdog = watchdog
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._tls = tls
        self._channel = _open_channel(address, tls)
        if tracer is not None:
            self._channel = tracer.channel(self._channel, address)
        self._unary = _unary_methods(self._channel)
        path = f"/{WORKER.full_name}/"
        self._attend = self._channel.stream_stream(
            path + "Attend"  # bytes: what may be read without being decoded is
        )
        self._write = self._channel.stream_unary(
            path + "Write", None, worker_pb2.WriteResponse.FromString
        )
        self._read = self._channel.unary_stream(
            path + "Read",
            worker_pb2.ReadRequest.SerializeToString,
            worker_pb2.ReadResponse.FromString,
        )
        self._health = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        self._idle: deque[_GrpcCall] = deque()

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        return self._invoke(self._unary[service, method], request, timeout_s)

    def open_stream(self) -> AttendStream:
        return _GrpcStream(self)

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> worker_pb2.WriteResponse:
        sent = fragments.frames(call)
        response: worker_pb2.WriteResponse = self._invoke(self._write, sent, timeout_s)
        return response

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> worker_pb2.ReadResult:
        responses = self._invoke(self._read, request, timeout_s)
        try:
            result: worker_pb2.ReadResult = join(responses, worker_pb2.ReadResult)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error
        return result

    def serves(self, service: str, *, timeout_s: float) -> bool:
        """Ask the server's standard health service whether it knows a service.

        The messages are spelled out here, since they are all that the client would need of the
        package grpcio-health-checking: field 1 of each, a string and an enum.
        """
        name = service.encode()
        assert len(name) < 128, "a longer name needs a longer length"
        try:
            self._invoke(self._health, b"\x0a" + bytes([len(name)]) + name, timeout_s)
        except (NotFound, Unimplemented):  # a server without health is none of ours
            return False
        return True

    def find_refusal(self, timeout_s: float) -> str | None:
        """Return why no connection comes about, if it is for plaintext or a certificate."""
        tls = self._tls
        if tls is None:
            return find_refusal(self.address, timeout_s=timeout_s)
        return find_refusal(
            self.address,
            tls=Shown(tls.ca_file, tls.cert_file, tls.key_file, tls.server_name),
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().cancel()
        self._channel.close()

    def take(self) -> _GrpcCall:
        """Return a stream that is connected and idle, or a new one."""
        while self._idle:
            try:
                idle = self._idle.pop()
            except IndexError:
                break  # another thread was faster
            if idle.active:
                return idle
            idle.cancel()
        return _GrpcCall(self._attend, self._metadata, self._watchdog, self._clock)

    def give(self, call: _GrpcCall) -> None:
        """Keep a stream for the next who needs one."""
        if len(self._idle) < MAX_IDLE_STREAMS:
            self._idle.append(call)
        else:
            call.cancel()

    def _invoke(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from error
        except ValueError as error:
            raise Unavailable(f"the client is closed: {error}") from error


class _GrpcStream:
    """A session's stream: borrows one of the transport's for each call."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._transport = transport
        self._call: _GrpcCall | None = None

    def attend(self, call: AnyCall, *, timeout_s: float) -> AnyResult:
        self.send(call, timeout_s=timeout_s)
        return self.receive()

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        assert self._call is None, "the last call has not been received"
        self._call = self._transport.take()
        self._call.send(call, timeout_s)

    def receive(self) -> AnyResult:
        assert self._call is not None, "nothing was sent"
        try:
            result = self._call.receive()
        except BaseException:
            self.close()  # an answer may still come: never to be taken for the next call's
            raise
        if isinstance(result, SteadyAnswer):
            self._transport.give(self._call)
            self._call = None
            return result
        call_id = self._call.call_id
        if result.call_id != call_id:
            self.close()
            return checked(result, call_id)
        self._transport.give(self._call)
        self._call = None
        return checked(result, call_id)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


class _GrpcCall:
    """One open Attend RPC."""

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: tuple[tuple[str, str], ...],
        watchdog: Watchdog,
        clock: Clock,
    ) -> None:
        self.deadline = NEVER
        self.call_id = 0
        self._steady: SteadyCall | None = None  # the call under way, if it is one
        self._timeout_s = 0.0
        self._overdue = False
        self._watchdog = watchdog
        self._clock = clock
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        try:
            self._rpc = method(iter(self._requests.get, None), metadata=metadata)
        except ValueError as error:
            raise Unavailable(f"the client is closed: {error}") from error
        watchdog.watch(self)

    @property
    def active(self) -> bool:
        return bool(self._rpc.is_active())

    def send(self, call: AnyCall, timeout_s: float) -> None:
        self.call_id = call.call_id
        self._timeout_s = timeout_s
        self._watchdog.arm(self, self._clock.monotonic() + timeout_s)
        if isinstance(call, SteadyCall):
            self._steady = call
            self._requests.put(call.frame())
            return
        self._steady = None
        for frame in fragments.frames(call):
            self._requests.put(frame)

    def receive(self) -> AnyResult:
        steady = self._steady
        try:
            first = next(self._rpc, None)
            if steady is not None and first is not None:
                answer = steady.read(first)
                if answer is not None:
                    return answer
            rest = itertools.chain(() if first is None else (first,), self._rpc)
            responses = map(worker_pb2.AttendResponse.FromString, rest)
            result: worker_pb2.AttendResult = join(responses, worker_pb2.AttendResult)
        except grpc.RpcError as error:
            if self._overdue:
                raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s") from error
            raise status.from_rpc_error(error) from error
        finally:
            self.deadline = NEVER
        return result

    def expire(self) -> None:
        self._overdue = True
        self._rpc.cancel()

    def cancel(self) -> None:
        self._watchdog.forget(self)
        self._rpc.cancel()
        self._requests.put(None)  # lets gRPC's sending thread go


def _unary_methods(channel: grpc.Channel) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (service.full_name, method.name): channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type).SerializeToString,
            message_factory.GetMessageClass(method.output_type).FromString,
        )
        for service in (MANAGER, WORKER)
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }


def _open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    limit = fragments.MAX_FRAME_BYTES + _FRAME_HEADROOM
    options: list[tuple[str, object]] = [
        ("grpc.keepalive_time_ms", int(KEEPALIVE_TIME_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # Without it a peer that acknowledges TCP but answers nothing is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),  # we retry: same bytes, and only what may be repeated
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is None:
        return grpc.insecure_channel(address, options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        *(_read_file(path) for path in (tls.ca_file, tls.key_file, tls.cert_file))
    )
    return grpc.secure_channel(address, credentials, options)


def _read_file(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
