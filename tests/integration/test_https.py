"""Metrics and status page over TLS: who is served, and that bad peers hurt nobody else."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from kvservice.clock import SystemClock
from kvservice.config import ManagerSettings, Security, WorkerSettings
from kvservice.credentials import CertificateFiles, replace_file
from kvservice.metrics import MetricsEndpoint, endpoint
from kvservice.runtime.https import HttpsContexts
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.process import ProcessServer
from kvservice.runtime.worker import WorkerServer
from tests.securing import LIMITS, Folder
from tests.serving import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TOKEN = "prometheus-" + "0" * 32
RESET = struct.pack("ii", 1, 0)
BODY = bytes(32 << 20)
"""More than all buffers between two sockets take."""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "ours")
    replace_file(folder.path / "metrics-token", TOKEN.encode(), 0o600)
    return folder


@pytest.fixture(params=["manager", "worker"])
def server(request: pytest.FixtureRequest, folder: Folder) -> Iterator[ProcessServer]:
    """A server that others could reach, and that asks for certificates over gRPC."""
    kind: str = request.param
    security = folder.mutual_tls(metrics_token_file=folder.name("metrics-token"))
    with serving(kind, security) as server:
        yield server


def serving(kind: str, security: Security) -> ProcessServer:
    where: dict[str, Any] = {"host": "0.0.0.0", "advertise_host": "127.0.0.1", "metrics_port": 0}
    if kind == "manager":
        return ManagerServer(ManagerSettings(limits=LIMITS, security=security, **where))
    return WorkerServer(WorkerSettings("w0", 1 << 20, limits=LIMITS, security=security, **where))


def fetch(url: str, context: ssl.SSLContext | None, token: str | None = None) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def metrics(server: ProcessServer, context: ssl.SSLContext | None, scheme: str = "https") -> bytes:
    status, body = fetch(f"{scheme}://{server.metrics_address}/metrics", context, TOKEN)
    assert status == 200
    return body


def dial(server: ProcessServer) -> socket.socket:
    host, _, port = str(server.metrics_address).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has hung up, as soon as that is known here."""
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == endpoint.__name__]


def test_who_trusts_the_ca_is_served(server: ProcessServer, folder: Folder) -> None:
    """For its token, which travels under TLS; without a certificate of its own, also where gRPC
    wants one."""
    assert b"grpc_server_handled" in metrics(server, folder.https())
    url = f"https://{server.metrics_address}/metrics"
    assert fetch(url, folder.https())[0] == 401
    assert fetch(url, folder.https(), "guess-" + "0" * 32)[0] == 401


def test_others_are_refused(
    server: ProcessServer, folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who trusts another CA, who speaks plaintext, an old TLS or nonsense: a line for each says
    why, and the next one is served."""
    caplog.set_level(logging.INFO, endpoint.__name__)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        metrics(server, Folder(tmp_path / "foreign").https())
    with pytest.raises(OSError, match=r"reset|closed"):
        metrics(server, None, scheme="http")
    with dial(server) as nonsense:
        nonsense.sendall(bytes(64))
        until(lambda: is_closed(nonsense))
    old = folder.https()
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(urllib.error.URLError, match="PROTOCOL_VERSION"):
        metrics(server, old)
    reasons = ("unknown ca", "speaks plaintext", "wrong version number", "unsupported protocol")
    until(lambda: len(said(caplog)) >= len(reasons))
    lines = said(caplog)
    assert len(lines) == len(reasons)
    for reason in reasons:
        [line] = [line for line in lines if reason in line]
        assert line.startswith("refused an HTTPS connection from 127.0.0.1: ")
        assert "\n" not in line
    assert not any(record.exc_info for record in caplog.records)
    assert metrics(server, folder.https())


def serial(server: ProcessServer, folder: Folder) -> int:
    """Return the serial number of the certificate that a new connection is shown."""
    with dial(server) as plain, folder.https().wrap_socket(plain, server_hostname="localhost") as c:
        shown = c.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_a_new_certificate_is_shown_to_the_next_connection(
    server: ProcessServer, folder: Folder
) -> None:
    """Without a restart, and from then on; connections that are open go on."""
    before = serial(server, folder)
    with folder.https().wrap_socket(dial(server), server_hostname="127.0.0.1") as kept:
        folder.issue()
        renewed = until(lambda: found if (found := serial(server, folder)) != before else None)
        assert serial(server, folder) == renewed
        written = x509.load_pem_x509_certificate((folder.path / "server.pem").read_bytes())
        assert written.serial_number == renewed
        kept.sendall(f"GET /metrics HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert kept.recv(15) == b"HTTP/1.0 200 OK"


@pytest.mark.parametrize("server", ["worker"], indirect=True)
def test_a_broken_new_certificate_leaves_the_old_one(
    server: ProcessServer, folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    """As over gRPC: what was read before goes on to be shown."""
    caplog.set_level(logging.WARNING, "kvservice.credentials")
    before = serial(server, folder)
    replace_file(folder.path / "server.key", b"-----BEGIN PRIVATE KEY-----\n", 0o600)
    until(lambda: serial(server, folder) and caplog.records)
    assert serial(server, folder) == before


@pytest.mark.parametrize("server", ["worker"], indirect=True)
def test_stalled_handshakes_keep_nobody_out(
    server: ProcessServer, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says nothing, or stops in the middle of it, has one place of so many, and no more."""
    monkeypatch.setattr(endpoint, "HANDSHAKE_S", 60.0)
    with ExitStack() as stalled:

        def stall(number: int) -> socket.socket:
            connection = stalled.enter_context(dial(server))
            connection.sendall(b"\x16\x03\x01\x02\x00"[: number % 6])
            return connection

        first = [stall(number) for number in range(endpoint.MAX_CONNECTIONS - 1)]
        assert metrics(server, folder.https())
        last = [stall(0), stall(0)]
        # Whichever comes while there is no place, such as the one that was just served had.
        until(lambda: any(map(is_closed, last)))
        assert not any(map(is_closed, first))
    assert until(lambda: served(server, folder))


def served(server: ProcessServer, folder: Folder) -> bool:
    try:
        return bool(metrics(server, folder.https()))
    except OSError:
        return False


@pytest.mark.parametrize("server", ["worker"], indirect=True)
def test_handshakes_take_so_long_at_most(
    server: ProcessServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many bytes come meanwhile."""
    caplog.set_level(logging.INFO, endpoint.__name__)
    monkeypatch.setattr(endpoint, "HANDSHAKE_S", 0.5)
    with dial(server) as silent, dial(server) as slow:
        slow.sendall(b"\x16\x03\x01\x02\x00")

        def has_ended() -> bool:
            if is_closed(slow):
                return True
            with suppress(OSError):
                slow.send(b"\x00")
            return False

        until(has_ended, 5.0)
        until(lambda: is_closed(silent), 5.0)
    assert sum("no handshake within 0.5 s" in line for line in said(caplog)) == 2


@contextmanager
def endpoint_with(page: endpoint.Page, folder: Folder | None) -> Iterator[MetricsEndpoint]:
    """Serve a page beside no metrics; over TLS if there is a folder."""
    tls: Callable[[], ssl.SSLContext] | None = None
    if folder is not None:
        paths = (folder.path / "server.pem", folder.path / "server.key", None)
        files = CertificateFiles(*paths, check=lambda *_: None, clock=SystemClock())
        tls = HttpsContexts(files).get
    with closing(
        MetricsEndpoint(CollectorRegistry(), "127.0.0.1", 0, {"/large": page}, tls=tls)
    ) as serving:
        yield serving


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plaintext", "tls"])
def test_requests_take_so_long_at_most(
    folder: Folder, is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many bytes come meanwhile: else 64 peers could keep Prometheus out for ever."""
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.5)
    with endpoint_with(lambda *_: [], folder if is_encrypted else None) as serving:
        slow = socket.create_connection(("127.0.0.1", serving.port), timeout=10)
        if is_encrypted:
            slow = folder.https().wrap_socket(slow, server_hostname="127.0.0.1")
        with slow:
            slow.sendall(b"GET /large HTTP/1.0\r\nX-Slow: ")

            def has_ended() -> bool:
                try:
                    slow.sendall(b"x")
                except OSError:
                    return True
                return False

            until(has_ended, 5.0)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plaintext", "tls"])
@pytest.mark.parametrize("way", ["goes", "takes nothing"])
def test_who_does_not_take_the_answer_is_let_go(
    folder: Folder,
    way: str,
    is_encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A peer that goes, or takes nothing of what it has asked for, is no failure of ours: its
    thread ends, and there is no traceback."""
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.5)
    asked, gone, over = threading.Event(), threading.Event(), threading.Event()

    class Answer(list[bytes]):
        def close(self) -> None:
            """As WSGI has it: called when the answer has been sent, or cannot be."""
            over.set()

    def page(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        del environ
        asked.set()
        assert gone.wait(10)
        start("200 OK", [])
        return Answer([BODY])

    with endpoint_with(page, folder if is_encrypted else None) as serving:
        connection = socket.create_connection(("127.0.0.1", serving.port), timeout=10)
        if is_encrypted:
            connection = folder.https().wrap_socket(connection, server_hostname="127.0.0.1")
        with connection:
            connection.sendall(b"GET /large HTTP/1.0\r\n\r\n")
            assert asked.wait(10)
            if way == "goes":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.close()
            gone.set()
            assert over.wait(10)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err + captured.out


def test_status_page_is_there_over_tls(folder: Folder) -> None:
    """With its numbers, for those who may read them."""
    security = folder.tls(token_file=folder.name("tokens"))
    with serving("manager", security) as server:
        url, context = f"https://{server.metrics_address}", folder.https()
        assert b"/status.js" in fetch(f"{url}/", context)[1]
        wanted = {"alice": 403, "olga": 200, "prometheus": 200}
        for name, status in wanted.items():
            got, body = fetch(f"{url}/status.json", context, folder.tokens[name])
            assert got == status
            assert (json.loads(body).get("workers") == []) is (status == 200)
        assert fetch(f"{url}/status.json", context)[0] == 401
