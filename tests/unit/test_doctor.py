"""The checks of `kvservice doctor` that need no service."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from kvservice.certificates import make_development_certificates
from kvservice.cli import main
from kvservice.cli.doctor import FINE, WARNING, WRONG, check_encryption, check_versions
from kvservice.clock import SystemClock
from tests.programs import ROOT

REQUIRES = [
    "grpcio>=1.73.1",
    "protobuf<8,>=6.31",
    'torch>=2.6; extra == "server"',
    'kvservice[hf,server]; extra == "demo"',
]


@pytest.mark.parametrize(
    ("installed", "outcome", "says"),
    [
        ({"grpcio": "1.73.1", "protobuf": "7.36.2"}, FINE, "grpcio 1.73.1"),
        ({"grpcio": "1.85.3", "protobuf": "6.31"}, FINE, "protobuf 6.31"),
        ({"grpcio": "1.73.0", "protobuf": "6.31"}, WRONG, ">=1.73.1 is needed"),
        ({"grpcio": "1.73.1", "protobuf": "8.0"}, WRONG, "protobuf 8.0 is installed"),
        ({"protobuf": "7.0"}, WRONG, "grpcio is missing"),
        ({"grpcio": "2.0", "protobuf": "7.0", "torch": "2.5.1"}, WRONG, "torch 2.5.1"),
        ({"grpcio": "2.0", "protobuf": "7.0", "torch": "2.13.0+cpu"}, FINE, "torch 2.13.0+cpu"),
    ],
)
def test_versions(installed: dict[str, str], outcome: str, says: str) -> None:
    """What is needed, or there, must have a version that is asked for; extras may be absent."""
    finding = check_versions(installed.get, REQUIRES)
    assert finding.outcome == outcome
    assert says in finding.found
    assert bool(finding.advice) is (outcome == WRONG)


def test_our_own_requirements_are_understood() -> None:
    """Of this installation, which the tests run on, nothing is wrong."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requires = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    assert any(requirement.startswith("ray") for requirement in requires)
    finding = check_versions(metadata.version, requires)
    assert finding.outcome == FINE, finding
    newer = [requirement.replace(">=", ">=99.") for requirement in requires]
    assert check_versions(metadata.version, newer).outcome == WRONG


def test_sources_that_were_never_installed_are_told() -> None:
    """Then it is not known what is needed."""
    assert check_versions(metadata.version, None).outcome == WARNING


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_plaintext_on_loopback_is_fine(listener: socket.socket) -> None:
    """Whoever could listen there is on this machine already."""

    def hang_up() -> None:
        accepted, _ = listener.accept()
        accepted.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    finding = check_encryption(f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    assert finding.outcome == FINE
    assert "none" in finding.found


@pytest.mark.parametrize(("days", "outcome"), [(30, FINE), (3, WARNING)])
def test_certificate_is_looked_at(
    listener: socket.socket, tmp_path: Path, days: float, outcome: str
) -> None:
    """How long it holds is said, and is a warning in its last week."""
    make_development_certificates(
        tmp_path, hosts=(), callers=(), days=days, now=SystemClock().time()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    context.set_alpn_protocols(["h2"])

    def shake_hands() -> None:
        accepted, _ = listener.accept()
        with context.wrap_socket(accepted, server_side=True) as encrypted:
            encrypted.recv(1)

    thread = threading.Thread(target=shake_hands)
    thread.start()
    finding = check_encryption(f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    assert finding.outcome == outcome
    assert "TLSv1.3" in finding.found
    assert bool(finding.advice) is (outcome != FINE)


def test_without_a_service_the_installation_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each check says what it found; nothing is wrong where the tests run."""
    monkeypatch.setenv("KVSERVICE_RUN_DIR", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["check"] for finding in findings] == [
        *("versions", "kernel", "open files", "memory", "port", "service")
    ]
    assert all(finding["outcome"] in (FINE, WARNING) for finding in findings)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(finding["found"] in text for finding in findings)


def test_a_service_that_is_not_there_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says so, and the advice what to look at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert main(["doctor", "--address", address]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "kvservice up" in out
