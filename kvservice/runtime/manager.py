"""A manager as a process serves it. Loads no torch."""

from __future__ import annotations

import logging
import uuid
from contextlib import ExitStack

from kvservice.clock import Clock, SystemClock
from kvservice.config import ManagerSettings
from kvservice.manager import PageManager
from kvservice.metrics import ManagerMetrics
from kvservice.runtime.process import ProcessServer
from kvservice.server.worker_stub import GrpcWorkerHandle
from kvservice.wire.names import MANAGER

LOG = logging.getLogger(__name__)


class ManagerServer(ProcessServer):
    """The manager behind gRPC, with its metrics.

    `manager`, `address` and `metrics_address` are there once it has been started.
    """

    manager: PageManager

    def __init__(self, settings: ManagerSettings, *, clock: Clock | None = None) -> None:
        super().__init__(settings.limits, clock if clock is not None else SystemClock())
        self.settings = settings
        self.incarnation = uuid.uuid4().hex

    def _start(self, running: ExitStack) -> None:
        settings = self.settings
        metrics = ManagerMetrics()
        server = self._listen(running, settings.host, settings.port, settings.advertise_host)
        self.manager = PageManager(
            GrpcWorkerHandle,
            clock=self._clock,
            incarnation=self.incarnation,
            workers_expected=settings.workers_expected,
        )
        running.callback(self.manager.close)
        metrics.watch(self.manager.membership, self._clock)
        self._serve_metrics(running, metrics, settings)
        self._serve_health(running, server, settings)
        server.start(self.manager, MANAGER, recorder=metrics)
        running.callback(lambda: server.stop(self._grace_s))
        LOG.info("manager serves at %s", self.address)
