"""The manager's picture of its workers, and its way to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvservice.clock import Clock
from kvservice.core.caller import Caller
from kvservice.core.directory import (
    Directory,
    SessionKey,
    WorkerRecord,
    WorkerState,
    WorkerView,
)
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    KVServiceError,
    SessionNotFound,
    StaleWorker,
    Unavailable,
    WorkerLost,
)
from kvservice.core.extents import (
    find_gap,
    first_missing,
    in_order,
    merge_sessions,
    pages_lost,
    row_lengths,
)
from kvservice.core.membership import Event, EventLog
from kvservice.core.placement import Candidate, rank
from kvservice.core.session import SessionInfo
from kvservice.v1 import types_pb2
from kvservice.wire.convert import session_from_pb, session_to_pb

LOG = logging.getLogger(__name__)

MAX_PARALLEL: Final = 8
RETRY_DELAY_S: Final = 0.2


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


def ordered(parts: Sequence[Part]) -> list[Part]:
    """Return the parts in position order, the tail last."""
    by_extent = {part.info.extents[0]: part for part in parts}
    return [by_extent[info.extents[0]] for info in in_order([part.info for part in parts])]


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
        suspect_after_s: float,
    ) -> None:
        """
        Args:
            connect: Makes the handle of the worker at an address. Must not block.
            timeout_s: Deadline of each call on a worker.
            suspect_after_s: How long a worker may be silent.
        """
        self._connect = connect
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._directory = Directory(suspect_after_s)
        self._events = EventLog()
        self._handles: dict[str, tuple[str, WorkerHandle]] = {}  # worker id -> address, handle
        self._busy: set[SessionKey] = set()
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="kvservice-manager")

    def close(self) -> None:
        """End the threads and the connections. Calls in progress may fail."""
        self._threads.shutdown(wait=True)
        with self._lock:
            handles, self._handles = self._handles, {}
        for _, handle in handles.values():
            handle.close()

    # What workers say

    def heartbeat(
        self,
        record: WorkerRecord,
        changed: Iterable[tuple[SessionKey, float]],
        ended: Iterable[SessionKey],
        *,
        expired: Iterable[SessionKey],
        first: bool,
    ) -> float | None:
        """Take a heartbeat; the first of a stream registers. Raises StaleWorker.

        Returns:
            Within how many seconds the worker is to leave; None: it is not to.
        """
        with self._lock:
            now = self._clock.monotonic()
            if first:
                known = self._directory.find_worker(record.worker_id)
                self._directory.register(record, changed, now)
                self._note_event(record.worker_id, _registered(known, record))
            else:
                self._directory.heartbeat(record, changed, ended, now, expired=expired)
            leave_by = self._directory.leave_by(record.worker_id)
        return None if leave_by is None else max(0.0, leave_by - now)

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

    def num_left(self) -> int:
        """Return how many workers were drained, and have not come back."""
        with self._lock:
            return self._directory.num_left

    def _note_event(self, worker_id: str, text: str) -> None:
        self._events.add(self._clock.time(), worker_id, text)
        LOG.info("worker %s %s", worker_id, text)

    def note(self, key: SessionKey, parts: Sequence[Part], *, settle: bool = False) -> None:
        """Note who holds a session; `settle`: anew, whatever was lost of one of that id."""
        with self._lock:
            if settle:
                self._directory.settle(key)
            for part in parts:
                self._directory.note(key, part.worker_id, part.info.spec.ttl_s)

    def end(self, key: SessionKey, worker_id: str) -> None:
        with self._lock:
            self._directory.end(key, worker_id)

    def settle(self, keys: Iterable[SessionKey]) -> None:
        with self._lock:
            for key in keys:
                self._directory.settle(key)

    # Who there is

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

    def holders(self, key: SessionKey) -> list[str]:
        with self._lock:
            return self._directory.holders(key)

    @contextmanager
    def one_at_a_time(self, key: SessionKey) -> Iterator[None]:
        """Let one caller at a time decide where a session goes: a repeat may come too early."""
        with self._lock:
            if not self._lock.wait_for(lambda: key not in self._busy, self._timeout_s):
                raise Unavailable("another call on this session is in progress")
            self._busy.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(key)
                self._lock.notify_all()

    # Asking

    def ask(self, worker_id: str, method: str, request: Any, caller: Caller) -> Any:
        """Call a worker, for the incarnation of it that is registered.

        Raises:
            WorkerLost: It does not answer, or another incarnation does.
            KVServiceError: What it answers.
        """
        with self._lock:
            record = self._directory.find_worker(worker_id)
            if record is None:
                raise WorkerLost(f"worker {worker_id} is gone", worker_id=worker_id)
            stale, handle = self._handle(record)
        if stale is not None:
            stale.close()
        if "incarnation" in request.DESCRIPTOR.fields_by_name:
            request = copy_of(request, incarnation=record.incarnation)
        try:
            return handle.call(method, request, self._timeout_s, caller)
        except Draining:
            raise
        except (Unavailable, DeadlineExceeded, StaleWorker) as error:
            raise WorkerLost(
                f"worker {worker_id} does not answer: {error.reason}",
                retry_delay_s=RETRY_DELAY_S,
                worker_id=worker_id,
            ) from error

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
        run: Callable[..., Iterable[Any]] = self._threads.map if len(worker_ids) > 1 else map
        return list(zip(worker_ids, run(ask, worker_ids), strict=True))

    def parts(
        self,
        key: SessionKey,
        caller: Caller,
        *,
        keep_at_most: int | None = None,
        complete_at: Sequence[int] = (),
    ) -> list[Part]:
        """Ask all workers that hold a session where it stands.

        One that the directory does not know (yet) is looked for at all workers.

        Args:
            keep_at_most: Go on with what is left of a session that has lost tokens, if none of
                those below this position are: for the change that cuts it to there.
            complete_at: The rows' lengths, by the word of the session's only writer. Where so
                much is found, nothing is missing: the writer has cut it to what was left.

        Raises:
            SessionNotFound, WorkerLost.
            PagesLost: A worker that held a part of it is gone.
        """
        known = self.holders(key)
        request = types_pb2.GetSessionRequest(session_id=key[1])
        found: list[Part] = []
        for worker_id, answer in self.ask_all(
            known or self.reachable(), "GetSession", request, caller
        ):
            if isinstance(answer, SessionNotFound):
                self.end(key, worker_id)
            elif isinstance(answer, KVServiceError):
                raise answer
            else:
                found.append(Part(worker_id, session_from_pb(answer.session)))
        if not found and known:
            return self.parts(key, caller, keep_at_most=keep_at_most, complete_at=complete_at)
        self.note(key, found)
        self._check_complete(key, found, keep_at_most, complete_at)
        if not found:
            raise SessionNotFound(
                "no such session: it was never opened, was released, or has expired"
            )
        return found

    def undo(self, session_id: str, parts: Sequence[Part], caller: Caller) -> None:
        """Free what was opened on the way to a failure. What cannot be reached will expire."""
        for part in parts:
            with suppress(KVServiceError):
                request = types_pb2.ReleaseRequest(session_ids=[session_id])
                self.ask(part.worker_id, "Release", request, caller)
            self.end((caller.tenant, session_id), part.worker_id)

    def is_incomplete(self, key: SessionKey, parts: Sequence[Part]) -> bool:
        """Whether a worker that held a part is gone, and the client has not dealt with it yet."""
        epoch = max((part.info.epoch for part in parts), default=None)
        with self._lock:
            return self._directory.is_incomplete(key, epoch, self._clock.monotonic())

    def _check_complete(
        self,
        key: SessionKey,
        found: Sequence[Part],
        keep_at_most: int | None,
        complete_at: Sequence[int],
    ) -> None:
        if not self.is_incomplete(key, found):
            return
        extents = [part.info.extents[0] for part in ordered(found)]
        stored = row_lengths(extents) or (0,) * len(complete_at)
        if found and complete_at and stored == tuple(complete_at) and find_gap(extents) is None:
            self.settle([key])
            return
        position = first_missing(extents)
        if not found or keep_at_most is None or keep_at_most > position:
            raise pages_lost(position)

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
