"""Calls that are bad, as functions of a running service: what `test_bad_inputs` is made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvservice.config import ConfigError, Security, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.core.errors import KVServiceError
from kvservice.core.session import SessionInfo, WorkerStats
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import status
from kvservice.wire.names import MANAGER, WORKER
from tests import raw_http2
from tests.raw_http2 import RawConnection, frame, request_headers
from tests.securing import Folder
from tests.serving import (
    Peer,
    allocate_request,
    attend_call,
    new_id,
    scrape,
    spec,
    until,
    worker_peer,
)

LIMITS = ServerLimits(
    max_frame_bytes=1 << 20,
    fragment_bytes=1 << 14,
    max_message_bytes=1 << 22,
    max_streams=4,
    unary_threads=4,
)
NUM_PAGES = 64
QUOTAS = "[tenants.small]\nsessions = 2\nrows = 2\npages = 2\ntokens = 40\n"
MAX_GROWTH_BYTES = 96 << 20
"""What the whole catalogue may leave in the process, which is client and servers together."""


@dataclass
class Bench:
    """A service, and the session that all bad calls are about."""

    manager: ManagerServer
    worker: WorkerServer
    peer: Peer
    front: Peer
    session_id: str = ""
    folder: Folder | None = None

    def open(self) -> None:
        """Open the session, with 20 tokens in its one layer."""
        self.session_id = new_id()
        opened = spec(ttl_s=3600.0, max_tokens=200)
        self.front.call("Allocate", allocate_request(self.session_id, opened))
        self.peer.attend_once(attend_call(self.session_id, 0, 20, step=1))

    def state(self) -> tuple[Any, ...]:
        """Return all that bad input must leave alone."""
        stats: WorkerStats = self.worker.worker.stats()
        listed: list[tuple[str, SessionInfo]] = self.worker.worker.list_sessions(None)
        pools = [(p.used_pages, p.reserved_pages, p.num_tokens) for p in stats.pools]
        return stats.num_sessions, stats.used_bytes, stats.appended_tokens, pools, listed

    def samples(self, name: str, **labels: str) -> float:
        """Return the sum of the worker's samples of a metric that have these labels."""
        found = scrape(str(self.worker.metrics_address))
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for key, value in found.items()
            if key.partition("{")[0] == name and all(one in key for one in wanted)
        )

    def open_streams(self) -> float:
        started = self.samples("grpc_server_started_total", grpc_method="Attend")
        return started - self.samples("grpc_server_handled_total", grpc_method="Attend")

    def check_serving(self) -> None:
        """Make good calls."""
        found = self.front.call(
            "GetSession", types_pb2.GetSessionRequest(session_id=self.session_id)
        )
        assert list(found.session.layers[0].lengths) == [20]
        call = attend_call(self.session_id, 0, 20, step=1)  # again: the same bytes
        assert self.peer.attend_once(call).HasField("out")


# -- how calls are made

Bad = Callable[[Bench], None]
"""Does something bad, and raises what it is told: an error of ours, or of gRPC's."""


def code_of(bad: Callable[[], Any]) -> tuple[str, KVServiceError | None]:
    try:
        bad()
    except KVServiceError as error:
        return error.code.name, error
    except grpc.RpcError as error:
        told = status.from_rpc_error(error)
        code: str = error.code().name  # type: ignore[attr-defined]
        return code, told
    return "OK", None


def unary(method: str, request: Any, *, front: bool = False) -> Bad:
    """Return a call of the worker, or of the manager."""

    def run(bench: Bench) -> None:
        made = request(bench) if callable(request) else request
        (bench.front if front else bench.peer).call(method, made)

    return run


def attend(**changes: Any) -> Bad:
    """Return a good next Attend of one token, changed. `k.shape=[...]` is written k__shape."""

    def run(bench: Bench) -> None:
        call = attend_call(bench.session_id, 20, 1, step=2)
        for name, value in changes.items():
            change(call, name.split("__"), value)
        bench.peer.attend_once(call)

    return run


def change(message: Any, path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        message = getattr(message, parent)
    if value is None:
        message.ClearField(last)
    elif isinstance(value, list):
        getattr(message, last)[:] = value
    else:
        setattr(message, last, value)


def pop(**fields: Any) -> Bad:
    good = {"epoch": 1, "keep": [10], "expected_lengths": [20]}
    return unary(
        "Pop", lambda b: types_pb2.PopRequest(session_id=b.session_id, **{**good, **fields})
    )


def allocate(session_id: str | None = None, *, front: bool = True, **fields: Any) -> Bad:
    """Return an Allocate whose spec has these fields of the message."""

    def request(bench: Bench) -> types_pb2.AllocateRequest:
        made = allocate_request(session_id if session_id is not None else new_id(), spec())
        for name, value in fields.items():
            change(made, name.split("__"), value)
        return made

    return unary("Allocate", request, front=front)


def as_tenant(tenant: str, run: Callable[[Peer], Any]) -> Bad:
    def asked(bench: Bench) -> None:
        with worker_peer(bench.worker.address, tenant) as peer:
            run(peer)

    return asked


def raw(path: str, payload: bytes = b"", **options: Any) -> Bad:
    def run(bench: Bench) -> None:
        bench.peer.channel.unary_unary(path)(payload, timeout=20, **options)

    return run


GET = f"/{WORKER.full_name}/GetSession"


def streams(bench: Bench) -> None:
    """Open one stream more than there may be."""
    method = bench.peer.channel.stream_stream(
        f"/{WORKER.full_name}/Attend", None, worker_pb2.AttendResponse.FromString
    )
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield worker_pb2.AttendRequest(call=worker_pb2.AttendCall(call_id=1)).SerializeToString()
        hold.wait(20)

    opened = [method(requests(), timeout=30) for _ in range(LIMITS.max_streams)]
    try:
        for call in opened:
            next(call)  # it is served, so it counts
        next(method(requests(), timeout=30))
    finally:
        hold.set()
        for call in opened:
            call.cancel()
        until(lambda: bench.open_streams() == 0, 5.0)


def overdue(bench: Bench) -> None:
    """Ask for something that waits, with too little time."""
    [session] = [
        one for one in bench.worker.worker._sessions.all() if one.key[1] == bench.session_id
    ]
    with session.lock:
        done = threading.Event()
        failure: list[BaseException] = []

        def ask() -> None:
            try:
                request = types_pb2.GetSessionRequest(session_id=bench.session_id)
                bench.peer.call("GetSession", request, 0.3)
            except BaseException as error:
                failure.append(error)
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(10)
    raise failure[0]


def cancelled(bench: Bench) -> None:
    """Go away in the middle of a stream; the server notices, and counts it."""

    def counted() -> float:
        return bench.samples(
            "grpc_server_handled_total", grpc_method="Attend", grpc_code="CANCELLED"
        )

    before = counted()
    method = bench.peer.channel.stream_stream(
        f"/{WORKER.full_name}/Attend", None, worker_pb2.AttendResponse.FromString
    )
    hold = threading.Event()

    def requests() -> Iterator[bytes]:
        yield worker_pb2.AttendRequest(call=worker_pb2.AttendCall(call_id=1)).SerializeToString()
        hold.wait(20)

    call = method(requests(), timeout=30)
    next(call)
    call.cancel()
    hold.set()
    until(lambda: bench.open_streams() == 0, 5.0)
    until(lambda: counted() > before, 5.0)  # it is counted a moment after it has been closed
    next(call)


def closed(first: bytes) -> Bad:
    """Return: connect, say something, and be hung up on. Raises Unavailable then."""

    def run(bench: Bench) -> None:
        with RawConnection(bench.worker.address) as connection:
            connection.send(first)
            if connection.is_closed():
                raise errors.Unavailable("the server has closed the connection")

    return run


def flood(bench: Bench) -> None:
    """Send pings without end. Raises Unavailable once the server asks for calm."""
    with RawConnection(bench.worker.address) as connection:
        connection.begin()
        try:
            for _ in range(40):
                connection.send(*[frame(raw_http2.PING, 0, 0, bytes(8))] * 50)
        except ConnectionError:
            raise errors.Unavailable("the server has closed the connection") from None
        for kind, _, _, payload in connection.frames():
            if kind == raw_http2.GOAWAY:
                assert raw_http2.goaway_code(payload) == raw_http2.ENHANCE_YOUR_CALM
                raise errors.Unavailable("the server has asked for calm")


def rapid_reset(bench: Bench) -> None:
    """Open a thousand streams and reset each at once, beside others who are served."""
    with RawConnection(bench.worker.address) as connection:
        connection.begin()
        block = request_headers(GET, bench.worker.address)
        try:
            for number in range(1000):
                connection.send(
                    frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 2 * number + 1, block),
                    frame(
                        raw_http2.RST_STREAM,
                        0,
                        2 * number + 1,
                        raw_http2.CANCEL.to_bytes(4, "big"),
                    ),
                )
        except ConnectionError:
            raise errors.Unavailable("the server has closed the connection") from None
        for _ in range(20):
            bench.check_serving()


def unknown_encoding(bench: Bench) -> None:
    """Say that the message is compressed in a way that nobody knows."""
    with RawConnection(bench.worker.address) as connection:
        connection.begin()
        block = request_headers(GET, bench.worker.address, grpc_encoding="nonsense")
        message = b"\x01" + (3).to_bytes(4, "big") + b"abc"
        connection.send(
            frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, block),
            frame(raw_http2.DATA, raw_http2.END_STREAM, 1, message),
        )
        for kind, flags, stream, payload in connection.frames():
            ends = kind == raw_http2.HEADERS and stream == 1 and flags & raw_http2.END_STREAM
            # A literal in the trailers: its name, the length of its value, and 13.
            if ends and b"grpc-status\x0213" in payload:
                raise errors.InternalError("the server does not know this encoding")


def conversation(*frames_of: Any) -> Bad:
    """Return a stream of these frames, made of the bench; its first error is the answer."""

    def run(bench: Bench) -> None:
        made = [one(bench) if callable(one) else one for one in frames_of]
        sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in made]
        for answer in bench.peer.attend(sent):
            if answer.result.HasField("error"):
                raise status.from_status(answer.result.error)

    return run


def part(data: bytes, total: int, *, last: bool = False) -> worker_pb2.AttendRequest:
    fragment = types_pb2.Fragment(data=data, total_bytes=total, last=last)
    return worker_pb2.AttendRequest(fragment=fragment)


def again(**changes: Any) -> Callable[[Bench], worker_pb2.AttendRequest]:
    """Return the session's last append once more, changed."""

    def make(bench: Bench) -> worker_pb2.AttendRequest:
        call = attend_call(bench.session_id, 0, 20, step=1)
        for name, value in changes.items():
            change(call, name.split("__"), value)
        return worker_pb2.AttendRequest(call=call)

    return make


def without_header(bench: Bench) -> worker_pb2.AttendRequest:
    call = attend_call(bench.session_id, 20, 1, step=2)
    call.ClearField("header")
    return worker_pb2.AttendRequest(call=call)


def on_every_method(payload: bytes, *, but: tuple[str, ...] = ()) -> Bad:
    """Return the same bytes on each unary RPC of both services; all must answer alike."""

    def run(bench: Bench) -> None:
        told: list[KVServiceError] = []
        for service, peer in ((WORKER, bench.peer), (MANAGER, bench.front)):
            for method in service.methods:
                streams = method.client_streaming or method.server_streaming
                if streams or method.name in but:
                    continue
                code, error = code_of(lambda p=peer, m=method.name: p.call(m, payload))
                assert code == "INVALID_ARGUMENT", (method.full_name, code, error)
                assert error is not None
                told.append(error)
        raise told[0]

    return run


# What an empty request is good for.
EMPTY_IS_GOOD = ("PageStats", "ListSessions", "OpenLane", "ListWorkers")


def concurrent(bench: Bench) -> None:
    """Append twice at once, other bytes each; whoever comes second is told. Then undo it."""
    outcomes: list[tuple[str, KVServiceError | None]] = []
    barrier = threading.Barrier(2)

    def append(seed: int) -> None:
        with worker_peer(bench.worker.address) as peer:
            barrier.wait(10)
            call = attend_call(bench.session_id, 20, 1, step=2 + seed, seed=seed)
            outcomes.append(code_of(lambda: peer.attend_once(call)))

    threads = [threading.Thread(target=append, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(code for code, _ in outcomes) == ["ABORTED", "OK"]
    bench.peer.call("Release", types_pb2.ReleaseRequest(session_ids=[bench.session_id]))
    bench.open()
    raise next(error for _, error in outcomes if error is not None)


def draining(bench: Bench) -> None:
    """Open a session on a worker that is leaving."""
    with WorkerServer(WorkerSettings("leaving", 1 << 20, limits=LIMITS)) as worker:
        worker.worker.drain()
        with worker_peer(worker.address) as peer:
            peer.call("Allocate", allocate_request(new_id(), spec()))


def expired(bench: Bench) -> None:
    """Renew a lease that is over; the answer names what is missing."""
    gone = new_id()
    answer = bench.peer.call("RenewLease", types_pb2.RenewLeaseRequest(session_ids=[gone]))
    assert list(answer.missing_session_ids) == [gone]
    bench.peer.call("GetSession", types_pb2.GetSessionRequest(session_id=gone))


def quota(make: Callable[[], types_pb2.AllocateRequest]) -> Bad:
    def run(peer: Peer) -> None:
        request = make()
        try:
            peer.call("Allocate", request)
        finally:
            peer.call("Release", types_pb2.ReleaseRequest(session_ids=[request.session_id]))

    return as_tenant("small", run)


def many_sessions(peer: Peer) -> None:
    ids = [new_id() for _ in range(3)]
    try:
        for session_id in ids:
            peer.call("Allocate", allocate_request(session_id, spec()))
    finally:
        peer.call("Release", types_pb2.ReleaseRequest(session_ids=ids))


def append_to_a_new_session(peer: Peer, num_tokens: int) -> None:
    session_id = new_id()
    peer.call("Allocate", allocate_request(session_id, spec()))
    try:
        peer.attend_once(attend_call(session_id, 0, num_tokens, step=1))
    finally:
        peer.call("Release", types_pb2.ReleaseRequest(session_ids=[session_id]))


def long_row(peer: Peer) -> None:
    append_to_a_new_session(peer, 41)


def many_pages(peer: Peer) -> None:
    append_to_a_new_session(peer, 40)


def other_request(bench: Bench) -> None:
    bench.front.call("Allocate", allocate_request(bench.session_id, spec(num_rows=2)))


def same_request(bench: Bench) -> None:
    opened = spec(ttl_s=3600.0, max_tokens=200)
    answer = bench.front.call("Allocate", allocate_request(bench.session_id, opened))
    assert list(answer.session.layers[0].lengths) == [20]


def evicted_pop(bench: Bench) -> None:
    """Cut where the next query could see what a window has let go."""
    session_id = new_id()
    opened = allocate_request(session_id, spec())
    opened.spec.layers[0].window = 16
    bench.peer.call("Allocate", opened)
    try:
        for step, position in enumerate((0, 40, 80), 1):
            call = attend_call(session_id, position, 40, step=step)
            call.mask.window = 16
            if position:
                evict = call.header.evict_before.add()
                evict.window, evict.positions[:] = 16, [position - 15]
            bench.peer.attend_once(call)
        request = types_pb2.PopRequest(
            session_id=session_id, epoch=1, keep=[30], expected_lengths=[120]
        )
        bench.peer.call("Pop", request)
    finally:
        bench.peer.call("Release", types_pb2.ReleaseRequest(session_ids=[session_id]))


def spread_of_nan(bench: Bench) -> None:
    """NaN in one row of a batch stays in that row."""
    import numpy as np

    from kvservice.wire import calls
    from kvservice.wire.tensors import to_numpy

    session_id = new_id()
    bench.peer.call("Allocate", allocate_request(session_id, spec(num_rows=2)))
    try:
        one = attend_call(new_id(), 0, 3, step=1)
        call = attend_call(session_id, 0, 6, step=1)
        call.header.counts[:] = [3, 3]
        call.positions[:] = [0, 0]
        for tensor, good in ((call.q, one.q), (call.k, one.k), (call.v, one.v)):
            bad = np.full(len(good.data) // 4, np.nan, np.float32).tobytes()
            tensor.data = good.data + bad
        out = to_numpy(calls.attend_result_from_pb(bench.peer.attend_once(call)).out)
        assert np.isfinite(out[:3]).all()
        assert np.isnan(out[3:]).all()
    finally:
        bench.peer.call("Release", types_pb2.ReleaseRequest(session_ids=[session_id]))


def huge_batch(bench: Bench) -> None:
    """A million rows with a token each: refused by the count, at once."""
    call = attend_call(bench.session_id, 20, 1, step=2)
    call.query_counts[:] = [1] * 100_000
    call.header.counts[:] = [1] * 100_000
    began = time.perf_counter()
    try:
        bench.peer.attend_once(call)
    finally:
        assert time.perf_counter() - began < 5.0


def bad_start(security: Security) -> Bad:
    def run(bench: Bench) -> None:
        server = WorkerServer(WorkerSettings("bad", 1 << 20, limits=LIMITS, security=security))
        refused(server.start)

    return run


def refused(start: Callable[[], None]) -> None:
    with pytest.raises(ConfigError) as caught:
        start()
    assert "\n" not in str(caught.value)
    raise errors.InvalidRequest(str(caught.value))


def port_in_use(bench: Bench) -> None:
    port = int(bench.worker.address.rpartition(":")[2])
    refused(WorkerServer(WorkerSettings("second", 1 << 20, port=port, limits=LIMITS)).start)


def too_much_memory(bench: Bench) -> None:
    from kvservice.config import Budget
    from kvservice.runtime.worker import budget_bytes

    refused(lambda: budget_bytes(Budget(num_bytes=1 << 50), "cpu") and None)
