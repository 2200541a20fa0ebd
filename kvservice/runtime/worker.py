"""A worker as a process serves it."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from kvservice.clock import Clock, SystemClock
from kvservice.config import (
    Budget,
    ConfigError,
    WorkerSettings,
    format_size,
    memory_limit_bytes,
)
from kvservice.metrics import WorkerMetrics
from kvservice.runtime.process import ProcessServer, failpoints
from kvservice.runtime.secrets import Secrets
from kvservice.server.guard import Guard
from kvservice.server.heartbeat import HeartbeatSource
from kvservice.server.lane import LaneServer
from kvservice.server.worker_stub import GrpcWorkerHandle, HeartbeatLoop
from kvservice.wire.names import WORKER
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.data_plane.service import WorkerService
from kvservice_workers.devices import device_memory_bytes
from kvservice_workers.worker import PageWorker, WorkerConfig

LOG = logging.getLogger(__name__)

EXPIRY_S: Final = 0.5
AUDIT_S: Final = 60.0
LINGER_S: Final = 1.0
"""How long a worker stays after its last session has moved: whoever uses it is told by then."""


def budget_bytes(budget: Budget, device: str) -> int:
    """Return what a worker's pages may take in this process, on this device.

    Raises:
        ConfigError: More than there is, or the device cannot be used.
    """
    try:
        available = memory_limit_bytes() if device == "cpu" else device_memory_bytes(device)
    except RuntimeError as error:  # torch's answer to a device that is not there
        raise _unusable(device, error) from error
    wanted = budget.of(available)
    if wanted > available:
        raise ConfigError(
            f"a budget of {format_size(wanted)} is more than the {format_size(available)} that "
            f"{'this process may use' if device == 'cpu' else device + ' has'}; ask for less, or "
            "for a share such as 70%"
        )
    return wanted


class WorkerServer(ProcessServer):
    """A page worker behind gRPC, with its leases, metrics, and heartbeats to a manager if any.

    `worker`, `address` and `metrics_address` are there once it has been started.
    """

    worker: PageWorker
    _drain: Drain

    def __init__(self, settings: WorkerSettings, *, clock: Clock | None = None) -> None:
        super().__init__(settings.limits, clock if clock is not None else SystemClock())
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.lane_addresses: tuple[str, ...] = ()
        self._lane: LaneServer | None = None

    def _start(self, running: ExitStack) -> None:
        settings = self.settings
        self.secrets = secrets = Secrets(settings.security, self._clock)
        guard = secrets.guard(self.incarnation)
        metrics = WorkerMetrics(settings.worker_id)
        server = self._listen(running, settings.host, settings.port, settings.advertise_host)
        self._failpoints = failpoints(self._clock)
        self.worker = self._make_worker()
        running.callback(self.worker.close)
        metrics.watch(self.worker.stats)
        metrics.watch_tenants(self.worker.tenant_pages, secrets.named_tenants, secrets.quota_of)
        metrics.watch_files(secrets.up_to_date, secrets.certificate_ends)
        self._serve_metrics(running, metrics, settings)
        self._serve_health(running, server, settings)
        self._drain = Drain(self.worker, self._clock)
        expiry = _Expiry(self.worker, self._drain, self._clock)
        running.callback(expiry.stop)
        expiry.start()
        lane = self._lane = self._open_lane(running, metrics, guard)
        dialer, speaker = secrets.dialer(), secrets.speaker("worker")
        puller = Puller(
            self.worker,
            lambda address: GrpcWorkerHandle(address, dialer, speaker),
            clock=self._clock,
            failpoints=self._failpoints,
        )
        running.callback(puller.close)
        service = WorkerService(
            self.worker,
            None if lane is None else lane.admit,
            None if guard.is_open else guard.issue,
            puller=puller,
            failpoints=self._failpoints,
        )
        if lane is not None:
            lane.start(service)
            self.lane_addresses = lane.addresses
        server.start(service, WORKER, recorder=metrics, guard=guard)
        # Once more, so that calls have ended before the worker is freed.
        running.callback(lambda: server.stop(self._grace_s))
        if settings.manager_address is not None:
            source = HeartbeatSource(
                self.worker,
                self.metrics_address or "",
                tokens=guard.tokens_behind,
                failpoints=self._failpoints,
            )
            heartbeat = HeartbeatLoop(
                source,
                settings.manager_address,
                clock=self._clock,
                drain=self._drain.within,
                dialer=secrets.dialer(),
                speaker=secrets.speaker("manager"),
            )
            self._drain.leaving = heartbeat.leave
            running.callback(heartbeat.stop)
            heartbeat.start()
        LOG.info("worker %s serves at %s", settings.worker_id, self.address)

    def wait(self) -> None:
        """Wait until this worker is to leave: the manager has said so, and its sessions have ended
        or the time for that is over. The caller then stops it, and the manager is told."""
        self._clock.wait(self._drain.done, None)

    def leave(self) -> bool:
        """Give its sessions away: the manager, if there is one, is told with the next heartbeat,
        and moves them. Those that stay are waited for, for `drain_s` seconds at most."""
        if self.settings.drain_s <= 0:
            return False
        self._drain.within(self.settings.drain_s)
        self._drain.look()
        return True

    def _open_lane(
        self, running: ExitStack, metrics: WorkerMetrics, guard: Guard
    ) -> LaneServer | None:
        settings = self.settings
        if settings.lane_port is None or settings.security.encrypts:
            return None  # the lane is plaintext
        lane = LaneServer(
            settings.host,
            settings.lane_port,
            advertised=settings.advertise_host,
            limits=settings.limits,
            clock=self._clock,
            recorder=metrics,
            guard=guard,
        )
        running.callback(lane.stop)
        return lane

    def _make_worker(self) -> PageWorker:
        settings = self.settings
        config = WorkerConfig(
            worker_id=settings.worker_id,
            incarnation=self.incarnation,
            budget_bytes=settings.budget_bytes,
            address=self.address,
            device=settings.device,
            max_sessions=settings.max_sessions,
            zero_freed_pages=settings.zero_freed_pages,
        )
        try:
            return PageWorker(
                config,
                clock=self._clock,
                quota_of=self.secrets.quota_of,
                failpoints=self._failpoints,
            )
        except RuntimeError as error:  # torch's answer to a device that is not there
            raise _unusable(settings.device, error) from error


def _unusable(device: str, error: RuntimeError) -> ConfigError:
    first_line = str(error).partition("\n")[0]
    return ConfigError(f"device {device!r} cannot be used: {first_line}")


class Drain:
    """Whether a worker is to leave, and whether it may: `done` is set then."""

    def __init__(self, worker: PageWorker, clock: Clock) -> None:
        self.done = threading.Event()
        self.leaving: Callable[[], None] = lambda: None  # is told, just before
        self._worker = worker
        self._clock = clock
        self._leave_by: float | None = None

    def within(self, seconds: float) -> None:
        """Open no more sessions; leave when there are none, after `seconds` at the latest."""
        if self._leave_by is None:
            LOG.info("draining, for %g s at most", seconds)
        self._worker.drain()
        self._leave_by = self._clock.monotonic() + seconds

    def look(self) -> None:
        """Leave if it is time to."""
        if self._leave_by is None or self.done.is_set():
            return
        left = self._worker.num_sessions
        busy = not self._worker.is_empty or self._worker.departures.waits_for_takers(LINGER_S)
        if not busy or self._clock.monotonic() >= self._leave_by:
            LOG.log(
                logging.WARNING if left else logging.INFO, "drained, with %d sessions left", left
            )
            self.leaving()
            self.done.set()


class _Expiry:
    """Frees sessions whose lease is over, audits pages, and looks whether it is time to leave."""

    def __init__(self, worker: PageWorker, drain: Drain, clock: Clock) -> None:
        self._worker = worker
        self._drain = drain
        self._audit_at = clock.monotonic() + AUDIT_S
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
                self._worker.leases.expire()
                self._drain.look()
                self._audit()
            except Exception:
                LOG.exception("looking after sessions failed")

    def _audit(self) -> None:
        if self._clock.monotonic() >= self._audit_at:
            if wrong := self._worker.audit():
                LOG.error("%d pages have references that no table explains", wrong)
            self._audit_at = self._clock.monotonic() + AUDIT_S

    def _pause_s(self) -> float:
        """Return the time to wait: a lease that begins meanwhile may end before the next look."""
        deadline = self._worker.leases.next_deadline()
        if deadline is None:
            return EXPIRY_S
        return min(max(deadline - self._clock.monotonic(), 0.01), EXPIRY_S)
