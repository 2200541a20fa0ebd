"""The workers of a service at one moment, and what has happened to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.core.liveness import WorkerView
from kvservice.core.recovery import Recovery

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Membership:
    """What a manager knows of its workers.

    Fields:
        expected: Workers that there should be, without those that were drained; 0: unknown.
        recovery: How it has taken over from an earlier manager; None: it has not, or not yet.
        missing_copies: Of sessions' pages: as many should be there, and are not.
    """

    workers: Sequence[WorkerView]
    expected: int
    recovery: Recovery | None = None
    missing_copies: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an operator may want to know. `at` is in seconds since the epoch."""

    at: float
    worker_id: str
    text: str


class EventLog:
    """The last events, oldest first. The caller guards it."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def add(self, at: float, worker_id: str, text: str) -> None:
        self._events.append(Event(at, worker_id, text))

    def recent(self) -> list[Event]:
        return list(self._events)
