"""Manager and workers inside this process, behind the same interface: no Ray, no network.

For notebooks and tests, and to measure what the network costs.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvservice.clock import Clock, SystemClock
from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import InvalidRequest, StaleWorker, Unavailable
from kvservice.manager import PageManager
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.wire.names import MANAGER, WORKER, snake_case
from kvservice_client import Client
from kvservice_client._connections import Connections
from kvservice_client._transport import InProcessTransport, Transport
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig

LOG: Final = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
MANAGER_ADDRESS: Final = "embedded:manager"


class EmbeddedService:
    """Manager and workers, their addresses, and the one thread that they need.

    `start` before use, `close` after it.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        memory_bytes: int,
        device: str,
        clock: Clock | None = None,
    ) -> None:
        if num_workers < 1:
            raise InvalidRequest(f"num_workers must be at least 1, got {num_workers}")
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.workers = [
            PageWorker(
                WorkerConfig(
                    worker_id=f"worker-{index}",
                    incarnation=uuid.uuid4().hex,
                    budget_bytes=memory_bytes,
                    address=f"embedded:worker-{index}",
                    device=device,
                ),
                clock=self.clock,
            )
            for index in range(num_workers)
        ]
        self._pullers = [Puller(worker, self._handle, clock=self.clock) for worker in self.workers]
        self.services = {
            worker.config.address: WorkerService(worker, puller=puller)
            for worker, puller in zip(self.workers, self._pullers, strict=True)
        }
        self.manager = PageManager(
            self._handle,
            clock=self.clock,
            incarnation=uuid.uuid4().hex,
            workers_expected=num_workers,
            # A busy process may keep our thread waiting, which says nothing about its workers.
            suspect_after_s=math.inf,
            dead_after_s=math.inf,
        )
        self._sources = [HeartbeatSource(worker) for worker in self.workers]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-embedded", daemon=True)

    def start(self) -> None:
        self._beat(first=True)
        self._thread.start()

    def dial(self, address: str) -> Transport:
        """Return the way to an address.

        Raises:
            Unavailable: Nobody has it.
        """
        if address == MANAGER_ADDRESS:
            return InProcessTransport({MANAGER.full_name: self.manager})
        if address not in self.services:
            raise Unavailable(f"nobody has the address {address}")
        return InProcessTransport({WORKER.full_name: self.services[address]})

    def close(self) -> None:
        """End the thread and free all pages."""
        self._stop.set()
        self._thread.join()
        for puller in self._pullers:
            puller.close()
        self.manager.close()
        for worker in self.workers:
            worker.close()

    def _handle(self, address: str) -> _Handle:
        return _Handle(self.services[address])

    def _run(self) -> None:
        while not self.clock.wait(self._stop, PERIOD_S):
            for worker in self.workers:
                worker.leases.expire()
            self._beat(first=False)
            self.manager.look_after_moves()

    def _beat(self, *, first: bool) -> None:
        for source in self._sources:
            try:
                self._report(source, first=first)
            except StaleWorker as error:  # the manager takes it for dead: others go on
                LOG.warning("a heartbeat was refused: %s", error)

    def _report(self, source: HeartbeatSource, *, first: bool) -> None:
        for index, message in enumerate(source.messages()):
            first_of_stream = first and not index
            source.answered(self.manager.heartbeat(message, ANONYMOUS, first=first_of_stream))


class _Handle:
    """The way of the manager, or of another worker, to a worker of the same process."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        del timeout_s  # nothing to wait for
        return getattr(self._service, snake_case(method))(request, caller)

    def close(self) -> None:
        pass


@contextmanager
def embedded(
    *, num_workers: int = 1, memory_bytes: int = 1 << 30, device: str = "cpu"
) -> Iterator[Client]:
    """Yield a client of a service that lives in this process, for as long as the block lasts.

    Args:
        num_workers: Workers behind the manager, at least 1.
        memory_bytes: What the arenas of each worker may take.
        device: Where the arenas are, as torch names it.
    """
    service = EmbeddedService(num_workers=num_workers, memory_bytes=memory_bytes, device=device)
    service.start()
    try:
        client = Client(Connections(MANAGER_ADDRESS, service.dial, clock=service.clock))
        with client:
            yield client
    finally:
        service.close()
