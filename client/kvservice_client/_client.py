"""Client: the way to a service, and what can be asked of it besides sessions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import NoReturn

from kvservice.core.errors import (
    AlreadyExists,
    InvalidRequest,
    KVServiceError,
    StaleEpoch,
    TooLarge,
    Unimplemented,
)
from kvservice.core.geometry import DEFAULT_PAGE_SIZE, LayerGeometry, LayerSpec
from kvservice.core.session import (
    DEFAULT_TTL_S,
    SessionInfo,
    SessionSpec,
    WorkerStats,
    check_session_id,
)
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire import convert
from kvservice_client._connections import FRONT, Connections
from kvservice_client._extents import adopt
from kvservice_client._fork import MAX_FORK_TRIES
from kvservice_client._leases import Leases
from kvservice_client._mirror import Mirror
from kvservice_client._session import Session


class Client:
    """A connection to a service: a manager with its workers, or a lone worker. Thread-safe.

    A context manager; `close` ends it. Sessions keep their client alive.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._leases = Leases(connections)
        self._finalizer = weakref.finalize(self, self._leases.close_soon)
        self._finalizer.atexit = False  # `Leases` sees to the process's end

    def open(
        self,
        *,
        num_rows: int,
        layers: Sequence[LayerSpec | LayerGeometry] | None = None,
        windows: Sequence[int | None] | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        max_tokens: int | None = None,
        reserve_tokens: int | None = None,
        ttl_s: float = DEFAULT_TTL_S,
        replicas: int = 1,
        spread: int = 1,
    ) -> Session:
        """Open a session.

        Args:
            num_rows: Sequences that step together.
            layers: Each layer's shape, where known beforehand. None: each layer's first tokens
                decide, and its pages are shared with nobody's pool but its forks'.
            windows: Each layer's window; None: all positions. Layers beyond: all positions.
            page_size: Tokens in a page.
            max_tokens: No row grows beyond. None: no bound.
            reserve_tokens: Room for so many tokens in each row is promised now.
            ttl_s: How long the session lives without any call; calls and renewals are the
                client's business while it lives. 1 s to 1 h.
            replicas: Copies of every page.
            spread: Workers that share the first tokens.

        Raises:
            OutOfPages: The reservation does not fit now.
            TooManySessions, QuotaExceeded, Draining, Unavailable.
        """
        spec = SessionSpec(
            num_rows=num_rows,
            layers=_layer_specs(layers, windows),
            page_size=page_size,
            max_tokens=max_tokens,
            reserve_tokens=reserve_tokens,
            ttl_s=ttl_s,
            replicas=replicas,
            spread=spread,
        )
        session_id = self._connections.new_id()
        request = types_pb2.AllocateRequest(session_id=session_id, spec=convert.spec_to_pb(spec))
        try:
            opened = self._connections.ask(FRONT, "Allocate", request).session
        except KVServiceError:
            self._leases.let_go(session_id, ttl_s)  # it may have been opened all the same
            raise
        return self._session(opened)

    def attach(self, session_id: str) -> Session:
        """Take a session over, where an earlier holder has left it.

        The earlier holder, if it still lives, gets StaleEpoch from now on. If a worker has died
        with a part of the session, its first call raises PagesLost; `Session.roll_back` says how
        many tokens still hold, and goes on from there.

        Raises:
            SessionNotFound: It was released, or its lease has expired.
            PagesLost: Workers have died with all of it.
            TooLarge: It has padding in too many places to be told. Nothing has changed.
        """
        request = types_pb2.AttachRequest(session_id=check_session_id(session_id))
        attached = self._connections.ask(FRONT, "Attach", request).session
        self._leases.hand_over(session_id)
        return self._session(attached)

    def fork(self, session_id: str, token_count: int | None = None) -> Session:
        """Open a session that shares another's pages, or the leading `token_count` of each row.

        The other one goes on undisturbed, whoever holds it. As `Session.fork`, by id.

        Raises:
            SessionNotFound, PositionOutOfRange.
            TooLarge: It has padding in too many places to be told.
        """
        looked_up = types_pb2.GetSessionRequest(session_id=check_session_id(session_id))
        for last in (False,) * (MAX_FORK_TRIES - 1) + (True,):
            parent = self._connections.ask(FRONT, "GetSession", looked_up).session
            child_id = self._connections.new_id()
            request = types_pb2.ForkRequest(
                session_id=session_id,
                epoch=parent.epoch,
                new_session_id=child_id,
                token_count=token_count,
            )
            try:
                child = self._connections.ask(FRONT, "Fork", request).session
                break
            except StaleEpoch:  # its holder has just changed it
                if last:
                    raise
            except KVServiceError as error:
                self._leases.let_go(child_id, DEFAULT_TTL_S)
                if last or not isinstance(error, AlreadyExists):  # it has moved before we knew
                    raise
        session = self._session(child)
        try:
            convert.session_from_pb(child).check_padding_listed()
        except TooLarge:
            session.release()
            raise
        return session

    def page_stats(self) -> list[WorkerStats]:
        """Return the numbers of all workers that can be reached."""
        answer = self._connections.ask(FRONT, "PageStats", types_pb2.PageStatsRequest())
        return [convert.stats_from_pb(stats) for stats in answer.workers]

    def list_workers(self) -> list[manager_pb2.WorkerInfo]:
        """Return what is known of each worker; see `WorkerInfo` in manager.proto."""
        if self._connections.lone_worker:
            return [convert.record_to_pb(stats, "") for stats in self.page_stats()]
        answer = self._connections.ask(FRONT, "ListWorkers", manager_pb2.ListWorkersRequest())
        return list(answer.workers)

    def workers_expected(self) -> int:
        """Return how many workers there should be, without those drained; 0: nobody knows."""
        if self._connections.lone_worker:
            return 1
        answer = self._connections.ask(FRONT, "ListWorkers", manager_pb2.ListWorkersRequest())
        return int(answer.expected_count)

    def drain_worker(self, worker_id: str, *, timeout_s: float = 300.0) -> manager_pb2.WorkerInfo:
        """Let a worker take no new sessions, and leave when those it has have moved or ended.

        For operators. Returns at once; `list_workers` shows the worker until it has left.

        Args:
            timeout_s: How long it waits for sessions that nobody has room for. What is left of
                them then is lost.

        Raises:
            WorkerNotFound: There is none of that name.
            PermissionDenied: The caller is no operator.
            Unimplemented: This is a lone worker, with nobody to tell it.
        """
        if self._connections.lone_worker:
            raise Unimplemented("a lone worker has no manager to tell it: end its process")
        request = manager_pb2.DrainWorkerRequest(
            worker_id=worker_id, timeout=convert.seconds_to_pb(timeout_s)
        )
        answer: manager_pb2.DrainWorkerResponse = self._connections.ask(
            FRONT, "DrainWorker", request
        )
        return answer.worker

    def move_session(
        self,
        session_id: str,
        worker_id: str,
        *,
        from_worker_id: str = "",
        timeout_s: float | None = None,
    ) -> SessionInfo:
        """Move a session to another worker while it is used, and wait until it is there.

        For operators. Whoever uses the session does not notice.

        Args:
            from_worker_id: Whose part of it, where several workers have one.
            timeout_s: None: the client's. When it is over the session may still move.

        Returns:
            The session as it is now.

        Raises:
            SessionNotFound, WorkerNotFound: There is none of that name.
            AlreadyExists: The worker holds the session, or a part of it.
            OutOfPages, TooManySessions, QuotaExceeded, Draining: The worker does not take it.
            Conflict: It is being moved elsewhere, changes faster than it can be copied, or the
                worker cannot reach the one that holds it.
            PagesLost: The worker that held it has died.
            PermissionDenied: The caller is no operator.
            Unimplemented: This is a lone worker.
        """
        if self._connections.lone_worker:
            raise Unimplemented("a lone worker has nobody to move a session to")
        request = manager_pb2.MoveSessionRequest(
            session_id=session_id, worker_id=worker_id, from_worker_id=from_worker_id
        )
        answer: manager_pb2.MoveSessionResponse = self._connections.ask(
            FRONT, "MoveSession", request, timeout_s=timeout_s
        )
        return convert.session_from_pb(answer.session)

    def list_sessions(self) -> list[SessionInfo]:
        """Return the caller's sessions; all of them for operators."""
        found: list[SessionInfo] = []
        request = types_pb2.ListSessionsRequest(page_size=convert.MAX_LIST_SIZE)
        while True:
            answer = self._connections.ask(FRONT, "ListSessions", request)
            found += [convert.session_from_pb(session) for session in answer.sessions]
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    def close(self) -> None:
        """Release the sessions that are still open, and end all connections."""
        self._finalizer.detach()
        self._leases.close(self._connections.config.timeout_s)
        self._connections.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvservice client of {self._connections.front}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client, and whatever has one, is not pickled: connect anew, and attach to sessions"
        )

    def _session(self, opened: types_pb2.Session) -> Session:
        mirror = Mirror(convert.session_from_pb(opened))
        told = self._connections.extents_of(opened)
        held = [one for one in told if one.incarnation]
        mirror.extents, mirror.spares = adopt((), held, mirror.longest(), mirror.spec.spread)
        for missing in told:
            if not missing.incarnation:
                mirror.miss(missing.starts)
        mirror.go_on_where_missing()
        return Session(self._connections, self._leases, mirror, self)


def use(client: Client | None) -> None:
    """Set the client that caches use where none is given. None: none is set any more."""
    global _current
    _current = client


def current_client() -> Client:
    """Return the client set by `use`.

    Raises:
        RuntimeError: None is set.
    """
    if _current is None:
        raise RuntimeError(
            "no client: pass client=..., or set one for all with "
            "kvservice_client.use(kvservice_client.connect(address))"
        )
    return _current


_current: Client | None = None


def _layer_specs(
    layers: Sequence[LayerSpec | LayerGeometry] | None, windows: Sequence[int | None] | None
) -> tuple[LayerSpec, ...]:
    stated = [
        LayerSpec(geometry=layer) if isinstance(layer, LayerGeometry) else layer
        for layer in layers or ()
    ]
    if windows is None:
        return tuple(stated)
    if stated and len(windows) != len(stated):
        raise InvalidRequest(f"windows must be one for each of {len(stated)} layers")
    if any(layer.window is not None for layer in stated):
        raise InvalidRequest("state windows in `layers` or in `windows`, not in both")
    if not stated:
        return tuple(LayerSpec(window=window) for window in windows)
    return tuple(
        replace(layer, window=window) for layer, window in zip(stated, windows, strict=True)
    )
