"""The same service in three ways: in this process, and behind gRPC, with and without lanes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvservice.clock import Clock, SystemClock
from kvservice.config import ServerLimits
from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import CapacityError, InvalidRequest, Unavailable
from kvservice.core.geometry import LayerGeometry, LayerSpec
from kvservice.core.recorder import NullRpcRecorder
from kvservice.core.session import SessionSpec
from kvservice.embedded import MANAGER_ADDRESS, EmbeddedService
from kvservice.manager import PageManager
from kvservice.server.app import GrpcServer
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.lane import LaneServer
from kvservice.server.worker_stub import GrpcWorkerHandle, HeartbeatLoop
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client import Client, ClientConfig
from kvservice_client._connections import Connections
from kvservice_client._transport import Dial, Transport
from kvservice_client._transport_grpc import GrpcTransport
from kvservice_client._transport_lane import LaneTransport
from kvservice_client._watchdog import Watchdog
from kvservice_client.testing import eventually
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig


@dataclass
class Backend:
    """A running service: where its manager is, the way there, and its workers for looking at.

    Fields:
        kill: Makes a worker, by its index, answer nobody.
        restart: Lets it live again, empty, at the same address.
        beat: Lets the manager know all that the workers know.
    """

    front: str
    dial: Dial
    workers: list[PageWorker]
    clock: Clock
    kill: Callable[[int], None]
    restart: Callable[[int], None]
    beat: Callable[[], None]
    manager: PageManager
    clients: list[Client] = field(default_factory=list)

    def connect(
        self, *, config: ClientConfig | None = None, dial: Dial | None = None, lone: bool = False
    ) -> Client:
        """Return another client; it is closed with the service, if not before.

        Args:
            lone: Of the first worker alone, not of the manager.
        """
        connections = Connections(
            self.workers[0].config.address if lone else self.front,
            dial or self.dial,
            lone_worker=lone,
            config=config or ClientConfig(timeout_s=10.0),
        )
        client = Client(connections)
        self.clients.append(client)
        return client

    def index_of(self, worker_id: str) -> int:
        return next(
            index
            for index, worker in enumerate(self.workers)
            if worker.config.worker_id == worker_id
        )

    def move(self, session_id: str, to: int, *, source: int | None = None) -> types_pb2.Session:
        """Move (a worker's part of) a session to a worker, by their indices."""
        request = manager_pb2.MoveSessionRequest(
            session_id=session_id, worker_id=self.workers[to].config.worker_id
        )
        if source is not None:
            request.from_worker_id = self.workers[source].config.worker_id
        return self.manager.move_session(request, ANONYMOUS).session

    def bury(self, index: int) -> None:
        """Tell the manager that a worker is known to be dead."""
        config = self.workers[index].config
        self.manager.worker_died(config.worker_id, config.incarnation)

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


FILLER = "00000000-0000-4000-8000-000000000001"
"""Whose the pages are that `fill_up` takes."""


def fill_up(worker: PageWorker, geometries: Sequence[LayerGeometry]) -> None:
    """Promise all free pages of a worker, as long as there are twelve at most, to `FILLER`."""
    layers = tuple(LayerSpec(geometry=one) for one in geometries)
    for tokens in range(4 * 12, 0, -4):
        spec = SessionSpec(1, layers, page_size=4, reserve_tokens=tokens)
        try:
            worker.opening.allocate(ANONYMOUS.tenant, FILLER, spec)
        except (CapacityError, InvalidRequest):
            continue
        return


class Switch:
    """Stands before a worker's service, and can be turned off."""

    def __init__(self, service: WorkerService) -> None:
        self.service: WorkerService | None = service

    def __getattr__(self, name: str) -> Any:
        if self.service is None:
            raise Unavailable("the worker is dead")
        return getattr(self.service, name)


class _Silent:
    """Heartbeats of the dead."""

    def messages(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def embedded_backend(
    *, num_workers: int = 1, memory_bytes: int = 1 << 26, clock: Clock | None = None
) -> Iterator[Backend]:
    """Manager and workers inside this process."""
    service = EmbeddedService(
        num_workers=num_workers, memory_bytes=memory_bytes, device="cpu", clock=clock
    )
    switches = [Switch(service.services[worker.config.address]) for worker in service.workers]
    for worker, switch in zip(service.workers, switches, strict=True):
        service.services[worker.config.address] = switch  # type: ignore[assignment]

    def kill(index: int) -> None:
        switches[index].service = None
        service._sources[index] = _Silent()  # type: ignore[call-overload]
        config = service.workers[index].config
        service.manager._directory.cut_off(config.worker_id, config.incarnation)

    def restart(index: int) -> None:
        worker = service.workers[index]
        config = replace(worker.config, incarnation=uuid.uuid4().hex)
        service.workers[index] = PageWorker(config, clock=service.clock)
        puller = Puller(service.workers[index], service._handle, clock=service.clock)
        service._pullers[index] = puller
        switches[index].service = WorkerService(service.workers[index], puller=puller)
        service._sources[index] = HeartbeatSource(service.workers[index])
        for message in service._sources[index].messages():
            service.manager.heartbeat(message, ANONYMOUS, first=True)

    def beat() -> None:
        service._beat(first=False)

    service.start()
    backend = Backend(
        MANAGER_ADDRESS,
        service.dial,
        service.workers,
        service.clock,
        kill,
        restart,
        beat,
        service.manager,
    )
    try:
        yield backend
        backend.finish()
    finally:
        service.close()


class GrpcWorker:
    """A worker behind a server, with its heartbeats, and a lane if it is to have one."""

    def __init__(
        self, config: WorkerConfig, manager_address: str, clock: Clock, *, lane: bool
    ) -> None:
        self._server = GrpcServer()
        host, _, port = config.address.rpartition(":")
        bound = self._server.listen(host, int(port))
        config = replace(config, address=f"{host}:{bound}", incarnation=uuid.uuid4().hex)
        self.worker = PageWorker(config, clock=clock)
        self._lane = LaneServer(
            host,
            0,
            advertised=None,
            limits=ServerLimits(),
            clock=SystemClock(),
            recorder=NullRpcRecorder(),
        )
        self._puller = Puller(self.worker, GrpcWorkerHandle, clock=SystemClock())
        service = WorkerService(
            self.worker, self._lane.admit if lane else None, puller=self._puller
        )
        if lane:
            self._lane.start(service)
        self._server.start(service, WORKER)
        source = HeartbeatSource(self.worker)
        self._heartbeats = HeartbeatLoop(source, manager_address, clock=SystemClock())
        self._heartbeats.start()

    def stop(self) -> None:
        self._heartbeats.stop()
        self._puller.close()
        self._lane.stop()
        self._server.stop(0.0)


@contextmanager
def grpc_backend(
    *,
    num_workers: int = 1,
    memory_bytes: int = 1 << 26,
    clock: Clock | None = None,
    lane: bool = False,
) -> Iterator[Backend]:
    """Manager and workers behind gRPC servers of this process; Attend goes by lane if told so."""
    clock = clock or SystemClock()
    watchdog = Watchdog(SystemClock())
    manager = PageManager(
        GrpcWorkerHandle,
        clock=SystemClock(),
        incarnation=uuid.uuid4().hex,
        workers_expected=num_workers,
    )
    server = GrpcServer()
    front = f"127.0.0.1:{server.listen('127.0.0.1', 0)}"
    server.start(manager, MANAGER)
    running = [
        GrpcWorker(
            WorkerConfig(
                worker_id=f"worker-{index}",
                incarnation="",
                budget_bytes=memory_bytes,
                address="127.0.0.1:0",
            ),
            front,
            clock,
            lane=lane,
        )
        for index in range(num_workers)
    ]
    workers = [one.worker for one in running]
    dialled: list[LaneTransport] = []

    def dial(address: str) -> Transport:
        transport = GrpcTransport(address, clock=SystemClock(), watchdog=watchdog)
        if not lane:
            return transport
        laned = LaneTransport(transport, clock=SystemClock())
        dialled.append(laned)
        return laned

    def kill(index: int) -> None:
        running[index].stop()

    def restart(index: int) -> None:
        running[index] = GrpcWorker(workers[index].config, front, clock, lane=lane)
        workers[index] = running[index].worker

    def beat() -> None:
        """Wait for a heartbeat of each worker that was sent after now."""
        asked_at = manager._clock.monotonic()
        eventually(lambda: all(view.heard_at > asked_at for view in manager.workers()))

    backend = Backend(front, dial, workers, clock, kill, restart, beat, manager)
    try:
        eventually(lambda: len(manager.workers()) == num_workers)
        yield backend
        backend.finish()
        fallen_back = [one for one in dialled if one._ask_at]
        assert not fallen_back, "gRPC has served where there was a lane"
    finally:
        watchdog.close()
        for one in running:
            one.stop()
        server.stop(0.0)
        for worker in workers:
            worker.close()
        manager.close()
