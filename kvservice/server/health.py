"""Health, for everybody: beside a server's services, and at a port for probes.

Kubernetes' own gRPC probes can do neither TLS nor credentials. What is served here is whether the
process serves, which is no secret. As nobody is asked who they are, nobody gets much: few bytes,
little time, a few threads that serve nothing else, and no `Watch`, which would hold some of it
for as long as the peer likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from kvservice.clock import Clock, SystemClock
from kvservice.config import ConfigError, ServerLimits
from kvservice.core.errors import Overloaded
from kvservice.server.rooms import Room, in_room, refusing
from kvservice.server.streams import OpenCalls
from kvservice.server.threads import served_by

CHECK: Final = "/grpc.health.v1.Health/Check"
_THREADS: Final = 8
_CALLS: Final = 64
_READ_S: Final = 2.0
_MAX_REQUEST_BYTES: Final = 1 << 10
_MAX_MESSAGE_BYTES: Final = 4 << 10
_MAX_CONNECTIONS: Final = 64


class HealthHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The method `Check` of a server. `close` ends the threads."""

    def __init__(self, servicer: health.HealthServicer, calls: OpenCalls) -> None:
        """
        Args:
            calls: Of the server: ends what takes too long.
        """
        self._servicer = servicer
        self._calls = calls
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvservice-health")
        self._room = Room(_CALLS, Overloaded("too many ask for health", retry_delay_s=1.0))
        check = served_by(self._threads, in_room(self._room, self._check))
        self._handler = grpc.stream_unary_rpc_method_handler(
            check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )
        self._refusal = refusing(self._room.refusal)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != CHECK:
            return None
        return self._handler if self._room.take() else self._refusal

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _check(self, raws: Iterator[bytes], context: Any) -> health_pb2.HealthCheckResponse:
        try:
            with self._calls.watched(context, timeout_s=_READ_S):
                raw = next(raws, b"")
            if len(raw) > _MAX_REQUEST_BYTES:
                raise ValueError("longer than any name of a service")
            request = health_pb2.HealthCheckRequest.FromString(raw)
        except grpc.RpcError:  # it has gone, or was too slow
            return health_pb2.HealthCheckResponse()
        except (DecodeError, ValueError):
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details("not a HealthCheckRequest")
            return health_pb2.HealthCheckResponse()
        return self._servicer.Check(request, context)


class HealthServer:
    """Serves the health of another server at a port of its own, between its making and `close`."""

    def __init__(
        self,
        servicer: health.HealthServicer,
        host: str,
        port: int,
        *,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            servicer: Of the server whose health is told.
            port: 0: any free one.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        clock = clock if clock is not None else SystemClock()
        self._calls = OpenCalls(ServerLimits(), clock)
        self._handlers = HealthHandlers(servicer, self._calls)
        self._none = ThreadPoolExecutor(1)  # never used: each method has its threads
        self._server = grpc.server(
            self._none,
            handlers=(self._handlers,),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", 5000),
                ("grpc.settings_timeout", 5000),
            ],
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = int(self._server.add_insecure_port(address))
        except RuntimeError:
            self.port = 0
        if not self.port:
            self._handlers.close()
            raise ConfigError(
                f"cannot serve health on {address}: it is in use, or not an address of this "
                "machine; choose another port, or 0 for any free one"
            )
        self._calls.start()
        self._server.start()

    def close(self) -> None:
        """Serve no more."""
        self._server.stop(0).wait()
        self._calls.stop()
        self._handlers.close()
