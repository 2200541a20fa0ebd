"""Who may read metrics where other machines can reach them."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvservice.config import ConfigError, ManagerSettings, Security, WorkerSettings
from kvservice.credentials import replace_file
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.numbers import refusal_of
from kvservice.runtime.process import ProcessServer
from kvservice.runtime.worker import WorkerServer
from tests.securing import LIMITS, Folder
from tests.serving import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TOKEN = "prometheus-" + "0" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    replace_file(folder.path / "metrics-token", TOKEN.encode(), 0o600)
    return folder


def serving(security: Security, *, manager: bool, host: str = "0.0.0.0") -> ProcessServer:
    if manager:
        return ManagerServer(
            ManagerSettings(
                host=host,
                advertise_host="127.0.0.1",
                metrics_port=0,
                limits=LIMITS,
                security=security,
            )
        )
    return WorkerServer(
        WorkerSettings(
            "w0",
            1 << 20,
            host=host,
            advertise_host="127.0.0.1",
            metrics_port=0,
            limits=LIMITS,
            security=security,
        )
    )


def fetch(server: ProcessServer, token: str | None = None, folder: Folder | None = None) -> int:
    """Return the HTTP status of a scrape, and check that its numbers come with 200 alone.

    Args:
        folder: Of the CA that signed the server's certificate. None: plaintext.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    scheme, context = ("http", None) if folder is None else ("https", folder.https())
    url = f"{scheme}://{server.metrics_address}/metrics"
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            status, body = int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    assert (b"grpc_server_handled" in body) is (status == 200)
    return status


@pytest.fixture(params=[True, False], ids=["manager", "worker"])
def is_manager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_prometheus_presents_its_token(folder: Folder, is_manager: bool) -> None:
    """The one that all have; at the manager those of a role that reads numbers, too. It is read
    again when it changes."""
    security = folder.tls(
        token_file=folder.name("tokens") if is_manager else None,
        metrics_token_file=folder.name("metrics-token"),
    )
    with serving(security, manager=is_manager) as server:

        def status(token: str | None = None) -> int:
            return fetch(server, token, folder)

        assert status() == 401
        assert status("guess-" + "0" * 32) == 401
        assert status(TOKEN) == 200
        wanted = {"alice": 403, "olga": 200, "prometheus": 200} if is_manager else {"olga": 401}
        assert {name: status(folder.tokens[name]) for name in wanted} == wanted
        replace_file(folder.path / "metrics-token", b"another-" + b"1" * 32, 0o600)
        until(lambda: status(TOKEN) == 401)
        assert status("another-" + "1" * 32) == 200


def test_nobody_is_asked_where_nobody_else_comes(folder: Folder, is_manager: bool) -> None:
    """On the loopback interface, or because somebody has said so."""
    for host, security in (
        ("127.0.0.1", folder.security(metrics_token_file=folder.name("metrics-token"))),
        ("0.0.0.0", folder.security(insecure=True)),
        ("0.0.0.0", Security(insecure=True)),
    ):
        with serving(security, manager=is_manager, host=host) as server:
            assert fetch(server) == 200


def test_without_any_token_they_are_for_this_machine(folder: Folder, is_manager: bool) -> None:
    """Where certificates alone say who calls: this port asks for none."""
    with serving(folder.mutual_tls(), manager=is_manager) as server:
        assert fetch(server, folder=folder) == 200
    assert refusal_of({"REMOTE_ADDR": "10.1.2.3"}, None) == "403 Forbidden"
    assert refusal_of({"REMOTE_ADDR": "fe80::1"}, None) == "403 Forbidden"
    assert refusal_of({}, None) == "403 Forbidden"


@pytest.mark.parametrize(
    "text", ["", "two words-that-are-long-enough", "short", "sha256:" + "0" * 64]
)
def test_a_token_that_is_none_stops_the_start(folder: Folder, text: str) -> None:
    """In one line that does not hold it."""
    replace_file(folder.path / "metrics-token", text.encode(), 0o600)
    security = folder.security(metrics_token_file=folder.name("metrics-token"))
    with pytest.raises(ConfigError) as caught:
        serving(security, manager=False, host="127.0.0.1").start()
    assert "\n" not in str(caught.value)
    assert not text or text not in str(caught.value)
