"""The manager's status page: its numbers over HTTP, and what a browser makes of them."""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.config import ManagerSettings, Security, ServerLimits, WorkerSettings
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice_client import Client, Session, connect
from tests.browser import Browser, running_browser
from tests.programs import needs
from tests.serving import until

pytestmark = pytest.mark.processes

LIMITS = ServerLimits(max_streams=8, unary_threads=4)
TOKENS = """
operators-token-0123456789 ops operator
metrics-token-0123456789ab prom metrics
tenants-token-0123456789ab acme tenant
"""


@dataclass
class Service:
    """A manager with its page, and two workers."""

    manager: ManagerServer
    client: Client
    url: str


@pytest.fixture
def service(leaves_nothing: None) -> Iterator[Service]:
    settings = ManagerSettings(metrics_port=0, limits=LIMITS, workers_expected=2)
    with ExitStack() as running:
        manager = running.enter_context(ManagerServer(settings))
        for name in ("kv-worker-0", "kv-worker-1"):
            running.enter_context(
                WorkerServer(
                    WorkerSettings(name, 1 << 20, manager_address=manager.address, limits=LIMITS)
                )
            )
        until(lambda: len(manager.manager.workers()) == 2)
        client = running.enter_context(connect(manager.address))
        yield Service(manager, client, f"http://{manager.metrics_address}")


def fetch(url: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def numbers(service: Service) -> dict[str, Any]:
    status, _, body = fetch(f"{service.url}/status.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def opened(client: Client, tokens: int, **options: Any) -> Session:
    session = client.open(num_rows=1, **options)
    q, kv = np.ones((1, 4, tokens, 16), np.float32), np.ones((1, 2, tokens, 16), np.float32)
    session.attend(0, q, kv, kv)
    return session


def test_numbers_are_those_of_page_stats(service: Service) -> None:
    """The same as the RPC's; of a session's id no more than tells it from others."""
    with opened(service.client, 40) as session:
        found = until(lambda: n if (n := numbers(service))["total"]["sessions"] == 1 else None)
        stats = {worker.worker_id: worker for worker in service.client.page_stats()}
        for row in found["workers"]:
            pools = stats[row["workerId"]].pools
            assert row["usedPages"] == sum(pool.used_pages for pool in pools)
            assert row["freePages"] == sum(pool.free_pages for pool in pools)
            assert row["budgetBytes"] == 1 << 20
        assert found["total"]["usedPages"] == 3
        assert [entry["longest"] for entry in found["sessions"]] == [40]
        assert found["service"]["expectedWorkers"] == 2
        assert {event["workerId"] for event in found["events"]} == {"kv-worker-0", "kv-worker-1"}
        assert session.id not in json.dumps(found)
        assert found["sessions"][0]["id"] == session.id[:8]


def test_nothing_can_be_changed(service: Service) -> None:
    """GET and HEAD alone, of paths that there are; metrics are where they were."""
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert fetch(f"{service.url}/status.json", method=method)[0] == 405
    assert fetch(f"{service.url}/../etc/passwd")[0] == 404
    assert fetch(f"{service.url}/index.html")[0] == 404
    assert b"kvservice_workers_expected 2.0" in fetch(f"{service.url}/metrics")[2]


@pytest.mark.parametrize("path", ["/", "/status.js", "/status.json", "/metrics", "/nowhere"])
def test_head_is_what_get_says_before_the_body(service: Service, path: str) -> None:
    """For probes that want no more, and for whoever looks with `curl -I`."""
    address = urllib.parse.urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b""
    first, _, rest = head.partition(b"\r\n")
    headers = http.client.parse_headers(io.BytesIO(rest + b"\r\n\r\n"))
    status, expected, content = fetch(f"{service.url}{path}")
    assert int(first.split()[1]) == status
    assert headers.keys() == list(expected)
    assert headers["Content-Type"] == expected["Content-Type"]
    if not path.endswith(("json", "metrics")):  # which tell another time each time
        assert int(headers["Content-Length"]) == len(content)


def test_page_takes_nothing_from_elsewhere(service: Service) -> None:
    """Its policy forbids it, and it names no other place."""
    for path in ("/", "/status.js", "/status.css"):
        status, headers, body = fetch(service.url + path)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert b"http://" not in body
        assert b"https://" not in body


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:9", 200), ("evil.example:80", 403)],
)
def test_names_from_elsewhere_do_not_lead_here(service: Service, host: str, status: int) -> None:
    """A page from elsewhere, whose name has been made to lead to this machine, gets nothing."""
    assert fetch(f"{service.url}/status.json", Host=host)[0] == status


@pytest.fixture
def guarded(tmp_path: Path, leaves_nothing: None) -> Iterator[str]:
    """Return the URL of a manager that wants tokens."""
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    for secret in (tokens, key):
        secret.chmod(0o600)
    security = Security(token_file=str(tokens), key_file=str(key))
    settings = ManagerSettings(metrics_port=0, limits=LIMITS, security=security)
    with ManagerServer(settings) as manager:
        yield f"http://{manager.metrics_address}"


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer nobodys-token-0123456789", 401),
        ("Basic operators-token-0123456789", 401),
        ("Bearer tenants-token-0123456789ab", 403),
        ("Bearer metrics-token-0123456789ab", 200),
        ("bearer operators-token-0123456789", 200),
    ],
)
def test_same_tokens_as_over_grpc(guarded: str, authorization: str | None, status: int) -> None:
    """Operators and metrics may read numbers; tenants may not. The page itself says nothing."""
    headers = {} if authorization is None else {"Authorization": authorization}
    got, _, body = fetch(f"{guarded}/status.json", **headers)
    assert got == status
    assert (b"workers" in body) is (status == 200)
    assert fetch(f"{guarded}/")[0] == 200


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with running_browser(tmp_path / "browser") as browser:
        yield browser


COUNT = "return document.querySelectorAll('[data-worker] .cell.{}').length"


@needs("chromium", "chromedriver")
@pytest.mark.slow
def test_browser_shows_what_goes_on(service: Service, browser: Browser, tmp_path: Path) -> None:
    """Numbers, a map of pages, sessions and events; live, and without a complaint."""
    first = opened(service.client, 150)
    browser.resize(1200, 1000)
    browser.open(service.url)
    until(lambda: "live" in browser.text("#live"), 20.0)
    until(lambda: browser.run(COUNT.format("used")) == 10, 20.0)
    # That attention is slow may be so, where tests run.
    assert browser.text("#alerts") == "none" or "KVServiceSlow" in browser.text("#alerts")
    assert "kv-worker-0" in browser.text("#workers")
    assert first.id[:8] in browser.text("#sessions")
    assert "has registered" in browser.text("#events")
    with opened(service.client, 60), opened(service.client, 33, reserve_tokens=320):
        # Live: nothing was loaded again.
        until(lambda: browser.run(COUNT.format("used")) == 10 + 4 + 3, 20.0)
        until(lambda: browser.run(COUNT.format("reserved")) == 20 - 3, 20.0)
        assert browser.text("[data-name=sessions] b") == "3"
        assert browser.text("#session-count") == "(3)"
        kept = Path(os.environ.get("KVSERVICE_SCREENSHOTS") or tmp_path) / "status.png"
        browser.screenshot(kept)
        assert kept.read_bytes().startswith(b"\x89PNG")
        assert kept.stat().st_size > 20_000
    first.release()
    until(lambda: browser.run(COUNT.format("used")) == 0, 20.0)
    assert browser.complaints() == []


@needs("chromium", "chromedriver")
@pytest.mark.slow
def test_browser_asks_for_a_token(guarded: str, browser: Browser) -> None:
    """Locked until one is entered that may; what was entered is not shown again."""
    browser.open(guarded)
    until(lambda: browser.text("#live") == "locked", 20.0)
    assert browser.run("return document.getElementById('board').hidden")
    enter = (
        "document.getElementById('token').value = '{}'; document.getElementById('enter').click()"
    )
    browser.run(enter.format("tenants-token-0123456789ab"))
    until(lambda: browser.text("#live") == "this token may not", 20.0)
    browser.run(enter.format("metrics-token-0123456789ab"))
    until(lambda: "live" in browser.text("#live"), 20.0)
    assert not browser.run("return document.getElementById('board').hidden")
    assert browser.run("return document.getElementById('token').value") == ""
