"""Calls in progress, and what bounds them: too many, too long, too quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.errors import Overloaded
from kvservice.server.rooms import Room

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
TELL_S: Final = 10.0
"""How often the log says that calls are refused, while they are."""

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
    """Bounds the numbers of calls, and cancels those whose time is over.

    A stream holds a thread as long as it lives, and other calls may have to wait for one: the
    places are as many as the threads of streams, and the threads and the queue of other calls.
    The watching thread runs between `start` and `stop`.
    """

    def __init__(self, limits: ServerLimits, clock: Clock) -> None:
        num_calls = limits.unary_threads + limits.queued_calls
        self.streams = Room(
            limits.max_streams,
            Overloaded(
                f"this server has {limits.max_streams} streams open, the most it may",
                retry_delay_s=1.0,
                limit=limits.max_streams,
            ),
        )
        self.calls = Room(
            num_calls,
            Overloaded(
                f"this server has {num_calls} calls in progress, the most it may",
                retry_delay_s=0.2,
                limit=num_calls,
            ),
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._open: set[OpenCall] = set()
        self._told_at = -TELL_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvservice-streams", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def watched(self, context: Cancellable, *, timeout_s: float) -> Iterator[OpenCall]:
        """Cancel a call that takes longer than `timeout_s` seconds, unless it moves its end."""
        entry = OpenCall(context, self._clock.monotonic() + timeout_s)
        with self._lock:
            self._open.add(entry)
        try:
            yield entry
        finally:
            with self._lock:
                self._open.discard(entry)

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
            self._tell_refusals()

    def _tell_refusals(self) -> None:
        """Say how many were refused: for each of them a line would be more work than to serve."""
        now = self._clock.monotonic()
        if now < self._told_at + TELL_S:
            return
        for room in (self.streams, self.calls):
            if number := room.num_refused():
                LOG.info("refused %d calls: %s", number, room.refusal.message)
                self._told_at = now
