"""The service on a Ray of its own, and on another's: from the command line to a session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.clock import SystemClock
from kvservice.cluster.head import make_scratch, plan_head, start_head
from kvservice.cluster.ports import check_port_free, free_ports
from kvservice.cluster.processes import (
    TAG_VARIABLE,
    end,
    find_process,
    is_alive,
    members,
    wait_until,
)
from kvservice.cluster.state import RunState, StateStore
from kvservice_client import connect

CLOCK = SystemClock()
ROWS, HEADS, DIM, TOKENS = 2, 2, 8, 40

# Twice the usual limit, for machines that are busy with something else.
pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Command:
    """`kvservice` with a place of its own for records."""

    run_directory: Path
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvservice", *arguments],
            env=self.environment | {"KVSERVICE_RUN_DIR": str(self.run_directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, exit_code: int = 0) -> str:
        """Run it; return what it prints: on stdout, or on stderr if it is to fail."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=100)
        assert process.returncode == exit_code, f"{arguments}: {out}{err}"
        return err if exit_code else out

    def json(self, *arguments: str, exit_code: int = 0) -> Any:
        with self.start(*arguments, "--json") as process:
            out, err = process.communicate(timeout=100)
        assert process.returncode == exit_code, f"{arguments}: {out}{err}"
        return json.loads(out)

    def record(self, name: str = "default") -> RunState:
        state = StateStore(self.run_directory, name).find()
        assert state is not None
        return state


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("run"), dict(os.environ))


@pytest.fixture(scope="module")
def service(command: Command) -> Iterator[RunState]:
    """A detached service with two workers, ended by `down`, after which nothing must be left."""
    up = command.json("up", "--detach", "--workers", "2", "--port", "0", "--memory", "64MiB")
    state = command.record()
    try:
        assert up["managerAddress"] == state.manager_address
        yield state
    finally:
        done = command.json("down")
    assert done["wasRunning"]
    assert done["endedProcessCount"] >= 4
    assert members(state.tag, state.head) == []
    assert not Path(state.scratch).exists()
    host, port = state.manager_address.split(":")
    check_port_free(host, int(port), "--port")
    assert command.json("down") == {
        "wasRunning": False,
        "killedActors": [],
        "endedProcessCount": 0,
    }
    assert not command.json("status", exit_code=3)["healthy"]


def tensors(num_tokens: int, seed: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    shape = (ROWS, HEADS, num_tokens, DIM)
    return [random.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Return causal attention in float64; the queries are the newest positions."""
    num_queries, num_tokens = q.shape[2], k.shape[2]
    scores = np.einsum("rhqd,rhtd->rhqt", q.astype(float), k.astype(float)) / DIM**0.5
    visible = np.arange(num_tokens) <= np.arange(num_queries)[:, None] + num_tokens - num_queries
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rhqt,rhtd->rhqd", weights / weights.sum(-1, keepdims=True), v.astype(float))


def processes_named(state: RunState, name: str) -> list[int]:
    """Return the pids of the service's processes that Ray calls so."""
    return [
        key.pid
        for key in members(state.tag, state.head)
        if Path(f"/proc/{key.pid}/cmdline").read_bytes().startswith(f"ray::{name}".encode())
    ]


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    assert wait_until(condition, clock=CLOCK, timeout_s=timeout_s)


def is_healthy(command: Command) -> bool:
    with command.start("status") as process:
        process.communicate()
    return process.returncode == 0


def test_session_from_end_to_end(command: Command, service: RunState) -> None:
    """A session on both workers attends right, and three ways of counting pages agree."""
    status = command.json("status")
    assert status["healthy"]
    assert [worker["state"] for worker in status["workers"]] == ["WORKER_STATE_ALIVE"] * 2
    with connect(service.manager_address) as client:
        session = client.open(num_rows=ROWS, spread=2)
        q, k, v = tensors(TOKENS, 1)
        np.testing.assert_allclose(session.attend(0, q, k, v), attention(q, k, v), atol=1e-5)
        q1, k1, v1 = tensors(1, 2)
        out = session.attend(0, q1, k1, v1)
        k, v = np.concatenate([k, k1], axis=2), np.concatenate([v, v1], axis=2)
        np.testing.assert_allclose(out, attention(q1, k, v), atol=1e-5)

        by_rpc = {stats.worker_id: used_pages(stats) for stats in client.page_stats()}
        assert all(by_rpc.values()), "the session should lie on both workers"
        by_command = {
            worker["workerId"]: sum(pool["usedPageCount"] for pool in worker["pools"])
            for worker in command.json("stats")["workers"]
        }
        by_metrics = {
            worker["workerId"]: used_pages_in_metrics(worker["metricsAddress"])
            for worker in status["workers"]
        }
        assert by_rpc == by_command == by_metrics
        assert 'kvservice_workers{state="alive"} 2.0' in metrics(status["metricsAddress"])
        assert session.id in command("sessions")
        table = command("stats")
        assert all(worker_id in table for worker_id in by_rpc)

        session.release()
        until(lambda: not any(used_pages(stats) for stats in client.page_stats()))


def used_pages(stats: Any) -> int:
    return sum(pool.used_pages for pool in stats.pools)


def metrics(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        lines: list[str] = response.read().decode().splitlines()
        return lines


def used_pages_in_metrics(address: str) -> int:
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in metrics(address)
        if line.startswith("kvservice_pages{") and 'state="used"' in line
    )


def test_up_again_finds_it(command: Command, service: RunState) -> None:
    """With the same options it answers where it is; with others it fails, in one line."""
    options = ("--detach", "--workers", "2", "--port", "0", "--memory", "64MiB")
    assert command.json("up", *options)["managerAddress"] == service.manager_address
    assert command.record() == service
    for other in (("--workers", "3"), ("--address", "auto", "--port", "50051")):
        error = command("up", *options, *other, exit_code=1)
        assert error.count("\n") == 1
        assert "kvservice down" in error


def test_manager_comes_back_at_its_port_and_knows_the_sessions(
    command: Command, service: RunState
) -> None:
    """Killed, it is restarted by Ray, asks the workers, and nobody's session is lost."""
    with connect(service.manager_address) as client:
        session = client.open(num_rows=ROWS)
        q, k, v = tensors(TOKENS, 3)
        session.attend(0, q, k, v)
        (manager,) = processes_named(service, "ManagerActor")
        os.kill(manager, signal.SIGKILL)
        # Decoding goes on meanwhile.
        q1, k1, v1 = tensors(1, 4)
        out = session.attend(0, q1, k1, v1)
        k, v = np.concatenate([k, k1], axis=2), np.concatenate([v, v1], axis=2)
        np.testing.assert_allclose(out, attention(q1, k, v), atol=1e-5)

        until(lambda: is_healthy(command))
        assert processes_named(service, "ManagerActor") not in ([], [manager])
        assert command.json("status")["managerAddress"] == service.manager_address
        until(lambda: session.id in command("sessions"))
        found = [info for info in client.list_sessions() if info.session_id == session.id]
        assert found[0].lengths == ((TOKENS + 1, TOKENS + 1),)
        session.release()


def test_worker_comes_back(command: Command, service: RunState) -> None:
    """Killed, it is restarted with another incarnation, under its own name."""
    before = {
        worker["workerId"]: worker["incarnation"] for worker in command.json("workers")["workers"]
    }
    os.kill(processes_named(service, "WorkerActor")[0], signal.SIGKILL)

    def is_back() -> bool:
        found = command.json("workers")["workers"]
        alive = {
            worker["workerId"]: worker["incarnation"]
            for worker in found
            if worker["state"] == "WORKER_STATE_ALIVE"
        }
        return alive.keys() == before.keys() and alive != before

    until(is_back)
    assert is_healthy(command)


def test_second_service_in_the_foreground(command: Command, service: RunState) -> None:
    """It has a Ray of its own, lives until a signal, and leaves nothing; the first stays."""
    with command.start(
        "up", "--name", "second", "--port", "0", "--memory", "64MiB", "--json"
    ) as up:
        assert up.stdout is not None
        try:
            line = up.stdout.readline()
            assert line, up.stderr and up.stderr.read()
            state = command.record("second")
            assert json.loads(line)["managerAddress"] == state.manager_address
            assert command.json("status", "--name", "second")["healthy"]
            assert command.json("status")["healthy"]
        finally:
            up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=60) == 0
    assert members(state.tag, state.head) == []
    assert not Path(state.scratch).exists()
    command("status", "--name", "second", exit_code=3)
    assert is_healthy(command)


def test_drained_worker_leaves_for_good(command: Command, service: RunState) -> None:
    """Its actor ends, and Ray does not start it again; the other worker goes on.

    The last one with this service, which has a worker less afterwards.
    """
    done = command.json("drain", "kv-worker-1")
    assert done == {"workerId": "kv-worker-1", "hasLeft": True, "sessionsLeft": 0}
    until(lambda: len(processes_named(service, "WorkerActor")) == 1)
    [left] = command.json("workers")["workers"]
    assert (left["workerId"], left["state"]) == ("kv-worker-0", "WORKER_STATE_ALIVE")
    findings = command.json("doctor")["findings"]
    assert {"memory", "manager", "clocks"} <= {finding["check"] for finding in findings}


@pytest.mark.usefixtures("leaves_nothing")
def test_failed_up_leaves_nothing(command: Command) -> None:
    """Ray needs longer than a second, so that this ends in the middle."""
    error = command(
        "up", "--name", "hasty", "--detach", "--port", "0", "--timeout", "1", exit_code=1
    )
    assert error.splitlines()[-1].startswith("kvservice up: ")
    assert "Traceback" not in error
    command("status", "--name", "hasty", exit_code=3)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_that_is_ended_in_the_middle(command: Command, number: signal.Signals) -> None:
    """Asked to end, it ends what it has started. Killed, it has left a record for `down`."""
    name = f"ended-{number.name}"
    store = StateStore(command.run_directory, name)
    with command.start("up", "--name", name, "--port", "0") as up:
        until(lambda: (state := store.find()) is not None and state.head is not None)
        state = command.record(name)
        up.send_signal(number)
        _, error = up.communicate(timeout=60)
    if number == signal.SIGINT:
        assert up.returncode == 128 + number
        assert "Traceback" not in error
        assert store.find() is None
    else:
        command("status", "--name", name, exit_code=3)
        assert command.json("down", "--name", name)["endedProcessCount"] >= 1
    assert members(state.tag, state.head) == []
    assert not Path(state.scratch).exists()


@pytest.mark.usefixtures("leaves_nothing")
def test_on_a_ray_of_somebody_else(tmp_path: Path) -> None:
    """Too much is refused with numbers; what fits serves; `down` ends our actors and no more."""
    scratch = make_scratch()
    tag = str(uuid.uuid4())
    plan = plan_head(scratch, tag=tag, num_workers=1, environment=dict(os.environ))
    head = start_head(plan, tmp_path / "ray.log")
    key = find_process(head.pid)
    environment = {k: v for k, v in plan.environment.items() if k != TAG_VARIABLE}
    command = Command(tmp_path / "run", environment)
    options = ("--detach", "--address", plan.address, "--memory", "64MiB")
    port = str(free_ports("127.0.0.1", 1)[0])
    try:
        until(lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text(), 60)
        error = command(
            "up", *options, "--port", port, "--workers", "2", "--timeout", "12", exit_code=1
        )
        assert "in time; " in error
        assert "(the cluster has 1, free 0)" in error
        command("status", exit_code=3)

        command.json("up", *options, "--port", port)
        assert command.json("status")["workers"][0]["state"] == "WORKER_STATE_ALIVE"
        assert command.json("up", *options, "--port", port)["kind"] == "joined"
        assert command.json("down")["killedActors"] == ["kv-manager", "kv-worker-0"]
        assert key is not None
        assert is_alive(key)
        assert command.json("down")["wasRunning"] is False
    finally:
        assert end(tag, key, clock=CLOCK, grace_s=10) == []
        head.wait()
        shutil.rmtree(scratch)
