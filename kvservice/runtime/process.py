"""What manager and worker have in common."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from kvservice.clock import Clock
from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings, stated_failpoints
from kvservice.core.failpoints import Failpoints
from kvservice.metrics import Metrics, MetricsEndpoint
from kvservice.metrics.endpoint import Page
from kvservice.runtime.secrets import Secrets
from kvservice.server.app import GrpcServer
from kvservice.server.health import HealthServer

GRACE_S: Final = 5.0


def failpoints(clock: Clock) -> Failpoints:
    """Return the failpoints of this process, as its environment says.

    Raises:
        ConfigError: They are stated outside of a test, or cannot be read.
    """

    def wait(seconds: float) -> None:
        clock.wait(threading.Event(), seconds)

    return Failpoints(
        stated_failpoints(), crash=lambda: os.kill(os.getpid(), signal.SIGKILL), wait=wait
    )


class ProcessServer:
    """Serves from `start` to `stop`: `start` once, `stop` once; or `with`."""

    address: str
    metrics_address: str | None
    health_address: str | None

    secrets: Secrets

    def __init__(self, limits: ServerLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._grace_s = GRACE_S
        self._running = ExitStack()

    def start(self) -> None:
        """Serve. If that fails, nothing is left running.

        Raises:
            ConfigError: A port is taken, or a setting cannot be.
        """
        with ExitStack() as running:
            self._start(running)
            self._running = running.pop_all()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new calls, let those in progress end within `grace_s`, and free everything."""
        self._grace_s = grace_s
        self._running.close()

    def wait(self) -> None:
        """Wait until there is nothing more to do for it: for ever, unless it is told to leave."""
        self._clock.wait(threading.Event(), None)

    def leave(self) -> bool:
        """Begin to end, so that `wait` returns when it may. Return whether that is of use."""
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self, running: ExitStack) -> None:
        raise NotImplementedError

    def _listen(
        self, running: ExitStack, host: str, port: int, advertised: str | None
    ) -> GrpcServer:
        """Bind, so that the address is known before anybody is told of it."""
        credentials = self.secrets.server_credentials()
        server = GrpcServer(self._limits, clock=self._clock, credentials=credentials)
        running.callback(lambda: server.stop(self._grace_s))
        bound = server.listen(host, port)
        self.address = _join(advertised or host, bound)
        return server

    def _serve_metrics(
        self,
        running: ExitStack,
        metrics: Metrics,
        settings: ManagerSettings | WorkerSettings,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        self.metrics_address = None
        if settings.metrics_port is not None:
            guard = self.secrets.numbers_guard(settings.host)
            endpoint = MetricsEndpoint(
                metrics.registry,
                settings.host,
                settings.metrics_port,
                pages,
                guard=guard,
                tls=self.secrets.https_context(),
            )
            running.callback(endpoint.close)
            self.metrics_address = _join(settings.advertise_host or settings.host, endpoint.port)

    def _serve_health(
        self, running: ExitStack, server: GrpcServer, settings: ManagerSettings | WorkerSettings
    ) -> None:
        """Say at the port for probes what the server says of itself, which is: not yet."""
        self.health_address = None
        if settings.health_port is not None:
            endpoint = HealthServer(server.health, settings.host, settings.health_port)
            running.callback(endpoint.close)
            self.health_address = _join(settings.advertise_host or settings.host, endpoint.port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
