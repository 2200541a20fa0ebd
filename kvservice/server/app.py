"""A gRPC server around a service that it knows by its descriptor."""

from __future__ import annotations

from typing import Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from kvservice.clock import Clock, SystemClock
from kvservice.config import ConfigError, ServerLimits
from kvservice.core.recorder import NullRpcRecorder, RpcRecorder
from kvservice.server.guard import Guard, OpenGuard
from kvservice.server.handlers import Handlers
from kvservice.server.health import HealthHandlers
from kvservice.server.reflecting import ReflectionHandlers
from kvservice.server.streams import OpenCalls
from kvservice.server.threads import RpcThreads
from kvservice.wire.tracing import find_tracer

FRAME_HEADROOM: Final = 64 << 10  # what a frame has around its payload
REFUSED_AT_ONCE: Final = 64  # calls of one connection that may be on their way to a refusal


class GrpcServer:
    """A threaded server: `listen`, then `start`, at last `stop`.

    Streams hold a thread each, and other calls have theirs. A call for which there is no place is
    refused as it arrives: it takes neither a thread nor a turn in a queue, and is not read.
    """

    def __init__(
        self,
        limits: ServerLimits | None = None,
        *,
        clock: Clock | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """
        Args:
            credentials: For TLS. None: plaintext.
        """
        self._limits = limits if limits is not None else ServerLimits()
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._credentials = credentials
        self._calls = OpenCalls(self._limits, self._clock)
        self._stream_threads = RpcThreads(self._limits.max_streams, self._clock)
        self._call_threads = RpcThreads(self._limits.unary_threads, self._clock)
        self._health = health.HealthServicer()
        self._health_handlers = HealthHandlers(self._health, self._calls)
        self._started = False
        tracer = find_tracer()
        self._server = grpc.server(
            self._stream_threads,
            options=_options(self._limits),
            interceptors=() if tracer is None else tracer.interceptors(),
        )

    @property
    def health(self) -> health.HealthServicer:
        """What it says of itself, to be served at another port as well."""
        return self._health

    def listen(self, host: str, port: int) -> int:
        """Bind to host and port (0: any free one) and return the port. Nothing is served yet.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"cannot listen on {address}: it is in use, or not an address of this machine; "
                "choose another port, or 0 for any free one"
            )
        return int(bound)

    def start(
        self,
        service: object,
        descriptor: ServiceDescriptor,
        *,
        recorder: RpcRecorder | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Serve, with health and reflection beside. At most once.

        Args:
            guard: Says who may call what; health is for everybody. None: everybody, everything.
        """
        guard = guard if guard is not None else OpenGuard(self._clock)
        recorder = recorder if recorder is not None else NullRpcRecorder()
        for threads in (self._stream_threads, self._call_threads):
            threads.recorder = recorder.queue
        reflecting = ReflectionHandlers(
            (descriptor.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME),
            calls=self._calls,
            timeout_s=self._limits.default_deadline_s,
            guard=guard,
            threads=self._stream_threads,
        )
        handlers = Handlers(
            service,
            descriptor,
            limits=self._limits,
            calls=self._calls,
            recorder=recorder,
            clock=self._clock,
            guard=guard,
            stream_threads=self._stream_threads,
            call_threads=self._call_threads,
        )
        # Its own last, so that what reaches them and is not theirs is nobody's.
        self._server.add_generic_rpc_handlers((self._health_handlers, reflecting, handlers))
        self._calls.start()
        self._server.start()
        self._started = True
        for name in ("", descriptor.full_name):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those in progress `grace_s` seconds, end all threads.

        May be called again, and without `start`.
        """
        self._health.enter_graceful_shutdown()
        if not self._started:
            self._started = True
            self._server.start()  # only one that has run lets go of its port
        self._server.stop(grace_s).wait()
        self._calls.stop()
        self._health_handlers.close()
        for threads in (self._stream_threads, self._call_threads):
            threads.shutdown(wait=True)


def serve(
    service: object,
    *,
    descriptor: ServiceDescriptor,
    host: str,
    port: int,
    limits: ServerLimits | None = None,
    clock: Clock | None = None,
    recorder: RpcRecorder | None = None,
    credentials: grpc.ServerCredentials | None = None,
    guard: Guard | None = None,
) -> tuple[GrpcServer, int]:
    """Serve a service at host and port; return the server, which the caller stops, and the port.

    Args:
        service: An object with a method `(request, caller)` for each RPC of the descriptor.
        port: 0: any free one.

    Raises:
        ConfigError: The port is taken. Nothing has been started.
    """
    server = GrpcServer(limits, clock=clock, credentials=credentials)
    bound = server.listen(host, port)
    server.start(service, descriptor, recorder=recorder, guard=guard)
    return server, bound


def _options(limits: ServerLimits) -> list[tuple[str, int]]:
    frame = limits.max_frame_bytes + FRAME_HEADROOM
    return [
        # Else a second server on the same port takes half of its connections, without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", frame),
        ("grpc.max_send_message_length", frame),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        # Of one connection: more than there are places, so that what is too much is refused here,
        # instead of waiting in the client.
        (
            "grpc.max_concurrent_streams",
            limits.max_streams + limits.unary_threads + limits.queued_calls + REFUSED_AT_ONCE,
        ),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # Connections on which nothing is said, or not HTTP/2.
        ("grpc.server_handshake_timeout_ms", 5000),
        ("grpc.settings_timeout", 5000),
        # Clients ping to notice a dead server. On a busy machine pings arrive late and together:
        # nobody is cut off for that, but for pings without end.
        ("grpc.http2.max_ping_strikes", 100),
        # This is how we notice a dead client.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(limits.ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.ping_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
