"""Manager and workers as processes that a test may kill, freeze, and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvservice.clock import SystemClock
from kvservice.cluster.ports import free_ports
from kvservice.core.errors import KVServiceError
from kvservice.v1 import manager_pb2
from kvservice_client import Client, ClientConfig, WorkerStats, connect
from tests.processes import stands_still
from tests.programs import ROOT
from tests.serving import until

CLOCK = SystemClock()
HOST = "127.0.0.1"
SCRIPTS = {"manager": "tests.chaos.manager_process", "worker": "tests.chaos.worker_process"}
START_S = 60.0  # for a process that loads torch on a machine that is busy
TTL_S = 2.0


class Process:
    """One process of ours, from `start` on; after `kill` it may be started again.

    Attributes:
        failpoints: Where lives that are launched from now on end, or fail; see
            `kvservice/core/failpoints.py`.
    """

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self._kind = kind
        self._settings = settings
        self._popen: subprocess.Popen[str] | None = None
        self.failpoints = ""
        self.said: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.said["address"])

    @property
    def worker_id(self) -> str:
        return str(self._settings["worker_id"])

    @property
    def running(self) -> bool:
        return self._popen is not None

    def launch(self) -> None:
        """Start it; `wait` for it before it is asked anything."""
        assert self._popen is None, "it runs already"
        self._popen = subprocess.Popen(
            [sys.executable, "-m", SCRIPTS[self._kind], json.dumps(self._settings)],
            cwd=ROOT,
            env=dict(os.environ) | self._flags(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _flags(self) -> dict[str, str]:
        if not self.failpoints:
            return {}
        return {"KVSERVICE_TESTING": "1", "KVSERVICE_FAILPOINTS": self.failpoints}

    def wait(self) -> None:
        """Wait until it serves."""
        line = self._stdout_line()
        assert line, f"the {self._kind} has ended at its start"
        self.said = json.loads(line)

    def start(self) -> None:
        self.launch()
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._popen is not None, "it does not run"
        self._popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._reap()

    def wait_until_ended(self) -> None:
        """Wait until it has ended by itself."""
        popen = self._popen
        assert popen is not None, "it does not run"
        until(lambda: popen.poll() is not None, START_S)
        self._reap()

    def begin_again(self, failpoints: str = "") -> None:
        """Kill it, and start it with these failpoints."""
        self.kill()
        self.failpoints = failpoints
        self.start()
        self.failpoints = ""

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        assert self._popen is not None
        pid = self._popen.pid
        until(lambda: stands_still(pid))

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def check(self) -> None:
        """Assert the worker's invariants: pages counted, owned as often as referenced, reachable
        from a session with a lease."""
        assert self._popen is not None
        assert self._popen.stdin is not None
        self._popen.stdin.write("check\n")
        self._popen.stdin.flush()
        assert self._stdout_line() == "ok\n"

    def end(self) -> None:
        """End it in an orderly way, if it runs."""
        if self._popen is not None:
            self.thaw()
            assert self._popen.stdin is not None
            self._popen.stdin.close()
            try:
                self._popen.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._popen.kill()
            self._reap()

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        return _status(self.pid, "VmRSS") * 1024

    def num_threads(self) -> int:
        return _status(self.pid, "Threads")

    def num_files(self) -> int:
        """Return the open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def pid(self) -> int:
        assert self._popen is not None, "it does not run"
        return self._popen.pid

    def _stdout_line(self) -> str:
        assert self._popen is not None
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def _reap(self) -> None:
        assert self._popen is not None
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
        self._popen = None


class Service:
    """A manager and workers, and the clients that a test has connected."""

    def __init__(self, manager: Process, workers: list[Process], stack: ExitStack) -> None:
        self.manager = manager
        self.workers = workers
        self._stack = stack
        self._clients: list[Client] = []

    @property
    def address(self) -> str:
        return self.manager.address

    def connect(self, *, address: str | None = None, lane: bool = True, **limits: Any) -> Client:
        """Return a client; it is closed with the service."""
        config = ClientConfig(**{k: v for k, v in limits.items() if k != "timeout_s"})
        client = connect(
            address or self.address,
            lane=lane,
            timeout_s=limits.get("timeout_s", 30.0),
            config=config,
        )
        self._clients.append(client)
        return client

    def add_worker(self, **settings: Any) -> Process:
        """Launch a further worker, that joins."""
        worker = Process("worker", settings)
        self.workers.append(worker)
        self._stack.callback(worker.end)
        worker.launch()
        return worker

    def worker_named(self, worker_id: str) -> Process:
        return next(one for one in self.workers if one.worker_id == worker_id)

    def wait_for(self, num_workers: int, *, timeout_s: float = START_S) -> None:
        """Wait until the manager takes so many workers for alive."""
        with self.connect() as client:
            until(lambda: num_alive(client) == num_workers, timeout_s)

    def repair(self) -> None:
        """Start again what has been killed, and wait until all are there."""
        dead = [one for one in (self.manager, *self.workers) if not one.running]
        for one in dead:
            one.launch()
        for one in dead:
            one.wait()
        self.wait_for(len(self.workers))

    def stats(self) -> list[WorkerStats]:
        with self.connect() as client:
            return client.page_stats()

    def close_clients(self) -> None:
        """Close all clients; what they have open is released."""
        while self._clients:
            self._clients.pop().close()

    def settle(self, *, timeout_s: float = TTL_S + 1.0) -> float:
        """Close all clients; return the seconds until no page is used on any worker.

        Then the invariants of every worker hold, or this fails.
        """
        self.close_clients()
        started = CLOCK.monotonic()
        with self.connect() as client:
            until(
                lambda: num_alive(client) == len(self.workers) and not pages(client), timeout_s + 2
            )
            took = CLOCK.monotonic() - started
            # One that holds nothing may have been opened without anybody's knowing: its lease ends.
            until(lambda: not any(stats.num_sessions for stats in client.page_stats()), TTL_S + 2)
        for worker in self.workers:
            worker.check()
        return took


@contextmanager
def serving(
    num_workers: int, *, memory_bytes: int = 64 << 20, **settings: Any
) -> Iterator[Service]:
    """Yield a service of processes, all of which are ended afterwards.

    Args:
        settings: More fields of `WorkerSettings`, for every worker.
    """
    with ExitStack() as stack:
        port = free_ports(HOST, 1)[0]  # known beforehand: it must come back at it
        manager = Process("manager", {"host": HOST, "port": port, "workers_expected": num_workers})
        stack.callback(manager.end)
        manager.launch()
        workers: list[Process] = []
        service = Service(manager, workers, stack)
        for index in range(num_workers):
            service.add_worker(
                worker_id=f"worker-{index}",
                budget_bytes=memory_bytes,
                manager_address=f"{HOST}:{port}",
                **settings,
            )
        for process in (manager, *workers):
            process.wait()
        service.wait_for(num_workers)
        stack.callback(service.close_clients)
        yield service


def num_alive(client: Client) -> int:
    try:
        alive = manager_pb2.WORKER_STATE_ALIVE
        return sum(one.state == alive for one in client.list_workers())
    except KVServiceError:
        return -1


def pages(client: Client) -> int:
    """Return the pages that are used or promised on all workers."""
    return sum(
        pool.used_pages + pool.reserved_pages
        for stats in client.page_stats()
        for pool in stats.pools
    )


def _status(pid: int, name: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))
