"""The RPCs by which sessions go from worker to worker, on protobuf messages."""

from __future__ import annotations

from google.protobuf.message import Message

from kvservice.core.caller import Caller
from kvservice.core.errors import AlreadyExists, InvalidRequest, Unimplemented
from kvservice.core.moving import MovedTo, stay_by
from kvservice.v1 import worker_pb2
from kvservice.wire import calls, copies
from kvservice.wire.convert import session_id_from_pb, session_to_pb
from kvservice_workers.data_plane.answers import Answers
from kvservice_workers.data_plane.puller import Puller
from kvservice_workers.session_state import session_not_found
from kvservice_workers.worker import PageWorker


class MoveService:
    """What the manager, other workers and holders of sessions ask for moves and copies."""

    def __init__(self, worker: PageWorker, puller: Puller | None, answers: Answers) -> None:
        """
        Args:
            puller: Takes sessions over from other workers. None: this one does not.
        """
        self._worker = worker
        self._puller = puller
        self._answers = answers

    def follow_session(
        self, request: worker_pb2.FollowSessionRequest, caller: Caller
    ) -> worker_pb2.FollowSessionResponse:
        """Say where a session goes on."""
        tenant, session_id = self._answers.about(request, caller)
        found = self._worker.departures.find_successor(tenant, session_id)
        if found is None:
            raise session_not_found()
        to = found.to
        capability = self._answers.capability(
            caller, session_id, found.ttl_s, incarnation=to.incarnation
        )
        return worker_pb2.FollowSessionResponse(
            worker_id=to.worker_id,
            address=to.address,
            incarnation=to.incarnation,
            capability=capability,
            ticket=to.ticket,
            copied_at_epoch=found.copied_at_epoch,
            copied_from_epoch=found.copied_from_epoch,
            stay=to.stay,
        )

    def pull_session(
        self, request: worker_pb2.PullSessionRequest, caller: Caller
    ) -> worker_pb2.PullSessionResponse:
        """Take a session over, or say how far that is."""
        del caller
        self._answers.check_incarnation(request.incarnation)
        session_id_from_pb(request.session_id)
        _check_present(request, "move_id", "source_address", "source_incarnation")
        if request.source_incarnation == self._worker.config.incarnation:
            raise AlreadyExists("the session is to be taken from the worker itself")
        if self._puller is None:
            raise Unimplemented("this worker takes no sessions over")
        pull = self._puller.pull(request)
        response = worker_pb2.PullSessionResponse(copied_bytes=pull.copied_bytes)
        if pull.info is not None:
            response.session.CopyFrom(session_to_pb(pull.info))
        return response

    def copy_state(
        self, request: worker_pb2.CopyStateRequest, caller: Caller
    ) -> worker_pb2.CopyStateResponse:
        """Say what a session is made of, to whoever copies it."""
        del caller
        self._answers.check_incarnation(request.incarnation)
        _check_present(request, "copier")
        copy, ticket, state = self._worker.departures.state(
            request.tenant,
            session_id_from_pb(request.session_id),
            request.copier,
            request.copy,
            freeze=request.freeze,
        )
        return worker_pb2.CopyStateResponse(
            copy=copy, ticket=ticket, state=copies.state_to_pb(state)
        )

    def copy_pages(
        self, request: worker_pb2.CopyPagesRequest, caller: Caller
    ) -> worker_pb2.CopyPagesResponse:
        """Return contents of pages."""
        del caller
        self._answers.check_incarnation(request.incarnation)
        copied = self._worker.departures.pages(
            request.tenant,
            session_id_from_pb(request.session_id),
            request.copy,
            request.window if request.HasField("window") else None,
            [calls.layer_from_pb(layer) for layer in request.layers],
            copies.page_numbers_from_pb(request.pages),
        )
        return copies.pages_to_pb(copied)

    def hand_over(
        self, request: worker_pb2.HandOverRequest, caller: Caller
    ) -> worker_pb2.HandOverResponse:
        """Let another worker hold a session from now on, or as well."""
        del caller
        self._answers.check_incarnation(request.incarnation)
        _check_present(request, "ticket", "worker_address", "worker_incarnation")
        to = MovedTo(
            request.worker_id,
            request.worker_address,
            request.worker_incarnation,
            request.ticket,
            stay_by(self._worker.config.incarnation, request.ticket),
        )
        session_id = session_id_from_pb(request.session_id)
        if request.keep:
            self._worker.departures.share(request.tenant, session_id, to)
        else:
            self._worker.departures.hand_over(
                request.tenant, session_id, to, confirmed=request.confirmed
            )
        return worker_pb2.HandOverResponse()


def _check_present(request: Message, *names: str) -> None:
    for name in names:
        if not getattr(request, name):
            raise InvalidRequest(f"{name} is missing")
