"""Turns: one caller at a time decides where a session goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvservice.clock import Clock
from kvservice.core.directory import SessionKey
from kvservice.core.errors import Unavailable


class Turns:
    """Who decides just now where a session goes. Thread-safe.

    Args:
        timeout_s: How long to wait for one's turn.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._taken: dict[SessionKey, threading.Event] = {}  # set when the turn is over

    @contextmanager
    def take(self, key: SessionKey) -> Iterator[None]:
        """Have the turn on a session, after all who have it: a repeat may come too early.

        Raises:
            Unavailable: Others go on for too long.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        mine = threading.Event()
        while (ahead := self._enter(key, mine)) is not None:
            if not self._clock.wait(ahead, deadline - self._clock.monotonic()):
                raise Unavailable("another call on this session is in progress")
        try:
            yield
        finally:
            with self._lock:
                del self._taken[key]
            mine.set()

    def is_taken(self, key: SessionKey) -> bool:
        """Whether somebody has the turn on a session: it may be open in part."""
        with self._lock:
            return key in self._taken

    def _enter(self, key: SessionKey, mine: threading.Event) -> threading.Event | None:
        """Take the turn on a session; or return the event at whose setting to try again."""
        with self._lock:
            ahead = self._taken.get(key)
            if ahead is None:
                self._taken[key] = mine
            return ahead
