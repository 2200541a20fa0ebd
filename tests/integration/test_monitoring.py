"""A real Prometheus scrapes a running service: the dashboard has data, and an alert arrives."""

from __future__ import annotations

import json
import math
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.certificates import make_development_certificates
from kvservice.clock import SystemClock
from kvservice.config import ManagerSettings, Security, ServerLimits, WorkerSettings
from kvservice.core.errors import AlreadyExists, KVServiceError
from kvservice.credentials import replace_file
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice_client import Client, connect
from tests.monitoring import (
    DEPLOY,
    Prometheus,
    alerts_at,
    promtool,
    running_alertmanager,
    running_prometheus,
    secured_job,
)
from tests.programs import needs
from tests.serving import scrape, until

LIMITS = ServerLimits(max_streams=16, unary_threads=4)
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvservice.json").read_text())
VARIABLES = {"$__rate_interval": "10s", "$__range": "60s", "$worker": ".*"}

pytestmark = [
    pytest.mark.processes,
    needs("prometheus", "promtool", "prometheus-alertmanager"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]


@dataclass
class Monitored:
    """A service under load, and those who watch it."""

    manager: ManagerServer
    workers: list[WorkerServer]
    client: Client
    prometheus: Prometheus
    alertmanager: str


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A manager that has taken over from another, two workers, a decoder that goes on and on."""
    folder = tmp_path_factory.mktemp("monitoring")
    with ExitStack() as running:
        first = start_manager()
        port = int(first.address.rsplit(":", 1)[1])
        workers = []
        for name in ("w0", "w1"):
            settings = WorkerSettings(
                name, 64 << 20, manager_address=first.address, metrics_port=0, limits=LIMITS
            )
            workers.append(running.enter_context(WorkerServer(settings)))
        until(lambda: len(first.manager.workers()) == 2)
        secured = running.enter_context(WorkerServer(secured_settings(folder)))
        first.stop(0.1)
        manager = start_manager(port)
        running.callback(manager.stop, 0.1)
        until(lambda: manager.manager.membership().recovery)
        client = running.enter_context(connect(manager.address))
        alertmanager = running.enter_context(running_alertmanager(folder / "alertmanager"))
        prometheus = running.enter_context(
            running_prometheus(
                folder / "prometheus",
                manager=str(manager.metrics_address),
                workers=[str(worker.metrics_address) for worker in workers],
                more_jobs=[
                    secured_job(
                        "kvservice-worker-secured",
                        str(secured.metrics_address),
                        ca_file=folder / "tls" / "ca.pem",
                        token_file=folder / "metrics-token",
                    )
                ],
                alertmanager=alertmanager,
            )
        )
        kept = running.enter_context(client.open(num_rows=2))
        kept.attend(0, np.ones((2, 4, 40, 16), np.float32), *[np.ones((2, 2, 40, 16), "f4")] * 2)
        load = Load(client)
        running.callback(load.stop)
        load.start()
        until(lambda: prometheus.targets_up() == 4, 30.0)
        yield Monitored(manager, workers, client, prometheus, alertmanager)


def secured_settings(folder: Path) -> WorkerSettings:
    """Return the settings of a lone worker with certificates and quotas, which others can reach."""
    make_development_certificates(
        folder / "tls", hosts=(), callers=(), days=30, now=SystemClock().time()
    )
    for name in ("key", "metrics-token"):
        replace_file(folder / name, secrets.token_hex(32).encode(), 0o600)
    (folder / "quotas.toml").write_text("[tenants.default]\npages = 1000\n")
    security = Security(
        tls_cert=str(folder / "tls" / "server.pem"),
        tls_key=str(folder / "tls" / "server.key"),
        tls_ca=str(folder / "tls" / "ca.pem"),
        quota_file=str(folder / "quotas.toml"),
        key_file=str(folder / "key"),
        metrics_token_file=str(folder / "metrics-token"),
    )
    return WorkerSettings(
        "secured",
        64 << 20,
        host="0.0.0.0",
        advertise_host="127.0.0.1",
        metrics_port=0,
        limits=LIMITS,
        security=security,
    )


def start_manager(port: int = 0) -> ManagerServer:
    settings = ManagerSettings(port=port, metrics_port=0, workers_expected=2, limits=LIMITS)
    server = ManagerServer(settings)
    server.start()
    return server


class Load:
    """A decoder that steps, forks, pops, is moved, and makes mistakes, until it is told to stop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        clock = SystemClock()
        while not clock.wait(self._stop, 0.05):
            with suppress(KVServiceError):  # a worker may be gone
                self._decode()

    def _decode(self) -> None:
        q, kv = np.ones((1, 4, 20, 16), np.float32), np.ones((1, 2, 20, 16), np.float32)
        for lane in (True, False):
            with (
                connect(self._client._connections.front, lane=lane, timeout_s=5.0) as client,
                client.open(num_rows=1) as session,
            ):
                for _ in range(3):
                    session.attend(0, q, kv, kv)
                with session.fork() as branch:
                    branch.attend(0, q, kv, kv)
                session.pop(5)
                for worker_id in ("w0", "w1"):
                    with suppress(AlreadyExists):  # it is there
                        client.move_session(session.id, worker_id)
                session.read(0)
                with client.attach(session.id), suppress(KVServiceError):
                    session.attend(0, q, kv, kv)  # somebody has taken it over: refused


def queries() -> list[tuple[str, str]]:
    """Return title and expression of every query of the dashboard, its variables filled in."""
    found = []
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            found.append((panel["title"], expression))
    return found


def test_what_is_exported_is_clean(monitored: Monitored) -> None:
    """`promtool check metrics` has nothing to say about manager and workers."""
    for server in (monitored.manager, *monitored.workers):
        url = f"http://{server.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        assert promtool("check", "metrics", text=text) == ""


def test_prometheus_has_what_is_exported(monitored: Monitored) -> None:
    """A counter that stands still is the same there, and pages add up in every scrape."""
    p = monitored.prometheus
    for worker in monitored.workers:
        name = worker.settings.worker_id
        budget = until(lambda name=name: p.value(f'kvservice_budget_bytes{{worker="{name}"}}'))
        assert budget == worker.settings.budget_bytes
        assert scrape(str(worker.metrics_address))[f'kvservice_budget_bytes{{worker="{name}"}}']
    until(lambda: (p.value("sum(kvservice_page_allocations_total)") or 0) > 100, 30.0)
    leak = (
        "sum by (worker) (kvservice_page_allocations_total)"
        " - sum by (worker) (kvservice_page_frees_total)"
        ' - (sum by (worker) (kvservice_pages{state="used"})'
        " or 0 * sum by (worker) (kvservice_page_allocations_total))"
    )
    # At every moment that was scraped, under load.
    assert p.value(f"max(max_over_time(abs({leak})[30s:500ms]))") == 0
    assert (p.value('sum(max_over_time(kvservice_pages{state="used"}[30s]))') or 0) >= 6
    # Over HTTPS, for its token.
    ends_in = "kvservice_tls_certificate_expiry_timestamp_seconds{role='server'} - time()"
    assert (p.value(ends_in) or 0) == pytest.approx(30 * 86400, abs=600)
    assert p.value('sum(kvservice_workers{state="alive"})') == 2
    assert p.value('kvservice_manager_recoveries_total{outcome="complete"}') == 1


@pytest.mark.parametrize(("title", "expression"), queries())
def test_dashboard_has_data(monitored: Monitored, title: str, expression: str) -> None:
    """Every query of every panel yields numbers."""

    def numbers() -> list[float]:
        found = monitored.prometheus.query(expression)
        return [value for _, value in found if not math.isnan(value)]

    assert until(numbers, 30.0), title


def test_alert_arrives(monitored: Monitored) -> None:
    """A worker goes: Alertmanager hears of it, and of nothing that is not the case."""
    assert not alerts_at(monitored.alertmanager).keys() & {"KVServiceWorkerDown"}
    monitored.workers[1].stop(0.1)
    arrived = until(lambda: alerts_at(monitored.alertmanager).get("KVServiceWorkerDown"), 60.0)
    assert arrived["labels"]["severity"] == "critical"
    assert arrived["annotations"]["description"].startswith("1 workers can be had")
    assert arrived["status"]["state"] == "active"
    firing = {alert["labels"]["alertname"] for alert in firing_alerts(monitored.prometheus)}
    assert "KVServiceWorkerDown" in firing
    assert not firing & {"KVServicePageLeak", "KVServiceManagerDown", "KVServiceFailpointsOn"}


def firing_alerts(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [a for a in prometheus.get("alerts")["alerts"] if a["state"] == "firing"]


class TestDashboard:
    """What Grafana would trip over."""

    def test_identity(self) -> None:
        """A fixed uid, no id of some installation, and panels that can be told apart."""
        assert DASHBOARD["uid"] == "kvservice"
        assert DASHBOARD["id"] is None
        ids = [panel["id"] for panel in DASHBOARD["panels"]]
        assert len(set(ids)) == len(ids)

    def test_data_source_is_a_variable(self) -> None:
        """No query names one of its own."""
        for panel in DASHBOARD["panels"]:
            for part in (panel, *panel.get("targets", ())):
                if panel["type"] != "row":
                    assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}

    def test_rows(self) -> None:
        """Everything that an operator asks about has its row, and nothing overlaps."""
        rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
        assert rows == [
            "Calls: rates, errors, durations",
            "Pages and bytes",
            "Sessions and leases",
            "Workers and recovery",
            "Security",
            "Moves and copies",
        ]
        taken: set[tuple[int, int]] = set()
        for panel in DASHBOARD["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
