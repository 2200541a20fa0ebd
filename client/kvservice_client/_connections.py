"""What all calls of a client share: ways to servers, time limits, retries."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from google.protobuf.message import Message

from kvservice.clock import Clock, SystemClock
from kvservice.core.errors import DeadlineExceeded, KVServiceError, Unavailable
from kvservice.core.session import Extent
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client._retry import Detection, Random, Retrier, RetryPolicy
from kvservice_client._transport import Dial, Transport

FRONT: Final = ""
"""Stands for the address that the client was connected to."""

MAX_KNOCK_S: Final = 1.0
"""How long a silent worker may take to answer over a new connection."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Time limits of a client, in seconds.

    Fields:
        timeout_s: For one call of the client's or a session's, retries included.
        detection_s: A worker that does not answer for so long, over a new connection either, and
            that the manager does not call alive, is dead: PagesLost.
        silence_s: The longest that a connection can be dead unnoticed.
    """

    timeout_s: float = 30.0
    detection_s: float = 3.5
    silence_s: float = 3.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Connections:
    """Ways to servers, made at first use and kept. Thread-safe.

    Args:
        front: The address that the client was connected to.
        dial: Makes the way to an address.
        lone_worker: `front` is a worker without a manager, not a manager.
        on_close: Called at the end of `close`.
        background: Whether threads may be started. If not, somebody calls `Leases.look`.
        new_id: Makes the ids of sessions: UUID4s that nobody else makes.
    """

    def __init__(
        self,
        front: str,
        dial: Dial,
        *,
        lone_worker: bool = False,
        config: ClientConfig | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
        on_close: Callable[[], None] | None = None,
        background: bool = True,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.front = front
        self.background = background
        self.new_id = new_id
        self.lone_worker = lone_worker
        self.config = config if config is not None else ClientConfig()
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.retrier = Retrier(self.clock, rng, self.config.retry)
        self.knock_s = min(MAX_KNOCK_S, self.config.detection_s / 4)
        self.detection = Detection(self.config.detection_s - self.knock_s, self.config.silence_s)
        self._dial = dial
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._replaced: list[Transport] = []  # calls on them may still be under way
        self._closed = False
        self._on_close = on_close

    def to(self, address: str) -> Transport:
        """Return the way to an address; `FRONT` stands for the client's own server."""
        address = address or self.front
        transport = self._transports.get(address)
        if transport is None:
            with self._lock:
                if self._closed:
                    raise Unavailable("the client is closed")
                transport = self._transports.get(address)
                if transport is None:
                    transport = self._transports[address] = self._dial(address)
        return transport

    def knock(self, address: str, request: types_pb2.PageStatsRequest) -> str | None:
        """Ask a worker over a new connection who it is, where the old one brings no answers.

        If it answers, the new connection replaces the old one.

        Returns:
            The incarnation that answers, "" if it does not say; None if nobody does.
        """
        transport = self._dial(address or self.front)
        try:
            answer = transport.call(WORKER.full_name, "PageStats", request, timeout_s=self.knock_s)
            incarnation = str(answer.workers[0].incarnation)
        except (Unavailable, DeadlineExceeded):
            transport.close()
            return None
        except KVServiceError:  # a refusal is an answer
            incarnation = ""
        with self._lock:
            if self._closed:
                transport.close()
                return None
            old = self._transports.pop(address or self.front, None)
            self._transports[address or self.front] = transport
            if old is not None:
                self._replaced.append(old)
        return incarnation

    def ask(
        self,
        address: str,
        method: str,
        request: Message,
        *,
        timeout_s: float | None = None,
        detection: Detection | None = None,
    ) -> Any:
        """Make a unary call that may be repeated, trying again while nobody answers.

        Args:
            address: A worker's, or `FRONT`.
            timeout_s: None: the configured one.

        Raises:
            ServerDead: With `detection` only; see `Retrier.run`.
            KVServiceError: What the service answers, or Unavailable, or DeadlineExceeded.
        """
        manager = address == FRONT and not self.lone_worker
        service = MANAGER.full_name if manager else WORKER.full_name

        def attempt(left_s: float) -> Any:
            return self.to(address).call(service, method, request, timeout_s=left_s)

        return self.retrier.run(attempt, timeout_s or self.config.timeout_s, detection)

    def ask_once(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """Ask the client's manager something that can be done without an answer."""
        return self.to(FRONT).call(MANAGER.full_name, method, request, timeout_s=timeout_s)

    def extents_of(self, session: types_pb2.Session) -> list[Extent]:
        """Return the extents of an answer, with addresses to dial: a lone worker is where we have
        found it."""
        extents = convert.session_from_pb(session).extents
        if not self.lone_worker:
            return list(extents)
        return [replace(one, address=self.front) for one in extents]

    def close(self) -> None:
        """End everything in flight."""
        with self._lock:
            self._closed = True
            transports = [*self._transports.values(), *self._replaced]
        self.retrier.close()
        for transport in transports:
            transport.close()
        if self._on_close is not None:
            self._on_close()
