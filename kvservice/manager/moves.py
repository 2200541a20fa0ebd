"""Moving sessions from worker to worker: by hand, and away from those that leave. And copying them
where a copy is missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvservice.clock import Clock
from kvservice.core.caller import SERVICE, Caller, Role
from kvservice.core.directory import SessionKey
from kvservice.core.errors import (
    AlreadyExists,
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KVServiceError,
    Unavailable,
    WorkerLost,
    WorkerNotFound,
)
from kvservice.core.extents import find_lone
from kvservice.core.failpoints import Failpoints
from kvservice.core.liveness import WorkerState
from kvservice.core.session import SessionInfo
from kvservice.manager.calls import WorkerCalls
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.lookup import Lookup
from kvservice.manager.parts import Part
from kvservice.manager.turns import Turns
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.convert import session_from_pb

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.05
MAX_AT_ONCE: Final = 4
"""Sessions that are moved away from workers that leave, or copied, all of them together."""

MISSING_FOR_S: Final = 2.0
"""How long a copy is missing before it is made: it may be on its way through a change."""

PAUSE_S: Final = 2.0
"""How long a session that nobody can take is left alone."""

SILENCE_S: Final = 10.0
"""How long the target of a move may not answer, before who waits for it is told."""

MAX_MOVE_S: Final = 3600.0


@dataclass(eq=False, slots=True)
class Move:
    """A session on its way.

    Fields:
        source, target: Workers' ids.
        keep: The source keeps it.
        begun_at: In the clock's monotonic seconds.
    """

    key: SessionKey
    move_id: str
    source: str
    source_address: str
    source_incarnation: str
    target: str
    keep: bool
    begun_at: float


class Moves:
    """Lets workers take sessions over from each other, and keeps the directory in step.

    The data goes from worker to worker, and so does the decision whose a session is. This object
    may be gone at any moment: what it has begun ends without it. Thread-safe.
    """

    def __init__(
        self,
        directory: SharedDirectory,
        calls: WorkerCalls,
        lookup: Lookup,
        turns: Turns,
        *,
        clock: Clock,
        incarnation: str,
        failpoints: Failpoints,
    ) -> None:
        """
        Args:
            incarnation: The manager's: begins the ids of its moves.
        """
        self._directory = directory
        self._calls = calls
        self._lookup = lookup
        self._turns = turns
        self._failpoints = failpoints
        self._clock = clock
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._num_begun = 0
        self._under_way: dict[SessionKey, Move] = {}
        self._looked_after: dict[SessionKey, Move] = {}  # of those, what `look` has begun
        self._missing_since: dict[SessionKey, float] = {}
        self._refused: dict[SessionKey, set[str]] = {}  # by whom, since the last pause
        self._not_before: dict[SessionKey, float] = {}

    def close(self) -> None:
        """End all waiting."""
        self._stop.set()

    # By hand

    def move(self, key: SessionKey, target: str, source: str) -> SessionInfo:
        """Move (a part of) a session, and wait until it is there.

        Args:
            source: The worker whose part it is; empty: there is only one.

        Raises:
            SessionNotFound, WorkerNotFound, PagesLost.
            AlreadyExists: The target holds (a part of) it.
            OutOfPages, ..., Draining: The target does not take it.
            Conflict: It is being moved elsewhere, changes too fast, or the two workers cannot reach
                each other.
            DeadlineExceeded: It takes too long, and may still arrive.
        """
        with self._lock:
            move = self._under_way.get(key)
        if move is None:
            move = self._begin(key, self._source_of(key, target, source), target)
        elif move.target != target:
            raise Conflict(f"the session is being moved to {move.target}", retry_delay_s=1.0)
        try:
            info = self._wait_for(move)
            self._arrived(move, info)
            return info
        finally:
            self._end(move)

    def _wait_for(self, move: Move) -> SessionInfo:
        deadline = self._clock.monotonic() + MAX_MOVE_S
        silent_by = self._clock.monotonic() + SILENCE_S
        while True:
            now = self._clock.monotonic()
            try:
                info = self._ask(move)
            except WorkerLost:
                if now >= silent_by or self._directory.is_dead(move.target):
                    raise
            else:
                if info is not None:
                    return info
                silent_by = now + SILENCE_S
            if self._clock.wait(self._stop, POLL_S):
                raise Unavailable("the manager is about to end")
            if now >= deadline:
                raise DeadlineExceeded(f"it is not there after {MAX_MOVE_S:g} s")

    def _source_of(self, key: SessionKey, target: str, source: str) -> str:
        """Return from which worker a session is to go, if it can go to the target."""
        self._directory.check_takes_sessions(target)
        caller = Caller(key[0], Role.TENANT)
        parts = [part.worker_id for part in self._lookup.parts(key, caller, look_only=True)]
        if target in parts:
            raise AlreadyExists(f"worker {target} holds the session, or a part of it")
        if source and source not in parts:
            raise WorkerNotFound(f"worker {source} holds nothing of the session", worker_id=source)
        if not source and len(parts) > 1:
            raise InvalidRequest(
                f"the session is on {len(parts)} workers, {', '.join(parts)}: say from which one"
            )
        return source or parts[0]

    # Away from workers that leave, and copies that are missing

    def look(self) -> None:
        """See how far moves and copies are, and begin others. To be called every `POLL_S`."""
        for move in list(self._looked_after.values()):
            self._look_at(move)
        now = self._clock.monotonic()
        leaving, missing = self._directory.leaving(), self._directory.missing_copies()
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        listed = {key for _, keys in leaving for key in keys} | missing.keys()
        self._not_before = {k: at for k, at in self._not_before.items() if k in listed}
        self._refused = {k: by for k, by in self._refused.items() if k in listed}
        for source, keys in leaving:
            for key in keys:
                if self._may_begin(key, now):
                    self._let_go(key, source, now)
        for key, since in self._missing_since.items():
            if now >= since + MISSING_FOR_S and self._may_begin(key, now):
                self._let_copy(key, now)

    def _may_begin(self, key: SessionKey, now: float) -> bool:
        return (
            len(self._looked_after) < MAX_AT_ONCE
            and key not in self._under_way
            and not self._turns.is_taken(key)
            and self._not_before.get(key, 0.0) <= now
        )

    def _let_copy(self, key: SessionKey, now: float) -> None:
        """Begin to make a copy that a session lacks, on the best worker that has not refused it."""
        try:
            parts = self._lookup.parts(key, Caller(key[0], Role.TENANT), look_only=True)
            lone = find_lone([part.info for part in parts])
            source = next((part for part in parts if part.info is lone), None)
            held = {part.worker_id for part in parts}
            target = None if source is None else self._best_target(key, held)
            if source is None or target is None:
                self._not_before[key] = now + PAUSE_S
                return
            if target in self._directory.holders(key):
                # What the session has left behind there makes room for what it is now.
                release = types_pb2.ReleaseRequest(
                    session_ids=[key[1]], epochs=[max(1, source.info.epoch - 1)]
                )
                self._calls.ask(target, "Release", release, Caller(key[0], Role.TENANT))
                self._directory.end(key, target)
            move = self._begin(key, source.worker_id, target, keep=True)
        except KVServiceError as error:
            LOG.debug("a session lacks a copy for now: %s", error)
            self._not_before[key] = now + PAUSE_S
        else:
            self._looked_after[key] = move

    def _let_go(self, key: SessionKey, source: str, now: float) -> None:
        """Begin to move a session to the best worker that has not refused it."""
        target = self._best_target(key, set(self._directory.holders(key)))
        if target is None:
            self._not_before[key] = now + PAUSE_S
            return
        try:
            self._looked_after[key] = self._begin(key, source, target)
        except KVServiceError as error:
            LOG.debug("a session stays on %s for now: %s", source, error)
            self._not_before[key] = now + PAUSE_S

    def _best_target(self, key: SessionKey, held: set[str]) -> str | None:
        """Return the best worker that neither holds a session nor has refused it; None: there is
        none, and after a pause all are asked again."""
        out = held | self._refused.get(key, set())
        target = next((one for one in self._directory.ranked() if one not in out), None)
        if target is None:
            self._refused.pop(key, None)
        return target

    def _look_at(self, move: Move) -> None:
        try:
            info = self._ask(move)
        except WorkerLost:
            if not self._directory.is_dead(move.target):
                return  # it will be heard again, and knows how far it is
            failed: KVServiceError | None = None
        except KVServiceError as error:
            failed = error
        else:
            if info is None:
                return
            self._arrived(move, info)
            self._refused.pop(move.key, None)
            self._end(move)
            return
        self._end(move)
        if isinstance(failed, (CapacityError, Draining)):
            self._refused.setdefault(move.key, set()).add(move.target)
        else:
            self._not_before[move.key] = self._clock.monotonic() + PAUSE_S

    def _end(self, move: Move) -> None:
        with self._lock:
            for moves in (self._looked_after, self._under_way):
                if moves.get(move.key) is move:
                    del moves[move.key]

    # One move

    def _begin(self, key: SessionKey, source: str, target: str, *, keep: bool = False) -> Move:
        record = self._directory.record_of(source)
        if self._turns.is_taken(key):
            raise Conflict("the session is being opened, or grows", retry_delay_s=1.0)
        with self._lock:
            if key in self._under_way:
                raise Conflict("the session is being moved already", retry_delay_s=1.0)
            self._num_begun += 1
            move = self._under_way[key] = Move(
                key,
                f"{self._incarnation}:{self._num_begun}",
                source,
                record.address,
                record.incarnation,
                target,
                keep,
                self._clock.monotonic(),
            )
        return move

    def _ask(self, move: Move) -> SessionInfo | None:
        """Let the target take a session over, or ask how far it is. None: on its way.

        Raises:
            WorkerLost: The target does not answer.
            KVServiceError: It does not take it, or cannot.
        """
        state = self._directory.state_of_life(move.source_incarnation)
        request = worker_pb2.PullSessionRequest(
            tenant=move.key[0],
            session_id=move.key[1],
            move_id=move.move_id,
            source_worker_id=move.source,
            source_address=move.source_address,
            source_incarnation=move.source_incarnation,
            source_is_dead=state is WorkerState.DEAD,
            keep=move.keep,
        )
        answer = self._calls.ask(move.target, "PullSession", request, SERVICE)
        self._failpoints.passed("manager.move.begun")
        return session_from_pb(answer.session) if answer.HasField("session") else None

    def _arrived(self, move: Move, info: SessionInfo) -> None:
        """Note where a session is now, and tell the worker before it, if there is one."""
        self._failpoints.passed("manager.move.done")
        arrived = [Part(move.target, info)]  # as it was then: it may have ended since
        if move.keep:
            self._directory.note(move.key, arrived, asked_at=move.begun_at)
            LOG.info("a session on worker %s has a copy on %s", move.source, move.target)
            return
        others = [one for one in self._directory.holders(move.key) if one != move.source]
        self._directory.note(move.key, arrived, asked_at=move.begun_at)
        self._directory.end(move.key, move.source)
        LOG.info("a session has moved from worker %s to %s", move.source, move.target)
        for worker_id in others:
            if worker_id != move.target:
                self._tell(move, worker_id, info)

    def _tell(self, move: Move, worker_id: str, info: SessionInfo) -> None:
        """Tell a worker of the session whose tokens go on where it has moved. Whoever is not told
        knows with the next step; and whoever asks finds out by what the extent replaces."""
        caller = Caller(move.key[0], Role.TENANT)
        ask = types_pb2.GetSessionRequest(session_id=move.key[1], look_only=True)
        with suppress(KVServiceError):
            extents: Sequence[types_pb2.Extent] = self._calls.ask(
                worker_id, "GetSession", ask, caller
            ).session.extents
            followers = extents[0].followed_by.split(",") if extents else []
            if move.source_incarnation in followers:
                here = info.extents[0].incarnation
                now = [here if one == move.source_incarnation else one for one in followers]
                note = types_pb2.AppendRequest(
                    session_id=move.key[1],
                    epoch=info.epoch,
                    followed_by=",".join(now),
                )
                self._calls.ask(worker_id, "Append", note, caller)
