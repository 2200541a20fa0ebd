"""TLS on real sockets: who gets in, who is told why not, and certificates that change."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kvservice.clock import SystemClock
from kvservice.config import ConfigError, ManagerSettings, Security, WorkerSettings
from kvservice.core.errors import Unavailable
from kvservice.credentials import replace_file
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice_client import Tls, connect
from tests.driving import Driver
from tests.securing import LIMITS, Folder, SecuredService, secured
from tests.serving import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """Two CAs that do not know each other, and one whose certificates have expired."""
    root = tmp_path_factory.mktemp("tls")
    past = SystemClock().time() - 10 * DAY_S
    return {
        "ours": Folder(root / "ours"),
        "foreign": Folder(root / "foreign"),
        "expired": Folder(root / "expired", now=past),
    }


@pytest.fixture(scope="module")
def service(folders: dict[str, Folder]) -> Iterator[SecuredService]:
    """A manager and two workers that ask for certificates."""
    with secured(folders["ours"], folders["ours"].mutual_tls(), num_workers=2) as service:
        yield service


def test_everything_works_with_certificates_on_both_sides(service: SecuredService) -> None:
    """Manager and workers find each other, and a decoder gets what attention is, over two."""
    tls = service.folder.client_tls("tenant-alice")
    with connect(service.manager.address, tls=tls) as client:
        driver = Driver.open(client, num_rows=2, spread=2)
        for _ in range(3):
            driver.step(5)
        driver.fork().step()
        driver.pop(4)
        driver.step()
        driver.check_stored()
        assert all(not worker.lane_addresses for worker in service.workers), "a lane is plaintext"
        driver.session.release()


REFUSED: list[tuple[str, Callable[[dict[str, Folder]], Tls | None], str]] = [
    ("plaintext", lambda f: None, "speaks TLS, and this client plaintext"),
    ("unknown CA", lambda f: f["foreign"].client_tls("tenant-alice"), "certificate is refused"),
    (
        "wrong name",
        lambda f: f["ours"].client_tls("tenant-alice", server_name="elsewhere.test"),
        "elsewhere.test",
    ),
    ("no certificate", lambda f: f["ours"].client_tls(), "wants a client certificate"),
    (
        "foreign certificate",
        lambda f: f["foreign"].client_tls("tenant-alice", ca_file=f["ours"].name("ca.pem")),
        "must be signed by the CA",
    ),
    (
        "expired certificate",
        lambda f: f["expired"].client_tls("tenant-alice", ca_file=f["ours"].name("ca.pem")),
        "must be signed by the CA",
    ),
]


@pytest.mark.parametrize(
    ("tls", "text"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_refusals_are_said_in_one_line_and_at_once(
    service: SecuredService, folders: dict[str, Folder], tls: Any, text: str
) -> None:
    """No handshake, no service: the client says why, long before its time is over."""
    started = SystemClock().monotonic()
    with pytest.raises(Unavailable, match=text) as caught:
        connect(service.manager.address, tls=tls(folders), timeout_s=60.0)
    assert "\n" not in str(caught.value)
    assert SystemClock().monotonic() - started < 30.0


def test_an_expired_certificate_of_the_same_ca_is_refused(
    service: SecuredService, tmp_path: Path, folders: dict[str, Folder]
) -> None:
    """The CA is right, the time is over."""
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_bytes((folders["ours"].path / name).read_bytes())
    old = Folder(tmp_path, now=SystemClock().time() - 10 * DAY_S)
    tls = old.client_tls("tenant-alice")
    with pytest.raises(Unavailable, match="and be valid now"):
        connect(service.manager.address, tls=tls, timeout_s=60.0)


def test_a_tls_client_of_a_plaintext_server_is_told(folders: dict[str, Folder]) -> None:
    """The other way round."""
    tls = folders["ours"].client_tls()
    with (
        ManagerServer(ManagerSettings(limits=LIMITS)) as manager,
        pytest.raises(Unavailable, match="does not speak TLS"),
    ):
        connect(manager.address, tls=tls, timeout_s=60.0)


def serial(address: str, folder: Folder) -> int:
    """Return the serial number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=folder.name("ca.pem"))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.load_cert_chain(folder.name("tenant-bob.pem"), folder.name("tenant-bob.key"))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_new_certificates_are_taken_without_a_restart(tmp_path: Path) -> None:
    """New connections are shown the new one; sessions that run notice nothing."""
    folder = Folder(tmp_path)
    with secured(folder, folder.mutual_tls()) as service:
        servers = [service.manager, *service.workers]
        before = [serial(server.address, folder) for server in servers]
        with connect(service.manager.address, tls=folder.client_tls("tenant-alice")) as client:
            driver = Driver.open(client)
            driver.step(3)
            folder.issue()
            for server, old in zip(servers, before, strict=True):
                until(lambda server=server, old=old: serial(server.address, folder) != old)
            driver.step(3)
            # Over connections of the manager's own that know the new one.
            assert [one.session_id for one in client.list_sessions()] == [driver.session.id]
            until(lambda: service.num_alive() == 1)


def test_a_broken_new_certificate_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written file locks nobody out; the log says what is wrong, once."""
    folder = Folder(tmp_path)
    with secured(folder, folder.mutual_tls()) as service:
        before = serial(service.manager.address, folder)
        caplog.set_level(logging.WARNING, "kvservice.credentials")
        (tmp_path / "server.pem").write_text("-----BEGIN CERTIFICATE-----\n")
        until(lambda: serial(service.manager.address, folder) and caplog.records)
        assert serial(service.manager.address, folder) == before
        assert all(
            "is not a certificate in PEM" in record.getMessage() for record in caplog.records
        )
        assert len(caplog.records) <= 2, "once for each process that reads it"


def weak(folder: Path, ours: Folder) -> Security:
    """Return settings with a certificate of a key that no TLS library takes any more."""
    folder.mkdir()
    key = rsa.generate_private_key(65537, 1024)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weak")])
    now = datetime.fromtimestamp(SystemClock().time(), UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    replace_file(folder / "server.pem", certificate, 0o600)
    replace_file(folder / "server.key", private, 0o600)
    return ours.tls(tls_cert=str(folder / "server.pem"), tls_key=str(folder / "server.key"))


def bad_settings(folders: dict[str, Folder], tmp_path: Path) -> Iterator[tuple[Security, str]]:
    ours, expired = folders["ours"], folders["expired"]
    other = folders["foreign"].name("server.key")
    readable = tmp_path / "readable.key"
    readable.write_bytes(Path(ours.name("server.key")).read_bytes())
    readable.chmod(0o644)
    yield ours.tls(tls_key=other), "does not belong to the key"
    yield ours.tls(tls_key=str(readable)), "chmod 600"
    yield ours.tls(tls_cert=ours.name("nothing.pem")), "nothing.pem cannot be read"
    yield ours.tls(tls_cert=ours.name("key")), "not a certificate in PEM"
    yield weak(tmp_path / "weak", ours), "cannot be shown over TLS"
    yield ours.tls(tls_key=ours.name("key")), "private key in PEM"
    yield ours.tls(tls_ca=ours.name("key")), "CA file"
    yield expired.tls(), "has expired at"
    yield ours.tls(key_file=ours.name("server.pem")), "everybody may use it"
    yield ours.security(token_file=ours.name("key")), "TOKEN TENANT ROLE"
    yield ours.security(quota_file=ours.name("tokens")), "not TOML"


def test_files_that_cannot_be_stop_the_start(folders: dict[str, Folder], tmp_path: Path) -> None:
    """In one line that names the file and the fix, without a word of what is in it."""
    for security, text in bad_settings(folders, tmp_path):
        for server in (
            ManagerServer(ManagerSettings(limits=LIMITS, security=security)),
            WorkerServer(WorkerSettings("w", 1 << 20, limits=LIMITS, security=security)),
        ):
            with pytest.raises(ConfigError, match=text) as caught:
                server.start()
            said = str(caught.value)
            assert "\n" not in said
            for secret in ("key", "server.key", "tokens"):
                for line in Path(folders["ours"].name(secret)).read_text().split():
                    assert len(line) < 16 or line not in said
