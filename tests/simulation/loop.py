"""One thread, one clock that jumps from event to event, and tasks that wait for each other."""

from __future__ import annotations

import heapq
import random
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from greenlet import getcurrent, greenlet


class Crashed(BaseException):
    """Ends what a process does that has crashed, wherever that is. Nobody catches it."""


class Process:
    """What can crash, or be frozen for a while. Tasks and events belong to one."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.frozen = False
        self.stuck: list[Callable[[], Any]] = []  # what has come while it was frozen, in order
        self.tasks: list[greenlet] = []

    def crash(self) -> None:
        """End all tasks where they are. Events that are under way find nobody."""
        self.alive = False
        self.loop.note("crash", self.name)
        tasks, self.tasks = self.tasks, []
        current = getcurrent()
        for task in tasks:
            if task is not current and not task.dead:
                task.parent = current  # which goes on when this one has ended
                with suppress(Crashed):  # of one that has not begun yet
                    task.throw(Crashed())
        if current in tasks:
            raise Crashed

    def end(self) -> None:
        """End all tasks, at the end of the simulation."""
        Process.crash(self)

    def freeze(self, seconds: float) -> None:
        """Let nothing happen in it for so long; then all that has come meanwhile."""
        if not self.frozen:
            self.loop.note("freeze", self.name, seconds)
            self.frozen = True
            self.loop.later(seconds, self.thaw)

    def thaw(self) -> None:
        self.frozen = False
        stuck, self.stuck = self.stuck, []
        for event in stuck:
            self.loop.later(0.0, event, self)


class Loop:
    """Runs events in the order of their times. All chance comes from one seed.

    Attributes:
        log: What has happened, if `keep_log`.
    """

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.log: list[str] = []
        self.num_events = 0
        self._keep_log = keep_log
        self._noted: list[tuple[float, tuple[object, ...]]] = []
        self._events: list[tuple[float, int, Process | None, Callable[[], Any]]] = []
        self._serial = 0
        self._hub = getcurrent()

    def note(self, *what: object) -> None:
        """Note what happens: words and numbers."""
        self._noted.append((self.now, what))
        if self._keep_log:
            self.log.append(f"{self.now - 1000.0:9.4f} {' '.join(map(str, what))}")

    @property
    def trace(self) -> int:
        """A checksum of all that has happened, to compare two runs of a seed."""
        return zlib.crc32(repr(self._noted).encode())

    def later(
        self, delay_s: float, event: Callable[[], Any], process: Process | None = None
    ) -> None:
        """Let something happen; in a process, unless that has crashed by then."""
        self._push(self.now + delay_s, process, event)

    def spawn(self, process: Process, run: Callable[[], Any]) -> None:
        """Begin a task of a process."""

        def guarded() -> None:
            try:
                run()
            except Crashed:
                pass
            finally:
                if task in process.tasks:
                    process.tasks.remove(task)

        task = greenlet(guarded, self._hub)
        process.tasks.append(task)
        self.later(0.0, task.switch, process)

    def sleep(self, process: Process, seconds: float) -> None:
        """Let a task wait."""
        self.later(seconds, self._resume(), process)
        self.park()

    def park(self) -> None:
        """Let a task wait for somebody to call what `waker` has given."""
        self._hub.switch()

    def waker(self, process: Process) -> Callable[[], None]:
        """Return what wakes the current task, in its process's time. To be called by events."""
        resume = self._resume()
        return lambda: self.happen(resume, process)

    def happen(self, event: Callable[[], Any], process: Process | None) -> None:
        """Let something happen now; in a process, if it lives. To be called by events."""
        if process is not None:
            if not process.alive:
                return
            if process.frozen:
                process.stuck.append(event)
                return
        self.num_events += 1
        event()

    def _resume(self) -> Callable[[], Any]:
        task = getcurrent()
        assert task is not self._hub, "only tasks wait"
        return lambda: None if task.dead else task.switch()

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Run events until something is so. It must become so within `limit_s`."""
        deadline = self.now + limit_s
        while not until():
            assert self._events, "nothing will ever happen again"
            at, _, process, event = heapq.heappop(self._events)
            assert at <= deadline, f"not done within {limit_s:g} s"
            self.now = max(self.now, at)
            with suppress(Crashed):  # of a process that has crashed in the middle of it
                self.happen(event, process)

    def _push(self, at: float, process: Process | None, event: Callable[[], Any]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, process, event))


class SimClock:
    """A process's view of the loop's time."""

    def __init__(self, loop: Loop, process: Process) -> None:
        self._loop = loop
        self._process = process

    def monotonic(self) -> float:
        return self._loop.now

    def time(self) -> float:
        return self._loop.now

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait in steps: events are set behind our back."""
        loop = self._loop
        deadline = loop.now + (1e9 if timeout_s is None else timeout_s)
        while not event.is_set() and loop.now < deadline:
            loop.sleep(self._process, min(0.1, deadline - loop.now))
        return event.is_set()
