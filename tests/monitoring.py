"""A real Prometheus and a real Alertmanager, on loopback, with folders of their own."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kvservice.cluster.ports import free_ports
from tests.programs import ROOT, find
from tests.serving import until

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
INTERVAL = "500ms"


def promtool(*arguments: str, text: str | None = None, cwd: Path | None = None) -> str:
    """Run promtool; return what it prints, which must not be a complaint."""
    done = subprocess.run(
        [find("promtool") or "promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """Answers queries."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **fields: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{fields}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series that a query yields now."""
        found = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def value(self, expression: str) -> float | None:
        """Return the one value that a query yields now; None if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def targets_up(self) -> int:
        return sum(target["health"] == "up" for target in self.get("targets")["activeTargets"])


def secured_job(name: str, target: str, *, ca_file: Path, token_file: Path) -> dict[str, Any]:
    """Return the job for a server with a certificate for `localhost`, as the comment of
    `deploy/prometheus` has it."""
    lines = (DEPLOY / "prometheus" / "prometheus.yml").read_text().splitlines()
    said = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    job: dict[str, Any] = yaml.safe_load("\n".join(said))
    assert job.keys() == {"scheme", "tls_config", "authorization"}
    job["tls_config"] |= {"ca_file": str(ca_file), "server_name": "localhost"}
    job["authorization"] |= {"credentials_file": str(token_file)}
    return {"job_name": name, "static_configs": [{"targets": [target]}], **job}


@contextmanager
def running_prometheus(
    folder: Path,
    *,
    manager: str,
    workers: Iterable[str],
    more_jobs: Sequence[dict[str, Any]] = (),
    alertmanager: str,
) -> Iterator[Prometheus]:
    """Scrape a service as `deploy/prometheus` says, at other addresses and many times faster.

    Alerts wait a second, where the rules say minutes.
    """
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": INTERVAL,
        "scrape_timeout": INTERVAL,
        "evaluation_interval": INTERVAL,
    }
    for job, targets in zip(config["scrape_configs"], ([manager], list(workers)), strict=True):
        job["static_configs"][0]["targets"] = targets
    config["scrape_configs"] += more_jobs
    [managers] = config["alerting"]["alertmanagers"]
    managers["static_configs"][0]["targets"] = [alertmanager]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text(re.sub(r"(?m)^( +for:).*$", r"\1 1s", RULES.read_text()))
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    command = [
        find("prometheus") or "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with _running(command, folder / "prometheus.log", f"http://{address}/-/ready"):
        yield Prometheus(address)


@contextmanager
def running_alertmanager(folder: Path) -> Iterator[str]:
    """Yield the address of an Alertmanager that tells nobody."""
    folder.mkdir()
    route = {"receiver": "nobody", "group_wait": "0s", "group_interval": "1s"}
    config = {"route": route, "receivers": [{"name": "nobody"}]}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    command = [
        find("prometheus-alertmanager") or "prometheus-alertmanager",
        f"--config.file={folder / 'config.yml'}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with _running(command, folder / "alertmanager.log", f"http://{address}/-/ready"):
        yield address


def alerts_at(alertmanager: str) -> dict[str, dict[str, Any]]:
    """Return the alerts that an Alertmanager has, by name."""
    url = f"http://{alertmanager}/api/v2/alerts"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return {alert["labels"]["alertname"]: alert for alert in json.load(answer)}


@contextmanager
def _running(command: list[str], log: Path, ready: str) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as run:
        try:
            until(lambda: run.poll() is not None or _answers(ready), 60.0)
            assert run.poll() is None, log.read_text()
            yield
        finally:
            run.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
