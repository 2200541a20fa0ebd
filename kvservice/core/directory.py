"""Which workers there are, and which sessions they hold, as far as heartbeats have said.

The directory may lag behind the workers by one heartbeat, and nothing relies on it being exact:
whoever acts on it asks the workers.

A worker is dead by certain knowledge (another life of it has come, or its supervisor says so), or
by presumption: nobody has heard it for `dead_after_s`, or its heartbeats have ended and its address
refuses connections. One that was only presumed dead is welcome with all that it holds as soon as
it is heard again; until then nothing is placed on it.

What such a worker comes back with may have been left behind: the session went on without it, at
later epochs. So the directory remembers the latest epoch that it has heard of each session, for as
long as anybody holds it and one ttl longer.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from kvservice.core.epochs import Latest, LatestEpochs
from kvservice.core.errors import StaleWorker, WorkerNotFound
from kvservice.core.extents import is_left_behind
from kvservice.core.lease import LeaseTable

SessionKey = tuple[str, str]  # tenant, session id

# Heartbeats come once a second: dead is who has missed three.
SUSPECT_AFTER_S: Final = 2.0
DEAD_AFTER_S: Final = 3.5
REFUSING_FOR_S: Final = 0.2
REMEMBERED_INCARNATIONS: Final = 16
REMEMBERED_ENDS_S: Final = 10.0  # longer than an answer of a worker may take
MAX_LEFT_BEHIND: Final = 4000  # sessions that a worker is told of at once


class WorkerState(Enum):
    """ALIVE: takes sessions. SUSPECT: late. DEAD: gone, as far as can be told. DRAINING: leaves."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


class Report(NamedTuple):
    """What a worker says of a session that it holds; `group`: of the extent, as in `Extent`."""

    key: SessionKey
    ttl_s: float
    epoch: int
    replicas: int = 1
    group: int = 0


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
    registered_at: float
    cut_off: bool = False
    refusing_since: float | None = None
    presumed_dead: bool = False
    dead: bool = False
    drain_by: float | None = None  # it is to leave, then at the latest
    restarts: int = 0
    sessions: dict[SessionKey, Report] = field(default_factory=dict)
    left_behind: dict[SessionKey, float] = field(default_factory=dict)  # key -> since when
    ended: dict[SessionKey, float] = field(default_factory=dict)  # lately -> when it was heard


class Directory:
    """Sessions -> workers, and workers -> what they said last. `now` is monotonic, in seconds.

    Invariants (asserted by `check`):
      1. A session lists a worker if, and only if, the worker lists the session.
      2. Every worker that a session lists is registered, and not known to be dead.
      3. A session that is lost altogether is listed by nobody, and will be forgotten.
      4. The latest epoch of every session that is listed is known, and no part is beyond it. That
         of one that is not listed will be forgotten.
      5. A worker lists what it has left behind.
      6. Sessions that are to have copies are listed.
    """

    def __init__(
        self, suspect_after_s: float = SUSPECT_AFTER_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self._suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._workers: dict[str, _Worker] = {}
        self._holders: dict[SessionKey, dict[str, None]] = {}
        self._replaced: dict[str, deque[str]] = {}
        self._left: set[str] = set()  # workers that were drained, and have not come back
        self._lost: LeaseTable[SessionKey] = LeaseTable()  # until when it is remembered
        self._epochs: LatestEpochs[SessionKey] = LatestEpochs()
        self._copied: dict[SessionKey, None] = {}  # sessions that are to have copies, oldest first

    # What workers say

    def register(self, record: WorkerRecord, sessions: Iterable[Report], now: float) -> None:
        """Take a worker in, with the sessions that it holds now.

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
                self._forget(key, record.worker_id, now)
        worker = self._workers[record.worker_id] = _Worker(record, now, now)
        self._left.discard(record.worker_id)
        if known is not None and known.record.incarnation == record.incarnation:
            worker.drain_by, worker.restarts = known.drain_by, known.restarts
        elif known is not None:
            worker.restarts = known.restarts + 1
        for report in sessions:
            self._heard(report, record, now)

    def heartbeat(
        self,
        record: WorkerRecord,
        changed: Iterable[Report],
        ended: Iterable[SessionKey],
        now: float,
    ) -> None:
        """Note what has changed on a worker.

        Args:
            ended: Sessions that were released there, or whose lease was over.

        Raises:
            StaleWorker: Another incarnation is registered, or none. Nothing has changed.
        """
        worker = self._workers.get(record.worker_id)
        if worker is None or worker.record.incarnation != record.incarnation or worker.dead:
            raise _stale(record)
        worker.record, worker.heard_at = record, now
        worker.cut_off, worker.refusing_since, worker.presumed_dead = False, None, False
        for key in ended:
            self.end(key, record.worker_id, now)
            worker.ended[key] = now
        for key in [key for key, at in worker.ended.items() if at < now - REMEMBERED_ENDS_S]:
            del worker.ended[key]
        # After those that have ended: one that is in both has ended and begun again.
        for report in changed:
            self._heard(report, record, now)
        for key in self._lost.expired(now):
            self._lost.revoke(key)
        self._epochs.expire(now)

    def cut_off(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker's connection has broken: it is suspect until it is heard again."""
        worker = self._find(worker_id, incarnation)
        if worker is not None:
            worker.cut_off = True

    def refused(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that nobody accepts connections at a worker's address.

        If that goes on for `REFUSING_FOR_S`, it is presumed dead until it is heard again.
        """
        worker = self._find(worker_id, incarnation)
        if worker is None:
            return
        if worker.refusing_since is None:
            worker.refusing_since = now
        worker.presumed_dead |= now - worker.refusing_since >= REFUSING_FOR_S

    def answered(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker accepts connections, though its heartbeats do not arrive."""
        worker = self._find(worker_id, incarnation)
        if worker is not None:
            worker.refusing_since = None

    def bury(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that a worker is known to be gone, and what it held with it.

        The incarnation is refused from now on, should it come back after all.
        """
        worker = self._find(worker_id, incarnation)
        if worker is not None and not worker.dead:
            worker.dead = True
            replaced = self._replaced.setdefault(worker_id, deque(maxlen=REMEMBERED_INCARNATIONS))
            replaced.append(incarnation)
            for key, report in list(worker.sessions.items()):
                self._forget(key, worker_id, now)
                if key not in self._holders:
                    self.settle(key)
                    self._lost.grant(key, now + report.ttl_s)

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
    def left(self) -> frozenset[str]:
        """Ids of workers that were drained, and have not come back."""
        return frozenset(self._left)

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more: there should be one less."""
        self._left.discard(worker_id)

    @property
    def num_left(self) -> int:
        """Workers that were drained, and have not come back."""
        return len(self._left)

    # Sessions

    def note(self, report: Report, worker_id: str, now: float) -> None:
        """Note that a worker holds a session. Of unknown and dead workers nothing is noted."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.dead:
            return
        key = report.key
        worker.sessions[key] = report
        self._holders.setdefault(key, {})[worker_id] = None
        if report.replicas > 1:
            self._copied[key] = None
        self.settle(key)
        latest = self._epochs.heard(key, report.epoch, worker.record.incarnation)
        for other_id in self._holders[key]:
            other = self._workers[other_id]
            if other.sessions[key].epoch == latest:
                other.left_behind.pop(key, None)
            elif is_left_behind(other.sessions[key].epoch, latest):
                other.left_behind.setdefault(key, now)

    def end(self, key: SessionKey, worker_id: str, now: float) -> None:
        """Note that a worker does not hold a session any more."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._epochs.ended(key, worker.record.incarnation)
        if worker_id in self._holders.get(key, ()):
            self._forget(key, worker_id, now)

    def has_ended_since(self, key: SessionKey, worker_id: str, since: float) -> bool:
        """Whether a worker has said, at `since` or later, that it does not hold a session any more.

        What it has answered to a question of before may be of before. If it has begun the session
        again, it says so itself.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        unlisted = worker.registered_at >= since and key not in worker.sessions
        return unlisted or worker.ended.get(key, -math.inf) >= since

    def begin(self, key: SessionKey) -> None:
        """Note that a session is opened anew: whatever there was by this id is of the past."""
        self.settle(key)
        self._epochs.begin(key)
        for worker_id in self.holders(key):
            worker = self._workers[worker_id]
            worker.left_behind.pop(key, None)
            self._epochs.heard(key, worker.sessions[key].epoch, worker.record.incarnation)

    def latest(self, key: SessionKey, now: float) -> Latest | None:
        """Return the latest epoch that was heard of a session, within its last ttl."""
        return self._epochs.get(key, now)

    def give_up(self, key: SessionKey, now: float) -> None:
        """Note that nobody waits any more for those who hold the latest of a session.

        If nobody holds that, the earlier parts are left behind, and told so.
        """
        latest = self._epochs.get(key, now)
        holders = [self._workers[worker_id] for worker_id in self.holders(key)]
        if latest is not None and all(one.sessions[key].epoch < latest.epoch for one in holders):
            for worker in holders:
                worker.left_behind.setdefault(key, now)

    def left_behind(self, worker_id: str, now: float) -> list[tuple[SessionKey, int]]:
        """Return what a worker may free, and up to which epoch, as it was when last heard of.

        A while after it was found out: what has ended and begun again has been told apart by then.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        since = now - self._dead_after_s
        told = (key for key, found_at in worker.left_behind.items() if found_at <= since)
        return [(key, worker.sessions[key].epoch) for key in islice(told, MAX_LEFT_BEHIND)]

    def holders(self, key: SessionKey) -> list[str]:
        """Return the workers that hold a session, in the order in which they came to it.

        Those that are presumed dead are among them.
        """
        return list(self._holders.get(key, ()))

    def keys_of(self, session_id: str) -> list[SessionKey]:
        """Return the sessions of an id: there is one, unless tenants have chosen the same."""
        return [key for key in self._holders if key[1] == session_id]

    def leaving(self, now: float) -> list[tuple[str, list[SessionKey]]]:
        """Return the workers that leave, each with the sessions that it still holds."""
        return [
            (worker_id, list(worker.sessions))
            for worker_id, worker in sorted(self._workers.items())
            if worker.sessions and self._state(worker, now) is WorkerState.DRAINING
        ]

    def missing_copies(self, now: float) -> dict[SessionKey, int]:
        """Return the sessions that have fewer copies of something than they should, as far as is
        known, and how many they lack. Costs O(sessions that are to have copies)."""
        missing: dict[SessionKey, int] = {}
        for key in self._copied:
            reports = [
                self._workers[worker_id].sessions[key]
                for worker_id in self._holders[key]
                if self._state(self._workers[worker_id], now) is not WorkerState.DEAD
            ]
            latest = max((report.epoch for report in reports), default=0)
            groups = Counter(report.group for report in reports if report.epoch == latest)
            wanted = max((report.replicas for report in reports), default=0)
            lacking = sum(max(0, wanted - count) for count in groups.values())
            if lacking:
                missing[key] = lacking
        return missing

    def is_lost(self, key: SessionKey, now: float) -> bool:
        """Whether all of a session has gone with its workers, within its last ttl."""
        return key in self._lost and self._lost.deadline(key) > now

    def settle(self, key: SessionKey) -> None:
        """Note that a session is no loss (any more): it was found, opened anew, or released."""
        if key in self._lost:
            self._lost.revoke(key)

    # Workers

    def find_worker(self, worker_id: str) -> WorkerRecord | None:
        """Return who is registered by this id; None if nobody, or one known to be dead."""
        worker = self._workers.get(worker_id)
        return None if worker is None or worker.dead else worker.record

    def state(self, worker_id: str, now: float) -> WorkerState:
        """Return a worker's state; DEAD for one that has never registered."""
        worker = self._workers.get(worker_id)
        return WorkerState.DEAD if worker is None else self._state(worker, now)

    def state_of_life(self, incarnation: str, now: float) -> WorkerState | None:
        """Return the state of an incarnation of some worker; None if it was never heard of."""
        for worker in self._workers.values():
            if worker.record.incarnation == incarnation:
                return self._state(worker, now)
        gone = any(incarnation in lives for lives in self._replaced.values())
        return WorkerState.DEAD if gone else None

    def find_cut_off(self, now: float) -> list[WorkerRecord]:
        """Return the workers whose connection has broken, and who are not dead yet."""
        return [
            worker.record
            for worker in self._workers.values()
            if worker.cut_off and self._state(worker, now) is WorkerState.SUSPECT
        ]

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

    def living_holders(self, now: float) -> Iterator[tuple[str, list[str]]]:
        """Yield the tenant of each session, and the workers that hold it and are not dead."""
        living = set(self.living(now))
        for key, holders in self._holders.items():
            yield key[0], [worker_id for worker_id in holders if worker_id in living]

    def living(self, now: float) -> list[str]:
        """Return the workers that are not dead."""
        workers = self._workers.items()
        return [name for name, one in workers if self._state(one, now) is not WorkerState.DEAD]

    def check(self) -> None:
        """Assert all invariants."""
        self._lost.check()
        self._epochs.check(self._holders.keys())
        num_listed = 0
        for key, holders in self._holders.items():
            assert holders, "a session without holders is listed"
            assert key not in self._lost, "held, and lost"
            latest = self._epochs.get(key, math.inf)
            assert latest is not None, "an epoch is forgotten"
            for worker_id in holders:
                report = self._workers[worker_id].sessions.get(key)
                assert report is not None, "a session lists a worker that does not hold it"
                assert report.epoch <= latest.epoch, "beyond the latest epoch"
            num_listed += len(holders)
        for worker in self._workers.values():
            num_listed -= len(worker.sessions)
            assert not (worker.dead and worker.sessions), "a dead worker lists sessions"
            assert worker.left_behind.keys() <= worker.sessions.keys()
        assert not num_listed, "a worker lists a session that does not list it"
        assert self._copied.keys() <= self._holders.keys(), "copies of what is held by nobody"

    def _find(self, worker_id: str, incarnation: str) -> _Worker | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.record.incarnation == incarnation else None

    def _heard(self, report: Report, record: WorkerRecord, now: float) -> None:
        """Take a worker's own word, which comes in order: a lower epoch is a new beginning."""
        begins = self._epochs.begins_anew(report.key, report.epoch, record.incarnation)
        self.note(report, record.worker_id, now)
        if begins:
            self.begin(report.key)
            self.note(report, record.worker_id, now)

    def _forget(self, key: SessionKey, worker_id: str, now: float) -> None:
        """Strike a worker, which holds the session, from its holders."""
        worker = self._workers[worker_id]
        report = worker.sessions.pop(key)
        worker.left_behind.pop(key, None)
        holders = self._holders[key]
        del holders[worker_id]
        if not holders:
            del self._holders[key]
            self._copied.pop(key, None)
            self._epochs.forget_at(key, now + report.ttl_s)

    def _state(self, worker: _Worker, now: float) -> WorkerState:
        silent_s = now - worker.heard_at
        if worker.dead or worker.presumed_dead or silent_s > self._dead_after_s:
            return WorkerState.DEAD
        if worker.cut_off or silent_s > self._suspect_after_s:
            return WorkerState.SUSPECT
        leaving = worker.record.draining or worker.drain_by is not None
        return WorkerState.DRAINING if leaving else WorkerState.ALIVE


def _stale(record: WorkerRecord) -> StaleWorker:
    return StaleWorker(
        f"worker {record.worker_id} is registered with another incarnation, or not at all",
        worker_id=record.worker_id,
    )
