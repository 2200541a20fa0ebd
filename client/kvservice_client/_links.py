"""Calls of one session to the workers that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from kvservice.core.errors import (
    Draining,
    InternalError,
    KVServiceError,
    Overloaded,
    SessionMoved,
    SessionNotFound,
    StaleEpoch,
    StaleWorker,
    Unavailable,
    WorkerLost,
)
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.names import WORKER
from kvservice_client._addressing import address
from kvservice_client._connections import Connections
from kvservice_client._copies import Copies
from kvservice_client._extents import Extent
from kvservice_client._judging import Judge
from kvservice_client._leases import Lease
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import FAILED, CopiesChanged, Failure
from kvservice_client._retry import Attempt, ServerDead
from kvservice_client._steady_call import SteadyAnswer, SteadyCall
from kvservice_client._transport import AnyCall, AttendStream
from kvservice_client._whereabouts import Whereabouts

MAX_FOLLOWED: Final = 16
"""How often a session may move while one call is made."""

T = TypeVar("T")
AttendCalls = Sequence[tuple[Extent, worker_pb2.AttendCall]]
Outcome = worker_pb2.AttendResult | Failure
AnyOutcome = Outcome | SteadyAnswer


class Links:
    """A session's ways to its workers. The session's lock is held by the caller.

    Every method tries again while a worker does not answer; when it counts as dead, or lives
    another life, the extent is marked lost and PagesLost raised. One that lives, but that no way
    leads to, is never lost: WorkerLost, in the end.

    Where there are two copies, one that does not answer is given up as soon as the other one does:
    CopiesChanged. As long as neither answers, neither is.

    Attributes:
        whereabouts: Where the session is now; followed during every call.
        copies: Finds and gives up the copies of its extents.
    """

    def __init__(self, connections: Connections, mirror: Mirror, lease: Lease) -> None:
        self.connections = connections
        self.lease = lease
        self._mirror = mirror
        self.whereabouts = Whereabouts(connections, mirror, lease)
        self.copies = Copies(connections, mirror, lease, self.whereabouts)
        self._judge = Judge(connections, mirror, lease, self.whereabouts, self.copies)

    def unary(self, extent: Extent, method: str, request: Message) -> Any:
        """Make a call that may be repeated, for the extent's incarnation of its worker."""

        def attempt(left_s: float) -> Any:
            address(request, extent, self.lease)
            transport = self.connections.to(extent.address)
            answer = transport.call(WORKER.full_name, method, request, timeout_s=left_s)
            if isinstance(answer, types_pb2.ReleaseResponse) and answer.moved_session_ids:
                raise SessionMoved("the session that is to be released has moved")
            return answer

        return self._run(extent, attempt)

    def write(self, extent: Extent, call: worker_pb2.WriteCall) -> worker_pb2.WriteResponse:
        def attempt(left_s: float) -> worker_pb2.WriteResponse:
            address(call, extent, self.lease)
            return self.connections.to(extent.address).write(call, timeout_s=left_s)

        return self._run(extent, attempt)

    def read(self, extent: Extent, request: worker_pb2.ReadRequest) -> worker_pb2.ReadResult:
        def attempt(left_s: float) -> worker_pb2.ReadResult:
            address(request, extent, self.lease)
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
                address(call, extent, self.lease)
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

    # -- one call

    def _run(self, extent: Extent, attempt: Attempt[T], began: float | None = None) -> T:
        """Make a call, wherever the extent is moved to meanwhile.

        Args:
            began: When the first try began, where it is over and `attempt` tells how it went.
        """
        for _ in range(MAX_FOLLOWED):
            try:
                return self._run_here(extent, attempt, began)
            except SessionMoved as error:
                self.whereabouts.follow(extent, error)
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
                lambda is_over: self._judge.judge(extent, is_over),
                began=began,
            )
        except (ServerDead, StaleWorker) as error:
            if self.whereabouts.goes_to_successor(extent):  # it has left: what it held is there
                return self._run_here(extent, attempt)
            extent.lost, extent.replaced = True, isinstance(error, StaleWorker)
            extent.close_stream()
            if self._mirror.give_up(extent):
                raise CopiesChanged(f"the worker at {extent.address} is given up") from error
            raise self._lost(extent) from error
        except SessionNotFound as error:
            other = self._mirror.other_copy(extent)
            if other is not None and self.copies.holds(
                other
            ):  # its lease was over on one of the two
                raise self.copies.give_up(extent) from error
            # Who was idle through several moves finds a worker that has forgotten where it went.
            if self.whereabouts.goes_to_successor(extent):
                return self._run_here(extent, attempt)
            raise
        except Draining:
            raise
        except StaleEpoch as error:
            if self._mirror.spec.replicas > 1 and self.copies.finds_new(extent):
                raise CopiesChanged("the session has a copy more") from error
            self.lease.taken = True  # by whoever has attached to the session since
            raise
        except Unavailable as error:
            raise WorkerLost(f"the worker at {extent.address} does not answer: {error}") from error
        self.lease.renewed(connections.clock.monotonic())
        return result

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
                address(call, extent, self.lease)
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
