"""Which sessions workers hold, as far as heartbeats have said.

The directory may lag behind the workers by one heartbeat, and nothing relies on it being exact:
whoever acts on it asks the workers.

What a worker holds that is known to be dead is struck off. One that is only presumed to be
(`Liveness`) is welcome with all that it holds as soon as it is heard again; until then nothing is
placed on it.

What such a worker comes back with may have been left behind: the session went on without it, at
later epochs. So the directory remembers the latest epoch that it has heard of each session, for as
long as anybody holds it and one ttl longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from kvservice.core.epochs import Latest, LatestEpochs
from kvservice.core.extents import is_left_behind
from kvservice.core.lease import LeaseTable
from kvservice.core.liveness import (
    DEAD_AFTER_S,
    SUSPECT_AFTER_S,
    Liveness,
    WorkerRecord,
    WorkerState,
    WorkerView,
)

SessionKey = tuple[str, str]  # tenant, session id

REMEMBERED_ENDS_S: Final = 10.0  # longer than an answer of a worker may take
MAX_LEFT_BEHIND: Final = 4000  # sessions that a worker is told of at once


class Report(NamedTuple):
    """What a worker says of a session that it holds; `group`: of the extent, as in `Extent`."""

    key: SessionKey
    ttl_s: float
    epoch: int
    replicas: int = 1
    group: int = 0


@dataclass(slots=True)
class _Held:
    """What a worker holds, in one life, as said since `since`."""

    incarnation: str
    since: float
    sessions: dict[SessionKey, Report] = field(default_factory=dict)
    left_behind: dict[SessionKey, float] = field(default_factory=dict)  # key -> since when
    ended: dict[SessionKey, float] = field(default_factory=dict)  # lately -> when it was heard


class Directory:
    """Sessions -> workers, and workers -> what they said last. `now` is monotonic, in seconds.

    Attributes:
        liveness: Which workers there are. It is told by `register`, `heartbeat`, `bury` and
            `leave`; what else is heard of a worker is for its own methods.

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
        self.liveness = Liveness(suspect_after_s, dead_after_s)
        self._held: dict[str, _Held] = {}  # of every worker that is listed
        self._holders: dict[SessionKey, dict[str, None]] = {}
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
        worker_id = record.worker_id
        known = self.liveness.register(record, now)
        if known is not None and known.incarnation != record.incarnation:
            self._lose_all(worker_id, now)
        elif known is not None:
            for key in list(self._held[worker_id].sessions):
                self._forget(key, worker_id, now)
        self._held[worker_id] = _Held(record.incarnation, now)
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
        self.liveness.heard(record, now)
        held = self._held[record.worker_id]
        for key in ended:
            self.end(key, record.worker_id, now)
            held.ended[key] = now
        for key in [key for key, at in held.ended.items() if at < now - REMEMBERED_ENDS_S]:
            del held.ended[key]
        # After those that have ended: one that is in both has ended and begun again.
        for report in changed:
            self._heard(report, record, now)
        for key in self._lost.expired(now):
            self._lost.revoke(key)
        self._epochs.expire(now)

    def bury(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that a worker is known to be gone, and what it held with it.

        The incarnation is refused from now on, should it come back after all.
        """
        if self.liveness.bury(worker_id, incarnation):
            self._lose_all(worker_id, now)

    def leave(self, worker_id: str, incarnation: str, now: float) -> None:
        """Note that a worker has left as it was asked to: with what it still held, if anything.

        It is listed no more.
        """
        if self.liveness.leave(worker_id, incarnation):
            self._lose_all(worker_id, now)
            del self._held[worker_id]

    # Sessions

    def note(self, report: Report, worker_id: str, now: float) -> None:
        """Note that a worker holds a session. Of unknown and dead workers nothing is noted."""
        if self.liveness.find_worker(worker_id) is None:
            return
        held, key = self._held[worker_id], report.key
        held.sessions[key] = report
        self._holders.setdefault(key, {})[worker_id] = None
        if report.replicas > 1:
            self._copied[key] = None
        self.settle(key)
        latest = self._epochs.heard(key, report.epoch, held.incarnation)
        for other_id in self._holders[key]:
            other = self._held[other_id]
            if other.sessions[key].epoch == latest:
                other.left_behind.pop(key, None)
            elif is_left_behind(other.sessions[key].epoch, latest):
                other.left_behind.setdefault(key, now)

    def end(self, key: SessionKey, worker_id: str, now: float) -> None:
        """Note that a worker does not hold a session any more."""
        held = self._held.get(worker_id)
        if held is not None:
            self._epochs.ended(key, held.incarnation)
        if worker_id in self._holders.get(key, ()):
            self._forget(key, worker_id, now)

    def has_ended_since(self, key: SessionKey, worker_id: str, since: float) -> bool:
        """Whether a worker has said, at `since` or later, that it does not hold a session any more.

        What it has answered to a question of before may be of before. If it has begun the session
        again, it says so itself.
        """
        held = self._held.get(worker_id)
        if held is None:
            return False
        unlisted = held.since >= since and key not in held.sessions
        return unlisted or held.ended.get(key, -math.inf) >= since

    def begin(self, key: SessionKey) -> None:
        """Note that a session is opened anew: whatever there was by this id is of the past."""
        self.settle(key)
        self._epochs.begin(key)
        for worker_id in self.holders(key):
            held = self._held[worker_id]
            held.left_behind.pop(key, None)
            self._epochs.heard(key, held.sessions[key].epoch, held.incarnation)

    def latest(self, key: SessionKey, now: float) -> Latest | None:
        """Return the latest epoch that was heard of a session, within its last ttl."""
        return self._epochs.get(key, now)

    def give_up(self, key: SessionKey, now: float) -> None:
        """Note that nobody waits any more for those who hold the latest of a session.

        If nobody holds that, the earlier parts are left behind, and told so.
        """
        latest = self._epochs.get(key, now)
        holders = [self._held[worker_id] for worker_id in self.holders(key)]
        if latest is not None and all(one.sessions[key].epoch < latest.epoch for one in holders):
            for one in holders:
                one.left_behind.setdefault(key, now)

    def left_behind(self, worker_id: str, now: float) -> list[tuple[SessionKey, int]]:
        """Return what a worker may free, and up to which epoch, as it was when last heard of.

        A while after it was found out: what has ended and begun again has been told apart by then.
        """
        held = self._held.get(worker_id)
        if held is None:
            return []
        since = now - self.liveness.dead_after_s
        told = (key for key, found_at in held.left_behind.items() if found_at <= since)
        return [(key, held.sessions[key].epoch) for key in islice(told, MAX_LEFT_BEHIND)]

    def holders(self, key: SessionKey) -> list[str]:
        """Return the workers that hold a session, in the order in which they came to it.

        Those that are presumed dead are among them.
        """
        return list(self._holders.get(key, ()))

    def keys_of(self, session_id: str) -> list[SessionKey]:
        """Return the sessions of an id: there is one, unless tenants have chosen the same."""
        return [key for key in self._holders if key[1] == session_id]

    def is_lost(self, key: SessionKey, now: float) -> bool:
        """Whether all of a session has gone with its workers, within its last ttl."""
        return key in self._lost and self._lost.deadline(key) > now

    def settle(self, key: SessionKey) -> None:
        """Note that a session is no loss (any more): it was found, opened anew, or released."""
        if key in self._lost:
            self._lost.revoke(key)

    # Over all workers

    def workers(self, now: float) -> list[WorkerView]:
        """Return all workers by id, dead ones until another incarnation registers."""
        return [
            self.liveness.view(worker_id, len(held.sessions), now)
            for worker_id, held in sorted(self._held.items())
        ]

    def leaving(self, now: float) -> list[tuple[str, list[SessionKey]]]:
        """Return the workers that leave, each with the sessions that it still holds."""
        return [
            (worker_id, list(held.sessions))
            for worker_id, held in sorted(self._held.items())
            if held.sessions and self.liveness.state(worker_id, now) is WorkerState.DRAINING
        ]

    def missing_copies(self, now: float) -> dict[SessionKey, int]:
        """Return the sessions that have fewer copies of something than they should, as far as is
        known, and how many they lack. Costs O(sessions that are to have copies)."""
        missing: dict[SessionKey, int] = {}
        for key in self._copied:
            reports = [
                self._held[worker_id].sessions[key]
                for worker_id in self._holders[key]
                if not self.liveness.is_dead(worker_id, now)
            ]
            latest = max((report.epoch for report in reports), default=0)
            groups = Counter(report.group for report in reports if report.epoch == latest)
            wanted = max((report.replicas for report in reports), default=0)
            lacking = sum(max(0, wanted - count) for count in groups.values())
            if lacking:
                missing[key] = lacking
        return missing

    def living_holders(self, now: float) -> Iterator[tuple[str, list[str]]]:
        """Yield the tenant of each session, and the workers that hold it and are not dead."""
        living = set(self.liveness.living(now))
        for key, holders in self._holders.items():
            yield key[0], [worker_id for worker_id in holders if worker_id in living]

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
                report = self._held[worker_id].sessions.get(key)
                assert report is not None, "a session lists a worker that does not hold it"
                assert report.epoch <= latest.epoch, "beyond the latest epoch"
            num_listed += len(holders)
        for worker_id, held in self._held.items():
            num_listed -= len(held.sessions)
            is_gone = self.liveness.find_worker(worker_id) is None
            assert not (is_gone and held.sessions), "a dead worker lists sessions"
            assert held.left_behind.keys() <= held.sessions.keys()
        assert not num_listed, "a worker lists a session that does not list it"
        assert self._copied.keys() <= self._holders.keys(), "copies of what is held by nobody"

    def _heard(self, report: Report, record: WorkerRecord, now: float) -> None:
        """Take a worker's own word, which comes in order: a lower epoch is a new beginning."""
        begins = self._epochs.begins_anew(report.key, report.epoch, record.incarnation)
        self.note(report, record.worker_id, now)
        if begins:
            self.begin(report.key)
            self.note(report, record.worker_id, now)

    def _lose_all(self, worker_id: str, now: float) -> None:
        """Strike a worker from all that it holds. What nobody else holds is lost."""
        for key, report in list(self._held[worker_id].sessions.items()):
            self._forget(key, worker_id, now)
            if key not in self._holders:
                self.settle(key)
                self._lost.grant(key, now + report.ttl_s)

    def _forget(self, key: SessionKey, worker_id: str, now: float) -> None:
        """Strike a worker, which holds the session, from its holders."""
        held = self._held[worker_id]
        report = held.sessions.pop(key)
        held.left_behind.pop(key, None)
        holders = self._holders[key]
        del holders[worker_id]
        if not holders:
            del self._holders[key]
            self._copied.pop(key, None)
            self._epochs.forget_at(key, now + report.ttl_s)
