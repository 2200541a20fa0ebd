"""The two copies of an extent: finding one that was made, and giving one up."""

from __future__ import annotations

from contextlib import suppress

from kvservice.core import session as core
from kvservice.core.errors import KVServiceError, SessionNotFound, WorkerLost
from kvservice.v1 import types_pb2
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
        """Whether an extent is at the next epoch because a copy of it was made; note that if so.

        Should there be another one, then whoever had the new one made has missed it: it is given
        up, for it is an epoch behind.

        Raises:
            WorkerLost: Nobody says. The call may be repeated.
        """
        try:
            to = self._whereabouts.ask_where_to(extent)
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
            self._lease.capabilities[to.address] = to.capability
        self._whereabouts.show(told, to.ticket)
        return True

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
            session_ids=[self._mirror.id], epochs=[self._mirror.epoch]
        )
        address(request, extent, self._lease)
        with suppress(KVServiceError):  # or its lease ends
            transport = self._connections.to(extent.address)
            transport.call(
                WORKER.full_name, "Release", request, timeout_s=self._connections.knock_s
            )
        return CopiesChanged(f"the copy at {extent.address} is given up")
