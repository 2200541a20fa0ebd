"""The whole service on Ray: actors that are killed come back, nodes go and come."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvservice.clock import SystemClock
from kvservice.cluster.head import HeadPlan, make_scratch, plan_head, start_head
from kvservice.cluster.ports import free_ports
from kvservice.cluster.processes import TAG_VARIABLE, find_process, members
from kvservice.cluster.processes import end as end_processes
from kvservice.v1 import manager_pb2
from kvservice_client import Client, connect
from tests.chaos.conftest import Report
from tests.chaos.decoding import Decoder, Load, workers_of
from tests.chaos.service import TTL_S, Process, num_alive
from tests.programs import ROOT, needs
from tests.serving import until

CLOCK = SystemClock()

START_S = 150.0  # for what Ray starts, on a machine that is busy

# So that Ray notices a dead node soon; its defaults take 14 s.
HASTY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

pytestmark = [
    pytest.mark.chaos, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600),
]  # fmt: skip


@dataclass(frozen=True)
class Kvservice:
    """The command, with a place of its own for records."""

    environment: dict[str, str]
    run_directory: Path

    def __call__(self, *arguments: str) -> Any:
        """Run it, and return what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "kvservice", *arguments, "--json"],
            env=self.environment | {"KVSERVICE_RUN_DIR": str(self.run_directory)},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


class Cluster:
    """A Ray of our own with several nodes on this machine, each at an address of its own."""

    def __init__(self, plan: HeadPlan, folder: Path, stack: ExitStack) -> None:
        self.plan = plan
        self.folder = folder
        self._stack = stack
        self._tags: dict[str, str] = {}

    def add_node(self, host: str, resources: dict[str, float]) -> None:
        """Start a node, and wait until Ray has it.

        Ray gives a node 30 s to appear, which is not enough on a machine that is busy: then again.
        """
        tag = self._tags[host] = str(uuid.uuid4())
        log = self.folder / f"{host}.log"
        for _ in range(3):
            node = self._start_node(host, resources, tag, log)
            self._stack.callback(node.wait)
            self._stack.callback(self.kill_node, host)  # first of the two

            def decided(node: subprocess.Popen[bytes] = node) -> bool:
                return has_started(log) or node.poll() is not None

            until(decided, START_S)
            if has_started(log):
                return
        raise AssertionError(log.read_text())

    def _start_node(
        self, host: str, resources: dict[str, float], tag: str, log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *(f"--address={self.plan.address}", f"--node-ip-address={host}"),
                    *("--num-cpus=0", f"--resources={json.dumps(resources)}"),
                    *("--object-store-memory=80000000", "--disable-usage-stats"),
                    *("--min-worker-port=0", "--max-worker-port=0"),
                ],
                env=dict(self.plan.environment) | {TAG_VARIABLE: tag},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_node(self, host: str) -> None:
        """Kill everything on a node at once, as when its power is cut."""
        for key in members(self._tags[host], None):
            os.kill(key.pid, signal.SIGKILL)

    def processes_named(self, host: str, name: str) -> list[int]:
        """Return the pids of processes of a node that Ray calls so."""
        return [
            key.pid
            for key in members(self._tags[host], None)
            if Path(f"/proc/{key.pid}/cmdline").read_bytes().startswith(f"ray::{name}".encode())
        ]

    @property
    def kvservice(self) -> Kvservice:
        environment = {k: v for k, v in self.plan.environment.items() if k != TAG_VARIABLE}
        return Kvservice(environment, self.folder / "run")


@contextmanager
def ray_cluster(folder: Path, **resources: float) -> Iterator[Cluster]:
    """Start a head at 127.0.0.2 that has these resources."""
    with ExitStack() as stack:
        scratch = make_scratch()
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        tag = str(uuid.uuid4())
        plan = plan_head(scratch, tag=tag, num_workers=1, environment=dict(os.environ))
        plan = replace(plan, environment=dict(plan.environment) | HASTY)
        log = folder / "head.log"
        head = start_head(plan, log)
        cluster = Cluster(plan, folder, stack)
        cluster._tags["127.0.0.2"] = tag

        def end() -> None:
            assert end_processes(tag, find_process(head.pid), clock=CLOCK, grace_s=10) == []
            head.wait()

        stack.callback(end)
        until(lambda: has_started(log), START_S)
        yield cluster


def has_started(log: Path) -> bool:
    """Whether a node says in its log that it has joined."""
    return "Ray runtime started" in log.read_text()


def hosts(client: Client) -> dict[str, str]:
    """Return worker id -> host of all workers that are alive."""
    return {
        one.worker_id: one.address.rpartition(":")[0]
        for one in client.list_workers()
        if one.state == manager_pb2.WORKER_STATE_ALIVE
    }


def all_hosts_have_sessions(clients: Callable[[], Client], count: int) -> Load:
    """Return decoders with sessions on all workers."""
    made: dict[int, Decoder] = {}
    looking = clients()
    for seed in range(count):
        before = seed

        def all_told(before: int = before) -> bool:
            return sum(one.session_count for one in looking.list_workers()) >= before

        until(all_told)
        made[seed] = Decoder(clients(), seed, ttl_s=TTL_S)
        made[seed].step(40)
    return Load(made)


def is_alive_pid(pid: int) -> bool:
    return find_process(pid) is not None


def use_of(clients: Callable[[], Client], worker_id: str) -> bool:
    """Whether a new session goes to a worker."""
    decoder = Decoder(clients(), 50, ttl_s=TTL_S)
    decoder.step(3)
    return workers_of(decoder) == [worker_id]


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that ends with its stdin, or by a signal."""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            assert running.stdin is not None
            running.stdin.close()
            try:
                running.wait(timeout=60 if "tests.chaos" in " ".join(command) else 0.1)
            except subprocess.TimeoutExpired:
                running.terminate()


def told(running: subprocess.Popen[str], what: str = "") -> str:
    """Say something to a process, and return the next line it says."""
    assert running.stdin is not None
    assert running.stdout is not None
    if what:
        running.stdin.write(f"{what}\n")
        running.stdin.flush()
    return running.stdout.readline().strip()


@needs("redis-server")
def test_a_gcs_that_dies_with_redis_behind_it(tmp_path: Path, report: Report) -> None:
    """Decoding goes on and workers join without it; when it is back, Ray restarts what dies."""
    redis_port, port = free_ports("127.0.0.1", 2)
    command = Kvservice(dict(os.environ) | {"RAY_AUTH_MODE": "disabled"}, tmp_path / "run")
    redis = ("redis-server", "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "")
    head_script = (sys.executable, "-m", "tests.chaos.gcs_process", f"127.0.0.1:{redis_port}")
    with ExitStack() as stack:
        stack.enter_context(process(*redis, "--dir", str(tmp_path)))
        head = stack.enter_context(process(*head_script))
        ray_address = told(head)
        up = command(
            "up", "--detach", "--address", ray_address, "--port", str(port), "--workers", "2",
            "--memory", "64MiB",
        )  # fmt: skip
        address = up["managerAddress"]

        def client() -> Client:
            return stack.enter_context(connect(address))

        looking = client()
        with all_hosts_have_sessions(client, 4) as load:
            load.all_advance()
            load.mark()
            assert told(head, "kill") == "done"
            joining = Process(
                "worker",
                {"worker_id": "joined", "budget_bytes": 512 << 20, "manager_address": address},
            )
            stack.callback(joining.end)
            joining.start()
            starts_s = CLOCK.monotonic()
            until(lambda: "joined" in hosts(looking))
            until(lambda: use_of(client, "joined"), 20.0)
            joined_s = CLOCK.monotonic() - starts_s
            load.run_for(lambda: CLOCK.monotonic() - load.marked_at > 20.0)
            slowest_s = max(load.slowest_s.values())
            assert not load.losses
            assert told(head, "start") == "done"
            load.all_advance(20)
            assert not load.losses, "nobody has lost anything"
        checked = load.num_checked
        command("down")
    report(
        "P6", "Ray's GCS SIGKILL for 20 s, Redis behind it: the slowest step",
        recovery_s=slowest_s, bound_s=1.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P6", "a worker joins while the GCS is away, and is used (from its start on)",
        recovery_s=joined_s, bound_s=10.0, num_checked=checked,
    )  # fmt: skip


def test_nodes_that_go_and_come(tmp_path: Path, report: Report) -> None:
    """Workers on two nodes; one node's power is cut; another joins, and is found and used."""
    with ExitStack() as stack, ray_cluster(tmp_path) as cluster:
        cluster.add_node("127.0.0.3", {"kvworker": 1})
        (port,) = free_ports("127.0.0.2", 1)
        up = cluster.kvservice(
            "up", "--detach", "--address", cluster.plan.address, "--port", str(port),
            "--workers", "2", "--memory", "64MiB",
        )  # fmt: skip
        address = up["managerAddress"]

        def client() -> Client:
            return stack.enter_context(connect(address))

        looking = client()
        placed = hosts(looking)
        assert sorted(placed.values()) == ["127.0.0.2", "127.0.0.3"]
        _, there = sorted(placed, key=placed.__getitem__)
        with all_hosts_have_sessions(client, 6) as load:
            load.all_advance()
            hit = {seed for seed, one in load.decoders.items() if workers_of(one) == [there]}
            assert 0 < len(hit) < 6
            load.mark()
            cluster.kill_node("127.0.0.3")
            load.run_for(lambda: load.resumed.keys() >= hit)
            load.all_advance()
            assert load.losses.keys() == hit
            told_s = max(seconds for seconds, _ in load.losses.values())
            tokens = max(count for _, count in load.losses.values())
            resumed_s = max(load.resumed.values())
            joining_at = CLOCK.monotonic()
            cluster.add_node("127.0.0.4", {"kvworker": 1})
            node_s = CLOCK.monotonic() - joining_at
            until(lambda: hosts(looking).get(there) == "127.0.0.4", START_S)
            joined_s = CLOCK.monotonic() - joining_at
            until(lambda: use_of(client, there), 20.0)
            (manager,) = cluster.processes_named("127.0.0.2", "ManagerActor")
            load.mark()
            os.kill(manager, signal.SIGKILL)
            until(lambda: not is_alive_pid(manager))
            Decoder(client(), 77, ttl_s=TTL_S).step(3)
            manager_s = CLOCK.monotonic() - load.marked_at
            load.all_advance()
            assert load.losses.keys() == hit, "a dead manager costs nobody anything"
            slowest_s = max(load.slowest_s.values())
        for decoder in load.decoders.values():
            decoder.check_stored()
        checked = load.num_checked
        until(lambda: num_alive(looking) == 2)
        cluster.kvservice("down")
    lost = f"its worker's pages, up to {tokens} tokens of each session"
    report(
        "P3", "Ray node killed (SIGKILL of all on it): its sessions are told", lost=lost,
        recovery_s=told_s, bound_s=4.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P3", "Ray node killed: all lost tokens are fed again", lost=lost,
        recovery_s=resumed_s, bound_s=8.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P3", "a node joins Ray: the lost worker is placed there, and used (from its start on)",
        recovery_s=joined_s - node_s, bound_s=20.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P4", "manager actor SIGKILL: restarted by Ray, it opens sessions",
        recovery_s=manager_s, bound_s=6.0, num_checked=checked,
    )  # fmt: skip
    report(
        "P4", "manager actor SIGKILL: the slowest step meanwhile",
        recovery_s=slowest_s, bound_s=1.0, num_checked=checked,
    )  # fmt: skip
