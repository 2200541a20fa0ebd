"""`PageManagerService` on protobuf messages, by forwarding to the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final

from kvservice.clock import Clock
from kvservice.core.caller import Caller, Role
from kvservice.core.directory import Directory, SessionKey
from kvservice.core.errors import InvalidRequest, KVServiceError, SessionNotFound
from kvservice.core.extents import join_parts
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.liveness import DEAD_AFTER_S, SUSPECT_AFTER_S, WorkerView
from kvservice.core.membership import Event, Membership
from kvservice.core.recovery import TakeOver
from kvservice.core.session import SessionInfo
from kvservice.manager.calls import WorkerCalls, WorkerHandle
from kvservice.manager.changes import Changes
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.forks import Forks
from kvservice.manager.growth import Growth
from kvservice.manager.leases import Leases
from kvservice.manager.lookup import Lookup
from kvservice.manager.moves import Moves
from kvservice.manager.parts import merged
from kvservice.manager.settling import SETTLE_S, Settling
from kvservice.manager.turns import Turns
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire import convert
from kvservice.wire.convert import (
    at_least_one,
    not_negative,
    session_from_pb,
    session_id_from_pb,
    session_to_pb,
)

LOOK_S: Final = 0.05
DRAIN_S: Final = 300.0
MAX_DRAIN_S: Final = 86_400.0


class PageManager:
    """One method per RPC: `(request, caller) -> response`, raising errors of the tree.

    Thread-safe.
    """

    def __init__(
        self,
        connect: Callable[[str], WorkerHandle],
        *,
        clock: Clock,
        incarnation: str,
        workers_expected: int = 0,
        forward_timeout_s: float = 5.0,
        suspect_after_s: float = SUSPECT_AFTER_S,
        dead_after_s: float = DEAD_AFTER_S,
        executor: Executor | None = None,
        failpoints: Failpoints = NO_FAILPOINTS,
        ended_tokens: Callable[[Iterable[bytes]], list[bytes]] = lambda _: [],
    ) -> None:
        """
        Args:
            connect: Makes the handle of the worker at an address. Must not block.
            incarnation: One life of this manager.
            workers_expected: Until so many have registered, or `SETTLE_S` are over, nothing is
                opened, and nothing is said to be lost or not there: a repeated Allocate might else
                end up on a second worker. 0: unknown.
            forward_timeout_s: Deadline of each call on a worker.
            suspect_after_s: A worker silent for so long gets no new sessions.
            dead_after_s: One silent for so long is dead, until it is heard again.
            executor: Runs calls on several workers at once. None: threads of the manager's own.
            ended_tokens: Returns those of some bearer tokens, named as in capabilities, that hold
                no more.
        """
        self._ended_tokens = ended_tokens
        self.incarnation = incarnation
        self.workers_expected = workers_expected
        self._clock = clock
        self._take_over = TakeOver(
            incarnation, workers_expected, started_at=clock.monotonic(), settle_s=SETTLE_S
        )
        self._take_over_lock = threading.Lock()
        self._failpoints = failpoints
        directory = SharedDirectory(Directory(suspect_after_s, dead_after_s), clock)
        calls = WorkerCalls(connect, directory, timeout_s=forward_timeout_s, executor=executor)
        turns = Turns(clock, forward_timeout_s)
        settling = Settling(directory, clock, workers_expected)
        lookup = Lookup(directory, calls, settling, clock)
        leases = Leases(directory, calls)
        self._directory, self._calls, self._turns = directory, calls, turns
        self._settling, self._lookup, self._leases = settling, lookup, leases
        self._growth = Growth(directory, calls, lookup, leases, failpoints)
        self._forks = Forks(directory, calls, lookup, leases, failpoints)
        self._changes = Changes(directory, calls, lookup, failpoints)
        self._moves = Moves(
            directory,
            calls,
            lookup,
            turns,
            clock=clock,
            incarnation=incarnation,
            failpoints=failpoints,
        )

    def close(self) -> None:
        """End the threads and the connections. Calls in progress may fail."""
        self._moves.close()
        self._calls.close()

    # Opening and growing

    def allocate(
        self, request: types_pb2.AllocateRequest, caller: Caller
    ) -> types_pb2.AllocateResponse:
        key = _key_of(request, caller)
        if request.extent_starts or request.epoch or request.group:
            raise InvalidRequest("extent_starts, epoch and group are for workers only")
        if not request.HasField("spec"):
            raise InvalidRequest("spec is missing")
        spec = convert.spec_from_pb(request.spec)
        self._settling.check()
        with self._turns.take(key):
            parts = self._growth.open(key, spec, caller)
        return types_pb2.AllocateResponse(session=merged(parts))

    def append(self, request: types_pb2.AppendRequest, caller: Caller) -> types_pb2.AppendResponse:
        key = _key_of(request, caller)
        at_least_one(request.epoch, "epoch")
        at_least_one(request.token_count, "token_count")
        not_negative(request.expected_lengths, "expected_lengths")
        with self._turns.take(key):
            info = self._growth.grow(key, request, caller)
        return types_pb2.AppendResponse(session=session_to_pb(info))

    def fork(self, request: types_pb2.ForkRequest, caller: Caller) -> types_pb2.ForkResponse:
        key = _key_of(request, caller)
        child = (caller.tenant, session_id_from_pb(request.new_session_id))
        with self._turns.take(child):
            parts = self._forks.fork(key, child, request, caller)
        return types_pb2.ForkResponse(session=merged(parts))

    # Structural changes

    def pop(self, request: types_pb2.PopRequest, caller: Caller) -> types_pb2.PopResponse:
        key = _key_of(request, caller)
        at_least_one(request.epoch, "epoch")
        not_negative(request.keep, "keep")
        not_negative(request.expected_lengths, "expected_lengths")
        return types_pb2.PopResponse(session=self._changes.pop(key, request, caller))

    def reset(self, request: types_pb2.ResetRequest, caller: Caller) -> types_pb2.ResetResponse:
        key = _key_of(request, caller)
        at_least_one(request.epoch, "epoch")
        return types_pb2.ResetResponse(session=self._changes.reset(key, request, caller))

    def select(self, request: types_pb2.SelectRequest, caller: Caller) -> types_pb2.SelectResponse:
        if not request.rows:
            raise InvalidRequest("rows must name at least one row")
        key = _key_of(request, caller)
        at_least_one(request.epoch, "epoch")
        return types_pb2.SelectResponse(session=self._changes.select(key, request, caller))

    def attach(self, request: types_pb2.AttachRequest, caller: Caller) -> types_pb2.AttachResponse:
        key = _key_of(request, caller)
        if request.keep_step:
            raise InvalidRequest("keep_step is for workers only")
        if request.HasField("epoch"):
            at_least_one(request.epoch, "epoch")
        return types_pb2.AttachResponse(session=self._changes.attach(key, request, caller))

    # Leases and ends

    def release(
        self, request: types_pb2.ReleaseRequest, caller: Caller
    ) -> types_pb2.ReleaseResponse:
        return types_pb2.ReleaseResponse(released_count=self._leases.release(request, caller))

    def renew_lease(
        self, request: types_pb2.RenewLeaseRequest, caller: Caller
    ) -> types_pb2.RenewLeaseResponse:
        ids = convert.session_ids_from_pb(request.session_ids)
        missing = self._leases.renew(ids, caller)
        return types_pb2.RenewLeaseResponse(missing_session_ids=missing)

    # Looking

    def get_session(
        self, request: types_pb2.GetSessionRequest, caller: Caller
    ) -> types_pb2.GetSessionResponse:
        key = _key_of(request, caller)
        return types_pb2.GetSessionResponse(session=merged(self._lookup.parts(key, caller)))

    def list_sessions(
        self, request: types_pb2.ListSessionsRequest, caller: Caller
    ) -> types_pb2.ListSessionsResponse:
        size = convert.list_size_from_pb(request)
        found: dict[str, list[SessionInfo]] = {}
        more = False
        workers = self._directory.reachable()
        for _, answer in self._calls.ask_all(workers, "ListSessions", request, caller):
            if isinstance(answer, KVServiceError):
                raise answer
            more = more or bool(answer.next_page_token)
            for session in answer.sessions:
                found.setdefault(session.session_id, []).append(session_from_pb(session))
        # Each worker answers with its lowest ids, so the lowest of all are among them.
        ids = sorted(found)[:size]
        more = more or len(found) > size
        return types_pb2.ListSessionsResponse(
            sessions=[session_to_pb(join_parts(found[session_id])) for session_id in ids],
            next_page_token=ids[-1] if more else "",
        )

    def page_stats(
        self, request: types_pb2.PageStatsRequest, caller: Caller
    ) -> types_pb2.PageStatsResponse:
        response = types_pb2.PageStatsResponse()
        workers = self._directory.reachable()
        for _, answer in self._calls.ask_all(workers, "PageStats", request, caller):
            if not isinstance(answer, KVServiceError):
                response.workers.extend(answer.workers)
        return response

    # Workers

    def list_workers(
        self, request: manager_pb2.ListWorkersRequest, caller: Caller
    ) -> manager_pb2.ListWorkersResponse:
        del request
        found = self.membership()
        infos = [convert.view_to_pb(view) for view in found.workers]
        if caller.role is Role.TENANT:  # how busy they are with others is nothing it may know
            infos = [
                manager_pb2.WorkerInfo(
                    worker_id=info.worker_id,
                    incarnation=info.incarnation,
                    address=info.address,
                    device=info.device,
                    state=info.state,
                )
                for info in infos
            ]
        return manager_pb2.ListWorkersResponse(workers=infos, expected_count=found.expected)

    def workers(self) -> list[WorkerView]:
        """Return what the manager knows of its workers."""
        return self._directory.workers()

    def left_workers(self) -> frozenset[str]:
        """Return the ids of workers that were drained, and have not come back."""
        return self._directory.left()

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more: `workers_expected` is without it."""
        self._directory.forget_left(worker_id)

    def membership(self) -> Membership:
        """Return the workers, how many there should be, and how this manager came to know them."""
        with self._take_over_lock:
            recovery = self._take_over.recovery(self._clock.monotonic())
        expected = max(0, self.workers_expected - len(self._directory.left()))
        missing = sum(self._directory.missing_copies().values())
        return Membership(self.workers(), expected, recovery, missing)

    def events(self) -> list[Event]:
        """Return what has happened to workers lately, oldest first."""
        return self._directory.events()

    def drain_worker(
        self, request: manager_pb2.DrainWorkerRequest, caller: Caller
    ) -> manager_pb2.DrainWorkerResponse:
        del caller
        if not request.worker_id:
            raise InvalidRequest("worker_id is missing")
        timeout_s = DRAIN_S
        if request.HasField("timeout"):
            timeout_s = convert.seconds_from_pb(request.timeout, "timeout")
        if not 0 <= timeout_s <= MAX_DRAIN_S:
            raise InvalidRequest(f"timeout must be 0 to {MAX_DRAIN_S:g} s, got {timeout_s:g} s")
        view = self._directory.drain(request.worker_id, timeout_s)
        return manager_pb2.DrainWorkerResponse(worker=convert.view_to_pb(view))

    def move_session(
        self, request: manager_pb2.MoveSessionRequest, caller: Caller
    ) -> manager_pb2.MoveSessionResponse:
        del caller
        session_id = session_id_from_pb(request.session_id)
        if not request.worker_id:
            raise InvalidRequest("worker_id is missing")
        key = self._owner_of(session_id, request.tenant)
        info = self._moves.move(key, request.worker_id, request.from_worker_id)
        try:
            owner = Caller(key[0], Role.TENANT)
            session = merged(self._lookup.parts(key, owner, look_only=True))
        except KVServiceError:  # it goes on, and has changed since
            session = session_to_pb(info)
        return manager_pb2.MoveSessionResponse(session=session)

    def _owner_of(self, session_id: str, tenant: str) -> SessionKey:
        """Return whose session is meant by an id."""
        keys = self._directory.keys_of(session_id)
        if tenant:
            keys = [key for key in keys if key[0] == tenant]
        if len(keys) > 1:
            raise InvalidRequest(f"{len(keys)} tenants have a session of this id: say which one")
        if not keys:
            self._settling.check()
            raise SessionNotFound("no such session: it has ended, or was never opened")
        return keys[0]

    def look_after_moves(self) -> None:
        """Move sessions away from workers that leave. To be called every `POLL_S`."""
        self._moves.look()

    def heartbeat(
        self, request: manager_pb2.HeartbeatRequest, caller: Caller, *, first: bool
    ) -> manager_pb2.HeartbeatResponse:
        """Take one message of a worker's stream. `first`: it registers the worker.

        Raises:
            StaleWorker: The incarnation has been replaced, or never registered.
        """
        del caller
        record = convert.record_from_pb(request.worker)
        leave_in_s, left_behind = self._directory.heartbeat(
            record,
            [convert.report_from_pb(report) for report in request.sessions],
            [_reported_key(report) for report in request.ended_sessions],
            first=first,
        )
        self._failpoints.passed("heartbeat.received")
        if first:
            with self._take_over_lock:
                self._take_over.registered(
                    request.known_manager, len(self.workers()), self._clock.monotonic()
                )
        response = manager_pb2.HeartbeatResponse(
            manager_incarnation=self.incarnation,
            left_behind=[convert.left_behind_to_pb(*one) for one in left_behind],
            ended_token_ids=self._ended_tokens(request.token_ids),
        )
        if first or request.known_manager:  # not of what only goes on with a long list
            pages = {one.tenant: one.page_count for one in request.limited_tenants}
            used = self._directory.used_elsewhere(record.worker_id, pages)
            response.used_elsewhere.extend(
                manager_pb2.TenantUse(
                    tenant=tenant, session_count=one.num_sessions, page_count=one.num_pages
                )
                for tenant, one in used.items()
            )
        if request.leaving:
            self._directory.leave(record.worker_id, record.incarnation)
        elif leave_in_s is not None:
            response.drain.CopyFrom(convert.seconds_to_pb(leave_in_s))
        return response

    def heartbeat_ended(self, last: manager_pb2.HeartbeatRequest) -> None:
        """Note that a worker's stream has broken. Nothing is placed there until it is back."""
        self._directory.cut_off(last.worker.worker_id, last.worker.incarnation)

    def look_after_workers(self) -> None:
        """Knock at the workers whose heartbeats have ended: who refuses connections is dead.

        To be called every `LOOK_S`.
        """
        self._calls.probe()

    def worker_died(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker is known to be gone: what it held is lost."""
        self._directory.bury(worker_id, incarnation)


def _key_of(request: Any, caller: Caller) -> SessionKey:
    """Return the caller's session that a request names."""
    return caller.tenant, session_id_from_pb(request.session_id)


def _reported_key(report: manager_pb2.SessionReport) -> SessionKey:
    return report.tenant, report.session.session_id
