"""Histories of what clients did to a session, and whether any order of events explains them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path


class Outcome(Enum):
    """UNKNOWN: nobody has said whether it happened."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Event:
    """One call of one client, on one session.

    Fields:
        op: "append" (tokens), "pop" (length to keep), "reset", or "see" (length that was told).
        start, end: Seconds.
    """

    client: int
    session: int
    op: str
    value: int
    start: float
    end: float
    outcome: Outcome


class History:
    """Events, noted by threads of their own: each appends to a list, which is atomic."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, event: Event) -> None:
        self.events.append(event)

    def save(self, path: Path) -> None:
        """Write one JSON object a line."""
        lines = [
            json.dumps(asdict(event) | {"outcome": event.outcome.value}) for event in self.events
        ]
        path.write_text("\n".join((*lines, "")))


def find_contradiction(events: Iterable[Event]) -> str | None:
    """Return how the events of one session contradict each other; None if they do not.

    A session has one writer, so its calls follow each other; the model is its length. What is
    unknown may have happened or not: then all lengths that are possible are carried along, and what
    is seen later decides.
    """
    possible = {0}
    for event in sorted(events, key=lambda one: one.start):
        after = {_apply(event, length) for length in possible}
        if event.op == "see":
            possible = possible & {event.value}
        elif event.outcome is Outcome.OK:
            possible = after
        elif event.outcome is Outcome.UNKNOWN:
            possible = possible | after
        if not possible:
            return f"{event} cannot be, after what was before"
    return None


def _apply(event: Event, length: int) -> int:
    if event.op == "append":
        return length + event.value
    if event.op == "pop":
        return min(length, event.value)
    return 0 if event.op == "reset" else length
