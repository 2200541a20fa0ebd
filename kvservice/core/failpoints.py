"""Named places at which a process can be made to fail, for tests of what happens then.

They are off unless a test sets them; then each says, when it is passed, whether it is time to end
the process, to fail the call, or to wait.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvservice.core.errors import InternalError, InvalidRequest

WORKER_POINTS: Final = {
    "allocate.done": "a session has been opened, and nobody has been told",
    "fork.done": "a session has been forked, and nobody has been told",
    "attend.pages_taken": "a step has its pages, and no layer has stored anything in them",
    "attend.stored": "a layer's tokens are stored, and nobody has been told",
    "write.stored": "tokens have been written, and nobody has been told",
    "change.checked": "a structural change would be accepted, and nobody has been told",
    "change.applied": "a structural change has been made, and nobody has been told",
    "move.copied": "a round of pages is copied from another worker, which may have changed since",
    "move.complete": "a frozen session is copied, and has not been asked for",
    "move.handed_over": "a session is another worker's, which has not been told",
    "move.arrived": "a session has come from another worker, and nobody else has been told",
    "heartbeat.sending": "a heartbeat is about to be sent",
}
MANAGER_POINTS: Final = {
    "open.placed": "a session is open on its workers, and the directory does not know",
    "grow.opened": "a session's new extent is open, without room promised",
    "grow.promised": "it has its room, and the worker before it has not been told",
    "manager.change.checked": "all workers would accept a change, and none has it",
    "manager.change.partly_applied": "one worker more has a change; others may not",
    "manager.fork.partly_done": "one worker more has forked a session; others may not",
    "manager.move.begun": "a session is on its way from worker to worker",
    "manager.move.done": "it has arrived, and the directory does not know",
    "heartbeat.received": "a heartbeat is noted, and the worker has not been answered",
}
POINTS: Final = {**WORKER_POINTS, **MANAGER_POINTS}

_STATED: Final = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>crash|error|delay:(?P<seconds>\d+(\.\d+)?))(@(?P<hit>\d+))?"
)


class Action(Enum):
    """CRASH: end the process at once. ERROR: raise InternalError. DELAY: wait, then go on."""

    CRASH = "crash"
    ERROR = "error"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What is to happen at a place. `at_hit` counts from 1; None: each time it is passed."""

    name: str
    action: Action
    seconds: float = 0.0
    at_hit: int | None = None


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """Read `attend.stored=crash@3;heartbeat.sending=delay:2.5`.

    Raises:
        InvalidRequest: It is not of this form, or names a place that there is not.
    """
    points = []
    for stated in filter(None, text.split(";")):
        match = _STATED.fullmatch(stated.strip())
        if match is None or match["name"] not in POINTS:
            raise InvalidRequest(
                f"not a failpoint: {stated!r}; write NAME=crash, NAME=error or NAME=delay:SECONDS, "
                f"with @N for the N-th time alone, and NAME one of {', '.join(POINTS)}"
            )
        action = Action(match["action"].partition(":")[0])
        hit = int(match["hit"]) if match["hit"] else None
        points.append(Failpoint(match["name"], action, float(match["seconds"] or 0), hit))
    return tuple(points)


class Failpoints:
    """The failpoints of one process, and how often each has been passed.

    Args:
        crash: Ends the process. Must not return.
        wait: Waits for so many seconds.
    """

    def __init__(
        self,
        points: Iterable[Failpoint] = (),
        *,
        crash: Callable[[], None],
        wait: Callable[[float], None],
    ) -> None:
        self._points = tuple(points)
        self._crash = crash
        self._wait = wait
        self.hits: Counter[str] = Counter()

    def passed(self, name: str) -> None:
        """Say that a place is passed. Without effect where nothing is set.

        Raises:
            InternalError: It is to fail here. What was done before stays done.
        """
        if not self._points:
            return
        assert name in POINTS, name
        self.hits[name] += 1
        for point in self._points:
            if point.name == name and point.at_hit in (None, self.hits[name]):
                self._act(point)

    def _act(self, point: Failpoint) -> None:
        match point.action:
            case Action.CRASH:
                self._crash()
            case Action.ERROR:
                raise InternalError(f"failpoint {point.name}", failpoint=point.name)
            case Action.DELAY:
                self._wait(point.seconds)


def _never() -> None:
    raise AssertionError("no failpoint is set")


NO_FAILPOINTS: Final = Failpoints(crash=_never, wait=lambda _seconds: _never())
