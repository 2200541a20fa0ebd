"""Where sessions go: opening them, and giving them room on further workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvservice.core.caller import Caller
from kvservice.core.directory import SessionKey
from kvservice.core.errors import (
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KVServiceError,
    Moving,
    OutOfPages,
    PagesLost,
    QuotaExceeded,
    SessionMoved,
    SessionNotFound,
    Unavailable,
    WorkerLost,
)
from kvservice.core.extents import is_empty, merge_sessions
from kvservice.core.failpoints import Failpoints
from kvservice.core.liveness import WorkerState
from kvservice.core.session import SessionInfo, SessionSpec
from kvservice.manager.calls import WorkerCalls, copy_of
from kvservice.manager.directory import SharedDirectory
from kvservice.manager.leases import Leases
from kvservice.manager.lookup import Lookup
from kvservice.manager.parts import Part, check_lengths
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice.wire.convert import session_from_pb


class Growth:
    """Gives sessions their places, on the workers that suit best. Thread-safe."""

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

    def open(self, key: SessionKey, spec: SessionSpec, caller: Caller) -> list[Part]:
        """Open a session on as many workers as its spec asks for, or find it where it was opened.

        Its copies come one after the other: the two best workers get the first of its parts.

        Raises:
            AlreadyExists: The id is in use for another request.
            WorkerLost: The session was lost with its workers: this may be a late copy of the
                request that had opened it, and an empty session is not to hide that.
            OutOfPages, Draining, Unavailable, ...: Not enough workers took it. Nothing has changed.
        """
        request = types_pb2.AllocateRequest(session_id=key[1], spec=convert.spec_to_pb(spec))
        holders = self._directory.holders(key)
        if holders:
            self._check_repeat(holders, request, caller)
            return self._find_opened(key, caller)
        if self._directory.is_lost(key):
            raise WorkerLost(
                "the session has died with its workers: release it first, or open another one",
                retry_delay_s=1.0,
            )
        placed: list[Part] = []
        failures: list[KVServiceError] = []
        needed = spec.spread * spec.replicas
        for worker_id in self._directory.ranked():
            group = len(placed) // spec.replicas + 1 if spec.replicas > 1 else 0
            try:
                answer = self._calls.ask(
                    worker_id, "Allocate", copy_of(request, group=group), caller
                )
            except SessionMoved:
                # It was opened by this very request, and has moved since.
                self._leases.undo(key[1], placed, caller)
                return self._find_opened(key, caller)
            except KVServiceError as error:
                if not _perhaps_elsewhere(error):
                    self._leases.undo(key[1], placed, caller)
                    raise
                failures.append(error)
                continue
            placed.append(Part(worker_id, session_from_pb(answer.session)))
            if len(placed) == needed:
                self._failpoints.passed("open.placed")
                self._directory.note(key, placed, settle=True)
                return placed
        self._leases.undo(key[1], placed, caller)
        raise self._no_place(failures, needed)

    def _find_opened(self, key: SessionKey, caller: Caller) -> list[Part]:
        """Return the parts of a session that was opened by an earlier copy of the request."""
        try:
            return self._lookup.parts(key, caller)
        except (PagesLost, SessionNotFound) as error:
            # It may as well have been opened in part only, with nothing there to be lost; or it has
            # gone with the worker that took it over, which may live again and know nothing.
            raise WorkerLost(
                "not all workers of the session can be had: open another one", retry_delay_s=1.0
            ) from error

    def _check_repeat(
        self, holders: Sequence[str], request: types_pb2.AllocateRequest, caller: Caller
    ) -> None:
        """Let the holders say whether this is the request that opened the session."""
        refusals: list[AlreadyExists] = []
        for worker_id in holders:
            try:
                self._calls.ask(worker_id, "Allocate", request, caller)
            except AlreadyExists as error:
                refusals.append(error)  # or it holds an extent that came later
            except SessionMoved:
                continue  # this request has opened it there
        if len(refusals) == len(holders):
            raise refusals[0]

    def _no_place(self, failures: Sequence[KVServiceError], num_workers: int) -> KVServiceError:
        """Return the error that says best why a session got no place."""
        for cls in (OutOfPages, CapacityError, Unavailable, DeadlineExceeded, InvalidRequest):
            for failure in failures:
                if isinstance(failure, cls):
                    return failure
        states = [view.state for view in self._directory.workers()]
        if states and all(state is WorkerState.DRAINING for state in states):
            return Draining("every worker is leaving", retry_delay_s=1.0)
        alive = states.count(WorkerState.ALIVE)
        return Unavailable(
            f"the session needs {num_workers} workers, {alive} can be had now", retry_delay_s=1.0
        )

    def grow(
        self, key: SessionKey, request: types_pb2.AppendRequest, caller: Caller
    ) -> SessionInfo:
        """Promise a session room for more tokens: at its tail, or on other workers.

        Returns:
            The session with all its extents, those that have made the promise last.

        Raises:
            OutOfPages: No worker has room. Nothing has changed.
            SessionNotFound, StaleEpoch, Conflict, PositionOutOfRange, PagesLost.
        """
        # An empty session's holder knows that it is empty.
        keep_at_most = None if any(request.expected_lengths) else 0
        parts = self._lookup.parts(key, caller, keep_at_most=keep_at_most)
        merge_sessions([part.info for part in parts])
        expected = tuple(request.expected_lengths)
        check_lengths(parts, expected, num_rows=len(expected))
        try:
            grown = [self._promise(part, request, caller) for part in _copies(parts, parts[-1])]
        except OutOfPages:
            extended = self._extend(key, parts, request, caller)
            if extended is None:
                raise
            grown = extended
        self._announce(parts, grown, request, caller)
        workers = {part.worker_id for part in grown}
        now = [part for part in parts if part.worker_id not in workers] + grown
        # Explicitly in this order: an extent without a start is not told from a closed one.
        extents = tuple(part.info.extents[0] for part in now)
        return replace(merge_sessions([part.info for part in now]), extents=extents)

    def _announce(
        self,
        parts: Sequence[Part],
        grown: Sequence[Part],
        request: types_pb2.AppendRequest,
        caller: Caller,
    ) -> None:
        """Tell the workers with the last tokens where the next ones will be, before there are any.

        Otherwise nobody could tell afterwards that they are missing.
        """
        follower = ",".join(part.info.extents[0].incarnation for part in grown)
        holding = [part for part in parts if not is_empty(part.info.extents[0])]
        if not holding or holding[-1].worker_id in {part.worker_id for part in grown}:
            return
        note = types_pb2.AppendRequest(
            session_id=request.session_id, epoch=request.epoch, followed_by=follower
        )
        for part in _copies(parts, holding[-1]):
            if part.info.extents[0].followed_by != follower:
                self._failpoints.passed("grow.promised")
                self._calls.ask(part.worker_id, "Append", note, caller)

    def _promise(self, part: Part, request: types_pb2.AppendRequest, caller: Caller) -> Part:
        """Promise room on one worker. An extent that holds nothing begins where the rows end."""
        answer = self._calls.ask(part.worker_id, "Append", request, caller)
        return Part(part.worker_id, session_from_pb(answer.session))

    def _promise_all(
        self, parts: Sequence[Part], request: types_pb2.AppendRequest, caller: Caller
    ) -> list[Part] | None:
        """Promise room on all copies of an extent; None if one of them has none."""
        try:
            return [self._promise(part, request, caller) for part in parts]
        except KVServiceError as error:
            if not _perhaps_elsewhere(error):
                raise
            return None

    def _extend(
        self,
        key: SessionKey,
        parts: Sequence[Part],
        request: types_pb2.AppendRequest,
        caller: Caller,
    ) -> list[Part] | None:
        """Promise room on other workers than the tail, in new extents or those that hold nothing.

        Returns:
            The new tail, with all its copies; None if not enough workers have room.
        """
        spec = parts[-1].info.spec
        for spare in parts[:-1]:
            if spec.replicas > 1 and is_empty(spare.info.extents[0]):
                promised = self._promise_all(_copies(parts, spare), request, caller)
                if promised is not None:
                    return promised
        held = {part.worker_id: part for part in parts}
        opening = types_pb2.AllocateRequest(
            session_id=key[1],
            # The reservation is on the workers that made it, and goes on counting there.
            spec=convert.spec_to_pb(replace(spec, reserve_tokens=None)),
            extent_starts=request.expected_lengths,
            epoch=request.epoch,
            group=max(part.info.extents[0].group for part in parts) + 1 if spec.replicas > 1 else 0,
        )
        grown, opened = list[Part](), list[Part]()
        for worker_id in self._directory.ranked():
            part = held.get(worker_id)
            if part is not None and (
                part is parts[-1] or not is_empty(part.info.extents[0]) or spec.replicas > 1
            ):
                continue  # it has positions already, which the new ones would not follow
            fresh: list[Part] = []
            try:
                if part is None:
                    answer = self._calls.ask(worker_id, "Allocate", opening, caller)
                    part = Part(worker_id, session_from_pb(answer.session))
                    fresh.append(part)
                    self._failpoints.passed("grow.opened")
                grown.append(self._promise(part, request, caller))
            except KVServiceError as error:
                self._leases.undo(key[1], fresh, caller)
                if not (_perhaps_elsewhere(error) or isinstance(error, SessionMoved)):
                    self._leases.undo(key[1], opened, caller)
                    raise
                continue
            opened += fresh
            if len(grown) == spec.replicas:
                self._directory.note(key, grown)
                return grown
        self._leases.undo(key[1], opened, caller)
        return None


def _copies(parts: Sequence[Part], of: Part) -> list[Part]:
    """Return a part with all its copies."""
    group = of.info.extents[0].group
    return [part for part in parts if group and part.info.extents[0].group == group] or [of]


def _perhaps_elsewhere(error: KVServiceError) -> bool:
    """Whether another worker may have what this one has not."""
    never_fits_here = isinstance(error, InvalidRequest) and "budget_bytes" in error.metadata
    if isinstance(error, Moving):
        return False  # it may be there
    full = isinstance(error, CapacityError) and not isinstance(error, QuotaExceeded)
    return full or never_fits_here or isinstance(error, (Unavailable, DeadlineExceeded))
