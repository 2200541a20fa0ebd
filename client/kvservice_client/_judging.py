"""Whether a worker that does not answer lives."""

from __future__ import annotations

from typing import Final

from kvservice.core.errors import KVServiceError
from kvservice.v1 import manager_pb2, types_pb2
from kvservice_client._connections import FRONT, Connections
from kvservice_client._copies import Copies
from kvservice_client._extents import Extent
from kvservice_client._leases import Lease
from kvservice_client._mirror import Mirror
from kvservice_client._retry import Verdict
from kvservice_client._whereabouts import Whereabouts

ASK_TIMEOUT_S: Final = 0.5
"""How long the manager may think about whether a worker is dead."""

_VERDICTS: Final = {
    manager_pb2.WORKER_STATE_DEAD: Verdict.DEAD,
    # It has been heard within the last seconds: if we cannot reach it, the way there is cut.
    manager_pb2.WORKER_STATE_ALIVE: Verdict.ALIVE,
    manager_pb2.WORKER_STATE_DRAINING: Verdict.ALIVE,
}


class Judge:
    """Judges a session's workers, by what its other copy, the manager, and they themselves say."""

    def __init__(
        self,
        connections: Connections,
        mirror: Mirror,
        lease: Lease,
        whereabouts: Whereabouts,
        copies: Copies,
    ) -> None:
        self._connections = connections
        self._mirror = mirror
        self._lease = lease
        self._whereabouts = whereabouts
        self._copies = copies

    def judge(self, extent: Extent, is_over: bool) -> Verdict:
        """Say whether a silent worker lives: by the manager's word, or at last by its own."""
        other = self._mirror.other_copy(extent)
        if other is not None and self._copies.holds(other):
            return Verdict.DEAD  # to us it is: we need not wait to know more
        verdict = self._ask_manager_about(extent)
        if verdict is Verdict.DEAD or not is_over:
            return verdict
        if other is not None:
            return Verdict.ALIVE  # it may as well be we who are cut off from both
        request = types_pb2.PageStatsRequest(
            session_id=self._mirror.id,
            capability=self._lease.capabilities.get(extent.address, b""),
        )
        incarnation = self._connections.knock(extent.address, request)
        if incarnation is None:
            return verdict
        extent.close_stream()  # that went the old way
        return Verdict.ALIVE if incarnation in ("", extent.incarnation) else Verdict.DEAD

    def _ask_manager_about(self, extent: Extent) -> Verdict:
        if self._connections.lone_worker:
            return Verdict.UNKNOWN
        try:
            request = manager_pb2.ListWorkersRequest()
            workers = self._connections.ask(
                FRONT, "ListWorkers", request, timeout_s=ASK_TIMEOUT_S
            ).workers
        except KVServiceError:
            return Verdict.UNKNOWN
        for one in workers:
            if one.worker_id == extent.worker_id:
                if one.incarnation != extent.incarnation:
                    return Verdict.DEAD
                return _VERDICTS.get(one.state, Verdict.UNKNOWN)
        # It has left, or the manager has just begun.
        return Verdict.UNKNOWN if self._whereabouts.find_successor(extent) is None else Verdict.DEAD
