"""Where Prometheus fetches a registry, and browsers what else a process has to show."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedReader, RawIOBase
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client import CollectorRegistry

from kvservice.clock import SystemClock
from kvservice.config import ConfigError

LOG = logging.getLogger(__name__)

Page = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application, for GET alone."""

METRICS: Final = "/metrics"
MAX_CONNECTIONS: Final = 64
HANDSHAKE_S: Final = 10.0
"""A connection over TLS is closed if its handshake takes longer, however many bytes come."""

REQUEST_S: Final = 30.0
"""So long a request may take to come, however many bytes come, and a peer to take a part of the
answer."""


class MetricsEndpoint:
    """Serves a registry over HTTP or HTTPS, at `/metrics`, between its making and `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        pages: Mapping[str, Page] | None = None,
        *,
        guard: Callable[[Page], Page] = lambda page: page,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """
        Args:
            port: 0: any free one.
            pages: What else there is, by its path. Nothing can be changed over HTTP.
            guard: Lets the registry be seen by those alone who may.
            tls: Returns the context for a connection that has just been accepted. None: plaintext.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        served = {METRICS: guard(_samples(registry)), **(pages or {})}

        def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
                return _refuse(start, "405 Method Not Allowed")
            page = served.get(environ["PATH_INFO"], _not_found)
            if environ["REQUEST_METHOD"] == "HEAD":
                return _head(page, environ, start)
            return page(environ, start)

        try:
            self._server = make_server(host, port, serve, _server_class(host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; choose another "
                "port, or 0 for any free one"
            ) from error
        self._server.tls = tls
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
    """A thread for each connection, of which there are so many at the most, handshakes included."""

    daemon_threads = True
    # Else those beyond five at once would wait for their packets to be sent again.
    request_queue_size = MAX_CONNECTIONS
    tls: Callable[[], ssl.SSLContext] | None = None

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

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with _encrypted(request, self.tls()) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        error = sys.exception()
        if isinstance(error, _HandshakeFailed):
            LOG.info("refused an HTTPS connection from %s: %s", client_address[0], error)
        elif isinstance(error, OSError):
            LOG.debug("lost an HTTP connection from %s: %s", client_address[0], error)
        else:
            LOG.exception("could not answer %s over HTTP", client_address[0])


class _HandshakeFailed(Exception):
    """A peer wants something else than TLS, another TLS than this, or takes too long."""


@contextmanager
def _encrypted(connection: socket.socket, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Shake hands, and take leave afterwards. However it ends, the connection is closed."""
    connection.settimeout(HANDSHAKE_S)
    # Not at once: a peer that has gone already would be taken for one that is still to connect.
    with context.wrap_socket(
        connection, server_side=True, do_handshake_on_connect=False
    ) as encrypted:
        try:
            encrypted.do_handshake()
        except OSError as error:
            raise _HandshakeFailed(_why(error)) from error
        yield encrypted
        # That nothing was cut off. The peer's own leave is not waited for.
        encrypted.settimeout(0.0)
        with suppress(OSError):
            encrypted.unwrap()


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no handshake within {HANDSHAKE_S:g} s"
    if not isinstance(error, ssl.SSLError):
        return f"it has gone: {error.strerror}"
    if error.reason == "HTTP_REQUEST":
        return "it speaks plaintext, and this port HTTPS alone"
    return str(error.reason or error).replace("_", " ").lower()


class _Reader(RawIOBase):
    """Reads what a peer sends until a time is over: each byte gives it no more of it."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._clock = SystemClock()
        self._ends_at = self._clock.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._ends_at - self._clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request takes too long")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Writer(BufferedIOBase):
    """Writes to a peer. If that is gone, or takes nothing, says so in the one way that wsgiref
    expects of peers: for the errors of TLS and of timeouts it would print a traceback."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._connection.settimeout(self._timeout_s)
            self._connection.sendall(data)
        except OSError as error:
            raise ConnectionAbortedError(str(error)) from error
        return len(data)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = BufferedReader(_Reader(self.connection, self.timeout))
        self.wfile = _Writer(self.connection, self.timeout)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing of each scrape."""


def _server_class(host: str, port: int) -> type[_Server]:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return type("_ServerOfFamily", (_Server,), {"address_family": family})


def _samples(registry: CollectorRegistry) -> Page:
    """Return what serves a registry in the format that is asked for, or in the usual one."""
    app: Page = prometheus_client.make_wsgi_app(registry)

    def page(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return app(environ, start)
        except (TypeError, ValueError):  # an Accept that the library stumbles over
            return app({k: v for k, v in environ.items() if k != "HTTP_ACCEPT"}, start)

    return page


def _head(page: Page, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Answer with the status and the headers that GET would get, its length among them."""
    answer: list[Any] = []
    body = page({**environ, "REQUEST_METHOD": "GET"}, lambda *said: answer.extend(said))
    status, headers = answer[:2]
    start(status, [*headers, ("Content-Length", str(sum(map(len, body))))])
    return []


def _not_found(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    del environ
    return _refuse(start, "404 Not Found")


def _refuse(start: Callable[..., Any], status: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET, HEAD")])
    return [f"{status}\n".encode()]
