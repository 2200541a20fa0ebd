"""More calls than there are places: refused as they arrive, unread, while those let in go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.clock import ManualClock
from kvservice.config import ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.worker import WorkerServer
from kvservice.server.health import CHECK
from kvservice.v1 import types_pb2
from kvservice.wire.names import WORKER
from tests import raw_http2
from tests.raw_http2 import RawConnection, frame, request_headers
from tests.securing import Folder
from tests.serving import Peer, allocate_request, new_id, scrape, spec, until, worker_peer

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LIMITS = ServerLimits(max_streams=2, unary_threads=2, queued_calls=2, default_deadline_s=30.0)
GET = f"/{WORKER.full_name}/GetSession"
UNAUTHENTICATED = b"grpc-status\x0216"  # a literal: its length, and 16


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    settings = WorkerSettings("w0", 1 << 22, metrics_port=0, limits=LIMITS)
    with WorkerServer(settings, clock=ManualClock()) as server:
        yield server
        server.worker.check()


@pytest.fixture
def peer(server: WorkerServer) -> Iterator[Peer]:
    with worker_peer(server.address) as peer:
        yield peer


def handled(server: WorkerServer, code: str, method: str = "GetSession") -> float:
    samples = scrape(str(server.metrics_address))
    return sum(
        value
        for name, value in samples.items()
        if name.startswith("grpc_server_handled_total")
        and f'grpc_method="{method}"' in name
        and f'grpc_code="{code}"' in name
    )


def test_calls_beyond_threads_and_queue_are_refused_at_once(
    server: WorkerServer, peer: Peer
) -> None:
    """With every thread at work and the queue full: no thread is needed to refuse, nor for health,
    and what was let in is served."""
    session_id = new_id()
    peer.call("Allocate", allocate_request(session_id, spec()))
    going_on, working = threading.Event(), threading.Semaphore(0)
    get = server.worker.access.get

    def slow(*args: Any, **kwargs: Any) -> object:
        working.release()
        assert going_on.wait(20)
        return get(*args, **kwargs)

    server.worker.access.get = slow  # type: ignore[method-assign,assignment]
    request = types_pb2.GetSessionRequest(session_id=session_id)
    with ThreadPoolExecutor(LIMITS.unary_threads + LIMITS.queued_calls) as pool:
        try:
            let_in = [pool.submit(peer.call, "GetSession", request, 20.0) for _ in range(4)]
            for _ in range(LIMITS.unary_threads):
                assert working.acquire(timeout=10)
            until(lambda: scrape(str(server.metrics_address))[QUEUE] == LIMITS.queued_calls)
            with pytest.raises(errors.Overloaded) as caught:
                peer.call("GetSession", request)
            assert caught.value.metadata["limit"] == "4"
            assert caught.value.retry_delay_s == 0.2
            stub = health_pb2_grpc.HealthStub(peer.channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        finally:
            going_on.set()
        assert [one.result().session.session_id for one in let_in] == [session_id] * 4
    assert peer.call("GetSession", request).session.session_id == session_id
    assert handled(server, "RESOURCE_EXHAUSTED") == 1


QUEUE = 'kvservice_queue_depth{worker="w0"}'


def test_requests_that_never_come_give_their_places_back(server: WorkerServer, peer: Peer) -> None:
    """Calls that are begun, and then say nothing, wait no longer than the default deadline."""
    session_id = new_id()
    peer.call("Allocate", allocate_request(session_id, spec(ttl_s=3600.0)))
    request = types_pb2.GetSessionRequest(session_id=session_id)

    def is_full() -> bool:
        try:
            peer.call("GetSession", request, 0.2)
        except errors.Overloaded:
            return True
        except errors.DeadlineExceeded:  # there was a place, and no thread
            pass
        return False

    def ended() -> float:
        return handled(server, "CANCELLED") + handled(server, "DEADLINE_EXCEEDED")

    with RawConnection(server.address) as connection:
        connection.begin()
        block = request_headers(GET, server.address)
        opened = range(1, 2 * (LIMITS.unary_threads + LIMITS.queued_calls), 2)
        for stream in opened:
            connection.send(frame(raw_http2.HEADERS, raw_http2.END_HEADERS, stream, block))
        until(is_full)
        until(lambda: _later(server) or _answers(peer, request))
        # Those that waited for a thread meanwhile have begun later, with a time of their own.
        until(lambda: _later(server) or ended() >= len(opened))


def _later(server: WorkerServer) -> None:
    server._clock.advance(LIMITS.default_deadline_s)  # type: ignore[attr-defined]


def _answers(peer: Peer, request: types_pb2.GetSessionRequest) -> bool:
    try:
        return bool(peer.call("GetSession", request, 0.5).session.session_id)
    except (errors.Overloaded, errors.DeadlineExceeded, errors.Unavailable):
        return False


def test_strangers_are_turned_away_before_they_have_said_anything(tmp_path: Path) -> None:
    """Who calls is asked first: a call without a credential is answered without its request."""
    folder = Folder(tmp_path)
    settings = WorkerSettings("w0", 1 << 22, limits=LIMITS, security=folder.security())
    with WorkerServer(settings) as server, RawConnection(server.address) as connection:
        connection.begin()
        block = request_headers(
            f"/{WORKER.full_name}/ListSessions",
            server.address,
            authorization="Bearer guess-guess-guess",
        )
        connection.send(frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, block))
        for kind, flags, stream, payload in connection.frames():
            if kind == raw_http2.HEADERS and stream == 1 and flags & raw_http2.END_STREAM:
                assert UNAUTHENTICATED in payload
                return
        pytest.fail("the connection has ended")


def test_health_is_small(peer: Peer) -> None:
    """It is for everybody: a long request is refused, and nothing can be held open."""
    with pytest.raises(grpc.RpcError) as long:
        peer.channel.unary_unary(CHECK)(b"\x0a\x80\x10" + b"x" * 2048, timeout=10)
    assert long.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as nonsense:
        peer.channel.unary_unary(CHECK)(b"\xff\xff", timeout=10)
    assert nonsense.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    watch = health_pb2_grpc.HealthStub(peer.channel).Watch
    with pytest.raises(grpc.RpcError) as held:
        next(watch(health_pb2.HealthCheckRequest(), timeout=10))
    assert held.value.code() is grpc.StatusCode.UNIMPLEMENTED
