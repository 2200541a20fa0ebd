"""The two copies of an extent: finding one that was made, and giving one up."""

from __future__ import annotations

from contextlib import suppress

from kvservice.core import session as core
from kvservice.core.errors import KVServiceError, SessionNotFound, WorkerLost
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.names import WORKER
from kvservice_client._addressing import address
from kvservice_client._connections import Connections
from kvservice_client._extents import Extent
from kvservice_client._leases import Lease
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import CopiesChanged
from kvservice_client._whereabouts import Whereabouts


class Copies:
    """Looks after the copies of a session's extents."""

    def __init__(
        self, connections: Connections, mirror: Mirror, lease: Lease, whereabouts: Whereabouts
    ) -> None:
        self._connections = connections
        self._mirror = mirror
        self._lease = lease
        self._whereabouts = whereabouts

    def look_for(self, extent: Extent) -> None:
        """Note the copy with which an extent's next epoch has begun, if it has: whoever goes there
        for another reason is told nothing of it.

        Raises:
            WorkerLost: Nobody says. The call may be repeated.
        """
        if self._mirror.spec.replicas > 1 and self._mirror.other_copy(extent) is None:
            self.finds_new(extent)

    def finds_new(self, extent: Extent) -> bool:
        """Whether an extent is at a later epoch because a copy of it was made; note that if so.

        Should there be another one, then whoever had the new one made has missed it: it is given
        up, for it is an epoch behind. What is asked may itself be the new one, which has come where
        one was before: then all others are given up, known or not.

        Raises:
            WorkerLost: Nobody says. The call may be repeated.
        """
        to = self._ask_for_new(extent)
        if to is None:
            return False
        mirror, other = self._mirror, self._mirror.other_copy(extent)
        if len(mirror.living) == 1:  # no other part has to come along, epoch by epoch
            mirror.epoch = max(mirror.epoch, to.copied_at_epoch - 1)
        if to.incarnation == extent.incarnation:
            extent.stay = to.stay
            mirror.go_on_twice()
            if other is not None:
                self.give_up(other)
            return True
        if other is not None and other.incarnation == to.incarnation and other.stay == to.stay:
            mirror.num_changed += 1  # it is known; one epoch more has begun
            return True
        if other is not None and other.address == to.address:
            # What was there has ended, be it with its worker: now the new copy is.
            other.lost = other.replaced = True
            other.close_stream()
            mirror.give_up(other)
        elif other is not None:
            self.give_up(other)
        told = core.Extent(to.worker_id, to.address, to.incarnation, stay=to.stay)
        mirror.found(extent, told)
        if to.capability:
            self._lease.capabilities[to.address] = to.capability
        self._whereabouts.show(told, to.ticket)
        return True

    def _ask_for_new(self, extent: Extent) -> worker_pb2.FollowSessionResponse | None:
        """Ask a worker for the copy with which its epoch has begun; None if there is none.

        Raises:
            WorkerLost: It does not say. The call may be repeated.
        """
        try:
            to = self._whereabouts.ask_where_to(extent)
        except SessionNotFound:
            return None
        except KVServiceError as error:
            raise WorkerLost(f"the worker at {extent.address} does not answer: {error}") from error
        first = to.copied_from_epoch or to.copied_at_epoch - 1
        return to if first <= self._mirror.epoch < to.copied_at_epoch else None

    def holds(self, extent: Extent) -> bool:
        """Whether a worker answers that it holds the session, in the life that we know."""
        request = types_pb2.GetSessionRequest(
            session_id=self._mirror.id,
            capability=self._lease.capabilities.get(extent.address, b""),
        )
        try:
            transport = self._connections.to(extent.address)
            answer = transport.call(
                WORKER.full_name, "GetSession", request, timeout_s=self._connections.knock_s
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
            session_ids=[self._mirror.id], epochs=[self._mirror.epoch], stays=[extent.stay]
        )
        address(request, extent, self._lease)
        with suppress(KVServiceError):  # or its lease ends
            transport = self._connections.to(extent.address)
            transport.call(
                WORKER.full_name, "Release", request, timeout_s=self._connections.knock_s
            )
        return CopiesChanged(f"the copy at {extent.address} is given up")
