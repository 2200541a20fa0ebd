"""Which workers there are, and which sessions they hold, as far as heartbeats have said.

The directory may lag behind the workers by one heartbeat, and nothing relies on it being exact:
whoever acts on it asks the workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvservice.core.errors import StaleWorker, WorkerNotFound
from kvservice.core.lease import LeaseTable

SessionKey = tuple[str, str]  # tenant, session id

SUSPECT_AFTER_S: Final = 3.0
REMEMBERED_INCARNATIONS: Final = 16


class WorkerState(Enum):
    """ALIVE: takes sessions. SUSPECT: silent. DEAD: known to be gone. DRAINING: is leaving."""

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
    """What the directory knows of a worker.

    Fields:
        heard_at: On the directory's monotonic clock.
        restarts: How often another incarnation has taken its place.
    """

    record: WorkerRecord
    state: WorkerState
    num_sessions: int
    heard_at: float
    restarts: int = 0


@dataclass(slots=True)
class _Worker:
    record: WorkerRecord
    heard_at: float
    cut_off: bool = False
    dead: bool = False
    drain_by: float | None = None  # it is to leave, then at the latest
    restarts: int = 0
    sessions: dict[SessionKey, float] = field(default_factory=dict)  # key -> ttl_s


@dataclass(slots=True)
class _Loss:
    # The survivors' epoch when somebody first looked. A later one means that the client has cut
    # the session to what is left.
    epoch: int | None = None


class Directory:
    """Sessions -> workers, and workers -> what they said last. `now` is monotonic, in seconds.

    Invariants (asserted by `check`):
      1. A session lists a worker if, and only if, the worker lists the session.
      2. Every worker that a session lists is registered, and not dead.
      3. Every loss has a time at which it is forgotten.
    """

    def __init__(self, suspect_after_s: float = SUSPECT_AFTER_S) -> None:
        self._suspect_after_s = suspect_after_s
        self._workers: dict[str, _Worker] = {}
        self._holders: dict[SessionKey, dict[str, None]] = {}
        self._replaced: dict[str, deque[str]] = {}
        self._left: set[str] = set()  # workers that were drained, and have not come back
        self._losses: dict[SessionKey, _Loss] = {}
        self._forget_at: LeaseTable[SessionKey] = LeaseTable()

    # What workers say

    def register(
        self, record: WorkerRecord, sessions: Iterable[tuple[SessionKey, float]], now: float
    ) -> None:
        """Take a worker in, with the sessions that it holds now and the ttl of each.

        Another incarnation of the same worker is replaced: what that held is lost.

        Raises:
            StaleWorker: The incarnation has been replaced or buried. Nothing has changed.
        """
        if record.incarnation in self._replaced.get(record.worker_id, ()):
            raise _stale(record)
        known = self._workers.get(record.worker_id)
        if known is not None and known.record.incarnation != record.incarnation:
            self.bury(record.worker_id, known.record.incarnation, now)
        elif known is not None:
            for key in list(known.sessions):
                self._forget(key, record.worker_id)
        worker = self._workers[record.worker_id] = _Worker(record, now)
        self._left.discard(record.worker_id)
        if known is not None and known.record.incarnation == record.incarnation:
            worker.drain_by, worker.restarts = known.drain_by, known.restarts
        elif known is not None:
            worker.restarts = known.restarts + 1
        for key, ttl_s in sessions:
            self.note(key, record.worker_id, ttl_s)

    def heartbeat(
        self,
        record: WorkerRecord,
        changed: Iterable[tuple[SessionKey, float]],
        ended: Iterable[SessionKey],
        now: float,
        *,
        expired: Iterable[SessionKey] = (),
    ) -> None:
        """Note what has changed on a worker.

        Args:
            ended: Sessions that were released there.
            expired: Sessions whose lease was over there.

        Raises:
            StaleWorker: Another incarnation is registered, or none. Nothing has changed.
        """
        worker = self._workers.get(record.worker_id)
        if worker is None or worker.record.incarnation != record.incarnation or worker.dead:
            raise _stale(record)
        worker.record, worker.heard_at, worker.cut_off = record, now, False
        for key in ended:
            self.end(key, record.worker_id)
        for key in expired:
            self.expire(key, record.worker_id, now)
        # After those that have ended: one that is in both has ended and begun again.
        for key, ttl_s in changed:
            self.note(key, record.worker_id, ttl_s)
        for key in self._forget_at.expired(now):
            self._forget_loss(key)

    def cut_off(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker's connection has broken: it is suspect until it is heard again."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.record.incarnation == incarnation:
            worker.cut_off = True

    def bury(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that a worker is known to be gone, and what it held with it.

        The incarnation is refused from now on, should it come back after all.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.record.incarnation == incarnation and not worker.dead:
            worker.dead = True
            replaced = self._replaced.setdefault(worker_id, deque(maxlen=REMEMBERED_INCARNATIONS))
            replaced.append(incarnation)
            self._lose_all(worker, now)

    # Leaving

    def drain(self, worker_id: str, leave_by: float) -> None:
        """Let a worker open no more sessions, and leave at `leave_by` at the latest.

        Raises:
            WorkerNotFound: There is none of that name, or it is dead.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.dead:
            raise WorkerNotFound(f"no worker {worker_id} is registered", worker_id=worker_id)
        worker.drain_by = leave_by

    def leave_by(self, worker_id: str) -> float | None:
        """Return when a worker is to have left; None: it is not to."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.drain_by

    def leave(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that a worker has left as it was asked to: with what it still held, if anything.

        It is listed no more.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.record.incarnation == incarnation:
            self.bury(worker_id, incarnation, now)
            del self._workers[worker_id]
            self._left.add(worker_id)

    @property
    def num_left(self) -> int:
        """Workers that were drained, and have not come back."""
        return len(self._left)

    # Sessions

    def note(self, key: SessionKey, worker_id: str, ttl_s: float) -> None:
        """Note that a worker holds a session. Of unknown and dead workers nothing is noted."""
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.dead:
            worker.sessions[key] = ttl_s
            self._holders.setdefault(key, {})[worker_id] = None

    def end(self, key: SessionKey, worker_id: str) -> None:
        """Note that a worker does not hold a session any more.

        With its last part the session has ended, whatever of it was lost before.
        """
        if worker_id in self._holders.get(key, ()):
            self._forget(key, worker_id)
            if key not in self._holders:
                self.settle(key)

    def expire(self, key: SessionKey, worker_id: str, now: float) -> None:
        """Note that a session's lease was over on a worker. What other workers still hold of it is
        not all of it: that part is lost, as if the worker had died."""
        ttl_s = self._workers[worker_id].sessions.get(key)
        self.end(key, worker_id)
        if ttl_s is not None and key in self._holders:
            self._lose(key, ttl_s, now)

    def holders(self, key: SessionKey) -> list[str]:
        """Return the workers that hold a session, in the order in which they came to it."""
        return list(self._holders.get(key, ()))

    def is_incomplete(self, key: SessionKey, epoch: int | None, now: float) -> bool:
        """Whether a worker of the session is gone, and its client has not dealt with that yet.

        Args:
            epoch: Where the workers that are left are. None: there are none.
        """
        loss = self._losses.get(key)
        if loss is not None and self._forget_at.deadline(key) <= now:
            self._forget_loss(key)
            return False
        if loss is None or epoch is None:
            return loss is not None
        if loss.epoch is None:
            loss.epoch = epoch
        if epoch > loss.epoch:
            self._forget_loss(key)
            return False
        return True

    def settle(self, key: SessionKey) -> None:
        """Note that the session has been opened anew, released, or cut to what is left."""
        if key in self._losses:
            self._forget_loss(key)

    # Workers

    def find_worker(self, worker_id: str) -> WorkerRecord | None:
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.dead else worker.record

    def workers(self, now: float) -> list[WorkerView]:
        """Return all workers by id, dead ones until another incarnation registers."""
        return [
            WorkerView(
                worker.record,
                self._state(worker, now),
                len(worker.sessions),
                worker.heard_at,
                worker.restarts,
            )
            for _, worker in sorted(self._workers.items())
        ]

    def check(self) -> None:
        """Assert all invariants."""
        listed = {(key, wid) for key, held in self._holders.items() for wid in held}
        held = {(key, wid) for wid, worker in self._workers.items() for key in worker.sessions}
        assert listed == held, "sessions and workers disagree"
        assert all(self._holders.values()), "a session without holders is listed"
        assert not any(worker.dead and worker.sessions for worker in self._workers.values())
        assert len(self._forget_at) == len(self._losses)

    def _forget(self, key: SessionKey, worker_id: str) -> None:
        self._workers[worker_id].sessions.pop(key, None)
        holders = self._holders.get(key, {})
        holders.pop(worker_id, None)
        if not holders:
            self._holders.pop(key, None)

    def _lose_all(self, worker: _Worker, now: float) -> None:
        for key, ttl_s in list(worker.sessions.items()):
            self._forget(key, worker.record.worker_id)
            self._lose(key, ttl_s, now)

    def _lose(self, key: SessionKey, ttl_s: float, now: float) -> None:
        self.settle(key)
        self._losses[key] = _Loss()
        self._forget_at.grant(key, now + ttl_s)

    def _forget_loss(self, key: SessionKey) -> None:
        del self._losses[key]
        self._forget_at.revoke(key)

    def _state(self, worker: _Worker, now: float) -> WorkerState:
        if worker.dead:
            return WorkerState.DEAD
        if worker.cut_off or now - worker.heard_at > self._suspect_after_s:
            return WorkerState.SUSPECT
        leaving = worker.record.draining or worker.drain_by is not None
        return WorkerState.DRAINING if leaving else WorkerState.ALIVE


def _stale(record: WorkerRecord) -> StaleWorker:
    return StaleWorker(
        f"worker {record.worker_id} is registered with another incarnation, or not at all",
        worker_id=record.worker_id,
    )
