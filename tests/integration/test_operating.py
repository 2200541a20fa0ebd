"""Operators' commands against a running service: top, drain, doctor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvservice.cli import main
from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import manager_pb2
from kvservice.wire.names import WORKER
from kvservice_client import Client, Session, connect
from tests.processes import running_service
from tests.securing import Folder, secured
from tests.serving import scrape, until, worker_peer

pytestmark = pytest.mark.processes

LIMITS = ServerLimits(max_streams=8, unary_threads=4)


def attend(session: Session, num_tokens: int = 20) -> None:
    q = np.ones((session.num_rows, 4, num_tokens, 16), np.float32)
    kv = np.ones((session.num_rows, 2, num_tokens, 16), np.float32)
    session.attend(0, q, kv, kv)


@dataclass
class Service:
    """A manager and two workers in this process."""

    manager: ManagerServer
    workers: dict[str, WorkerServer]
    client: Client

    def states(self) -> dict[str, int]:
        return {worker.worker_id: worker.state for worker in self.client.list_workers()}


@pytest.fixture
def service(leaves_nothing: None) -> Iterator[Service]:
    settings = ManagerSettings(metrics_port=0, limits=LIMITS, workers_expected=2)
    with ManagerServer(settings) as manager:
        workers = {}
        for name in ("w0", "w1"):
            of_worker = WorkerSettings(
                name, 64 << 20, metrics_port=0, manager_address=manager.address, limits=LIMITS
            )
            workers[name] = WorkerServer(of_worker)
            workers[name].start()
        try:
            until(lambda: len(manager.manager.workers()) == 2)
            with connect(manager.address) as client:
                yield Service(manager, workers, client)
        finally:
            for worker in workers.values():
                worker.stop(0.1)


def test_top_shows_what_goes_on(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are the service's; into a pipe it prints once, for people or as JSON."""
    with service.client.open(num_rows=2) as session:
        attend(session, 40)
        assert main(["top", "--address", service.manager.address, "--once", "--json"]) == 0
        board = json.loads(capsys.readouterr().out)
        assert [row["workerId"] for row in board["workers"]] == ["w0", "w1"]
        assert board["total"]["usedPages"] == 6
        assert board["total"]["sessions"] == 1
        assert board["total"]["p99Seconds"] > 0
        assert board["total"]["tokensPerSecond"] == 0
        # That attention is slow may be so, where tests run.
        assert {alert["name"] for alert in board["alerts"]} <= {"KVServiceSlow"}
        assert main(["top", "--address", service.manager.address, "--interval", "0.2"]) == 0
        text = capsys.readouterr().out
        assert "no alerts" in text or "KVServiceSlow" in text
        assert "[#" in text
        assert text.count("alive") == 2


def test_top_goes_on_as_json_until_a_signal(service: Service) -> None:
    """A line for each look; the end is no failure."""
    command = [sys.executable, "-m", "kvservice", "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(
        [*command, "--address", service.manager.address], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        boards = [json.loads(run.stdout.readline()) for _ in range(3)]
        run.terminate()
        assert run.wait(timeout=30) == 0
    assert all(len(board["workers"]) == 2 for board in boards)


def test_doctor_finds_nothing_wrong(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """With a service it looks at manager, encryption, each worker, and clocks."""
    assert main(["doctor", "--address", service.manager.address, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    checks = [finding["check"] for finding in findings]
    assert checks[-5:] == ["manager", "TLS", "reachable", "reachable", "clocks"]
    assert all(finding["outcome"] != "wrong" for finding in findings)


def test_drained_worker_gives_its_sessions_away_and_leaves(service: Service) -> None:
    """It opens none; those it has go to the other one while they are used; then it is gone."""
    client, workers = service.client, service.workers
    sessions = [client.open(num_rows=1) for _ in range(6)]
    for session in sessions:
        attend(session)
    name = next(w for w in workers if workers[w].worker.num_sessions)
    other = "w1" if name == "w0" else "w0"
    answer = client.drain_worker(name, timeout_s=60)
    assert answer.state == manager_pb2.WORKER_STATE_DRAINING
    until(lambda: workers[name].worker.stats().draining)
    with client.open(num_rows=1) as elsewhere:
        attend(elsewhere)
        assert elsewhere.page_stats()[0].worker_id == other
    until(lambda: workers[other].worker.num_sessions == 6)
    for session in sessions:
        attend(session)
        assert session.page_stats()[0].worker_id == other
        session.release()
    workers[name].wait()
    workers[name].stop(0.1)
    assert list(service.states()) == [other]


def test_drained_worker_leaves_with_its_last_session(service: Service) -> None:
    """Where nobody else takes them its sessions go on; it is listed until it has left, and missed
    by nobody."""
    client, workers = service.client, service.workers
    session = client.open(num_rows=1)
    attend(session)
    name = next(w for w in workers if workers[w].worker.num_sessions)
    other = "w1" if name == "w0" else "w0"
    workers[other].worker.admission.max_sessions = 0
    client.drain_worker(name, timeout_s=60)
    until(lambda: workers[name].worker.stats().draining)
    until(lambda: workers[other].worker.stats().moves["refused"])
    attend(session)
    assert service.states()[name] == manager_pb2.WORKER_STATE_DRAINING
    session.release()
    workers[name].wait()
    workers[name].stop(0.1)
    assert list(service.states()) == [other]
    assert client.workers_expected() == 1
    found = scrape(str(service.manager.metrics_address))
    assert found["kvservice_workers_expected"] == 1
    assert found['kvservice_workers{state="alive"}'] == 1
    texts = [event.text for event in service.manager.manager.events() if event.worker_id == name]
    assert texts[-2:] == ["is to leave, within 60 s", "has left"]


def test_drained_worker_leaves_when_its_time_is_over(service: Service) -> None:
    """What it holds then is lost, and its decoder is told so."""
    client, workers = service.client, service.workers
    session = client.open(num_rows=1)
    attend(session)
    name = next(w for w in workers if workers[w].worker.num_sessions)
    other = "w1" if name == "w0" else "w0"
    workers[other].worker.admission.max_sessions = 0
    client.drain_worker(name, timeout_s=0)
    workers[name].wait()
    workers[name].stop(0.1)
    until(lambda: name not in service.states())
    with pytest.raises(errors.PagesLost):
        attend(session)


def test_lone_worker_is_not_drained(service: Service) -> None:
    """There is nobody to tell it: the command says what to do instead."""
    address = service.workers["w0"].address
    with connect(address) as lone, pytest.raises(errors.Unimplemented, match="end its"):
        lone.drain_worker("w0")


def test_drain_command_waits_for_the_process_to_go(capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: the worker's own process ends, and the command with it."""
    with running_service(num_workers=2) as address, connect(address) as client:
        session = client.open(num_rows=1)
        attend(session)
        before = {worker.worker_id: worker for worker in client.list_workers()}
        holder = until(lambda: next((w for w in held(client)), None))
        other = next(name for name in before if name != holder)
        assert main(["drain", "nobody", "--address", address]) == 1
        assert "there are: worker-0, worker-1" in capsys.readouterr().err
        assert main(["drain", "127.0.0.1", "--address", address]) == 2
        assert "several workers" in capsys.readouterr().err
        command = ["drain", before[other].address, "--address", address, "--json"]
        assert main(command) == 0
        done = json.loads(capsys.readouterr().out)
        assert done == {"workerId": other, "hasLeft": True, "sessionsLeft": 0}
        assert [worker.worker_id for worker in client.list_workers()] == [holder]
        attend(session)
        command = ["drain", holder, "--address", address, "--json", "--no-wait", "--timeout", "90"]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["hasLeft"] is False
        attend(session)
        session.release()
        until(lambda: not client.list_workers(), 30.0)


def test_move_command(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, and back; who asks for nonsense is told so in one line."""
    session = service.client.open(num_rows=1)
    attend(session)
    held = session.page_stats()[0].worker_id
    other = "w1" if held == "w0" else "w0"
    address = ["--address", service.manager.address]
    assert main(["move", session.id, other, *address]) == 0
    assert capsys.readouterr().out == f"{session.id} is on {other}\n"
    attend(session)
    command = ["move", session.id, service.workers[held].address, "--from", other, "--json"]
    assert main([*command, *address]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [extent["workerId"] for extent in told["extents"]] == [held]
    for arguments, text in (
        ([session.id, held], "holds the session"),
        ([session.id, "nobody"], "no worker is called"),
        ([session.id, other, "--from", other], "holds nothing of the session"),
        (["123e4567-e89b-42d3-a456-426614174000", other], "no such session"),
        (["nonsense", other], "UUID4"),
    ):
        assert main(["move", *arguments, *address]) != 0
        told_so = capsys.readouterr().err
        assert text in told_so
        assert told_so.count("\n") == 1
    attend(session)
    assert session.page_stats()[0].worker_id == held


def held(client: Client) -> list[str]:
    return [stats.worker_id for stats in client.page_stats() if stats.num_sessions]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_commands_are_for_whom_their_calls_are(
    folder: Folder, capsys: pytest.CaptureFixture[str], leaves_nothing: None
) -> None:
    """Tenants see their own sessions, operators all; only operators drain."""
    security = folder.tls(token_file=folder.name("tokens"))
    with secured(folder, security, metrics_port=0) as service:
        tls = folder.client_tls()
        owned = [service.connect(name, tls=tls).open(num_rows=1) for name in ("alice", "bob")]

        def command(tenant: str, *arguments: str) -> int:
            token = folder.path / f"{tenant}.token"
            token.write_text(folder.tokens[tenant])
            token.chmod(0o600)
            secure = ("--token-file", str(token), "--tls-ca", folder.name("ca.pem"))
            return main([*arguments, "--address", service.manager.address, *secure])

        def listed(tenant: str) -> set[str]:
            assert command(tenant, "sessions", "--json") == 0
            found = json.loads(capsys.readouterr().out)["sessions"]
            return {session["sessionId"] for session in found}

        assert listed("alice") == {owned[0].id}
        assert listed("bob") == {owned[1].id}
        assert listed("olga") == {session.id for session in owned}
        assert command("alice", "drain", "w0") == 1
        assert "operator" in capsys.readouterr().err
        assert command("prometheus", "top", "--once", "--json") == 0
        assert json.loads(capsys.readouterr().out)["total"]["sessions"] == 2
        assert command("olga", "doctor", "--json") in (0, 1)
        findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
        assert "certificate holds for 2 days" in findings["TLS"]["found"]
        assert findings["TLS"]["outcome"] == "warning"
        assert findings["clocks"]["found"].startswith("1 compared"), "over HTTPS"
        assert command("olga", "workers") == 0
        address = service.workers[0].metrics_address
        assert f"https://{address}/metrics" in capsys.readouterr().out
        for session in owned:
            session.release()


def test_callers_who_are_turned_away_are_counted(folder: Folder, leaves_nothing: None) -> None:
    """By why: one call without a token, one with a wrong one, two that may not."""
    with secured(folder, metrics_port=0) as service:
        [worker] = service.workers
        method = f"/{WORKER.full_name}/PageStats"
        for token, error in (
            (None, errors.Unauthenticated),
            ("not-a-token-at-all-0123", errors.Unauthenticated),
            (folder.tokens["alice"], errors.PermissionDenied),
            (folder.tokens["bob"], errors.PermissionDenied),
        ):
            with worker_peer(worker.address) as peer:
                if token is not None:
                    peer.metadata = (("authorization", f"Bearer {token}"),)
                with pytest.raises(error):
                    peer.raw(method, b"")
        found = scrape(str(worker.metrics_address))
        counts = {
            reason: found[f'kvservice_auth_failures_total{{reason="{reason}"}}']
            for reason in ("missing", "invalid", "expired", "forbidden")
        }
        assert counts == {"missing": 1, "invalid": 1, "expired": 0, "forbidden": 2}


def test_live_view_is_drawn_on_a_terminal(service: Service) -> None:
    """Workers, bars and alerts, drawn again and again; Ctrl-C ends it, and is no failure."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    command = [sys.executable, "-m", "kvservice", "top", "--interval", "0.2"]
    with subprocess.Popen(
        [*command, "--address", service.manager.address],
        stdin=theirs,
        stdout=theirs,
        env=os.environ | {"TERM": "xterm-256color"},
    ) as run:
        os.close(theirs)
        drawn = b""
        while drawn.count(b"w1") < 3:
            drawn += os.read(ours, 65536)
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end has gone
            while rest := os.read(ours, 65536):
                drawn += rest
        assert run.wait(timeout=30) == 0
    os.close(ours)
    text = drawn.decode(errors="replace")  # a write may have been cut short by the signal
    assert "kvservice" in text
    assert "alive" in text
    assert "░" in text
    assert "Ctrl-C" in text
