"""A worker as a process serves it."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import ExitStack
from typing import Final

from kvservice.clock import Clock, SystemClock
from kvservice.config import ConfigError, WorkerSettings
from kvservice.metrics import WorkerMetrics
from kvservice.runtime.process import ProcessServer
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.lane import LaneServer
from kvservice.server.worker_stub import HeartbeatLoop
from kvservice.wire.names import WORKER
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.worker import PageWorker, WorkerConfig

LOG = logging.getLogger(__name__)

EXPIRY_S: Final = 0.5


class WorkerServer(ProcessServer):
    """A page worker behind gRPC, with its leases, metrics, and heartbeats to a manager if any.

    `worker`, `address` and `metrics_address` are there once it has been started.
    """

    worker: PageWorker

    def __init__(self, settings: WorkerSettings, *, clock: Clock | None = None) -> None:
        super().__init__(settings.limits, clock if clock is not None else SystemClock())
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.lane_addresses: tuple[str, ...] = ()
        self._lane: LaneServer | None = None

    def _start(self, running: ExitStack) -> None:
        settings = self.settings
        metrics = WorkerMetrics(settings.worker_id, settings.device)
        server = self._listen(running, settings.host, settings.port, settings.advertise_host)
        self.worker = self._make_worker(metrics)
        running.callback(self.worker.close)
        metrics.watch(self.worker.stats)
        self._serve_metrics(running, metrics, settings)
        expiry = _Expiry(self.worker, self._clock)
        running.callback(expiry.stop)
        expiry.start()
        lane = self._lane = self._open_lane(running, metrics)
        service = WorkerService(self.worker, None if lane is None else lane.admit)
        if lane is not None:
            lane.start(service)
            self.lane_addresses = lane.addresses
        server.start(service, WORKER, recorder=metrics)
        # Once more, so that calls have ended before the worker is freed.
        running.callback(lambda: server.stop(self._grace_s))
        if settings.manager_address is not None:
            source = HeartbeatSource(self.worker, self.metrics_address or "")
            heartbeat = HeartbeatLoop(source, settings.manager_address, clock=self._clock)
            running.callback(heartbeat.stop)
            heartbeat.start()
        LOG.info("worker %s serves at %s", settings.worker_id, self.address)

    def _open_lane(self, running: ExitStack, metrics: WorkerMetrics) -> LaneServer | None:
        settings = self.settings
        if settings.lane_port is None:
            return None
        lane = LaneServer(
            settings.host,
            settings.lane_port,
            advertised=settings.advertise_host,
            limits=settings.limits,
            clock=self._clock,
            recorder=metrics,
        )
        running.callback(lane.stop)
        return lane

    def _make_worker(self, metrics: WorkerMetrics) -> PageWorker:
        settings = self.settings
        config = WorkerConfig(
            worker_id=settings.worker_id,
            incarnation=self.incarnation,
            budget_bytes=settings.budget_bytes,
            address=self.address,
            device=settings.device,
            max_sessions=settings.max_sessions,
        )
        try:
            return PageWorker(config, clock=self._clock, recorder=metrics)
        except RuntimeError as error:  # torch's answer to a device that is not there
            first_line = str(error).partition("\n")[0]
            raise ConfigError(f"device {settings.device!r} cannot be used: {first_line}") from error


class _Expiry:
    """Frees sessions whose lease is over."""

    def __init__(self, worker: PageWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._pause_s()):
            try:
                self._worker.expire()
            except Exception:
                LOG.exception("freeing expired sessions failed")

    def _pause_s(self) -> float:
        """Return the time to wait: a lease that begins meanwhile may end before the next look."""
        deadline = self._worker.next_deadline()
        if deadline is None:
            return EXPIRY_S
        return min(max(deadline - self._clock.monotonic(), 0.01), EXPIRY_S)
