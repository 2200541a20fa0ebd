"""Leases of sessions on all their workers: renewed, and ended before their time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvservice.core.caller import Caller
from kvservice.core.errors import InvalidRequest, KVServiceError
from kvservice.manager.calls import WorkerCalls
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.parts import Part
from kvservice.v1 import types_pb2
from kvservice.wire import convert


class Leases:
    """Renews and ends the leases that workers keep; the manager keeps none. Thread-safe."""

    def __init__(self, directory: SharedDirectory, calls: WorkerCalls) -> None:
        self._directory = directory
        self._calls = calls

    def release(self, request: types_pb2.ReleaseRequest, caller: Caller) -> int:
        """Free sessions wherever they are; return how many there were."""
        epochs, unsettled = convert.release_from_pb(request)
        if request.stays:
            raise InvalidRequest("stays are for workers only")

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
            if epoch and self._directory.is_beyond((caller.tenant, session_id), epoch)
        }
        released = 0
        moved: set[str] = set()
        by_worker = self._by_worker(epochs, caller)
        for worker_id, mine in by_worker.items():
            if self._directory.is_dead(worker_id):
                continue  # what it holds, should it come back, ends with the lease
            answer = self._calls.ask(worker_id, "Release", asked(mine), caller)
            released += answer.released_count
            moved.update(answer.moved_session_ids)
            for session_id in mine:
                if session_id not in stay:
                    self._directory.end((caller.tenant, session_id), worker_id)
        for worker_id in self._directory.reachable() if moved else ():
            mine = [one for one in sorted(moved) if one not in by_worker.get(worker_id, ())]
            if mine:
                answer = self._calls.ask(worker_id, "Release", asked(mine), caller)
                released += answer.released_count
        self._directory.settle((caller.tenant, one) for one in epochs if one not in stay)
        return min(released, len(epochs))

    def renew(self, session_ids: Sequence[str], caller: Caller) -> list[str]:
        """Renew the leases of sessions; return those that no worker has, in the same order."""
        missing = set(session_ids)
        by_worker = self._by_worker(session_ids, caller)
        for worker_id, mine in by_worker.items():
            asked = types_pb2.RenewLeaseRequest(session_ids=mine)
            answer = self._calls.ask(worker_id, "RenewLease", asked, caller)
            missing -= set(mine) - set(answer.missing_session_ids)
        reachable = self._directory.reachable()
        if missing and len(by_worker) < len(reachable):
            # It may have moved, and nobody has said so yet.
            asked = types_pb2.RenewLeaseRequest(session_ids=sorted(missing))
            for _, found in self._calls.ask_all(reachable, "RenewLease", asked, caller):
                if not isinstance(found, KVServiceError):
                    missing &= set(found.missing_session_ids)
        return [session_id for session_id in session_ids if session_id in missing]

    def undo(self, session_id: str, parts: Sequence[Part], caller: Caller) -> None:
        """Free what was opened on the way to a failure. What cannot be reached will expire.

        A copy of the request that arrives late leaves what may be opened there again.
        """
        for part in parts:
            with suppress(KVServiceError):
                request = types_pb2.ReleaseRequest(
                    session_ids=[session_id], stays=[part.info.extents[0].stay]
                )
                self._calls.ask(part.worker_id, "Release", request, caller)
            self._directory.end((caller.tenant, session_id), part.worker_id)

    def _by_worker(self, session_ids: Iterable[str], caller: Caller) -> dict[str, list[str]]:
        """Return which sessions each worker is to be asked about; unknown ones, all workers."""
        reachable = self._directory.reachable()
        asked: dict[str, list[str]] = {}
        for session_id in session_ids:
            for worker_id in self._directory.holders((caller.tenant, session_id)) or reachable:
                asked.setdefault(worker_id, []).append(session_id)
        return asked
