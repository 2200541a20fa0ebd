"""Where Prometheus fetches a registry, and browsers what else a process has to show."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client import CollectorRegistry

from kvservice.config import ConfigError

Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application, for GET and HEAD alone."""

METRICS: Final = "/metrics"
MAX_CONNECTIONS: Final = 64
_IDLE_S: Final = 30.0


class MetricsEndpoint:
    """Serves a registry over HTTP, at `/metrics`, between its making and `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        pages: Mapping[str, Page] | None = None,
        *,
        guard: Callable[[Page], Page] = lambda page: page,
    ) -> None:
        """
        Args:
            port: 0: any free one.
            pages: What else there is, by its path. Nothing can be changed over HTTP.
            guard: Lets the registry be seen by those alone who may.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        served = {METRICS: guard(prometheus_client.make_wsgi_app(registry)), **(pages or {})}

        def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
                return _refuse(start, "405 Method Not Allowed")
            page = served.get(environ["PATH_INFO"])
            return _refuse(start, "404 Not Found") if page is None else page(environ, start)

        try:
            self._server = make_server(host, port, serve, _server_class(host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; choose another "
                "port, or 0 for any free one"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvservice-http", daemon=True
        )
        self._thread.start()
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are so many at the most."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing of each scrape."""


def _server_class(host: str, port: int) -> type[_Server]:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return type("_ServerOfFamily", (_Server,), {"address_family": family})


def _refuse(start: Callable[..., Any], status: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET, HEAD")])
    return [f"{status}\n".encode()]
