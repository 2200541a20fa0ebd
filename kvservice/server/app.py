"""A gRPC server around a service that it knows by its descriptor."""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvservice.clock import Clock, SystemClock
from kvservice.config import ConfigError, ServerLimits
from kvservice.core.errors import KVServiceError
from kvservice.core.recorder import NullRpcRecorder, RpcRecorder
from kvservice.server.guard import Guard, OpenGuard
from kvservice.server.handlers import Handlers
from kvservice.server.streams import OpenCalls
from kvservice.server.threads import RpcThreads
from kvservice.wire import status
from kvservice.wire.tracing import find_tracer

FRAME_HEADROOM: Final = 64 << 10  # what a frame has around its payload


class GrpcServer:
    """A threaded server: `listen`, then `start`, at last `stop`.

    Streams hold a thread each and are bounded below the number of threads, so that other calls
    always find one.
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
        self._calls = OpenCalls(self._limits.max_streams, self._clock)
        num_threads = self._limits.max_streams + self._limits.unary_threads
        self._threads = RpcThreads(num_threads, self._clock)
        self._health = health.HealthServicer()
        self._started = False
        tracer = find_tracer()
        self._server = grpc.server(
            self._threads,
            options=_options(self._limits),
            maximum_concurrent_rpcs=num_threads + self._limits.queued_calls,
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
        self._threads.recorder = recorder.queue
        names = (descriptor.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            _Reflection(names, self._calls, self._limits.default_deadline_s, guard), self._server
        )
        # Last, so that what reaches it and is not its own is nobody's.
        handlers = Handlers(
            service,
            descriptor,
            limits=self._limits,
            calls=self._calls,
            recorder=recorder,
            clock=self._clock,
            guard=guard,
        )
        self._server.add_generic_rpc_handlers((handlers,))
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
        self._threads.shutdown(wait=True)


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


class _Reflection(reflection.ReflectionServicer):  # type: ignore[misc]
    """The standard one, but its streams count as streams, and are for known callers."""

    def __init__(
        self, names: tuple[str, ...], calls: OpenCalls, timeout_s: float, guard: Guard
    ) -> None:
        super().__init__(names)
        self._guard = guard
        self._calls = calls
        self._timeout_s = timeout_s

    def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        try:
            with self._calls.stream(context, timeout_s=self._timeout_s):
                self._guard.check(self._guard.identify(context))
                yield from super().ServerReflectionInfo(request_iterator, context)
        except KVServiceError as error:
            context.abort(status.to_code(error), error.message)


def _options(limits: ServerLimits) -> list[tuple[str, int]]:
    frame = limits.max_frame_bytes + FRAME_HEADROOM
    return [
        # Else a second server on the same port takes half of its connections, without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", frame),
        ("grpc.max_send_message_length", frame),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", limits.max_streams + limits.queued_calls),
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
