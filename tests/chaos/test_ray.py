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
from dataclasses import replace
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
from tests.chaos.service import TTL_S, num_alive
from tests.serving import until

CLOCK = SystemClock()

# So that Ray notices a dead node soon; its defaults take 14 s.
HASTY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

pytestmark = [
    pytest.mark.chaos, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip


class Cluster:
    """A Ray of our own with several nodes on this machine, each at an address of its own."""

    def __init__(self, plan: HeadPlan, folder: Path, stack: ExitStack) -> None:
        self.plan = plan
        self.folder = folder
        self._stack = stack
        self._tags: dict[str, str] = {}

    def add_node(self, host: str, resources: dict[str, float]) -> None:
        """Start a node, and wait until Ray has it."""
        tag = self._tags[host] = str(uuid.uuid4())
        log = self.folder / f"{host}.log"
        environment = dict(self.plan.environment) | {TAG_VARIABLE: tag}
        with log.open("wb") as out:
            node = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *(f"--address={self.plan.address}", f"--node-ip-address={host}"),
                    *("--num-cpus=0", f"--resources={json.dumps(resources)}"),
                    *("--object-store-memory=80000000", "--disable-usage-stats"),
                    *("--min-worker-port=0", "--max-worker-port=0"),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(node.wait)
        self._stack.callback(self.kill_node, host)
        until(lambda: "Ray runtime started" in log.read_text(), 60.0)

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

    def kvservice(self, *arguments: str) -> Any:
        """Run the command, and return what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "kvservice", *arguments, "--json"],
            env={k: v for k, v in self.plan.environment.items() if k != TAG_VARIABLE}
            | {"KVSERVICE_RUN_DIR": str(self.folder / "run")},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


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
        until(lambda: "Ray runtime started" in log.read_text(), 60.0)
        yield cluster


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
            until(lambda: hosts(looking).get(there) == "127.0.0.4", 60.0)
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
