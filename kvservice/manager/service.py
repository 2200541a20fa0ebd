"""`PageManagerService` on protobuf messages, by forwarding to the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final

from kvservice.clock import Clock
from kvservice.core.caller import Caller, Role
from kvservice.core.directory import DEAD_AFTER_S, SUSPECT_AFTER_S, Directory, WorkerView
from kvservice.core.errors import (
    Conflict,
    InvalidRequest,
    KVServiceError,
    PagesLost,
    PositionOutOfRange,
    SessionNotFound,
    StaleEpoch,
)
from kvservice.core.extents import (
    find_loss,
    is_empty,
    join_parts,
    merge_sessions,
    row_lengths,
    without_laggards,
)
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.membership import Event, Membership
from kvservice.core.recovery import TakeOver
from kvservice.core.session import Extent, SessionInfo
from kvservice.manager import growth
from kvservice.manager.moves import Moves
from kvservice.manager.routes import Part, Routes, WorkerHandle, copy_of, merged
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
SETTLE_S: Final = 5.0
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
        self._routes = Routes(
            connect,
            clock=clock,
            timeout_s=forward_timeout_s,
            directory=Directory(suspect_after_s, dead_after_s),
            workers_expected=workers_expected,
            settle_s=SETTLE_S,
            executor=executor,
            failpoints=failpoints,
        )
        self._moves = Moves(self._routes, clock, incarnation)

    def close(self) -> None:
        """End the threads and the connections. Calls in progress may fail."""
        self._moves.close()
        self._routes.close()

    # Opening and growing

    def allocate(
        self, request: types_pb2.AllocateRequest, caller: Caller
    ) -> types_pb2.AllocateResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        if request.extent_starts or request.epoch or request.group:
            raise InvalidRequest("extent_starts, epoch and group are for workers only")
        if not request.HasField("spec"):
            raise InvalidRequest("spec is missing")
        spec = convert.spec_from_pb(request.spec)
        self._routes.check_settled()
        with self._routes.one_at_a_time(key):
            parts = growth.open_session(self._routes, key, spec, caller)
        return types_pb2.AllocateResponse(session=merged(parts))

    def append(self, request: types_pb2.AppendRequest, caller: Caller) -> types_pb2.AppendResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        at_least_one(request.epoch, "epoch")
        at_least_one(request.token_count, "token_count")
        not_negative(request.expected_lengths, "expected_lengths")
        with self._routes.one_at_a_time(key):
            info = growth.grow(self._routes, key, request, caller)
        return types_pb2.AppendResponse(session=session_to_pb(info))

    def fork(self, request: types_pb2.ForkRequest, caller: Caller) -> types_pb2.ForkResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        child = (caller.tenant, session_id_from_pb(request.new_session_id))
        with self._routes.one_at_a_time(child):
            parts = self._routes.parts(key, caller)
            parent = merge_sessions([part.info for part in parts])
            shortest = min(row_lengths(parent.extents), default=0)
            if request.token_count > shortest and request.epoch == parent.epoch:
                raise PositionOutOfRange(
                    f"the shortest row has {shortest} tokens, {request.token_count} were asked for",
                    length=shortest,
                )
            forwarded = copy_of(request, clip=len(parts) > 1)
            forked: list[Part] = []
            for part in parts:
                try:
                    answer = self._routes.ask(part.worker_id, "Fork", forwarded, caller)
                except KVServiceError:
                    self._routes.undo(child[1], forked, caller)
                    raise
                forked.append(Part(part.worker_id, session_from_pb(answer.session)))
                self._routes.passed("manager.fork.partly_done")
            # Its parent may be stepping: then one copy may be a call ahead of another.
            level = without_laggards([part.info for part in forked])
            self._routes.undo(child[1], [one for one in forked if one.info not in level], caller)
            forked = [one for one in forked if one.info in level]
            self._routes.note(child, forked, settle=True)
        return types_pb2.ForkResponse(session=merged(forked))

    # Structural changes

    def pop(self, request: types_pb2.PopRequest, caller: Caller) -> types_pb2.PopResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        at_least_one(request.epoch, "epoch")
        keep = not_negative(request.keep, "keep")
        expected = not_negative(request.expected_lengths, "expected_lengths")
        parts = self._routes.parts(
            key, caller, keep_at_most=max(keep, default=0), from_epoch=request.epoch
        )
        # A worker that has the change already does not look at what was expected.
        half_done = any(part.info.epoch != request.epoch for part in parts)
        if not half_done and find_loss([part.info for part in parts]) is None:
            _check_lengths(parts, expected)
        requests = {
            part.worker_id: copy_of(request, expected_lengths=_own_lengths(part)) for part in parts
        }
        return types_pb2.PopResponse(session=self._change("Pop", requests, caller))

    def reset(self, request: types_pb2.ResetRequest, caller: Caller) -> types_pb2.ResetResponse:
        requests = self._same_for_all(request, caller, keep_at_most=0)
        return types_pb2.ResetResponse(session=self._change("Reset", requests, caller))

    def select(self, request: types_pb2.SelectRequest, caller: Caller) -> types_pb2.SelectResponse:
        if not request.rows:
            raise InvalidRequest("rows must name at least one row")
        requests = self._same_for_all(request, caller)
        return types_pb2.SelectResponse(session=self._change("Select", requests, caller))

    def attach(self, request: types_pb2.AttachRequest, caller: Caller) -> types_pb2.AttachResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        if request.keep_step:
            raise InvalidRequest("keep_step is for workers only")
        try:
            parts = self._routes.parts(key, caller)
        except PagesLost:  # of what is left it can be said how much still holds
            parts = self._what_holds(key, caller)
        for part in parts:
            part.info.check_padding_listed()  # before the first of them changes
        epoch = min(part.info.epoch for part in parts)
        if request.HasField("epoch"):
            epoch = at_least_one(request.epoch, "epoch")
        # Explicitly from one epoch, so that a repeat is told. Workers that are ahead come first:
        # if it was another change than Attach that has put them there, they refuse. Those that hold
        # nothing come last: alone at the next epoch, they would be taken for an empty session.
        parts.sort(key=lambda part: (-part.info.epoch, is_empty(part.info.extents[0])))
        ahead = [part for part in parts if part.info.epoch == parts[0].info.epoch]
        try:
            taken = self._attach(parts, epoch, request, caller)
        except StaleEpoch:
            if request.HasField("epoch") or len(ahead) == len(parts):
                raise
            if self._all_went_on(parts, epoch, request, caller):
                taken = self._attach(parts, epoch + 1, request, caller)
                return types_pb2.AttachResponse(session=_what_is_left(taken))
            # Nobody but the holder that is being replaced knows the change that is half done, and
            # it may be gone: what lacks it is as good as lost.
            taken = self._attach(ahead, ahead[0].info.epoch, request, caller)
        return types_pb2.AttachResponse(session=_what_is_left(taken))

    def _what_holds(self, key: tuple[str, str], caller: Caller) -> list[Part]:
        """Return what is left of a session that is to be taken over.

        Raises:
            PagesLost: Nothing. Who still has something of before may free it.
        """
        try:
            return self._routes.parts(key, caller, keep_at_most=0)
        except PagesLost:
            self._routes.give_up(key)
            raise

    def _all_went_on(
        self, parts: Sequence[Part], epoch: int, request: types_pb2.AttachRequest, caller: Caller
    ) -> bool:
        """Finish what a holder has begun that has given up a copy; False: it was something else.

        Nothing depends on whether the holder does so itself: it has said nothing but its epoch.
        """
        try:
            self._attach(parts, epoch, copy_of(request, keep_step=True), caller)
        except StaleEpoch:
            return False
        return True

    def _attach(
        self, parts: Sequence[Part], epoch: int, request: types_pb2.AttachRequest, caller: Caller
    ) -> list[Part]:
        taken: list[Part] = []
        for part in parts:
            forwarded = copy_of(request, epoch=epoch)
            answer = self._routes.ask(part.worker_id, "Attach", forwarded, caller)
            taken.append(Part(part.worker_id, session_from_pb(answer.session)))
            self._routes.note((caller.tenant, request.session_id), taken[-1:])
        return taken

    def _same_for_all(
        self, request: Any, caller: Caller, *, keep_at_most: int | None = None
    ) -> dict[str, Any]:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        at_least_one(request.epoch, "epoch")
        parts = self._routes.parts(key, caller, keep_at_most=keep_at_most, from_epoch=request.epoch)
        return {part.worker_id: request for part in parts}

    def _change(
        self, method: str, requests: Mapping[str, Any], caller: Caller
    ) -> types_pb2.Session:
        """Make a structural change on all workers: first all check it, then all get it.

        In the order of positions: so of a change that is half done, those that are behind are the
        last. What fails on the way is rolled forward by whoever repeats it.
        """
        if len(requests) > 1:
            for worker_id, request in requests.items():
                self._routes.ask(worker_id, method, copy_of(request, check_only=True), caller)
            self._routes.passed("manager.change.checked")
        parts: list[Part] = []
        for worker_id, request in requests.items():
            answer = self._routes.ask(worker_id, method, request, caller)
            parts.append(Part(worker_id, session_from_pb(answer.session)))
            self._routes.note((caller.tenant, request.session_id), parts[-1:])
            self._routes.passed("manager.change.partly_applied")
        return merged(parts)

    # Leases and ends

    def release(
        self, request: types_pb2.ReleaseRequest, caller: Caller
    ) -> types_pb2.ReleaseResponse:
        epochs, unsettled = convert.release_from_pb(request)

        def asked(mine: Sequence[str]) -> types_pb2.ReleaseRequest:
            return types_pb2.ReleaseRequest(
                session_ids=mine,
                epochs=[epochs[one] for one in mine],
                unsettled_ids=[one for one in mine if one in unsettled],
            )

        # Whoever takes a session over does so here.
        stay = {
            session_id
            for session_id, epoch in epochs.items()
            if epoch and self._routes.is_beyond((caller.tenant, session_id), epoch)
        }
        released = 0
        moved: set[str] = set()
        by_worker = self._by_worker(epochs, caller)
        for worker_id, mine in by_worker.items():
            if self._routes.is_dead(worker_id):
                continue  # what it holds, should it come back, ends with the lease
            answer = self._routes.ask(worker_id, "Release", asked(mine), caller)
            released += answer.released_count
            moved.update(answer.moved_session_ids)
            for session_id in mine:
                if session_id not in stay:
                    self._routes.end((caller.tenant, session_id), worker_id)
        for worker_id in self._routes.reachable() if moved else ():
            mine = [one for one in sorted(moved) if one not in by_worker.get(worker_id, ())]
            if mine:
                answer = self._routes.ask(worker_id, "Release", asked(mine), caller)
                released += answer.released_count
        self._routes.settle((caller.tenant, one) for one in epochs if one not in stay)
        return types_pb2.ReleaseResponse(released_count=min(released, len(epochs)))

    def renew_lease(
        self, request: types_pb2.RenewLeaseRequest, caller: Caller
    ) -> types_pb2.RenewLeaseResponse:
        ids = convert.session_ids_from_pb(request.session_ids)
        missing = set(ids)
        by_worker = self._by_worker(ids, caller)
        for worker_id, mine in by_worker.items():
            asked = types_pb2.RenewLeaseRequest(session_ids=mine)
            answer = self._routes.ask(worker_id, "RenewLease", asked, caller)
            missing -= set(mine) - set(answer.missing_session_ids)
        if missing and len(by_worker) < len(self._routes.reachable()):
            # It may have moved, and nobody has said so yet.
            asked = types_pb2.RenewLeaseRequest(session_ids=sorted(missing))
            for _, found in self._routes.ask_all(
                self._routes.reachable(), "RenewLease", asked, caller
            ):
                if not isinstance(found, KVServiceError):
                    missing &= set(found.missing_session_ids)
        still_missing = [session_id for session_id in ids if session_id in missing]
        return types_pb2.RenewLeaseResponse(missing_session_ids=still_missing)

    def _by_worker(self, session_ids: Iterable[str], caller: Caller) -> dict[str, list[str]]:
        """Return which sessions each worker is to be asked about; unknown ones, all workers."""
        reachable = self._routes.reachable()
        asked: dict[str, list[str]] = {}
        for session_id in session_ids:
            for worker_id in self._routes.holders((caller.tenant, session_id)) or reachable:
                asked.setdefault(worker_id, []).append(session_id)
        return asked

    # Looking

    def get_session(
        self, request: types_pb2.GetSessionRequest, caller: Caller
    ) -> types_pb2.GetSessionResponse:
        key = (caller.tenant, session_id_from_pb(request.session_id))
        return types_pb2.GetSessionResponse(session=merged(self._routes.parts(key, caller)))

    def list_sessions(
        self, request: types_pb2.ListSessionsRequest, caller: Caller
    ) -> types_pb2.ListSessionsResponse:
        size = convert.list_size_from_pb(request)
        found: dict[str, list[SessionInfo]] = {}
        more = False
        workers = self._routes.reachable()
        for _, answer in self._routes.ask_all(workers, "ListSessions", request, caller):
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
        workers = self._routes.reachable()
        for _, answer in self._routes.ask_all(workers, "PageStats", request, caller):
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
        return self._routes.workers()

    def left_workers(self) -> frozenset[str]:
        """Return the ids of workers that were drained, and have not come back."""
        return self._routes.left()

    def forget_left(self, worker_id: str) -> None:
        """Miss a drained worker no more: `workers_expected` is without it."""
        self._routes.forget_left(worker_id)

    def membership(self) -> Membership:
        """Return the workers, how many there should be, and how this manager came to know them."""
        with self._take_over_lock:
            recovery = self._take_over.recovery(self._clock.monotonic())
        expected = max(0, self.workers_expected - self._routes.num_left())
        missing = sum(self._routes.missing_copies().values())
        return Membership(self.workers(), expected, recovery, missing)

    def events(self) -> list[Event]:
        """Return what has happened to workers lately, oldest first."""
        return self._routes.events()

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
        view = self._routes.drain(request.worker_id, timeout_s)
        return manager_pb2.DrainWorkerResponse(worker=convert.view_to_pb(view))

    def move_session(
        self, request: manager_pb2.MoveSessionRequest, caller: Caller
    ) -> manager_pb2.MoveSessionResponse:
        del caller
        session_id = session_id_from_pb(request.session_id)
        if not request.worker_id:
            raise InvalidRequest("worker_id is missing")
        key = self._key_of(session_id, request.tenant)
        info = self._moves.move(key, request.worker_id, request.from_worker_id)
        try:
            owner = Caller(key[0], Role.TENANT)
            session = merged(self._routes.parts(key, owner, look_only=True))
        except KVServiceError:  # it goes on, and has changed since
            session = session_to_pb(info)
        return manager_pb2.MoveSessionResponse(session=session)

    def _key_of(self, session_id: str, tenant: str) -> tuple[str, str]:
        """Return whose session is meant by an id."""
        keys = self._routes.keys_of(session_id)
        if tenant:
            keys = [key for key in keys if key[0] == tenant]
        if len(keys) > 1:
            raise InvalidRequest(f"{len(keys)} tenants have a session of this id: say which one")
        if not keys:
            self._routes.check_settled()
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
        leave_in_s, left_behind = self._routes.heartbeat(
            record,
            [convert.report_from_pb(report) for report in request.sessions],
            [_key(report) for report in request.ended_sessions],
            first=first,
        )
        self._routes.passed("heartbeat.received")
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
            used = self._routes.used_elsewhere(record.worker_id, pages)
            response.used_elsewhere.extend(
                manager_pb2.TenantUse(
                    tenant=tenant, session_count=one.num_sessions, page_count=one.num_pages
                )
                for tenant, one in used.items()
            )
        if request.leaving:
            self._routes.leave(record.worker_id, record.incarnation)
        elif leave_in_s is not None:
            response.drain.CopyFrom(convert.seconds_to_pb(leave_in_s))
        return response

    def heartbeat_ended(self, last: manager_pb2.HeartbeatRequest) -> None:
        """Note that a worker's stream has broken. Nothing is placed there until it is back."""
        self._routes.cut_off(last.worker.worker_id, last.worker.incarnation)

    def look_after_workers(self) -> None:
        """Knock at the workers whose heartbeats have ended: who refuses connections is dead.

        To be called every `LOOK_S`.
        """
        self._routes.probe()

    def worker_died(self, worker_id: str, incarnation: str) -> None:
        """Note that a worker is known to be gone: what it held is lost."""
        self._routes.bury(worker_id, incarnation)


def _what_is_left(parts: Sequence[Part]) -> types_pb2.Session:
    """Return a session of which something may be lost: then an extent without a worker says from
    which position on."""
    infos = [part.info for part in parts]
    loss = find_loss(infos)
    if loss is None:
        return merged(parts)
    joined = join_parts(infos)
    num_rows = len(joined.lengths[0]) if joined.lengths else joined.spec.num_rows
    from_there = (loss.position,) * num_rows
    lost = Extent("", "", "", from_there, from_there)
    return session_to_pb(replace(joined, extents=(*joined.extents, lost)))


def _own_lengths(part: Part) -> tuple[int, ...]:
    """Return the lengths of a worker's rows, as it counts them: 0 before there is a start."""
    return part.info.extents[0].stops or (0,) * part.info.spec.num_rows


def _check_lengths(parts: Sequence[Part], expected: tuple[int, ...]) -> None:
    stored = row_lengths([part.info.extents[0] for part in parts])
    stored = stored or (0,) * parts[0].info.spec.num_rows
    if stored != expected:
        raise Conflict(
            f"expected_lengths are {list(expected)}, stored are {list(stored)}",
            lengths=",".join(map(str, stored)),
        )


def _key(report: manager_pb2.SessionReport) -> tuple[str, str]:
    return report.tenant, report.session.session_id
