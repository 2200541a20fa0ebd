"""Calls of one session to the workers that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from kvservice.core import session as core
from kvservice.core.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    KVServiceError,
    Overloaded,
    PagesLost,
    SessionMoved,
    SessionNotFound,
    StaleEpoch,
    StaleWorker,
    Unavailable,
    WorkerLost,
)
from kvservice.v1 import manager_pb2, types_pb2, worker_pb2
from kvservice.wire import convert
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client._connections import FRONT, Connections
from kvservice_client._extents import Extent
from kvservice_client._leases import Lease
from kvservice_client._mirror import Mirror
from kvservice_client._retry import Attempt, ServerDead, Verdict
from kvservice_client._steady_call import SteadyAnswer, SteadyCall
from kvservice_client._transport import AnyCall, AttendStream


class CopiesChanged(Exception):
    """A copy was given up, or made, and another one has all that was acknowledged:
    `Changes.settle`, and the same call again. Never leaves the client."""


FAILED: Final = (KVServiceError, CopiesChanged)
"""What a call on a worker may end with, instead of its result."""

OUTCOME_UNKNOWN: Final = (PagesLost, CopiesChanged, Unavailable, DeadlineExceeded, InternalError)
"""After these it is not known whether a call was carried out. The worst comes first."""

FOLLOW_TIMEOUT_S: Final = 1.0
"""How long to ask where a session has moved to, before others are asked."""

LOOK_S: Final = 0.1
"""How long to ask, where there is another copy to go on with."""

MAX_FOLLOWED: Final = 16
"""How often a session may move while one call is made."""

ASK_TIMEOUT_S: Final = 0.5
"""How long the manager may think about whether a worker is dead."""

_VERDICTS: Final = {
    manager_pb2.WORKER_STATE_DEAD: Verdict.DEAD,
    # It has been heard within the last seconds: if we cannot reach it, the way there is cut.
    manager_pb2.WORKER_STATE_ALIVE: Verdict.ALIVE,
    manager_pb2.WORKER_STATE_DRAINING: Verdict.ALIVE,
}


T = TypeVar("T")
AttendCalls = Sequence[tuple[Extent, worker_pb2.AttendCall]]
Failure = KVServiceError | CopiesChanged
Outcome = worker_pb2.AttendResult | Failure
AnyOutcome = Outcome | SteadyAnswer


class Links:
    """A session's ways to its workers. The session's lock is held by the caller.

    Every method tries again while a worker does not answer; when it counts as dead, or lives
    another life, the extent is marked lost and PagesLost raised. One that lives, but that no way
    leads to, is never lost: WorkerLost, in the end.

    Where there are two copies, one that does not answer is given up as soon as the other one does:
    CopiesChanged. As long as neither answers, neither is.
    """

    def __init__(self, connections: Connections, mirror: Mirror, lease: Lease) -> None:
        self.connections = connections
        self.lease = lease
        self._mirror = mirror

    def unary(self, extent: Extent, method: str, request: Message) -> Any:
        """Make a call that may be repeated, for the extent's incarnation of its worker."""

        def attempt(left_s: float) -> Any:
            self._address(extent, request)
            transport = self.connections.to(extent.address)
            answer = transport.call(WORKER.full_name, method, request, timeout_s=left_s)
            if isinstance(answer, types_pb2.ReleaseResponse) and answer.moved_session_ids:
                raise SessionMoved("the session that is to be released has moved")
            return answer

        return self._run(extent, attempt)

    def write(self, extent: Extent, call: worker_pb2.WriteCall) -> worker_pb2.WriteResponse:
        def attempt(left_s: float) -> worker_pb2.WriteResponse:
            self._address(extent, call)
            return self.connections.to(extent.address).write(call, timeout_s=left_s)

        return self._run(extent, attempt)

    def read(self, extent: Extent, request: worker_pb2.ReadRequest) -> worker_pb2.ReadResult:
        def attempt(left_s: float) -> worker_pb2.ReadResult:
            self._address(extent, request)
            return self.connections.to(extent.address).read(request, timeout_s=left_s)

        return self._run(extent, attempt)

    def attend(
        self, calls: AttendCalls, meanwhile: Callable[[], None] | None = None
    ) -> list[Outcome]:
        """Send all calls, do something `meanwhile`, then collect the results or errors, in the
        same order.

        Only the calls without an answer are repeated. Errors that a worker answers are returned,
        so that each call's outcome is known.
        """
        for extent, call in calls:
            if self.lease.capabilities or call.incarnation != extent.incarnation:
                self._address(extent, call)
        return self._attend_all(calls, meanwhile)

    def attend_steadily(
        self, calls: Sequence[tuple[Extent, SteadyCall]]
    ) -> list[SteadyAnswer | Failure]:
        """As `attend`, of calls that are put together from pieces."""
        capabilities = self.lease.capabilities
        for extent, call in calls:
            call.capability = capabilities.get(extent.address, b"") if capabilities else b""
            if call.incarnation != extent.incarnation:
                call.go_to(extent.incarnation)
        outcomes: list[AnyOutcome]
        if len(calls) == 1:
            outcome = self._attend_at_once(*calls[0])
            if isinstance(outcome, SteadyAnswer):
                return [outcome]
            outcomes = [outcome]
        else:
            outcomes = self._attend_all(calls)
        return [
            _as_steady(call, outcome) for (_, call), outcome in zip(calls, outcomes, strict=True)
        ]

    def _attend_at_once(self, extent: Extent, call: SteadyCall) -> AnyOutcome:
        """Make a call on a stream that is there, as all goes well; whatever else happens is dealt
        with as if the call were made the ordinary way."""
        stream, failed = extent.stream, None
        try:
            if stream is not None and not extent.lost:
                began = self.connections.clock.monotonic()
                try:
                    answer = stream.attend(call, timeout_s=self.connections.config.timeout_s)
                    self.lease.renewed(began)
                    return answer
                except KVServiceError as error:
                    failed = (began, error)
            return self._attend_again(extent, call, failed)
        except BaseException:
            extent.close_stream()  # an answer may be under way that nobody waits for
            raise

    def _attend_all(
        self,
        calls: Sequence[tuple[Extent, AnyCall]],
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        try:
            if len(calls) == 1 and meanwhile is None:
                return [self._attend_again(*calls[0])]
            waiting = [self._send(extent, call) for extent, call in calls]
            if meanwhile is not None:
                meanwhile()
            return [
                self._receive(extent, call, stream)
                for stream, (extent, call) in zip(waiting, calls, strict=True)
            ]
        except BaseException:
            for extent, _ in calls:
                extent.close_stream()  # an answer may be under way that nobody waits for
            raise

    def settle_extents(self) -> None:
        """Give back extents that hold nothing, and renew and release the session where it is now.

        As many workers as the session spreads over stay with it. One that cannot be reached stays
        too, and is asked another time.
        """
        mirror = self._mirror
        while mirror.spares and len(mirror.extents) + len(mirror.spares) > mirror.spec.spread:
            if not all(self._give_back(copy) for copy in mirror.spares[-1].copies):
                break
            mirror.spares.pop().close_streams()
        self.follow_extents()

    def release(self) -> None:
        """Free the session on all its workers.

        Raises:
            WorkerLost: One does not answer; what it holds goes when the lease ends.
        """
        mirror = self._mirror
        request = types_pb2.ReleaseRequest(session_ids=[mirror.id], epochs=[mirror.epoch])
        if self.lease.unsettled:
            request.unsettled_ids.append(mirror.id)
        failures: list[KVServiceError] = []
        for extent in mirror.everywhere:
            try:
                with suppress(CopiesChanged):
                    self.unary(extent, "Release", request)
            except KVServiceError as error:
                if not extent.lost:  # with a dead worker its pages are gone
                    failures.append(error)
        if failures:
            raise failures[0]

    def _give_back(self, extent: Extent) -> bool:
        """Release what a worker holds of the session; return False if it cannot be reached."""
        mirror = self._mirror
        request = types_pb2.ReleaseRequest(session_ids=[mirror.id], epochs=[mirror.epoch])
        try:
            self.unary(extent, "Release", request)
        except FAILED:
            return extent.lost
        return True

    def ask_front(self, method: str, request: Message, *, timeout_s: float | None = None) -> Any:
        """Call the client's own server."""
        return self.connections.ask(FRONT, method, request, timeout_s=timeout_s)

    def tell_front(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """Make a call on the client's manager once, whose answer is not needed."""
        transport = self.connections.to(FRONT)
        return transport.call(MANAGER.full_name, method, request, timeout_s=timeout_s)

    def told_extents(self, session: types_pb2.Session) -> list[core.Extent]:
        """Return the extents of an answer, with addresses to dial."""
        return reachable_extents(self.connections, session)

    def follow_extents(self) -> None:
        """Renew and release the session where it is now."""
        everywhere = self._mirror.everywhere
        self.lease.session_id, self.lease.epoch = self._mirror.id, self._mirror.epoch
        self.lease.addresses = tuple(extent.address for extent in everywhere)
        issued = {extent.address: extent.capability for extent in everywhere}
        self.lease.entitled(issued, self.connections.clock.monotonic())
        for extent in everywhere:
            extent.capability = b""  # an old one is never to replace what was renewed

    # -- one call

    def _address(self, extent: Extent | core.Extent, request: Any) -> None:
        """Make a request one to the worker that an extent is on now, with the right to it."""
        if isinstance(request, SteadyCall):
            request.go_to(extent.incarnation)
            request.capability = self.lease.capabilities.get(extent.address, b"")
            return
        fields = request.DESCRIPTOR.fields_by_name
        if "incarnation" in fields:
            request.incarnation = extent.incarnation
        capability = self.lease.capabilities.get(extent.address, b"")
        if "capability" in fields:
            request.capability = capability
        elif capability and "capabilities" in fields:
            request.capabilities[:] = [capability]

    def _run(self, extent: Extent, attempt: Attempt[T], began: float | None = None) -> T:
        """Make a call, wherever the extent is moved to meanwhile.

        Args:
            began: When the first try began, where it is over and `attempt` tells how it went.
        """
        for _ in range(MAX_FOLLOWED):
            try:
                return self._run_here(extent, attempt, began)
            except SessionMoved as error:
                self._follow(extent, error)
                began = None
        raise WorkerLost("the session is moved faster than it can be followed")

    def _run_here(self, extent: Extent, attempt: Attempt[T], began: float | None = None) -> T:
        if extent.lost:
            raise self._lost(extent)
        connections = self.connections
        try:
            result = connections.retrier.run(
                attempt,
                connections.config.timeout_s,
                connections.detection,
                lambda is_over: self._judge(extent, is_over),
                began=began,
            )
        except (ServerDead, StaleWorker) as error:
            successor = self._find_successor(extent)
            if successor is not None:  # it has left, and what it held is there
                self._go_to(extent, successor)
                return self._run_here(extent, attempt)
            extent.lost, extent.replaced = True, isinstance(error, StaleWorker)
            extent.close_stream()
            if self._mirror.give_up(extent):
                raise CopiesChanged(f"the worker at {extent.address} is given up") from error
            raise self._lost(extent) from error
        except SessionNotFound as error:
            other = self._mirror.other_copy(extent)
            if other is not None and self._holds(other):  # its lease was over on one of the two
                raise self.give_up(extent) from error
            raise
        except Draining:
            raise
        except StaleEpoch as error:
            if self._mirror.spec.replicas > 1 and self._finds_copy(extent):
                raise CopiesChanged("the session has a copy more") from error
            self.lease.taken = True  # by whoever has attached to the session since
            raise
        except Unavailable as error:
            raise WorkerLost(f"the worker at {extent.address} does not answer: {error}") from error
        self.lease.renewed(connections.clock.monotonic())
        return result

    def _follow(self, extent: Extent, moved: SessionMoved) -> None:
        """Go where an extent has been moved to, by the word of the worker where it was.

        Where that is gone by now, by the manager's; and if that is too, without a right to it.
        """
        ticket = 0
        try:
            to = self._ask_where_to(extent)
            told = core.Extent(to.worker_id, to.address, to.incarnation, capability=to.capability)
            ticket = to.ticket
        except SessionNotFound:
            return  # it has come back
        except KVServiceError:
            found = self._find_successor(extent)
            where = moved.metadata
            if found is None and not where.get("incarnation"):
                raise WorkerLost("the session has moved, and nobody says where to") from moved
            told = found or core.Extent(
                where.get("worker_id", ""), where.get("address", ""), where["incarnation"]
            )
        self._go_to(extent, told)
        self._show(told, ticket)

    def look_for_copy(self, extent: Extent) -> None:
        """Note the copy with which an extent's next epoch has begun, if it has: whoever goes there
        for another reason is told nothing of it.

        Raises:
            WorkerLost: Nobody says. The call may be repeated.
        """
        if self._mirror.spec.replicas > 1 and self._mirror.other_copy(extent) is None:
            self._finds_copy(extent)

    def _finds_copy(self, extent: Extent) -> bool:
        """Whether an extent is at the next epoch because a copy of it was made; note that if so.

        Should there be another one, then whoever had the new one made has missed it: it is given
        up, for it is an epoch behind.

        Raises:
            WorkerLost: Nobody says. The call may be repeated.
        """
        try:
            to = self._ask_where_to(extent)
        except SessionNotFound:
            return False
        except KVServiceError as error:
            raise WorkerLost(f"the worker at {extent.address} does not answer: {error}") from error
        if to.copied_at_epoch != self._mirror.epoch + 1:
            return False
        missed = self._mirror.other_copy(extent)
        if missed is not None and missed.address == to.address:
            # Its worker lives another life by now, which has the new copy.
            missed.lost = missed.replaced = True
            missed.close_stream()
            self._mirror.give_up(missed)
        elif missed is not None:
            self.give_up(missed)
        told = core.Extent(to.worker_id, to.address, to.incarnation)
        self._mirror.found(extent, told)
        if to.capability:
            self.lease.capabilities[to.address] = to.capability
        self._show(told, to.ticket)
        return True

    def _ask_where_to(self, extent: Extent) -> worker_pb2.FollowSessionResponse:
        """Ask a worker who has taken the session over from it, or has a copy."""
        follow = worker_pb2.FollowSessionRequest(session_id=self._mirror.id)
        self._address(extent, follow)
        answer: worker_pb2.FollowSessionResponse = self.connections.ask(
            extent.address, "FollowSession", follow, timeout_s=FOLLOW_TIMEOUT_S
        )
        return answer

    def _show(self, told: core.Extent, ticket: int) -> None:
        """Let a worker believe that a session is its own, should it not have heard."""
        look = types_pb2.GetSessionRequest(session_id=self._mirror.id, ticket=ticket)
        self._address(told, look)
        with suppress(KVServiceError):
            self.connections.ask(told.address, "GetSession", look, timeout_s=FOLLOW_TIMEOUT_S)

    def _find_successor(self, extent: Extent) -> core.Extent | None:
        """Ask the manager for the worker that has taken over what was on an incarnation."""
        if self.connections.lone_worker or not extent.incarnation:
            return None
        request = types_pb2.GetSessionRequest(session_id=self._mirror.id)
        try:
            if self._mirror.other_copy(extent) is None:
                session = self.ask_front("GetSession", request, timeout_s=FOLLOW_TIMEOUT_S).session
            else:  # which can go on: what this one held need not be found
                session = self.tell_front("GetSession", request, timeout_s=LOOK_S).session
        except KVServiceError:
            return None
        known = {copy.incarnation for copy in self._mirror.everywhere}
        for one in self.told_extents(session):
            if one.incarnation not in known and one.stands_for(extent.incarnation):
                return one
        return None

    def _go_to(self, extent: Extent, told: core.Extent) -> None:
        """Let an extent be on another worker. What it holds is what it was."""
        extent.close_stream()
        extent.worker_id, extent.address = told.worker_id, told.address
        extent.incarnation, extent.capability = told.incarnation, told.capability
        for other in self._mirror.everywhere:
            if other is not extent and other.incarnation == told.incarnation:
                self._make_way(other)
        self.follow_extents()

    def _make_way(self, extent: Extent) -> None:
        """Find a part of the session that was on a worker where another part is now: a worker has
        one at most, so it has gone further, or with a worker that has died."""
        successor = self._find_successor(extent)
        if successor is not None:
            self._go_to(extent, successor)
            return
        extent.lost, extent.replaced = True, True
        extent.close_stream()
        if self._mirror.give_up(extent):
            raise CopiesChanged(f"the copy at {extent.address} is gone")

    def _judge(self, extent: Extent, is_over: bool) -> Verdict:
        """Say whether a silent worker lives: by the manager's word, or at last by its own."""
        other = self._mirror.other_copy(extent)
        if other is not None and self._holds(other):
            return Verdict.DEAD  # to us it is: we need not wait to know more
        verdict = self._ask_manager_about(extent)
        if verdict is Verdict.DEAD or not is_over:
            return verdict
        if other is not None:
            return Verdict.ALIVE  # it may as well be we who are cut off from both
        request = types_pb2.PageStatsRequest(
            session_id=self._mirror.id,
            capability=self.lease.capabilities.get(extent.address, b""),
        )
        incarnation = self.connections.knock(extent.address, request)
        if incarnation is None:
            return verdict
        extent.close_stream()  # that went the old way
        return Verdict.ALIVE if incarnation in ("", extent.incarnation) else Verdict.DEAD

    def _ask_manager_about(self, extent: Extent) -> Verdict:
        if self.connections.lone_worker:
            return Verdict.UNKNOWN
        try:
            request = manager_pb2.ListWorkersRequest()
            workers = self.ask_front("ListWorkers", request, timeout_s=ASK_TIMEOUT_S).workers
        except KVServiceError:
            return Verdict.UNKNOWN
        for one in workers:
            if one.worker_id == extent.worker_id:
                if one.incarnation != extent.incarnation:
                    return Verdict.DEAD
                return _VERDICTS.get(one.state, Verdict.UNKNOWN)
        # It has left, or the manager has just begun.
        return Verdict.UNKNOWN if self._find_successor(extent) is None else Verdict.DEAD

    def _holds(self, extent: Extent) -> bool:
        """Whether a worker answers that it holds the session, in the life that we know."""
        request = types_pb2.GetSessionRequest(
            session_id=self._mirror.id,
            capability=self.lease.capabilities.get(extent.address, b""),
        )
        try:
            transport = self.connections.to(extent.address)
            answer = transport.call(
                WORKER.full_name, "GetSession", request, timeout_s=self.connections.knock_s
            )
        except KVServiceError:
            return False
        return bool(answer.session.extents[0].incarnation == extent.incarnation)

    def give_up(self, extent: Extent) -> CopiesChanged:
        """Go on without a copy whose worker lives, but that is of no use; return what to raise."""
        extent.lost = True
        extent.close_stream()
        known = self._mirror.give_up(extent)
        assert known, "there is no other copy"
        request = types_pb2.ReleaseRequest(
            session_ids=[self._mirror.id], epochs=[self._mirror.epoch]
        )
        self._address(extent, request)
        with suppress(KVServiceError):  # or its lease ends
            transport = self.connections.to(extent.address)
            transport.call(WORKER.full_name, "Release", request, timeout_s=self.connections.knock_s)
        return CopiesChanged(f"the copy at {extent.address} is given up")

    def _lost(self, extent: Extent) -> KVServiceError:
        if self._mirror.find_lost() is None:  # a spare: nothing was there
            return WorkerLost(f"the worker at {extent.address} has died")
        return self._mirror.pages_lost()

    def _attend_again(
        self, extent: Extent, call: AnyCall, failed: tuple[float, KVServiceError] | None = None
    ) -> AnyOutcome:
        """Make a call; `failed`: when a first try began, and what became of it."""
        first = [] if failed is None else [failed[1]]

        def attempt(left_s: float) -> worker_pb2.AttendResult | SteadyAnswer:
            if first:
                raise first.pop()
            if call.incarnation != extent.incarnation:
                self._address(extent, call)
            return self._stream(extent).attend(call, timeout_s=left_s)

        try:
            return self._run(extent, attempt, None if failed is None else failed[0])
        except FAILED as error:
            return error

    def _send(self, extent: Extent, call: AnyCall) -> AttendStream | None:
        """Return the stream that will bring the answer; None: none will."""
        stream = self._stream(extent)
        try:
            stream.send(call, timeout_s=self.connections.config.timeout_s)
        except Unavailable:
            extent.close_stream()
            return None
        return stream

    def _receive(self, extent: Extent, call: AnyCall, stream: AttendStream | None) -> AnyOutcome:
        """Return what a call that was sent is answered, or that of the same call again."""
        if stream is None or stream is not extent.stream:  # it may have moved meanwhile
            return self._attend_again(extent, call)
        try:
            result = stream.receive()
        except (
            Unavailable,
            Overloaded,
            SessionMoved,
            SessionNotFound,
            StaleEpoch,
            StaleWorker,
        ):
            # Nobody has answered, or what was answered says something about the session: the same
            # call again is dealt with as if it were the only one.
            return self._attend_again(extent, call)
        except KVServiceError as error:
            return error
        self.lease.renewed(self.connections.clock.monotonic())
        return result

    def _stream(self, extent: Extent) -> AttendStream:
        if extent.stream is None:
            extent.stream = self.connections.to(extent.address).open_stream()
        return extent.stream


def _as_steady(call: SteadyCall, outcome: AnyOutcome) -> SteadyAnswer | Failure:
    """Return an outcome in the call's own form, whichever way it has come."""
    if not isinstance(outcome, worker_pb2.AttendResult):
        return outcome
    answer = call.answer_of(outcome)
    if answer is None:
        return InternalError("the answer has not the form of the one before in the same step")
    return answer


def reachable_extents(connections: Connections, session: types_pb2.Session) -> list[core.Extent]:
    """Return the extents of an answer. A lone worker is where we have found it."""
    extents = convert.session_from_pb(session).extents
    if not connections.lone_worker:
        return list(extents)
    return [replace(one, address=connections.front) for one in extents]
