"""The same service in two ways: inside this process, and behind gRPC on loopback."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvservice.clock import Clock, SystemClock
from kvservice.embedded import MANAGER_ADDRESS, EmbeddedService
from kvservice.manager import PageManager
from kvservice.server.app import GrpcServer
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.worker_stub import GrpcWorkerHandle, HeartbeatLoop
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client import Client, ClientConfig
from kvservice_client._connections import Connections
from kvservice_client._transport import Dial
from kvservice_client._transport_grpc import GrpcTransport
from kvservice_client._watchdog import Watchdog
from kvservice_client.testing import eventually
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig


@dataclass
class Backend:
    """A running service: where its manager is, the way there, and its workers for looking at."""

    front: str
    dial: Dial
    workers: list[PageWorker]
    clock: Clock
    clients: list[Client] = field(default_factory=list)

    def connect(self, *, config: ClientConfig | None = None, dial: Dial | None = None) -> Client:
        """Return another client; it is closed with the service, if not before."""
        connections = Connections(
            self.front, dial or self.dial, config=config or ClientConfig(timeout_s=10.0)
        )
        client = Client(connections)
        self.clients.append(client)
        return client

    def used_pages(self) -> int:
        return sum(
            pool.used_pages + pool.reserved_pages
            for worker in self.workers
            for pool in worker.stats().pools
        )

    def num_sessions(self) -> int:
        return sum(worker.stats().num_sessions for worker in self.workers)

    def finish(self) -> None:
        """Close the clients, after which no page may be in use and all invariants hold."""
        for client in self.clients:
            client.close()
        for worker in self.workers:
            worker.check()
        assert self.used_pages() == 0, f"{self.used_pages()} pages are still in use"
        assert self.num_sessions() == 0, f"{self.num_sessions()} sessions are still open"


@contextmanager
def embedded_backend(
    *, num_workers: int = 1, memory_bytes: int = 1 << 26, clock: Clock | None = None
) -> Iterator[Backend]:
    """Manager and workers inside this process."""
    service = EmbeddedService(
        num_workers=num_workers, memory_bytes=memory_bytes, device="cpu", clock=clock
    )
    service.start()
    backend = Backend(MANAGER_ADDRESS, service.dial, service.workers, service.clock)
    try:
        yield backend
        backend.finish()
    finally:
        service.close()


@contextmanager
def grpc_backend(
    *, num_workers: int = 1, memory_bytes: int = 1 << 26, clock: Clock | None = None
) -> Iterator[Backend]:
    """Manager and workers behind gRPC servers of this process."""
    clock = clock or SystemClock()
    watchdog = Watchdog(SystemClock())
    manager = PageManager(
        GrpcWorkerHandle,
        clock=clock,
        incarnation=uuid.uuid4().hex,
        workers_expected=num_workers,
    )
    server = GrpcServer()
    front = f"127.0.0.1:{server.listen('127.0.0.1', 0)}"
    server.start(manager, MANAGER)
    running = [
        _start_worker(f"worker-{index}", memory_bytes, front, clock) for index in range(num_workers)
    ]

    def dial(address: str) -> GrpcTransport:
        return GrpcTransport(address, clock=SystemClock(), watchdog=watchdog)

    backend = Backend(front, dial, [worker for worker, _, _ in running], clock)
    try:
        eventually(lambda: len(manager.workers()) == num_workers)
        yield backend
        backend.finish()
    finally:
        watchdog.close()
        for _, _, heartbeats in running:
            heartbeats.stop()
        server.stop(0.0)
        for worker, worker_server, _ in running:
            worker_server.stop(0.0)
            worker.close()
        manager.close()


def _start_worker(
    worker_id: str, memory_bytes: int, front: str, clock: Clock
) -> tuple[PageWorker, GrpcServer, HeartbeatLoop]:
    server = GrpcServer()
    address = f"127.0.0.1:{server.listen('127.0.0.1', 0)}"
    config = WorkerConfig(
        worker_id=worker_id,
        incarnation=uuid.uuid4().hex,
        budget_bytes=memory_bytes,
        address=address,
    )
    worker = PageWorker(config, clock=clock)
    server.start(WorkerService(worker), WORKER)
    heartbeats = HeartbeatLoop(HeartbeatSource(worker), front, clock=SystemClock())
    heartbeats.start()
    return worker, server, heartbeats
