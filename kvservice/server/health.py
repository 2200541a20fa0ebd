"""A port for probes: gRPC health, in plaintext, and nothing else.

Kubernetes' own gRPC probes can do neither TLS nor credentials. What is served here is whether the
process serves, which is no secret.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from kvservice.config import ConfigError

_THREADS: Final = 2
_QUEUED_CALLS: Final = 32
_MAX_MESSAGE_BYTES: Final = 4 << 10
_MAX_CONNECTIONS: Final = 64


class HealthServer:
    """Serves between its making and `close`."""

    def __init__(self, servicer: health.HealthServicer, host: str, port: int) -> None:
        """
        Args:
            servicer: Of the server whose health is told.
            port: 0: any free one.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvservice-health")
        self._server = grpc.server(
            self._threads,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", 5000),
                ("grpc.settings_timeout", 5000),
            ],
            maximum_concurrent_rpcs=_THREADS + _QUEUED_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = int(self._server.add_insecure_port(address))
        except RuntimeError:
            self.port = 0
        if not self.port:
            self._threads.shutdown()
            raise ConfigError(
                f"cannot serve health on {address}: it is in use, or not an address of this "
                "machine; choose another port, or 0 for any free one"
            )
        self._server.start()

    def close(self) -> None:
        """Serve no more."""
        self._server.stop(0).wait()
        self._threads.shutdown(wait=True)
