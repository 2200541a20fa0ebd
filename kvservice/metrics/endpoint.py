"""Where Prometheus fetches a registry."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry

from kvservice.config import ConfigError


class MetricsEndpoint:
    """Serves a registry over HTTP, at `/metrics`, between its making and `close`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """
        Args:
            port: 0: any free one.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; choose another "
                "port, or 0 for any free one"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
