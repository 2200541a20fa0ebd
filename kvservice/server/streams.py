"""Calls in progress, and what ends them: too many, too long, too quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvservice.clock import Clock
from kvservice.core.errors import Overloaded

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
NEVER: Final = float("inf")


class Cancellable(Protocol):
    """What is needed of a call: gRPC's context has it."""

    def cancel(self) -> bool: ...


class OpenCall:
    """A call in progress. Its own thread moves `ends_at`, the watching one reads it.

    `cancelled` tells what gRPC does not: to its thread, a stream that was cancelled while waiting
    may look like one that the client has ended. `has_ended` says whether the credential behind it
    does not hold any more.
    """

    __slots__ = ("cancelled", "context", "ends_at", "has_ended")

    def __init__(self, context: Cancellable, ends_at: float) -> None:
        self.context = context
        self.ends_at = ends_at
        self.cancelled = False
        self.has_ended: Callable[[], bool] = lambda: False


class OpenCalls:
    """Bounds the number of streams, and cancels calls whose time is over.

    A stream holds a thread as long as it lives, so there are fewer of them than threads. The
    watching thread runs between `start` and `stop`.
    """

    def __init__(self, max_streams: int, clock: Clock) -> None:
        self._max_streams = max_streams
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[OpenCall] = set()
        self._num_streams = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvservice-streams", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def num_streams(self) -> int:
        return self._num_streams

    @contextmanager
    def call(self, context: Cancellable, *, timeout_s: float) -> Iterator[OpenCall]:
        """Watch a call for `timeout_s` seconds."""
        entry = OpenCall(context, self._clock.monotonic() + timeout_s)
        with self._lock:
            self._open.add(entry)
        try:
            yield entry
        finally:
            with self._lock:
                self._open.discard(entry)

    @contextmanager
    def stream(self, context: Cancellable, *, timeout_s: float) -> Iterator[OpenCall]:
        """As `call`, for a stream.

        Raises:
            Overloaded: There are as many streams as there may be.
        """
        with self._lock:
            if self._num_streams >= self._max_streams:
                raise Overloaded(
                    f"this server has {self._max_streams} streams open, the most it may",
                    retry_delay_s=1.0,
                    limit=self._max_streams,
                )
            self._num_streams += 1
        try:
            with self.call(context, timeout_s=timeout_s) as entry:
                yield entry
        finally:
            with self._lock:
                self._num_streams -= 1

    def cancel_overdue(self) -> int:
        """Cancel the calls whose time, or whose credential's, is over; return how many."""
        now = self._clock.monotonic()
        with self._lock:
            entries = list(self._open)
        overdue = [one for one in entries if one.ends_at <= now or one.has_ended()]
        for entry in overdue:
            entry.ends_at = NEVER
            entry.has_ended = lambda: False
            entry.cancelled = True
            entry.context.cancel()
        return len(overdue)

    def _watch(self) -> None:
        while not self._clock.wait(self._stop, PERIOD_S):
            if number := self.cancel_overdue():
                LOG.info("closed %d idle or overdue calls", number)
