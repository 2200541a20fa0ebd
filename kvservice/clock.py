"""The only place that asks the time, sleeps or waits."""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

_LOOK_S: Final = 0.5


class Clock(Protocol):
    """Time as the service sees it. Seconds."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment, never going back."""

    def time(self) -> float:
        """Return seconds since the epoch: for people, metrics, and what other machines check."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait until the event is set or the time is over; return whether it is set."""


class SystemClock:
    """The machine's clock."""

    # Asked several times a layer: without a frame of Python's own around them.
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            return event.wait(timeout_s)
        # To a process that has been stopped, or has just been let go on, the kernel gives a signal
        # by any of its threads. Python runs handlers in the main thread alone, and nobody wakes
        # that for it: so it looks now and then, where it waits without end.
        while not event.wait(_LOOK_S):
            pass
        return True


class ManualClock:
    """A clock that only moves when told to, for tests. Thread-safe."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._moved = threading.Condition()

    def monotonic(self) -> float:
        with self._moved:
            return self._now

    def time(self) -> float:
        return self.monotonic()

    def advance(self, seconds: float) -> None:
        """Move the time forward and wake those whose wait is over."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        with self._moved:
            deadline = None if timeout_s is None else self._now + timeout_s
            while not event.is_set() and (deadline is None or self._now < deadline):
                # `event` is set without our condition, so look again from time to time.
                self._moved.wait(0.01)
            return event.is_set()


def now_ns() -> int:
    """Return nanoseconds for measuring durations."""
    return time.perf_counter_ns()
