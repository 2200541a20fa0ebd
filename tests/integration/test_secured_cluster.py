"""A secured service from the command line, on Ray, and where its secrets are not (P18)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvservice.cli import main
from kvservice.clock import SystemClock
from kvservice.cluster.processes import members
from kvservice.cluster.state import RunState, StateStore
from kvservice.core import errors
from kvservice.core.caller import Caller, Role
from kvservice.credentials import TokenFile
from kvservice.v1 import types_pb2
from kvservice.wire import status
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client import connect
from tests.securing import Folder

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass
class Secured:
    """A running service, its secrets, and what is said of it."""

    folder: Folder
    state: RunState
    run_directory: Path
    said: list[str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = run(self.run_directory, *arguments)
        self.said += [done.stdout, done.stderr]
        return done


def run(run_directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvservice", *arguments],
        env=os.environ | {"KVSERVICE_RUN_DIR": str(run_directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    run_directory = tmp_path_factory.mktemp("run")
    folder = Folder(tmp_path_factory.mktemp("secrets"))
    # As it should not be, but may: the tokens themselves, not their hashes.
    plain = "".join(f"{token} {name} tenant\n" for name, token in folder.tokens.items())
    path = folder.path / "tokens"
    path.write_text(plain.replace("olga tenant", "olga operator"))
    up = run(
        run_directory,
        *("up", "--detach", "--workers", "2", "--port", "0", "--memory", "64MiB", "--json"),
        *("--key", folder.name("key"), "--tokens", folder.name("tokens")),
        *("--tls-cert", folder.name("server.pem"), "--tls-key", folder.name("server.key")),
        *("--tls-ca", folder.name("ca.pem")),
    )
    assert up.returncode == 0, up.stderr
    state = StateStore(run_directory, "default").find()
    assert state is not None
    service = Secured(folder, state, run_directory, [up.stdout, up.stderr])
    try:
        yield service
    finally:
        assert run(run_directory, "down").returncode == 0


def test_it_serves_those_it_knows(service: Secured) -> None:
    """With the token and the CA; a session over both workers; nobody else."""
    folder, address = service.folder, service.state.manager_address
    tls = folder.client_tls()
    with connect(address, token=folder.tokens["alice"], tls=tls) as client:
        session = client.open(num_rows=2, spread=2)
        k = np.random.default_rng(0).standard_normal((2, 2, 40, 8)).astype(np.float32)
        out = session.attend(0, k, k, k)
        assert out.shape == k.shape
        assert np.isfinite(out).all()
        session.release()
    with connect(address, tls=tls) as client, pytest.raises(errors.Unauthenticated):
        client.open(num_rows=1)
    with pytest.raises(errors.Unavailable, match="speaks TLS"):
        connect(address)


def test_commands_present_their_credentials(service: Secured, tmp_path: Path) -> None:
    """From files; without them the command says what is missing."""
    token = tmp_path / "token"
    token.write_text(service.folder.tokens["olga"])
    shown = ("--token-file", str(token), "--tls-ca", service.folder.name("ca.pem"))
    status_of = service.run("status", "--json", *shown)
    assert status_of.returncode == 0, status_of.stdout
    assert json.loads(status_of.stdout)["healthy"]
    assert service.run("stats", "--tls-ca", service.folder.name("ca.pem")).returncode == 1
    assert "not known" in service.said[-1]


def canaries(service: Secured, capability: bytes, wrong: str) -> dict[str, bytes]:
    """Return what must not be found, in the forms in which it could be."""
    folder = service.folder
    found = {f"token of {name}": token.encode() for name, token in folder.tokens.items()}
    key = (folder.path / "key").read_text()
    found |= {"key": key.encode(), "key's bytes": bytes.fromhex(key)}
    pem = (folder.path / "server.key").read_text().splitlines()
    found["private key"] = pem[1].encode()
    found["wrong token"] = wrong.encode()
    mac = capability[-32:]
    found |= {
        "capability": mac,
        "capability in hex": mac.hex().encode(),
        "capability in base64": base64.b64encode(mac)[:40],
    }
    return found


def test_secrets_are_nowhere_to_be_found(service: Secured) -> None:
    """Not in logs, records, Ray's session, command lines, environments, metrics, or errors."""
    folder, address = service.folder, service.state.manager_address
    wrong = f"wrong-{secrets.token_hex(16)}"
    tls = folder.client_tls()
    said = list(service.said)
    with connect(address, token=folder.tokens["alice"], tls=tls) as client:
        session = client.open(num_rows=1)
        one = np.ones((1, 2, 3, 8), np.float32)
        session.attend(0, one, one, one)
        said += [repr(client), repr(session), repr(client.list_sessions())]
        [lease] = client._leases._leases
        said.append(repr(lease))
        capability = next(iter(lease.capabilities.values()))
        said += bad_calls(service, session.id, capability, wrong)
        looked_at = {"what was said": "\n".join(said).encode()}
        looked_at |= dict(everything(service))
        wanted = canaries(service, capability, wrong)
        hits = [
            f"{name} in {place}"
            for place, content in looked_at.items()
            for name, canary in wanted.items()
            if canary in content
        ]
        assert not hits, "\n".join(hits)
        # That these places are really looked at: what is no secret is there.
        assert any(b"manager serves at" in content for content in looked_at.values())
        assert any(folder.name("tokens").encode() in content for content in looked_at.values())
        assert any(b"grpc_server_handled" in content for content in looked_at.values())
        session.release()


def bad_calls(service: Secured, session_id: str, capability: bytes, wrong: str) -> list[str]:
    """Fail in many ways with secrets at hand; return all that is said then."""
    credentials = grpc.ssl_channel_credentials((service.folder.path / "ca.pem").read_bytes())
    said = []
    with connect(
        service.state.manager_address,
        token=service.folder.tokens["olga"],
        tls=service.folder.client_tls(),
    ) as client:
        workers = [worker.address for worker in client.list_workers()]
    asked = types_pb2.GetSessionRequest(session_id=session_id, capability=capability[:-1] + b"x")
    bearers = [wrong, service.folder.tokens["bob"], service.folder.tokens["alice"] + "x"]
    for owner, address in (
        (MANAGER, service.state.manager_address),
        *((WORKER, w) for w in workers),
    ):
        with grpc.secure_channel(address, credentials) as channel:
            for bearer in bearers:
                for request in (asked.SerializeToString(), bearer.encode()):
                    method = channel.unary_unary(f"/{owner.full_name}/GetSession")
                    metadata = (("authorization", f"Bearer {bearer}"),)
                    try:
                        method(request, metadata=metadata, timeout=10)
                    except grpc.RpcError as error:
                        told = status.from_rpc_error(error)
                        said += [str(told), repr(told.metadata), str(error.details())]  # type: ignore[attr-defined]
    assert said
    return said


def everything(service: Secured) -> Iterator[tuple[str, bytes]]:
    """Yield all places that outlive a call, and what is in them."""
    state = service.state
    for root in (service.run_directory, Path(state.scratch)):
        for path in root.rglob("*"):
            if path.is_file() and path.name != "token":  # Ray's own, which is made for this
                with contextlib.suppress(OSError):
                    yield str(path), path.read_bytes()
    for key in members(state.tag, state.head):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                yield f"{name} of {key.pid}", Path(f"/proc/{key.pid}/{name}").read_bytes()
    for address in metrics_addresses(service):
        url, context = f"https://{address}/metrics", service.folder.https()
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            yield f"metrics at {address}", answer.read()


def metrics_addresses(service: Secured) -> list[str]:
    tls: Any = service.folder.client_tls()
    token = service.folder.tokens["olga"]
    with connect(service.state.manager_address, token=token, tls=tls) as client:
        found = [worker.metrics_address for worker in client.list_workers()]
    return [service.state.metrics_address, *found]


# In this process, where a command that comes to nothing costs nothing.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSERVICE_RUN_DIR", str(tmp_path / "run"))
    return tmp_path


def test_a_start_that_cannot_be_is_refused_before_ray(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, at once; for `worker` and `manager` too."""
    folder = Folder(here / "secrets")
    readable = folder.path / "tokens"
    readable.chmod(0o644)
    secured = ("--key", folder.name("key"), "--tokens", str(readable))
    for arguments, text in (
        (("up", *secured), "chmod 600"),
        (("up", "--tokens", str(readable)), "--key"),
        (("up", "--host", "0.0.0.0"), "--insecure"),
        (("manager", "--port", "0", *secured), "chmod 600"),
        (("worker", "--port", "0", *secured), "chmod 600"),
        (("worker", "--port", "0", "--tls-cert", folder.name("server.pem")), "go together"),
        (("worker", "--port", "0", "--host", "0.0.0.0", "--advertise-host", "a"), "--insecure"),
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert text in said
        assert not any(token in said for token in folder.tokens.values())


def test_certificates_and_tokens_are_made_by_commands(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `certs` and `token` write is what the servers take; a second `certs` renews."""
    folder = here / "made"
    assert main(["certs", str(folder), "--tenant", "alice", "--operator", "olga"]) == 0
    assert {path.name for path in folder.iterdir()} == {
        *("ca.pem", "ca.key", "server.pem", "server.key", "capability.key"),
        *("tenant-alice.pem", "tenant-alice.key", "operator-olga.pem", "operator-olga.key"),
    }
    assert all(p.stat().st_mode & 0o077 == 0 for p in folder.iterdir() if p.suffix == ".key")
    before = (folder / "server.pem").read_bytes(), (folder / "ca.pem").read_bytes()
    assert main(["certs", str(folder)]) == 0
    after = (folder / "server.pem").read_bytes(), (folder / "ca.pem").read_bytes()
    assert before[0] != after[0]
    assert before[1] == after[1]
    capsys.readouterr()
    assert main(["token", "alice", "--file", str(folder / "tokens")]) == 0
    made = capsys.readouterr().out.strip()
    assert made not in (folder / "tokens").read_text()
    assert TokenFile(folder / "tokens", SystemClock()).find(made) == Caller("alice", Role.TENANT)
    assert main(["token", "no such name"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
