"""Which workers there are, and which of them live, as far as can be told.

A worker is dead by certain knowledge (another life of it has come, or its supervisor says so), or
by presumption: nobody has heard it for `dead_after_s`, or its heartbeats have ended and its address
refuses connections. One that was only presumed dead is welcome as soon as it is heard again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvservice.core.errors import StaleWorker, WorkerNotFound

# Heartbeats come once a second: dead is who has missed three.
SUSPECT_AFTER_S: Final = 2.0
DEAD_AFTER_S: Final = 3.5
REFUSING_FOR_S: Final = 0.2
REMEMBERED_INCARNATIONS: Final = 16


class WorkerState(Enum):
    """ALIVE: takes sessions. SUSPECT: late. DEAD: gone, as far as can be told. DRAINING: leaves."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says of itself. `address` is its service's, as host:port."""

    worker_id: str
    incarnation: str
    address: str
    device: str
    budget_bytes: int
    free_bytes: int
    draining: bool = False
    metrics_address: str = ""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of a worker.

    Fields:
        heard_at: On the monotonic clock of who knows it.
        restarts: How often another incarnation has taken its place.
    """

    record: WorkerRecord
    state: WorkerState
    num_sessions: int
    heard_at: float
    restarts: int = 0


@dataclass(slots=True)
class _Life:
    record: WorkerRecord
    heard_at: float
    cut_off: bool = False
    refusing_since: float | None = None
    presumed_dead: bool = False
    dead: bool = False
    drain_by: float | None = None  # it is to leave, then at the latest
    restarts: int = 0
    in_place_of: str = ""  # the incarnation that this one has replaced
    heard_again: bool = False  # since it registered


class Liveness:
    """The workers that have registered, and their states. `now` is monotonic, in seconds.

    Args:
        suspect_after_s: A worker silent for so long is suspect.
        dead_after_s: One silent for so long is dead, until it is heard again.
    """

    def __init__(self, suspect_after_s: float, dead_after_s: float) -> None:
        self._suspect_after_s = suspect_after_s
        self.dead_after_s = dead_after_s
        self._lives: dict[str, _Life] = {}  # the last one of each worker
        self._replaced: dict[str, deque[str]] = {}
        self._left: set[str] = set()  # workers that were drained, and have not come back

    # What is heard of them

    def register(self, record: WorkerRecord, now: float) -> WorkerRecord | None:
        """Take a worker in, in place of another incarnation of it, if there is one.

        Which of two came later is told by when they are heard alone. So one that was replaced may
        come back where nothing has followed the message that replaced it: that was of a life
        before, and late.

        Returns:
            What it has said of itself before, in this life or another one; None: it is new.

        Raises:
            StaleWorker: The incarnation has been replaced or buried. Nothing has changed.
        """
        worker_id = record.worker_id
        known = self._lives.get(worker_id)
        if record.incarnation in self._replaced.get(worker_id, ()):
            if known is None or not self._came_too_late(known, record.incarnation, now):
                raise _stale(record)
            self._replaced[worker_id].remove(record.incarnation)
        life = _Life(record, now)
        if known is not None and known.record.incarnation == record.incarnation:
            life.drain_by, life.restarts = known.drain_by, known.restarts
        elif known is not None:
            self.bury(worker_id, known.record.incarnation)
            life.restarts, life.in_place_of = known.restarts + 1, known.record.incarnation
        self._lives[worker_id] = life
        self._left.discard(worker_id)
        return None if known is None else known.record

    def heard(self, record: WorkerRecord, now: float) -> None:
        """Take a worker's word of itself.

        Raises:
            StaleWorker: Another incarnation is registered, or none. Nothing has changed.
        """
        life = self._find(record.worker_id, record.incarnation)
        if life is None or life.dead:
            raise _stale(record)
        life.record, life.heard_at, life.heard_again = record, now, True
        life.cut_off, life.refusing_since, life.presumed_dead = False, None, False

    def cut_off(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker's connection has broken: it is suspect until it is heard again."""
        life = self._find(worker_id, incarnation)
        if life is not None:
            life.cut_off = True

    def refused(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that nobody accepts connections at a worker's address.

        If that goes on for `REFUSING_FOR_S`, it is presumed dead until it is heard again.
        """
        life = self._find(worker_id, incarnation)
        if life is None:
            return
        if life.refusing_since is None:
            life.refusing_since = now
        life.presumed_dead |= now - life.refusing_since >= REFUSING_FOR_S

    def answered(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker accepts connections, though its heartbeats do not arrive."""
        life = self._find(worker_id, incarnation)
        if life is not None:
            life.refusing_since = None

    def bury(self, worker_id: str, incarnation: str) -> bool:
        """Note that a worker is known to be gone; return whether that was not known before.

        The incarnation is refused from now on, should it come back after all.
        """
        life = self._find(worker_id, incarnation)
        if life is None or life.dead:
            return False
        life.dead = True
        replaced = self._replaced.setdefault(worker_id, deque(maxlen=REMEMBERED_INCARNATIONS))
        replaced.append(incarnation)
        return True

    # Leaving

    def drain(self, worker_id: str, leave_by: float) -> None:
        """Let a worker open no more sessions, and leave at `leave_by` at the latest.

        Raises:
            WorkerNotFound: There is none of that name, or it is dead.
        """
        life = self._lives.get(worker_id)
        if life is None or life.dead:
            raise WorkerNotFound(f"no worker {worker_id} is registered", worker_id=worker_id)
        life.drain_by = leave_by

    def leave_by(self, worker_id: str) -> float | None:
        """Return when a worker is to have left; None: it is not to."""
        life = self._lives.get(worker_id)
        return None if life is None else life.drain_by

    def leave(self, worker_id: str, incarnation: str) -> bool:
        """Note that a worker has left as it was asked to: it is listed no more.

        Returns:
            Whether it was.
        """
        if self._find(worker_id, incarnation) is None:
            return False
        self.bury(worker_id, incarnation)
        del self._lives[worker_id]
        self._left.add(worker_id)
        return True

    @property
    def left(self) -> frozenset[str]:
        """Ids of workers that were drained, and have not come back."""
        return frozenset(self._left)

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more: there should be one less."""
        self._left.discard(worker_id)

    # Who there is

    def find_worker(self, worker_id: str) -> WorkerRecord | None:
        """Return who is registered by this id; None if nobody, or one known to be dead."""
        life = self._lives.get(worker_id)
        return None if life is None or life.dead else life.record

    def state(self, worker_id: str, now: float) -> WorkerState:
        """Return a worker's state; DEAD for one that has never registered."""
        life = self._lives.get(worker_id)
        return WorkerState.DEAD if life is None else self._state(life, now)

    def is_dead(self, worker_id: str, now: float) -> bool:
        """Whether a worker is known, or presumed, to be dead."""
        return self.state(worker_id, now) is WorkerState.DEAD

    def state_of_life(self, incarnation: str, now: float) -> WorkerState | None:
        """Return the state of an incarnation of some worker; None if it was never heard of."""
        for life in self._lives.values():
            if life.record.incarnation == incarnation:
                return self._state(life, now)
        gone = any(incarnation in lives for lives in self._replaced.values())
        return WorkerState.DEAD if gone else None

    def find_cut_off(self, now: float) -> list[WorkerRecord]:
        """Return the workers whose connection has broken, and who are not dead yet."""
        return [
            life.record
            for life in self._lives.values()
            if life.cut_off and self._state(life, now) is WorkerState.SUSPECT
        ]

    def living(self, now: float) -> list[str]:
        """Return the workers that are not dead."""
        return [worker_id for worker_id in self._lives if not self.is_dead(worker_id, now)]

    def view(self, worker_id: str, num_sessions: int, now: float) -> WorkerView:
        """Return all that is known of a worker that is listed."""
        life = self._lives[worker_id]
        state = self._state(life, now)
        return WorkerView(life.record, state, num_sessions, life.heard_at, life.restarts)

    def _find(self, worker_id: str, incarnation: str) -> _Life | None:
        life = self._lives.get(worker_id)
        return life if life is not None and life.record.incarnation == incarnation else None

    def _came_too_late(self, life: _Life, incarnation: str, now: float) -> bool:
        """Whether a life has replaced an incarnation, and nothing was heard of it afterwards."""
        is_silent = self._state(life, now) is WorkerState.DEAD and not life.heard_again
        return is_silent and life.in_place_of == incarnation

    def _state(self, life: _Life, now: float) -> WorkerState:
        silent_s = now - life.heard_at
        if life.dead or life.presumed_dead or silent_s > self.dead_after_s:
            return WorkerState.DEAD
        if life.cut_off or silent_s > self._suspect_after_s:
            return WorkerState.SUSPECT
        leaving = life.record.draining or life.drain_by is not None
        return WorkerState.DRAINING if leaving else WorkerState.ALIVE


def _stale(record: WorkerRecord) -> StaleWorker:
    return StaleWorker(
        f"worker {record.worker_id} is registered with another incarnation, or not at all",
        worker_id=record.worker_id,
    )
