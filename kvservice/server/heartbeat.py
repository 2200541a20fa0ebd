"""What a worker tells the manager, message by message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.liveness import WorkerView
from kvservice.core.session import EndedSession, SessionInfo
from kvservice.core.tenancy import Use
from kvservice.v1 import manager_pb2, types_pb2
from kvservice.wire import convert

MAX_SESSIONS: Final = 4000
"""Sessions in one message; more go into the next ones, which follow at once."""


class Releasing(Protocol):
    """What frees sessions, up to an epoch of each."""

    def release(self, tenant: str, session_ids: Mapping[str, int]) -> int: ...


class Reporting(Protocol):
    """What heartbeats need of a worker."""

    @property
    def leases(self) -> Releasing: ...

    def view(self, metrics_address: str) -> WorkerView: ...

    def changes_since(
        self, cursor: int
    ) -> tuple[int, list[tuple[str, SessionInfo]], list[EndedSession]]: ...

    def limited_tenants(self) -> dict[str, int]: ...

    def used_elsewhere(self, use: Mapping[str, Use]) -> None: ...


class Tokens(Protocol):
    """What heartbeats need of a guard: the tokens behind what it has issued."""

    def in_use(self) -> list[bytes]: ...

    def settle(self, asked: Sequence[bytes], ended: Iterable[bytes]) -> None: ...


class HeartbeatSource:
    """Makes the messages of one stream after the other. Not thread-safe."""

    def __init__(
        self,
        worker: Reporting,
        metrics_address: str = "",
        *,
        tokens: Tokens | None = None,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        """
        Args:
            tokens: None: nobody is asked who they are.
        """
        self._worker = worker
        self._tokens = tokens
        self._asked: list[bytes] = []
        self._is_first = False  # of the messages of one heartbeat
        self._failpoints = failpoints
        self._metrics_address = metrics_address
        self._cursor = 0
        self._known_manager = ""

    def answered(self, answer: manager_pb2.HeartbeatResponse) -> None:
        """Note who has answered, to be told to whoever comes after it; free what was left behind.

        An answer may be late: what has gone on here meanwhile stays.
        """
        self._known_manager = answer.manager_incarnation
        if self._tokens is not None:
            self._tokens.settle(self._asked, answer.ended_token_ids)
            self._asked = []
        if self._is_first:
            self._is_first = False
            self._worker.used_elsewhere(
                {
                    one.tenant: Use(one.session_count, one.page_count)
                    for one in answer.used_elsewhere
                }
            )
        for report in answer.left_behind:
            if report.session.epoch > 0:
                epochs = {report.session.session_id: report.session.epoch}
                self._worker.leases.release(report.tenant, epochs)

    def farewell(self) -> manager_pb2.HeartbeatRequest:
        """Return the last message of a worker that leaves."""
        worker = convert.view_to_pb(self._worker.view(self._metrics_address))
        return manager_pb2.HeartbeatRequest(worker=worker, leaving=True)

    def begin(self) -> None:
        """Begin a new stream: the next message lists all sessions."""
        self._cursor = 0

    def messages(self) -> Iterator[manager_pb2.HeartbeatRequest]:
        """Yield what has changed since the last time: at least one message, to be sent in order."""
        self._failpoints.passed("heartbeat.sending")
        self._cursor, changed, ended = self._worker.changes_since(self._cursor)
        worker = convert.view_to_pb(self._worker.view(self._metrics_address))
        reports = [convert.report_to_pb(tenant, info) for tenant, info in changed]
        ends = [_ended(one) for one in ended]
        self._asked = [] if self._tokens is None else self._tokens.in_use()
        self._is_first = True
        yield manager_pb2.HeartbeatRequest(
            worker=worker,
            token_ids=self._asked,
            limited_tenants=[
                manager_pb2.TenantUse(tenant=tenant, page_count=pages)
                for tenant, pages in self._worker.limited_tenants().items()
            ],
            sessions=reports[:MAX_SESSIONS],
            ended_sessions=ends,
            known_manager=self._known_manager,
        )
        for start in range(MAX_SESSIONS, len(reports), MAX_SESSIONS):
            more = reports[start : start + MAX_SESSIONS]
            yield manager_pb2.HeartbeatRequest(worker=worker, sessions=more)


def _ended(ended: EndedSession) -> manager_pb2.SessionReport:
    session = types_pb2.Session(session_id=ended.session_id)
    return manager_pb2.SessionReport(tenant=ended.tenant, session=session, expired=ended.expired)
