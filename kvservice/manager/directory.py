"""The directory as the manager's threads share it, and what else workers have said."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvservice.clock import Clock
from kvservice.core.directory import Directory, Report, SessionKey
from kvservice.core.epochs import Latest
from kvservice.core.errors import Draining, WorkerLost, WorkerNotFound
from kvservice.core.liveness import WorkerRecord, WorkerState, WorkerView
from kvservice.core.membership import Event, EventLog
from kvservice.core.placement import Candidate, rank
from kvservice.core.tenancy import TenantUse, Use
from kvservice.manager.parts import Part

LOG = logging.getLogger(__name__)

RETRY_DELAY_S: Final = 0.2
"""When to ask again, where the directory may know more by then."""


class SharedDirectory:
    """The directory, kept by heartbeats, with the events of workers and the use of tenants.

    Thread-safe: no method waits for anything while it holds the lock.
    """

    def __init__(self, directory: Directory, clock: Clock) -> None:
        """
        Args:
            directory: Empty; this object's from now on.
        """
        self._directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        self._use = TenantUse()
        self._events = EventLog()

    # What workers say

    def heartbeat(
        self,
        record: WorkerRecord,
        changed: Iterable[Report],
        ended: Iterable[SessionKey],
        *,
        first: bool,
    ) -> tuple[float | None, list[tuple[SessionKey, int]]]:
        """Take a heartbeat; the first of a stream registers. Raises StaleWorker.

        Returns:
            Within how many seconds the worker is to leave; None: it is not to. And what it is to
            free of sessions that have left it behind, each up to which epoch.
        """
        with self._lock:
            now = self._clock.monotonic()
            if first:
                known = self._directory.liveness.find_worker(record.worker_id)
                self._directory.register(record, changed, now)
                self._note_event(record.worker_id, _registered(known, record))
            else:
                self._directory.heartbeat(record, changed, ended, now)
            leave_by = self._directory.liveness.leave_by(record.worker_id)
            left_behind = self._directory.left_behind(record.worker_id, now)
        return None if leave_by is None else max(0.0, leave_by - now), left_behind

    def used_elsewhere(self, worker_id: str, pages: Mapping[str, int]) -> dict[str, Use]:
        """Take what a worker says of the limited tenants there, and return what these have on
        others that live."""
        with self._lock:
            now = self._clock.monotonic()
            self._use.reported(worker_id, pages)
            if self._use.is_due(now):
                self._use.count(self._directory.living_holders(now), now)
            return self._use.elsewhere(worker_id, self._directory.liveness.living(now))

    def cut_off(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.liveness.cut_off(worker_id, incarnation)
            record = self._directory.liveness.find_worker(worker_id)
            if record is not None and record.incarnation == incarnation:
                self._note_event(worker_id, "its connection has broken")

    def refused(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.liveness.refused(worker_id, incarnation, self._clock.monotonic())

    def answered(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.liveness.answered(worker_id, incarnation)

    def replaced(self, worker_id: str, incarnation: str) -> None:
        """Note that another life of a worker has answered: when that one registers, it is news."""
        with self._lock:
            self._directory.bury(worker_id, incarnation, self._clock.monotonic())

    def bury(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.bury(worker_id, incarnation, self._clock.monotonic())
            self._note_event(worker_id, "is gone, with what it held")

    def drain(self, worker_id: str, timeout_s: float) -> WorkerView:
        """Let a worker leave, within `timeout_s` seconds. Raises WorkerNotFound."""
        with self._lock:
            now = self._clock.monotonic()
            self._directory.liveness.drain(worker_id, now + timeout_s)
            self._note_event(worker_id, f"is to leave, within {timeout_s:g} s")
            views = self._directory.workers(now)
        return next(view for view in views if view.record.worker_id == worker_id)

    def leave(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.leave(worker_id, incarnation, self._clock.monotonic())
            self._note_event(worker_id, "has left")

    def events(self) -> list[Event]:
        """Return what has happened lately, oldest first."""
        with self._lock:
            return self._events.recent()

    def _note_event(self, worker_id: str, text: str) -> None:
        self._events.add(self._clock.time(), worker_id, text)
        LOG.info("worker %s %s", worker_id, text)

    # Workers

    def workers(self) -> list[WorkerView]:
        with self._lock:
            return self._directory.workers(self._clock.monotonic())

    def reachable(self) -> list[str]:
        """Return the workers worth asking: a silent one may take a whole deadline to not answer."""
        states = (WorkerState.ALIVE, WorkerState.DRAINING)
        return [view.record.worker_id for view in self.workers() if view.state in states]

    def ranked(self) -> list[str]:
        """Return the workers that take sessions, best first."""
        return rank(
            Candidate(view.record.worker_id, view.record.free_bytes, view.num_sessions)
            for view in self.workers()
            if view.state is WorkerState.ALIVE
        )

    def find_worker(self, worker_id: str) -> WorkerRecord | None:
        """Return who is registered by this id; None if nobody, or one known to be dead."""
        with self._lock:
            return self._directory.liveness.find_worker(worker_id)

    def record_of(self, worker_id: str) -> WorkerRecord:
        """As `find_worker`; raises WorkerNotFound instead."""
        record = self.find_worker(worker_id)
        if record is None:
            raise WorkerNotFound(f"no worker {worker_id} is registered", worker_id=worker_id)
        return record

    def record_and_state(self, worker_id: str) -> tuple[WorkerRecord, WorkerState]:
        """Return who is registered by this id, and its state.

        Raises:
            WorkerLost: Nobody, or one known or presumed to be dead.
        """
        with self._lock:
            record = self._directory.liveness.find_worker(worker_id)
            state = self._directory.liveness.state(worker_id, self._clock.monotonic())
        if record is None or state is WorkerState.DEAD:
            raise WorkerLost(f"worker {worker_id} is gone", worker_id=worker_id)
        return record, state

    def check_takes_sessions(self, worker_id: str) -> None:
        """Raise WorkerNotFound, WorkerLost or Draining unless a worker may be given sessions."""
        self.record_of(worker_id)
        if self.record_and_state(worker_id)[1] is WorkerState.DRAINING:
            raise Draining(f"worker {worker_id} is leaving", worker_id=worker_id)

    def is_dead(self, worker_id: str) -> bool:
        """Whether a worker is known, or presumed, to be dead."""
        with self._lock:
            return self._directory.liveness.is_dead(worker_id, self._clock.monotonic())

    def state_of_life(self, incarnation: str) -> WorkerState | None:
        """Return the state of an incarnation of some worker; None if it was never heard of."""
        with self._lock:
            return self._directory.liveness.state_of_life(incarnation, self._clock.monotonic())

    def find_cut_off(self) -> list[WorkerRecord]:
        """Return the workers whose heartbeats have ended, and who are not dead yet."""
        with self._lock:
            return self._directory.liveness.find_cut_off(self._clock.monotonic())

    def leaving(self) -> list[tuple[str, list[SessionKey]]]:
        """Return the workers that leave, each with the sessions that it still holds."""
        with self._lock:
            return self._directory.leaving(self._clock.monotonic())

    def left(self) -> frozenset[str]:
        """Return the ids of workers that were drained, and have not come back."""
        with self._lock:
            return self._directory.liveness.left

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more."""
        with self._lock:
            self._directory.liveness.forget_left(worker_id)

    # Sessions

    def note(
        self,
        key: SessionKey,
        parts: Sequence[Part],
        *,
        settle: bool = False,
        asked_at: float = math.inf,
    ) -> None:
        """Note who holds a session.

        Args:
            settle: Anew, whatever was lost of one of that id.
            asked_at: When they were asked, if it is not certain that none has ended it since.
        """
        with self._lock:
            now = self._clock.monotonic()
            if settle:
                self._directory.begin(key)
            for part in parts:
                record = self._directory.liveness.find_worker(part.worker_id)
                if record is None or record.incarnation != part.info.extents[0].incarnation:
                    continue  # another life has begun before this answer came
                if self._directory.has_ended_since(key, part.worker_id, asked_at):
                    continue  # a heartbeat was faster than this answer
                spec = part.info.spec
                report = Report(
                    key, spec.ttl_s, part.info.epoch, spec.replicas, part.info.extents[0].group
                )
                self._directory.note(report, part.worker_id, now)

    def end(self, key: SessionKey, worker_id: str) -> None:
        with self._lock:
            self._directory.end(key, worker_id, self._clock.monotonic())

    def settle(self, keys: Iterable[SessionKey]) -> None:
        with self._lock:
            for key in keys:
                self._directory.settle(key)

    def give_up(self, key: SessionKey) -> None:
        """Let those go who hold parts of a session that is lost, if those are all too old."""
        with self._lock:
            self._directory.give_up(key, self._clock.monotonic())

    def holders(self, key: SessionKey) -> list[str]:
        with self._lock:
            return self._directory.holders(key)

    def keys_of(self, session_id: str) -> list[SessionKey]:
        """Return the sessions of an id, of whatever tenant."""
        with self._lock:
            return self._directory.keys_of(session_id)

    def latest(self, key: SessionKey) -> Latest | None:
        """Return the latest epoch that was heard of a session, within its last ttl."""
        with self._lock:
            return self._directory.latest(key, self._clock.monotonic())

    def is_beyond(self, key: SessionKey, epoch: int) -> bool:
        """Whether a session was heard to be at a later epoch."""
        latest = self.latest(key)
        return latest is not None and latest.epoch > epoch

    def is_lost(self, key: SessionKey) -> bool:
        """Whether all of a session is known to have gone with its workers, not long ago."""
        with self._lock:
            return self._directory.is_lost(key, self._clock.monotonic())

    def is_held_or_lost(self, key: SessionKey) -> bool:
        """Whether workers are listed for a session, dead or alive, or it has gone with them."""
        with self._lock:
            return bool(self.holders(key)) or self.is_lost(key)

    def missing_copies(self) -> dict[SessionKey, int]:
        """Return the sessions that lack copies, and how many."""
        with self._lock:
            return self._directory.missing_copies(self._clock.monotonic())


def _registered(known: WorkerRecord | None, record: WorkerRecord) -> str:
    if known is None:
        return f"has registered, at {record.address}"
    if known.incarnation != record.incarnation:
        return "has registered as another incarnation: what the last one held is lost"
    return "has registered again"
