"""The manager's status page: what `kvservice top` shows, in a browser. Read-only.

The page itself holds nothing and is for everybody who reaches the port. Its numbers are for
those who may read numbers over gRPC: where tokens are in use, for operators' and metrics' ones,
presented as a bearer token. Where callers are told by certificates alone, which this port does not
ask for, and where authentication is off, they are for this machine, or for those whom the operator
has let reach the port by binding it elsewhere.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from ipaddress import ip_address
from typing import Any, Final

from kvservice import __version__
from kvservice.clock import Clock
from kvservice.core.board import Member, Reading, json_of, make_board
from kvservice.core.caller import ANONYMOUS, Caller
from kvservice.core.errors import KVServiceError
from kvservice.core.session import SessionInfo, WorkerStats
from kvservice.manager import PageManager
from kvservice.metrics.endpoint import Page
from kvservice.runtime.numbers import refusal_of
from kvservice.v1 import types_pb2
from kvservice.wire import convert

MIN_AGE_S: Final = 0.5
"""However many look, workers are asked this often at most."""

MAX_SESSIONS: Final = 200
_ASSETS: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
}
_HEADERS: Final = (
    # Nothing from anywhere else, and nothing inline: what the service says is never run.
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)


class StatusPage:
    """Serves the page and its numbers. Thread-safe.

    Args:
        address: Where the manager serves.
        find_caller: Returns whose token it is; None: nobody's. None instead of it: there are no
            tokens.
        is_guarded: Whether callers must say who they are.
    """

    def __init__(
        self,
        manager: PageManager,
        address: str,
        *,
        clock: Clock,
        find_caller: Callable[[str], Caller | None] | None,
        is_guarded: bool,
    ) -> None:
        self._manager = manager
        self._address = address
        self._clock = clock
        self._find_caller = find_caller
        self._is_guarded = is_guarded
        self._started_at = clock.monotonic()
        self._lock = threading.Lock()
        self._before: Reading | None = None
        self._latest: dict[str, Any] = {}
        self._read_at = float("-inf")

    def pages(self) -> Mapping[str, Page]:
        """Return what is served, by path."""
        folder = resources.files("kvservice.runtime") / "page"
        assets = {
            path: _asset((folder / name).read_bytes(), kind)
            for path, (name, kind) in _ASSETS.items()
        }
        return {**assets, "/status.json": self._serve_numbers}

    def numbers(self) -> dict[str, Any]:
        """Return all that the page shows, at most `MIN_AGE_S` old."""
        with self._lock:
            if self._clock.monotonic() - self._read_at >= MIN_AGE_S:
                self._latest = self._read()
                self._read_at = self._clock.monotonic()
            return self._latest

    def _read(self) -> dict[str, Any]:
        membership = self._manager.membership()
        members = [
            Member(view.record.worker_id, view.state.value, view.record.address, view.num_sessions)
            for view in membership.workers
        ]
        answer = self._manager.page_stats(types_pb2.PageStatsRequest(), ANONYMOUS)
        stats = [convert.stats_from_pb(worker) for worker in answer.workers]
        now = Reading(self._clock.monotonic(), members, stats)
        board = make_board(now, self._before, expected=membership.expected)
        self._before = now
        recovery = membership.recovery
        return {
            "service": {
                "version": __version__,
                "address": self._address,
                "expectedWorkers": membership.expected,
                "uptimeSeconds": self._clock.monotonic() - self._started_at,
                "takenOver": None if recovery is None else recovery.outcome,
            },
            **json_of(board),
            "pools": {worker.worker_id: _pools(worker) for worker in stats},
            "sessions": self._sessions(),
            "events": [
                {"at": event.at, "workerId": event.worker_id, "text": event.text}
                for event in reversed(self._manager.events())
            ],
        }

    def _sessions(self) -> list[dict[str, Any]]:
        request = types_pb2.ListSessionsRequest(page_size=MAX_SESSIONS)
        try:
            answer = self._manager.list_sessions(request, ANONYMOUS)
        except KVServiceError:  # a worker does not answer just now
            return []
        return [_session(convert.session_from_pb(session)) for session in answer.sessions]

    def _serve_numbers(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        refusal = self._refusal(environ)
        kind = ("Content-Type", "application/json")
        if refusal is not None:
            start(refusal, [kind, ("WWW-Authenticate", "Bearer"), *_HEADERS])
            return [json.dumps({"error": refusal}).encode()]
        body = json.dumps(self.numbers()).encode()
        start("200 OK", [kind, *_HEADERS])
        return [body]

    def _refusal(self, environ: Mapping[str, Any]) -> str | None:
        """Return why these numbers are not for whoever asks; None: they are."""
        if self._find_caller is not None:
            return refusal_of(environ, self._find_caller)
        if self._is_guarded and (refusal := refusal_of(environ, None)) is not None:
            return refusal
        # Else a page from elsewhere could read them, by a name that it lets lead here.
        host = environ.get("HTTP_HOST", "")
        return None if _is_literal(host) else "403 Forbidden"


def _asset(content: bytes, kind: str) -> Page:
    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        del environ
        start("200 OK", [("Content-Type", kind), *_HEADERS])
        return [content]

    return serve


def _pools(worker: WorkerStats) -> list[dict[str, int]]:
    return [
        {
            "pool": pool.pool,
            "used": pool.used_pages,
            "reserved": pool.reserved_pages,
            "free": pool.free_pages,
            "pageBytes": pool.page_bytes,
            "pageTokens": pool.page_size,
            "tokens": pool.num_tokens,
        }
        for pool in worker.pools
    ]


def _session(session: SessionInfo) -> dict[str, Any]:
    """Return what is shown of a session; of its id as much as tells it from others."""
    return {
        "id": session.session_id[:8],
        "rows": session.spec.num_rows,
        "longest": max((length for layer in session.lengths for length in layer), default=0),
        "epoch": session.epoch,
        "step": session.step,
        "workers": [extent.worker_id for extent in session.extents],
    }


def _is_literal(host: str) -> bool:
    """Whether a Host header names an address, or this machine: no name that others control."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
