"""Where sessions go: opening them, and giving them room on further workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvservice.core.caller import Caller
from kvservice.core.directory import SessionKey, WorkerState
from kvservice.core.errors import (
    AlreadyExists,
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KVServiceError,
    OutOfPages,
    PagesLost,
    QuotaExceeded,
    Unavailable,
    WorkerLost,
)
from kvservice.core.extents import is_empty, merge_sessions, row_lengths
from kvservice.core.session import SessionInfo, SessionSpec
from kvservice.manager.routes import Part, Routes, copy_of
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice.wire.convert import session_from_pb


def open_session(routes: Routes, key: SessionKey, spec: SessionSpec, caller: Caller) -> list[Part]:
    """Open a session on `spec.spread` workers, or find it where it has been opened already.

    Raises:
        AlreadyExists: The id is in use for another request.
        OutOfPages, Draining, Unavailable, ...: Not enough workers took it. Nothing has changed.
    """
    request = types_pb2.AllocateRequest(session_id=key[1], spec=convert.spec_to_pb(spec))
    holders = routes.holders(key)
    if holders:
        _check_repeat(routes, holders, request, caller)
        try:
            return routes.parts(key, caller)
        except PagesLost as error:
            # It may as well have been opened in part only, with nothing there to be lost.
            raise WorkerLost(
                "not all workers of the session can be had: open another one", retry_delay_s=1.0
            ) from error
    placed: list[Part] = []
    failures: list[KVServiceError] = []
    for worker_id in routes.ranked():
        try:
            answer = routes.ask(worker_id, "Allocate", request, caller)
        except KVServiceError as error:
            if not _perhaps_elsewhere(error):
                routes.undo(key[1], placed, caller)
                raise
            failures.append(error)
            continue
        placed.append(Part(worker_id, session_from_pb(answer.session)))
        if len(placed) == spec.spread:
            routes.passed("open.placed")
            routes.note(key, placed, settle=True)
            return placed
    routes.undo(key[1], placed, caller)
    raise _no_place(routes, failures, spec.spread)


def grow(
    routes: Routes, key: SessionKey, request: types_pb2.AppendRequest, caller: Caller
) -> SessionInfo:
    """Promise a session room for more tokens: at its tail, or on another worker.

    Returns:
        The session with all its extents, the one that has made the promise last.

    Raises:
        OutOfPages: No worker has room. Nothing has changed.
        SessionNotFound, StaleEpoch, Conflict, PositionOutOfRange, PagesLost.
    """
    # An empty session's holder knows that it is empty.
    keep_at_most = None if any(request.expected_lengths) else 0
    parts = routes.parts(key, caller, keep_at_most=keep_at_most)
    merge_sessions([part.info for part in parts])
    _check_lengths(parts, request)
    try:
        grown = _promise(routes, parts[-1], request, caller)
    except OutOfPages:
        extended = _extend(routes, key, parts, request, caller)
        if extended is None:
            raise
        grown = extended
    _announce(routes, parts, grown, request, caller)
    now = [part for part in parts if part.worker_id != grown.worker_id] + [grown]
    # Explicitly in this order: an extent without a start is not told from a closed one.
    extents = tuple(part.info.extents[0] for part in now)
    return replace(merge_sessions([part.info for part in now]), extents=extents)


def _check_lengths(parts: Sequence[Part], request: types_pb2.AppendRequest) -> None:
    """Refuse to grow a session of which more is stored, or less found, than its holder says."""
    expected = tuple(request.expected_lengths)
    stored = row_lengths([part.info.extents[0] for part in parts])
    if (stored or (0,) * len(expected)) != expected:
        raise Conflict(
            f"expected_lengths are {list(expected)}, stored are {list(stored)}",
            lengths=",".join(map(str, stored)),
        )


def _announce(
    routes: Routes,
    parts: Sequence[Part],
    grown: Part,
    request: types_pb2.AppendRequest,
    caller: Caller,
) -> None:
    """Tell the worker with the last tokens where the next ones will be, before there are any.

    Otherwise nobody could tell afterwards that they are missing.
    """
    follower = grown.info.extents[0].incarnation
    holding = [part for part in parts if not is_empty(part.info.extents[0])]
    if not holding or holding[-1].worker_id == grown.worker_id:
        return
    if holding[-1].info.extents[0].followed_by != follower:
        routes.passed("grow.promised")
        note = types_pb2.AppendRequest(
            session_id=request.session_id, epoch=request.epoch, followed_by=follower
        )
        routes.ask(holding[-1].worker_id, "Append", note, caller)


def _promise(routes: Routes, part: Part, request: types_pb2.AppendRequest, caller: Caller) -> Part:
    """Promise room on one worker. An extent without a start counts from 0."""
    if not part.info.extents[0].starts:
        request = copy_of(request, expected_lengths=[0] * len(request.expected_lengths))
    answer = routes.ask(part.worker_id, "Append", request, caller)
    return Part(part.worker_id, session_from_pb(answer.session))


def _extend(
    routes: Routes,
    key: SessionKey,
    parts: Sequence[Part],
    request: types_pb2.AppendRequest,
    caller: Caller,
) -> Part | None:
    """Promise room on another worker than the tail, in a new extent or in one without a start.

    Returns:
        The new tail; None if no worker has room.
    """
    held = {part.worker_id: part for part in parts}
    # The reservation is on the workers that made it, and goes on counting there.
    spec = replace(parts[-1].info.spec, reserve_tokens=None)
    opening = types_pb2.AllocateRequest(
        session_id=key[1],
        spec=convert.spec_to_pb(spec),
        extent_starts=request.expected_lengths,
        epoch=request.epoch,
    )
    for worker_id in routes.ranked():
        part, opened = held.get(worker_id), None
        if part is parts[-1] or (part is not None and part.info.extents[0].starts):
            continue  # it has positions already, which the new ones would not follow
        try:
            if part is None:
                answer = routes.ask(worker_id, "Allocate", opening, caller)
                part = opened = Part(worker_id, session_from_pb(answer.session))
                routes.passed("grow.opened")
            grown = _promise(routes, part, request, caller)
        except KVServiceError as error:
            if opened is not None:
                routes.undo(key[1], [opened], caller)
            if not _perhaps_elsewhere(error):
                raise
            continue
        routes.note(key, [grown])
        return grown
    return None


def _check_repeat(
    routes: Routes, holders: Sequence[str], request: types_pb2.AllocateRequest, caller: Caller
) -> None:
    """Let the holders say whether this is the request that opened the session."""
    refusals: list[AlreadyExists] = []
    for worker_id in holders:
        try:
            routes.ask(worker_id, "Allocate", request, caller)
        except AlreadyExists as error:
            refusals.append(error)  # or it holds an extent that came later
    if len(refusals) == len(holders):
        raise refusals[0]


def _perhaps_elsewhere(error: KVServiceError) -> bool:
    """Whether another worker may have what this one has not."""
    never_fits_here = isinstance(error, InvalidRequest) and "budget_bytes" in error.metadata
    full = isinstance(error, CapacityError) and not isinstance(error, QuotaExceeded)
    return full or never_fits_here or isinstance(error, (Unavailable, DeadlineExceeded))


def _no_place(
    routes: Routes, failures: Sequence[KVServiceError], num_workers: int
) -> KVServiceError:
    """Return the error that says best why a session got no place."""
    for cls in (OutOfPages, CapacityError, Unavailable, DeadlineExceeded, InvalidRequest):
        for failure in failures:
            if isinstance(failure, cls):
                return failure
    states = [view.state for view in routes.workers()]
    if states and all(state is WorkerState.DRAINING for state in states):
        return Draining("every worker is leaving", retry_delay_s=1.0)
    alive = states.count(WorkerState.ALIVE)
    return Unavailable(
        f"the session needs {num_workers} workers, {alive} can be had now", retry_delay_s=1.0
    )
