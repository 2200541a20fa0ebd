"""The manager's picture of its workers, and its way to them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvservice.clock import Clock
from kvservice.core.caller import ANONYMOUS, SERVICE, Caller
from kvservice.core.directory import (
    Directory,
    Report,
    SessionKey,
    WorkerRecord,
    WorkerState,
    WorkerView,
)
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    Moving,
    SessionMoved,
    SessionNotFound,
    StaleWorker,
    Unavailable,
    WorkerLost,
    WorkerNotFound,
)
from kvservice.core.extents import (
    Loss,
    current,
    find_loss,
    in_order,
    is_left_behind,
    merge_sessions,
    pages_lost,
    without_laggards,
)
from kvservice.core.failpoints import Failpoints
from kvservice.core.membership import Event, EventLog
from kvservice.core.placement import Candidate, rank
from kvservice.core.session import SessionInfo
from kvservice.core.tenancy import TenantUse, Use
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.convert import session_from_pb, session_to_pb

LOG = logging.getLogger(__name__)

MAX_PARALLEL: Final = 8
RETRY_DELAY_S: Final = 0.2
KNOCK_S: Final = 0.3
SUSPECT_TIMEOUT_S: Final = 1.0
FOLLOWS: Final = {"GetSession", "Allocate"}
"""Where it matters that a session has moved; others are told to ask again."""

NOBODYS_SESSION: Final = "00000000-0000-4000-8000-000000000000"


class WorkerHandle(Protocol):
    """The manager's way to one worker. Thread-safe."""

    def call(self, method: str, request: Any, timeout_s: float, caller: Caller) -> Any:
        """Make a unary call, by its name in the descriptor, as the caller.

        Raises:
            KVServiceError: What the worker answers, or Unavailable, DeadlineExceeded.
        """

    def close(self) -> None:
        """Let go of the connection."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker says about a session."""

    worker_id: str
    info: SessionInfo


def merged(parts: Sequence[Part]) -> types_pb2.Session:
    """Return the session of which these are the parts; raises as `merge_sessions` does."""
    return session_to_pb(merge_sessions([part.info for part in parts]))


class Routes:
    """The directory, kept by heartbeats, and calls on the workers that it lists.

    Thread-safe. The lock guards the directory and the handles, and is never held during a call.
    """

    def __init__(
        self,
        connect: Callable[[str], WorkerHandle],
        *,
        clock: Clock,
        timeout_s: float,
        directory: Directory,
        workers_expected: int,
        settle_s: float,
        executor: Executor | None,
        failpoints: Failpoints,
    ) -> None:
        """
        Args:
            connect: Makes the handle of the worker at an address. Must not block.
            timeout_s: Deadline of each call on a worker.
            directory: Empty; this object's from now on.
            workers_expected, settle_s: Until so many have registered, or this time is over, it is
                not known what there is. 0: only what others say of a worker is waited for.
            executor: Runs calls on several workers at once. None: threads of this object's own.
        """
        self._connect = connect
        self.passed = failpoints.passed
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._directory = directory
        self._workers_expected = workers_expected
        self._settled_at = clock.monotonic() + settle_s
        self._use = TenantUse()
        self._events = EventLog()
        self._handles: dict[str, tuple[str, WorkerHandle]] = {}  # worker id -> address, handle
        self._busy: dict[SessionKey, threading.Event] = {}  # set when it is no longer
        self._executor = executor or ThreadPoolExecutor(
            MAX_PARALLEL, thread_name_prefix="kvservice-manager"
        )

    def close(self) -> None:
        """End the threads and the connections. Calls in progress may fail."""
        self._executor.shutdown(wait=True)
        with self._lock:
            handles, self._handles = self._handles, {}
        for _, handle in handles.values():
            handle.close()

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
                known = self._directory.find_worker(record.worker_id)
                self._directory.register(record, changed, now)
                self._note_event(record.worker_id, _registered(known, record))
            else:
                self._directory.heartbeat(record, changed, ended, now)
            leave_by = self._directory.leave_by(record.worker_id)
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
            return self._use.elsewhere(worker_id, self._directory.living(now))

    def cut_off(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.cut_off(worker_id, incarnation)
            record = self._directory.find_worker(worker_id)
            if record is not None and record.incarnation == incarnation:
                self._note_event(worker_id, "its connection has broken")

    def bury(self, worker_id: str, incarnation: str) -> None:
        with self._lock:
            self._directory.bury(worker_id, incarnation, self._clock.monotonic())
            self._note_event(worker_id, "is gone, with what it held")

    def drain(self, worker_id: str, timeout_s: float) -> WorkerView:
        """Let a worker leave, within `timeout_s` seconds. Raises WorkerNotFound."""
        with self._lock:
            now = self._clock.monotonic()
            self._directory.drain(worker_id, now + timeout_s)
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

    def left(self) -> frozenset[str]:
        """Return the ids of workers that were drained, and have not come back."""
        with self._lock:
            return self._directory.left

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more."""
        with self._lock:
            self._directory.forget_left(worker_id)

    def num_left(self) -> int:
        """Return how many workers were drained, and have not come back."""
        with self._lock:
            return self._directory.num_left

    def _note_event(self, worker_id: str, text: str) -> None:
        self._events.add(self._clock.time(), worker_id, text)
        LOG.info("worker %s %s", worker_id, text)

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
                record = self._directory.find_worker(part.worker_id)
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

    def is_beyond(self, key: SessionKey, epoch: int) -> bool:
        """Whether a session was heard to be at a later epoch."""
        with self._lock:
            latest = self._directory.latest(key, self._clock.monotonic())
        return latest is not None and latest.epoch > epoch

    def is_lost(self, key: SessionKey) -> bool:
        """Whether all of a session is known to have gone with its workers, not long ago."""
        with self._lock:
            return self._directory.is_lost(key, self._clock.monotonic())

    def give_up(self, key: SessionKey) -> None:
        """Let those go who hold parts of a session that is lost, if those are all too old."""
        with self._lock:
            self._directory.give_up(key, self._clock.monotonic())

    def settle(self, keys: Iterable[SessionKey]) -> None:
        with self._lock:
            for key in keys:
                self._directory.settle(key)

    # Who there is

    def workers(self) -> list[WorkerView]:
        with self._lock:
            return self._directory.workers(self._clock.monotonic())

    def missing_copies(self) -> dict[SessionKey, int]:
        """Return the sessions that lack copies, and how many."""
        with self._lock:
            return self._directory.missing_copies(self._clock.monotonic())

    def is_dead(self, worker_id: str) -> bool:
        """Whether a worker is known, or presumed, to be dead."""
        with self._lock:
            now = self._clock.monotonic()
            return self._directory.state(worker_id, now) is WorkerState.DEAD

    def probe(self) -> None:
        """Knock at the workers whose heartbeats have ended, to tell the dead from the cut off."""
        with self._lock:
            suspects = self._directory.find_cut_off(self._clock.monotonic())
        for record in suspects:
            self._knock(record)

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

    def holders(self, key: SessionKey) -> list[str]:
        with self._lock:
            return self._directory.holders(key)

    def keys_of(self, session_id: str) -> list[SessionKey]:
        """Return the sessions of an id, of whatever tenant."""
        with self._lock:
            return self._directory.keys_of(session_id)

    def leaving(self) -> list[tuple[str, list[SessionKey]]]:
        """Return the workers that leave, each with the sessions that it still holds."""
        with self._lock:
            return self._directory.leaving(self._clock.monotonic())

    def record_of(self, worker_id: str) -> WorkerRecord:
        """Return who is registered by this id.

        Raises:
            WorkerNotFound: Nobody, or one known to be dead.
        """
        with self._lock:
            record = self._directory.find_worker(worker_id)
        if record is None:
            raise WorkerNotFound(f"no worker {worker_id} is registered", worker_id=worker_id)
        return record

    def check_takes_sessions(self, worker_id: str) -> None:
        """Raise WorkerNotFound, WorkerLost or Draining unless a worker may be given sessions."""
        self.record_of(worker_id)
        with self._lock:
            state = self._directory.state(worker_id, self._clock.monotonic())
        if state is WorkerState.DRAINING:
            raise Draining(f"worker {worker_id} is leaving", worker_id=worker_id)
        if state is WorkerState.DEAD:
            raise WorkerLost(f"worker {worker_id} is gone", worker_id=worker_id)

    def state_of_life(self, incarnation: str) -> WorkerState | None:
        """Return the state of an incarnation of some worker; None if it was never heard of."""
        with self._lock:
            return self._directory.state_of_life(incarnation, self._clock.monotonic())

    @contextmanager
    def one_at_a_time(self, key: SessionKey) -> Iterator[None]:
        """Let one caller at a time decide where a session goes: a repeat may come too early."""
        deadline = self._clock.monotonic() + self._timeout_s
        mine = threading.Event()
        while (ahead := self._enter(key, mine)) is not None:
            if not self._clock.wait(ahead, deadline - self._clock.monotonic()):
                raise Unavailable("another call on this session is in progress")
        try:
            yield
        finally:
            with self._lock:
                del self._busy[key]
            mine.set()

    def is_busy(self, key: SessionKey) -> bool:
        """Whether somebody decides just now where a session goes: it may be open in part."""
        with self._lock:
            return key in self._busy

    def _enter(self, key: SessionKey, mine: threading.Event) -> threading.Event | None:
        """Take the turn on a session; or return the event at whose setting to try again."""
        with self._lock:
            ahead = self._busy.get(key)
            if ahead is None:
                self._busy[key] = mine
            return ahead

    # Asking

    def ask(self, worker_id: str, method: str, request: Any, caller: Caller) -> Any:
        """Call a worker, for the incarnation of it that is registered.

        Raises:
            WorkerLost: It does not answer, or another incarnation does.
            KVServiceError: What it answers.
        """
        with self._lock:
            record = self._directory.find_worker(worker_id)
            state = self._directory.state(worker_id, self._clock.monotonic())
            if record is None or state is WorkerState.DEAD:
                raise WorkerLost(f"worker {worker_id} is gone", worker_id=worker_id)
            stale, handle = self._handle(record)
        if stale is not None:
            stale.close()
        if "incarnation" in request.DESCRIPTOR.fields_by_name:
            request = copy_of(request, incarnation=record.incarnation)
        try:
            timeout_s = SUSPECT_TIMEOUT_S if state is WorkerState.SUSPECT else self._timeout_s
            return handle.call(method, request, min(timeout_s, self._timeout_s), caller)
        except (Draining, Moving):
            raise
        except SessionMoved as error:
            if method in FOLLOWS:
                raise
            # It went while this call was on its way: the next one finds it.
            raise Moving(error.message, retry_delay_s=RETRY_DELAY_S) from error
        except (Unavailable, DeadlineExceeded, StaleWorker) as error:
            if isinstance(error, StaleWorker):  # another one answers, so this one is no more
                self.bury(worker_id, record.incarnation)
            raise WorkerLost(
                f"worker {worker_id} does not answer: {error.reason}",
                retry_delay_s=RETRY_DELAY_S,
                worker_id=worker_id,
            ) from error

    def _knock(self, record: WorkerRecord) -> None:
        """Ask a worker something cheap, and note whether anybody is there."""
        # Of a session that nobody has, so that the answer is an error that says who answers.
        request = types_pb2.ResetRequest(
            session_id=NOBODYS_SESSION, incarnation=record.incarnation, epoch=1, check_only=True
        )
        with self._lock:
            stale, handle = self._handle(record)
        if stale is not None:
            stale.close()
        refused = replaced = False
        try:
            handle.call("Reset", request, KNOCK_S, ANONYMOUS)
        except Draining:
            pass
        except Unavailable:
            refused = True
        except StaleWorker:
            replaced = True
        except DeadlineExceeded:
            return  # silence says nothing yet
        except KVServiceError:
            pass
        with self._lock:
            now = self._clock.monotonic()
            if refused:
                self._directory.refused(record.worker_id, record.incarnation, now)
            elif replaced:
                self._directory.bury(record.worker_id, record.incarnation, now)
            else:
                self._directory.answered(record.worker_id, record.incarnation)

    def ask_all(
        self, worker_ids: Sequence[str], method: str, request: Any, caller: Caller
    ) -> list[tuple[str, Any]]:
        """Call workers at the same time; return worker id and answer, or error, of each."""

        def ask(worker_id: str) -> Any:
            try:
                return self.ask(worker_id, method, request, caller)
            except KVServiceError as error:
                return error

        # One is asked by this thread: most sessions are on one worker.
        if len(worker_ids) <= 1:
            return [(worker_id, ask(worker_id)) for worker_id in worker_ids]
        # The others know what call they are part of, as this one does.
        contexts = [copy_context() for _ in worker_ids]
        answers = self._executor.map(
            lambda context, worker_id: context.run(ask, worker_id), contexts, worker_ids
        )
        return list(zip(worker_ids, answers, strict=True))

    def parts(
        self,
        key: SessionKey,
        caller: Caller,
        *,
        keep_at_most: int | None = None,
        from_epoch: int | None = None,
        look_only: bool = False,
    ) -> list[Part]:
        """Ask all workers that hold a session where it stands; return its parts in order.

        One that the directory does not know (yet), or not all of, is looked for at all workers.

        Args:
            keep_at_most: Go on with what is left of a session that has lost tokens, if none of
                those below this position are: for the change that cuts it to there.
            from_epoch: Of a structural change: parts that it has not reached yet belong to the
                session, even if those that it has reached are all that is left.
            look_only: Renew no lease: it is not the session's holder that asks.

        Raises:
            SessionNotFound, WorkerLost.
            Unavailable: Not all workers have reported yet, and no other knows the session.
            PagesLost: A worker that held a part of it is gone.
        """
        asked: dict[str, SessionInfo | None] = {}
        self._ask_where(key, self.holders(key), caller, asked, look_only=look_only)
        found = self._not_left_behind(key, asked)
        if not found or find_loss(list(found.values())) is not None:
            self._ask_where(key, self.reachable(), caller, asked, look_only=look_only)
            found = self._not_left_behind(key, asked)
        if not found:
            raise self._not_found(key)
        loss = find_loss(list(found.values()))
        if loss is not None and (keep_at_most is None or keep_at_most > loss.position):
            raise self._lost(loss)
        mine = current(list(found.values()))
        if from_epoch is not None:
            behind = without_laggards(info for info in found.values() if info.epoch == from_epoch)
            mine += [info for info in behind if info not in mine]
        ids = {info.extents[0]: worker_id for worker_id, info in found.items()}
        epochs = sorted({info.epoch for info in mine}, reverse=True)
        # Those that lack a change may have other rows; they come behind those that have it.
        by_epoch = [in_order([one for one in mine if one.epoch == epoch]) for epoch in epochs]
        return [Part(ids[info.extents[0]], info) for infos in by_epoch for info in infos]

    def _ask_where(
        self,
        key: SessionKey,
        worker_ids: Iterable[str],
        caller: Caller,
        asked: dict[str, SessionInfo | None],
        *,
        look_only: bool = False,
    ) -> None:
        """Ask workers that were not asked yet where a session stands; the dead are passed over.

        Args:
            asked: Gets the answers; None of who does not hold the session.
        """
        request = types_pb2.GetSessionRequest(session_id=key[1], look_only=look_only)
        waiting = [one for one in worker_ids if one not in asked and not self.is_dead(one)]
        asked_at = self._clock.monotonic()
        failures: list[KVServiceError] = []
        moved: list[str] = []
        unsure: dict[str, KVServiceError] = {}
        for worker_id, answer in self.ask_all(waiting, "GetSession", request, caller):
            if isinstance(answer, (SessionNotFound, SessionMoved)):
                self.end(key, worker_id)
                asked[worker_id] = None
                if isinstance(answer, SessionMoved):
                    moved.append(worker_id)
            elif not isinstance(answer, KVServiceError):
                info = asked[worker_id] = session_from_pb(answer.session)
                self.note(key, [Part(worker_id, info)], asked_at=asked_at)
            elif isinstance(answer, Moving):
                unsure[worker_id] = answer
            elif not self.is_dead(worker_id):
                failures.append(answer)
        for worker_id in moved:
            self._follow(key, worker_id, caller, asked, look_only=look_only)
        for worker_id, error in unsure.items():
            if asked.get(worker_id) is None:
                self._give_up_waiting(key, worker_id, error)
                failures.append(error)
        if failures:
            raise failures[0]

    def _follow(
        self,
        key: SessionKey,
        worker_id: str,
        caller: Caller,
        asked: dict[str, SessionInfo | None],
        *,
        look_only: bool,
    ) -> None:
        """Find a session that was moved from a worker, and let the one where it is believe it.

        Raises:
            PagesLost: The worker that took it over is dead.
        """
        follow = worker_pb2.FollowSessionRequest(session_id=key[1])
        try:
            to = self.ask(worker_id, "FollowSession", follow, caller)
        except SessionNotFound:
            return  # it is on its way back
        if asked.get(to.worker_id) is not None:
            return
        with self._lock:
            record = self._directory.find_worker(to.worker_id)
        if record is None or record.incarnation != to.incarnation or self.is_dead(to.worker_id):
            if self.state_of_life(to.incarnation) is WorkerState.DEAD and not any(asked.values()):
                raise pages_lost(0)
            return
        there = types_pb2.GetSessionRequest(
            session_id=key[1], ticket=to.ticket, look_only=look_only
        )
        with suppress(SessionNotFound, SessionMoved):  # it has ended, or gone further
            answer = self.ask(to.worker_id, "GetSession", there, caller)
            asked[to.worker_id] = session_from_pb(answer.session)

    def _give_up_waiting(self, key: SessionKey, worker_id: str, error: KVServiceError) -> None:
        """Tell a worker that waits for another one's word that this one is dead, if it is."""
        source = error.metadata.get("source", "")
        if source and self.state_of_life(source) is WorkerState.DEAD:
            request = worker_pb2.PullSessionRequest(
                tenant=key[0],
                session_id=key[1],
                move_id="none",
                source_address="none",
                source_incarnation=source,
                source_is_dead=True,
            )
            with suppress(KVServiceError):
                self.ask(worker_id, "PullSession", request, SERVICE)

    def _not_left_behind(
        self, key: SessionKey, asked: Mapping[str, SessionInfo | None]
    ) -> dict[str, SessionInfo]:
        """Return what workers hold of a session, as far as it can belong to it still.

        If nobody has the latest epoch that was heard of, and he who has said so is not there to
        take it back, what others have is of before.
        """
        found = {worker_id: info for worker_id, info in asked.items() if info is not None}
        with self._lock:
            latest = self._directory.latest(key, self._clock.monotonic())
        newest = max((info.epoch for info in found.values()), default=0)
        lives = {info.extents[0].incarnation for info in found.values()}
        if latest is not None and newest < latest.epoch and latest.incarnation not in lives:
            return {}
        return {
            worker_id: info
            for worker_id, info in found.items()
            if not is_left_behind(info.epoch, newest)
        }

    def _not_found(self, key: SessionKey) -> KVServiceError:
        """Return the error for a session that no worker has which can be asked."""
        with self._lock:
            now = self._clock.monotonic()
            # Who was presumed dead while it held the session, or has died with it.
            if self._directory.holders(key) or self._directory.is_lost(key, now):
                return pages_lost(0)
        if self._workers_expected and self._is_settling():
            return self._too_early()
        return SessionNotFound("no such session: it was never opened, was released, or has expired")

    def _lost(self, loss: Loss) -> KVServiceError:
        """Return the error for a part that nobody has: lost, or not known to be there yet."""
        with self._lock:
            now = self._clock.monotonic()
            states = {
                self._directory.state_of_life(incarnation, now)
                for incarnation in loss.incarnations or ("",)
            }
        if WorkerState.SUSPECT in states:
            return WorkerLost(
                f"a worker of this session is silent: from position {loss.position} on it is not "
                "known yet what is lost",
                retry_delay_s=RETRY_DELAY_S,
            )
        if None in states and self._is_settling():
            return self._too_early()
        return pages_lost(loss.position)

    def check_settled(self) -> None:
        """Refuse to decide anything before the workers that are expected have reported.

        Raises:
            Unavailable: They have not, and there is time left for it.
        """
        if self._workers_expected and self._is_settling():
            raise self._too_early()

    def _is_settling(self) -> bool:
        """Whether workers may still be on their way to a manager that has just started."""
        if self._clock.monotonic() >= self._settled_at:
            return False
        return not 0 < self._workers_expected <= len(self.workers())

    def _too_early(self) -> Unavailable:
        expected = self._workers_expected or "an unknown number"
        return Unavailable(
            f"{len(self.workers())} of {expected} workers have registered so far",
            retry_delay_s=RETRY_DELAY_S,
        )

    def undo(self, session_id: str, parts: Sequence[Part], caller: Caller) -> None:
        """Free what was opened on the way to a failure. What cannot be reached will expire."""
        for part in parts:
            with suppress(KVServiceError):
                request = types_pb2.ReleaseRequest(session_ids=[session_id])
                self.ask(part.worker_id, "Release", request, caller)
            self.end((caller.tenant, session_id), part.worker_id)

    def _handle(self, record: WorkerRecord) -> tuple[WorkerHandle | None, WorkerHandle]:
        """Return a handle to close, and that of the worker. The lock is held."""
        address, handle = self._handles.get(record.worker_id, ("", None))
        if handle is not None and address == record.address:
            return None, handle
        fresh = self._connect(record.address)
        self._handles[record.worker_id] = (record.address, fresh)
        return handle, fresh


def _registered(known: WorkerRecord | None, record: WorkerRecord) -> str:
    if known is None:
        return f"has registered, at {record.address}"
    if known.incarnation != record.incarnation:
        return "has registered as another incarnation: what the last one held is lost"
    return "has registered again"


def copy_of(request: Any, **changes: Any) -> Any:
    """Return a copy of a message with other values in some fields."""
    copy = type(request)()
    copy.CopyFrom(request)
    for name, value in changes.items():
        copy.ClearField(name)
        if isinstance(value, (list, tuple)):
            getattr(copy, name).extend(value)
        else:
            setattr(copy, name, value)
    return copy
