"""The way to another worker, and what is asked of the one that a session is taken from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvservice.clock import Clock
from kvservice.core.caller import SERVICE, Caller
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    PagesLost,
    StaleWorker,
    Unavailable,
)
from kvservice.core.moving import CopiedPages, SessionState
from kvservice.v1 import worker_pb2
from kvservice.wire import copies
from kvservice_workers.data_plane.pull import Pull
from kvservice_workers.worker_config import WorkerConfig

LOG = logging.getLogger(__name__)

CALL_S: Final = 5.0
HAND_OVER_S: Final = 1.0
SILENCE_S: Final = 10.0
"""How long the other worker may not answer, before the session is its own."""

CONFIRMATIONS: Final = 5


class Peer(Protocol):
    """The way to another worker. Thread-safe."""

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        """Make a unary call. Raises what the worker answers, or Unavailable, DeadlineExceeded."""

    def close(self) -> None:
        """Let go of the connection."""


class Source:
    """The worker that a session is taken from. Calls that may be repeated are."""

    def __init__(
        self, peer: Peer, pull: Pull, config: WorkerConfig, clock: Clock, stop: threading.Event
    ) -> None:
        """
        Args:
            config: Of the worker that takes it.
            stop: Nobody waits for an answer any more once it is set.
        """
        self.ticket = 0
        self._config = config
        self._peer = peer
        self._pull = pull
        self._clock = clock
        self._stop = stop
        self._copy = 0

    def close(self) -> None:
        self._peer.close()

    def state(self, *, freeze: bool = False) -> SessionState:
        """Return what the session is made of; `freeze`: from now on, for a moment."""
        answer = self._ask("CopyState", self._state_request(freeze))
        self._copy, self.ticket = answer.copy, answer.ticket
        return copies.state_from_pb(answer.state)

    def let_go(self) -> None:
        """Let the session thaw, if it was frozen."""
        if self.ticket:
            try:
                self._peer.call("CopyState", self._state_request(False), HAND_OVER_S, SERVICE)
            except KVServiceError as error:
                LOG.debug("the session thaws by itself: %s", error)

    def pages(self, window: int | None, layers: Sequence[int], pages: Sequence[int]) -> CopiedPages:
        """Return contents of pages."""
        request = self._about(
            worker_pb2.CopyPagesRequest(
                copy=self._copy,
                window=window,
                layers=layers,
                pages=copies.page_numbers_to_pb(pages),
            )
        )
        return copies.pages_from_pb(self._ask("CopyPages", request))

    def hand_over(self, *, confirmed: bool = False) -> None:
        """Ask for the session, once."""
        config = self._config
        request = self._about(
            worker_pb2.HandOverRequest(
                ticket=self.ticket,
                worker_id=config.worker_id,
                worker_address=config.address,
                worker_incarnation=config.incarnation,
                confirmed=confirmed,
                keep=self._pull.request.keep,
            )
        )
        self._peer.call("HandOver", request, HAND_OVER_S, SERVICE)

    def confirm(self) -> None:
        """Say that the session is served, for who waits for it; if that is heard."""
        for _ in range(CONFIRMATIONS):
            try:
                self.hand_over(confirmed=True)
            except (Unavailable, DeadlineExceeded):
                self._clock.wait(self._stop, 0.1)
            except KVServiceError:
                return
            else:
                return

    def _state_request(self, freeze: bool) -> Any:
        return self._about(
            worker_pb2.CopyStateRequest(
                copier=self._pull.request.move_id, copy=self._copy, freeze=freeze
            )
        )

    def _about(self, request: Any) -> Any:
        asked = self._pull.request
        request.tenant, request.session_id = asked.tenant, asked.session_id
        request.incarnation = asked.source_incarnation
        return request

    def _ask(self, method: str, request: Any) -> Any:
        deadline = self._clock.monotonic() + SILENCE_S
        while True:
            try:
                return self._peer.call(method, request, CALL_S, SERVICE)
            except StaleWorker as error:
                raise lost() from error
            except (Unavailable, DeadlineExceeded) as error:
                over = self._clock.monotonic() >= deadline or self._pull.source_is_dead
                if isinstance(error, Draining) or over or self._stop.is_set():
                    raise Unavailable(f"the other worker does not answer: {error}") from error
            if self._clock.wait(self._stop, 0.1):
                raise Unavailable("this worker is about to end")


def lost() -> PagesLost:
    """Return the error for a session whose worker is dead: what it had not handed over is lost."""
    return PagesLost("the worker that held the session has died", from_position=0)
