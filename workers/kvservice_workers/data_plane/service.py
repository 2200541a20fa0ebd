"""`PageWorkerService` on protobuf messages: checks, conversion, and one call on the worker each.

Streams and fragments are the transport's business: Attend, Write and Read take and return one
whole message here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvservice.core.access import Rights
from kvservice.core.caller import Caller, Role
from kvservice.core.errors import InvalidRequest, Unimplemented
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.said import Said
from kvservice.core.session import SessionInfo, check_session_id
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, convert
from kvservice.wire.convert import at_least_one, not_negative, session_id_from_pb, session_to_pb
from kvservice.wire.names import WORKER
from kvservice.wire.tracing import find_tracer
from kvservice_workers.attention.native import read_call, read_frame
from kvservice_workers.data_plane.answers import Answers, Issue
from kvservice_workers.data_plane.moves import MoveService
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.worker import PageWorker

# Calls with more bytes than this are no decoding steps.
_SMALL_BYTES: Final = 1 << 20
_ATTEND: Final = f"{WORKER.full_name}/Attend"

Admit = Callable[[Caller], tuple[tuple[str, ...], bytes]]
"""Returns where the lane is, and a token that lets the caller in, once."""


class WorkerService:
    """One method per RPC: `(request, caller) -> response`, raising errors of the tree.

    Thread-safe, as the worker is.
    """

    def __init__(
        self,
        worker: PageWorker,
        admit: Admit | None = None,
        issue: Issue | None = None,
        *,
        puller: Puller | None = None,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        """Serve a worker.

        Args:
            admit: Lets a caller onto the worker's lane. None: there is none.
            issue: Makes capabilities. None: nobody wants any.
            puller: Takes sessions over from other workers. None: this one does not.
        """
        self._worker = worker
        self._short_way = worker.short_way
        self._admit = admit
        self._answers = Answers(worker.config, issue)
        self._moves = MoveService(worker, puller, self._answers)
        self._tracer = find_tracer()
        self._passed = failpoints.passed

    # Sessions

    def allocate(
        self, request: types_pb2.AllocateRequest, caller: Caller
    ) -> types_pb2.AllocateResponse:
        about = self._answers.about(request, caller)
        starts = not_negative(request.extent_starts, "extent_starts")
        if bool(starts) is not bool(request.epoch):
            raise InvalidRequest("extent_starts and epoch go together")
        if not request.HasField("spec"):
            raise InvalidRequest("spec is missing")
        info = self._worker.opening.allocate(
            *about,
            convert.spec_from_pb(request.spec),
            extent_starts=starts,
            epoch=not_negative([request.epoch], "epoch")[0],
            group=not_negative([request.group], "group")[0],
        )
        self._passed("allocate.done")
        return types_pb2.AllocateResponse(session=self._answers.session(info, caller))

    def append(self, request: types_pb2.AppendRequest, caller: Caller) -> types_pb2.AppendResponse:
        about, epoch = self._answers.about(request, caller), at_least_one(request.epoch, "epoch")
        if request.followed_by:
            followed_by = convert.incarnation_from_pb(request.followed_by)
            info = self._worker.changes.go_on_elsewhere(*about, epoch, followed_by)
            return types_pb2.AppendResponse(session=session_to_pb(info))
        info = self._worker.changes.append(
            *about,
            epoch,
            at_least_one(request.token_count, "token_count"),
            not_negative(request.expected_lengths, "expected_lengths"),
        )
        return types_pb2.AppendResponse(session=self._answers.session(info, caller))

    def pop(self, request: types_pb2.PopRequest, caller: Caller) -> types_pb2.PopResponse:
        info = self._worker.changes.pop(
            *self._answers.about(request, caller),
            at_least_one(request.epoch, "epoch"),
            not_negative(request.keep, "keep"),
            not_negative(request.expected_lengths, "expected_lengths"),
            check_only=request.check_only,
        )
        return types_pb2.PopResponse(session=self._changed(info, request.check_only, caller))

    def reset(self, request: types_pb2.ResetRequest, caller: Caller) -> types_pb2.ResetResponse:
        info = self._worker.changes.reset(
            *self._answers.about(request, caller),
            at_least_one(request.epoch, "epoch"),
            check_only=request.check_only,
        )
        return types_pb2.ResetResponse(session=self._changed(info, request.check_only, caller))

    def select(self, request: types_pb2.SelectRequest, caller: Caller) -> types_pb2.SelectResponse:
        about = self._answers.about(request, caller)
        if not request.rows:
            raise InvalidRequest("rows must name at least one row")
        info = self._worker.changes.select(
            *about,
            at_least_one(request.epoch, "epoch"),
            not_negative(request.rows, "rows"),
            check_only=request.check_only,
        )
        return types_pb2.SelectResponse(session=self._changed(info, request.check_only, caller))

    def fork(self, request: types_pb2.ForkRequest, caller: Caller) -> types_pb2.ForkResponse:
        about = self._answers.about(request, caller)
        count = request.token_count if request.HasField("token_count") else None
        info = self._worker.opening.fork(
            *about,
            at_least_one(request.epoch, "epoch"),
            session_id_from_pb(request.new_session_id),
            token_count=None if count is None else at_least_one(count, "token_count"),
            ttl_s=convert.seconds_from_pb(request.ttl, "ttl") if request.HasField("ttl") else None,
            clip=request.clip,
        )
        self._passed("fork.done")
        return types_pb2.ForkResponse(session=self._answers.session(info, caller))

    def attach(self, request: types_pb2.AttachRequest, caller: Caller) -> types_pb2.AttachResponse:
        about = self._answers.about(request, caller)
        if request.keep_step:
            info = self._worker.changes.go_on(*about, at_least_one(request.epoch, "epoch"))
        else:
            epoch = at_least_one(request.epoch, "epoch") if request.HasField("epoch") else None
            info = self._worker.changes.attach(*about, epoch)
        return types_pb2.AttachResponse(session=self._changed(info, False, caller))

    def release(
        self, request: types_pb2.ReleaseRequest, caller: Caller
    ) -> types_pb2.ReleaseResponse:
        epochs, unsettled = convert.release_from_pb(request)
        stays = convert.stays_from_pb(request)
        released = self._worker.leases.release(caller.tenant, epochs, unsettled, stays)
        moved = self._worker.departures.moved_among(caller.tenant, epochs)
        return types_pb2.ReleaseResponse(released_count=released, moved_session_ids=moved)

    def renew_lease(
        self, request: types_pb2.RenewLeaseRequest, caller: Caller
    ) -> types_pb2.RenewLeaseResponse:
        ids = convert.session_ids_from_pb(request.session_ids)
        missing = self._worker.leases.renew(caller.tenant, ids)
        response = types_pb2.RenewLeaseResponse(missing_session_ids=missing)
        if self._answers.issues:
            for session_id in ids:
                ttl_s = self._worker.leases.find_ttl_s(caller.tenant, session_id)
                response.capabilities.append(
                    b"" if ttl_s is None else self._answers.capability(caller, session_id, ttl_s)
                )
        return response

    # Looking

    def get_session(
        self, request: types_pb2.GetSessionRequest, caller: Caller
    ) -> types_pb2.GetSessionResponse:
        about = self._answers.about(request, caller)
        if request.ticket:
            self._worker.arrivals.arrive_by(*about, request.ticket)
        info = self._worker.access.get(*about, renew=not request.look_only)
        return types_pb2.GetSessionResponse(
            session=self._answers.session(info, caller, Rights.READ)
        )

    def list_sessions(
        self, request: types_pb2.ListSessionsRequest, caller: Caller
    ) -> types_pb2.ListSessionsResponse:
        size = convert.list_size_from_pb(request)
        after = check_session_id(request.page_token) if request.page_token else ""
        everyone = caller.role is Role.OPERATOR
        listed = self._worker.list_sessions(None if everyone else caller.tenant)
        infos = sorted((info for _, info in listed), key=_session_id)
        rest = [info for info in infos if info.session_id > after]
        return types_pb2.ListSessionsResponse(
            sessions=[session_to_pb(info) for info in rest[:size]],
            next_page_token=rest[size - 1].session_id if len(rest) > size else "",
        )

    def page_stats(
        self, request: types_pb2.PageStatsRequest, caller: Caller
    ) -> types_pb2.PageStatsResponse:
        del request
        stats = convert.stats_to_pb(self._worker.stats())
        if caller.role is Role.TENANT:  # what others do here is nothing that it may know
            stats = types_pb2.WorkerStats(
                worker_id=stats.worker_id,
                incarnation=stats.incarnation,
                address=stats.address,
                device=stats.device,
                draining=stats.draining,
            )
        return types_pb2.PageStatsResponse(workers=[stats])

    # Moves

    def follow_session(
        self, request: worker_pb2.FollowSessionRequest, caller: Caller
    ) -> worker_pb2.FollowSessionResponse:
        return self._moves.follow_session(request, caller)

    def pull_session(
        self, request: worker_pb2.PullSessionRequest, caller: Caller
    ) -> worker_pb2.PullSessionResponse:
        return self._moves.pull_session(request, caller)

    def copy_state(
        self, request: worker_pb2.CopyStateRequest, caller: Caller
    ) -> worker_pb2.CopyStateResponse:
        return self._moves.copy_state(request, caller)

    def copy_pages(
        self, request: worker_pb2.CopyPagesRequest, caller: Caller
    ) -> worker_pb2.CopyPagesResponse:
        return self._moves.copy_pages(request, caller)

    def hand_over(
        self, request: worker_pb2.HandOverRequest, caller: Caller
    ) -> worker_pb2.HandOverResponse:
        return self._moves.hand_over(request, caller)

    # The data path

    def attend(
        self, call: worker_pb2.AttendCall, caller: Caller, said: Said | None = None
    ) -> worker_pb2.AttendResult:
        """Serve a call.

        Args:
            said: The same call as it came, where the short way has been tried with it.
        """
        if said is None and len(call.q.data) + len(call.k.data) <= _SMALL_BYTES:
            said = read_call(call.SerializeToString())
            frame = None if said is None else self.attend_steadily(said, caller)
            if frame is not None:
                return worker_pb2.AttendResponse.FromString(frame).result
        if self._tracer is not None and call.trace_parent:
            attributes: dict[str, int | str] = {
                "kvservice.worker": self._worker.config.worker_id,
                "kvservice.layer": call.layer,
                "kvservice.step": call.step,
            }
            with self._tracer.serving(_ATTEND, call.trace_parent, attributes):
                return self._attend(call, caller, said)
        return self._attend(call, caller, said)

    def _attend(
        self, call: worker_pb2.AttendCall, caller: Caller, said: Said | None
    ) -> worker_pb2.AttendResult:
        self._answers.check_incarnation(call.incarnation)
        result = self._worker.long_way.attend(caller.tenant, calls.attend_call_from_pb(call), said)
        self._passed("attend.stored")
        return calls.attend_result_to_pb(result, call.call_id)

    def read_attend(self, frame: bytes | memoryview) -> Said | None:
        """Look at an `AttendRequest` that may be served by `attend_steadily`.

        Returns:
            What aliases the frame. None: decode it, and take `attend`.
        """
        return read_frame(frame)

    def attend_steadily(self, said: Said, caller: Caller) -> bytes | None:
        """Serve a call that asks what the first layer of its step has asked.

        Returns:
            The serialized `AttendResponse`. None: take `attend`; nothing has changed.
        """
        if said.begins or (said.traced and self._tracer is not None):
            return None
        frame = self._short_way.attend(caller.tenant, said)
        if frame is not None:
            self._passed("attend.stored")
        return frame

    def write(self, call: worker_pb2.WriteCall, caller: Caller) -> worker_pb2.WriteResponse:
        self._answers.check_incarnation(call.incarnation)
        lengths = self._worker.tokens.write(caller.tenant, calls.write_call_from_pb(call))
        self._passed("write.stored")
        return worker_pb2.WriteResponse(lengths=lengths)

    def read(self, request: worker_pb2.ReadRequest, caller: Caller) -> worker_pb2.ReadResult:
        about = self._answers.about(request, caller)
        start, stop = not_negative([request.start, request.stop], "start and stop")
        result = self._worker.tokens.read(
            *about,
            at_least_one(request.epoch, "epoch"),
            calls.layer_from_pb(request.layer),
            start,
            stop,
        )
        return calls.read_result_to_pb(result)

    def open_lane(
        self, request: worker_pb2.OpenLaneRequest, caller: Caller
    ) -> worker_pb2.OpenLaneResponse:
        del request
        if self._admit is None:
            raise Unimplemented("this worker has no lane; Attend goes by gRPC")
        addresses, token = self._admit(caller)
        return worker_pb2.OpenLaneResponse(addresses=addresses, token=token)

    # -- inside

    def _changed(self, info: SessionInfo, check_only: bool, caller: Caller) -> types_pb2.Session:
        self._passed("change.checked" if check_only else "change.applied")
        return self._answers.session(info, caller)


def _session_id(info: SessionInfo) -> str:
    return info.session_id
