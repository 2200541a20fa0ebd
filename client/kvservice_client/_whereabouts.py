"""Where the parts of a session are: they move from worker to worker while it is used."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvservice.core import session as core
from kvservice.core.errors import KVServiceError, SessionMoved, SessionNotFound, WorkerLost
from kvservice.v1 import types_pb2, worker_pb2
from kvservice_client._addressing import address
from kvservice_client._connections import FRONT, Connections
from kvservice_client._extents import Extent
from kvservice_client._leases import Lease
from kvservice_client._mirror import Mirror
from kvservice_client._outcomes import CopiesChanged

FOLLOW_TIMEOUT_S: Final = 1.0
"""How long to ask where a session has moved to, before others are asked."""

LOOK_S: Final = 0.1
"""How long to ask, where there is another copy to go on with."""


class Whereabouts:
    """Keeps the mirror's extents, and the lease, where the session is.

    By the word of the workers where it was; where those are gone, by the manager's.
    """

    def __init__(self, connections: Connections, mirror: Mirror, lease: Lease) -> None:
        self._connections = connections
        self._mirror = mirror
        self._lease = lease

    def follow_extents(self) -> None:
        """Renew and release the session where it is now."""
        everywhere = self._mirror.everywhere
        self._lease.session_id, self._lease.epoch = self._mirror.id, self._mirror.epoch
        self._lease.addresses = tuple(extent.address for extent in everywhere)
        issued = {extent.address: extent.capability for extent in everywhere}
        self._lease.entitled(issued, self._connections.clock.monotonic())
        for extent in everywhere:
            extent.capability = b""  # an old one is never to replace what was renewed

    def follow(self, extent: Extent, moved: SessionMoved) -> None:
        """Go where an extent has been moved to, by the word of the worker where it was.

        Where that is gone by now, by the manager's; and if that is too, without a right to it.
        """
        ticket = 0
        try:
            to = self.ask_where_to(extent)
            told = core.Extent(
                to.worker_id,
                to.address,
                to.incarnation,
                capability=to.capability,
                stay=to.stay,
            )
            ticket = to.ticket
        except SessionNotFound:
            return  # it has come back
        except KVServiceError:
            found = self.find_successor(extent)
            where = moved.metadata
            if found is None and not where.get("incarnation"):
                raise WorkerLost("the session has moved, and nobody says where to") from moved
            told = found or core.Extent(
                where.get("worker_id", ""), where.get("address", ""), where["incarnation"]
            )
        self.go_to(extent, told)
        self.show(told, ticket)

    def go_to(self, extent: Extent, told: core.Extent) -> None:
        """Let an extent be on another worker, and no other part of the session there."""
        extent.move_to(told)
        for other in self._mirror.everywhere:
            if other is not extent and other.incarnation == told.incarnation:
                self._make_way(other)
        self.follow_extents()

    def _make_way(self, extent: Extent) -> None:
        """Find a part of the session that was on a worker where another part is now: a worker has
        one at most, so it has gone further, or with a worker that has died."""
        if self.goes_to_successor(extent):
            return
        extent.lost, extent.replaced = True, True
        extent.close_stream()
        if self._mirror.give_up(extent):
            raise CopiesChanged(f"the copy at {extent.address} is gone")

    def ask_where_to(self, extent: Extent) -> worker_pb2.FollowSessionResponse:
        """Ask a worker who has taken the session over from it, or has a copy."""
        follow = worker_pb2.FollowSessionRequest(session_id=self._mirror.id)
        address(follow, extent, self._lease)
        answer: worker_pb2.FollowSessionResponse = self._connections.ask(
            extent.address, "FollowSession", follow, timeout_s=FOLLOW_TIMEOUT_S
        )
        return answer

    def show(self, told: core.Extent, ticket: int) -> None:
        """Let a worker believe that a session is its own, should it not have heard."""
        look = types_pb2.GetSessionRequest(session_id=self._mirror.id, ticket=ticket)
        address(look, told, self._lease)
        with suppress(KVServiceError):
            self._connections.ask(told.address, "GetSession", look, timeout_s=FOLLOW_TIMEOUT_S)

    def goes_to_successor(self, extent: Extent) -> bool:
        """Let an extent be where the manager says that it is now; False: it does not say."""
        successor = self.find_successor(extent)
        if successor is None:
            return False
        self.go_to(extent, successor)
        return True

    def find_successor(self, extent: Extent) -> core.Extent | None:
        """Ask the manager for the worker that has taken over what was on an incarnation."""
        if self._connections.lone_worker or not extent.incarnation:
            return None
        request = types_pb2.GetSessionRequest(session_id=self._mirror.id)
        try:
            if self._mirror.other_copy(extent) is None:
                session = self._connections.ask(
                    FRONT, "GetSession", request, timeout_s=FOLLOW_TIMEOUT_S
                ).session
            else:  # which can go on: what this one held need not be found
                session = self._connections.ask_once(
                    "GetSession", request, timeout_s=LOOK_S
                ).session
        except KVServiceError:
            return None
        known = {copy.incarnation for copy in self._mirror.everywhere}
        for one in self._connections.extents_of(session):
            if one.incarnation not in known and one.stands_for(extent.incarnation):
                return one
        return None
