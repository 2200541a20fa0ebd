"""Forking sessions on all their workers."""

from __future__ import annotations

from kvservice.core.caller import Caller
from kvservice.core.directory import SessionKey
from kvservice.core.errors import KVServiceError, PositionOutOfRange
from kvservice.core.extents import merge_sessions, row_lengths, without_laggards
from kvservice.core.failpoints import Failpoints
from kvservice.manager.calls import WorkerCalls, copy_of
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.leases import Leases
from kvservice.manager.lookup import Lookup
from kvservice.manager.parts import Part
from kvservice.v1 import types_pb2
from kvservice.wire.convert import session_from_pb


class Forks:
    """Opens sessions that share the pages of others, where those are. Thread-safe."""

    def __init__(
        self,
        directory: SharedDirectory,
        calls: WorkerCalls,
        lookup: Lookup,
        leases: Leases,
        failpoints: Failpoints,
    ) -> None:
        self._directory = directory
        self._calls = calls
        self._lookup = lookup
        self._leases = leases
        self._failpoints = failpoints

    def fork(
        self, key: SessionKey, child: SessionKey, request: types_pb2.ForkRequest, caller: Caller
    ) -> list[Part]:
        """Fork a session on all workers that hold it, or on none; return the parts of the child.

        Raises:
            PositionOutOfRange: A row is shorter than what is to be shared.
            SessionNotFound, PagesLost, StaleEpoch, ...
        """
        parts = self._lookup.parts(key, caller)
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
            if request.epoch == parent.epoch:  # at which this part was what it is
                forwarded.epoch = part.info.epoch
            try:
                answer = self._calls.ask(part.worker_id, "Fork", forwarded, caller)
            except KVServiceError:
                self._leases.undo(child[1], forked, caller)
                raise
            forked.append(Part(part.worker_id, session_from_pb(answer.session)))
            self._failpoints.passed("manager.fork.partly_done")
        # Its parent may be stepping: then one copy may be a call ahead of another.
        level = without_laggards([part.info for part in forked])
        self._leases.undo(child[1], [one for one in forked if one.info not in level], caller)
        forked = [one for one in forked if one.info in level]
        self._directory.note(child, forked, settle=True)
        return forked
