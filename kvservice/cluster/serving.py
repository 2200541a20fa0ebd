"""What both actors need to serve from inside Ray."""

from __future__ import annotations

import threading
from typing import Final, Protocol

import ray

from kvservice.clock import SystemClock
from kvservice.config import ConfigError

_WILDCARDS: Final = ("0.0.0.0", "::")
_RESTART_TIMEOUT_S: Final = 15.0
_RETRY_S: Final = 0.2


class Server(Protocol):
    """What a manager's and a worker's server have in common."""

    def start(self) -> None:
        """Serve, or raise ConfigError."""


def where(host: str | None) -> tuple[str, str | None]:
    """Return where to listen and, if that isn't where others are to connect, where that is."""
    node = ray.util.get_node_ip_address()
    if host is None:
        return node, None
    return host, node if host in _WILDCARDS else None


def serve(server: Server) -> None:
    """Start a server. After a restart its port may be held for a moment by what was there before.

    Raises:
        ConfigError: The port is taken, or another setting cannot be.
    """
    clock = SystemClock()
    deadline = clock.monotonic()
    if ray.get_runtime_context().was_current_actor_reconstructed:
        deadline += _RESTART_TIMEOUT_S
    while True:
        try:
            server.start()
            return
        except ConfigError:
            if clock.monotonic() >= deadline:
                raise
            clock.wait(threading.Event(), _RETRY_S)
