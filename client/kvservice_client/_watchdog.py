"""Deadlines of calls on streams: one thread watches them all, no call has a thread of its own."""

from __future__ import annotations

import math
import threading
from typing import Final, Protocol

from kvservice.clock import Clock

NEVER: Final = math.inf


class Guarded(Protocol):
    """Something with a deadline in the clock's monotonic seconds; `NEVER` while nothing is due."""

    deadline: float

    def expire(self) -> None:
        """End what is overdue. Called by the watchdog's thread, at most once a deadline."""


class Watchdog:
    """Expires guarded objects whose deadline has passed.

    The thread starts at the first `watch`, sleeps until the earliest deadline it has seen, and is
    woken for an earlier one only. A call that ends in time costs no wake-up.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._guarded: set[Guarded] = set()
        self._wake = threading.Event()
        self._next = NEVER
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, guarded: Guarded) -> None:
        """Take it into the watch, until `forget`."""
        with self._lock:
            self._guarded.add(guarded)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="kvservice-deadlines", daemon=True
                )
                self._thread.start()

    def forget(self, guarded: Guarded) -> None:
        with self._lock:
            self._guarded.discard(guarded)

    def arm(self, guarded: Guarded, deadline: float) -> None:
        """Set a deadline. Disarm by setting `deadline` to `NEVER`."""
        guarded.deadline = deadline
        if deadline < self._next:
            self._wake.set()

    def close(self) -> None:
        """End the thread. Nothing expires afterwards."""
        with self._lock:
            self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            # While we look around, every `arm` wakes us again: it may be one we have passed.
            self._next = NEVER
            self._wake.clear()
            now = self._clock.monotonic()
            self._next = self._expire_overdue(now)
            timeout_s = None if self._next == NEVER else self._next - now
            self._clock.wait(self._wake, timeout_s)

    def _expire_overdue(self, now: float) -> float:
        with self._lock:
            guarded = list(self._guarded)
        earliest = NEVER
        for one in guarded:
            deadline = one.deadline
            if deadline <= now:
                one.deadline = NEVER
                one.expire()
            else:
                earliest = min(earliest, deadline)
        return earliest
