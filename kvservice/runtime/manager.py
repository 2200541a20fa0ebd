"""A manager as a process serves it. Loads no torch."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from kvservice.clock import Clock, SystemClock
from kvservice.config import ManagerSettings
from kvservice.manager import LOOK_S, POLL_S, PageManager
from kvservice.metrics import ManagerMetrics
from kvservice.runtime.process import ProcessServer, failpoints
from kvservice.runtime.secrets import Secrets
from kvservice.runtime.status_page import StatusPage
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
        self.secrets = secrets = Secrets(settings.security, self._clock)
        guard, dialer, speaker = (
            secrets.guard("manager"),
            secrets.dialer(),
            secrets.speaker("worker"),
        )
        metrics = ManagerMetrics()
        server = self._listen(running, settings.host, settings.port, settings.advertise_host)
        self.manager = PageManager(
            lambda address: GrpcWorkerHandle(address, dialer, speaker),
            clock=self._clock,
            incarnation=self.incarnation,
            workers_expected=settings.workers_expected,
            failpoints=failpoints(self._clock),
            ended_tokens=secrets.ended_tokens,
        )
        running.callback(self.manager.close)
        metrics.watch(self.manager.membership, self._clock)
        metrics.watch_files(secrets.up_to_date, secrets.certificate_ends)
        page = StatusPage(
            self.manager,
            self.address,
            clock=self._clock,
            find_caller=secrets.token_finder(),
            is_guarded=settings.security.authenticates,
        )
        self._serve_metrics(running, metrics, settings, page.pages())
        self._serve_health(running, server, settings)
        for name, look, period_s in (
            ("watch", self.manager.look_after_workers, LOOK_S),
            ("moves", self.manager.look_after_moves, POLL_S),
        ):
            watch = _Watch(name, look, period_s, self._clock)
            running.callback(watch.stop)
            watch.start()
        server.start(self.manager, MANAGER, recorder=metrics, guard=guard)
        running.callback(lambda: server.stop(self._grace_s))
        LOG.info("manager serves at %s", self.address)


class _Watch:
    """Lets the manager look after something, time and again."""

    def __init__(self, name: str, look: Callable[[], None], period_s: float, clock: Clock) -> None:
        self._look = look
        self._period_s = period_s
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvservice-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._period_s):
            try:
                self._look()
            except Exception:
                LOG.exception("%s failed", self._thread.name)
