"""A worker over real gRPC on loopback: the data path, its limits, and what goes wrong."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvservice.clock import ManualClock
from kvservice.config import ConfigError, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.worker import WorkerServer
from kvservice.server.app import GrpcServer, serve
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire import calls, status
from kvservice.wire.fragments import Joiner, frames
from kvservice.wire.names import WORKER
from kvservice.wire.tensors import to_numpy
from tests.serving import (
    PAGE_BYTES,
    Peer,
    allocate_request,
    attend_call,
    attention,
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
    max_streams=3,
    unary_threads=2,
    answer_s=3600.0,  # the clock jumps, perhaps before a stream has sent its answer
)
SETTINGS = WorkerSettings("w0", 1 << 22, metrics_port=0, limits=LIMITS)
pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    """Return a running worker whose time only moves when told to."""
    with WorkerServer(SETTINGS, clock=ManualClock()) as server:
        yield server
        server.worker.check()


@pytest.fixture
def peer(server: WorkerServer) -> Iterator[Peer]:
    with worker_peer(server.address) as peer:
        yield peer


def opened(peer: Peer, **fields: int) -> str:
    session_id = new_id()
    peer.call("Allocate", allocate_request(session_id, spec(**fields)))
    return session_id


def test_attend_answers_what_attention_is(peer: Peer) -> None:
    """Tokens sent over the wire are stored and attended to, layer by layer, step by step."""
    session_id = opened(peer, num_layers=2)
    for layer in range(2):
        result = peer.attend_once(attend_call(session_id, 0, 20, step=1, layer=layer, call_id=9))
        assert result.call_id == 9
        out = to_numpy(calls.attend_result_from_pb(result).out)
        if layer == 0:
            np.testing.assert_allclose(out, attention(20), atol=1e-5)
    session = peer.call("GetSession", types_pb2.GetSessionRequest(session_id=session_id)).session
    assert [list(layer.lengths) for layer in session.layers] == [[20], [20]]
    assert list(session.extents[0].stops) == [20]


def test_stream_answers_in_order_and_survives_errors(peer: Peer) -> None:
    """Each call is answered by its id; one that fails says why, and the next ones are served."""
    session_id = opened(peer)
    sent = [
        attend_call(session_id, 0, 3, step=1, call_id=1),
        attend_call(session_id, 7, 3, step=2, call_id=2),
        attend_call(new_id(), 0, 3, step=1, call_id=3),
        attend_call(session_id, 3, 3, step=2, call_id=4, epoch=9),
        attend_call(session_id, 3, 3, step=2, call_id=5),
    ]
    requests = [worker_pb2.AttendRequest(call=call).SerializeToString() for call in sent]
    results = [answer.result for answer in peer.attend(requests)]
    assert [result.call_id for result in results] == [1, 2, 3, 4, 5]
    failed = {
        result.call_id: status.from_status(result.error)
        for result in results
        if result.HasField("error")
    }
    assert {call_id: type(error) for call_id, error in failed.items()} == {
        2: errors.OutOfOrder,
        3: errors.SessionNotFound,
        4: errors.StaleEpoch,
    }
    assert failed[2].metadata["lengths"] == "3"
    assert not any(results[index].HasField("out") for index in (1, 2, 3))


def test_two_tenants_decode_under_one_session_id(server: WorkerServer) -> None:
    """In turns, layer by layer, the short way through a step included: each has its own."""
    session_id = new_id()
    with worker_peer(server.address, "alice") as alice, worker_peer(server.address, "bob") as bob:
        streams = []
        for peer in (alice, bob):
            peer.call("Allocate", allocate_request(session_id, spec(num_layers=3)))
            queue: SimpleQueue = SimpleQueue()
            streams.append((queue, peer.attend(iter(queue.get, None))))
        before = server.worker.stats().appended_tokens
        for layer in range(3):
            for seed, (queue, answers) in enumerate(streams):
                call = attend_call(session_id, 0, 8, step=1, layer=layer, seed=seed)
                made = attend_call(session_id, 0, 8, step=1, seed=seed)
                call.q.data, call.k.data, call.v.data = made.q.data, made.k.data, made.v.data
                if layer:
                    call.ClearField("header")
                queue.put(worker_pb2.AttendRequest(call=call).SerializeToString())
                result = next(answers).result
                assert not result.HasField("error"), result.error
                out = to_numpy(calls.attend_result_from_pb(result).out)
                np.testing.assert_allclose(out, attention(8, seed=seed), atol=1e-5)
        assert server.worker.stats().appended_tokens == before + 16
        for queue, answers in streams:
            queue.put(None)
            assert list(answers) == []


def test_large_messages_travel_in_fragments_both_ways(peer: Peer) -> None:
    """A prompt beyond any frame is cut by the sender, joined, and so is its answer."""
    session_id = opened(peer)
    call = attend_call(session_id, 0, 600, step=1)
    requests = list(frames(call, 10_000))
    assert len(requests) > 10
    joiner, joined = Joiner(1 << 22), None
    for answer in peer.attend(requests):
        assert answer.WhichOneof("frame") == "fragment"
        assert len(answer.fragment.data) <= LIMITS.fragment_bytes
        joined = joiner.add(answer.fragment)
    assert joined is not None
    result = worker_pb2.AttendResult.FromString(joined)
    out = to_numpy(calls.attend_result_from_pb(result).out)
    np.testing.assert_allclose(out, attention(600), atol=1e-5)


def test_write_and_read_move_keys_and_values(peer: Peer) -> None:
    """What Write stores in fragments, Read gives back, in fragments too."""
    session_id = opened(peer)
    call = attend_call(session_id, 0, 300, step=1)
    write = worker_pb2.WriteCall(
        session_id=session_id, epoch=1, k=call.k, v=call.v, rows=[0] * 300, positions=range(300)
    )
    method = peer.channel.stream_unary(
        f"/{WORKER.full_name}/Write", None, worker_pb2.WriteResponse.FromString
    )
    assert list(method(frames(write, 10_000), timeout=10).lengths) == [300]
    read = peer.channel.unary_stream(
        f"/{WORKER.full_name}/Read",
        worker_pb2.ReadRequest.SerializeToString,
        worker_pb2.ReadResponse.FromString,
    )
    request = worker_pb2.ReadRequest(session_id=session_id, epoch=1, start=10, stop=300)
    joiner, joined = Joiner(1 << 22), None
    for answer in read(request, timeout=10):
        joined = joiner.add(answer.fragment)
    assert joined is not None
    result = calls.read_result_from_pb(worker_pb2.ReadResult.FromString(joined))
    assert result.lengths == (300,)
    sent = to_numpy(calls.tensor_from_pb(call.k, "k"))[10:]
    assert np.array_equal(to_numpy(result.k)[0].transpose(1, 0, 2), sent)


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ([b"\xff\xff\xff"], "undecodable"),
        ([b""], "expected a call"),
        (
            [worker_pb2.AttendRequest(fragment=types_pb2.Fragment(data=b"a", total_bytes=3))],
            "within",
        ),
        (
            [
                worker_pb2.AttendRequest(fragment=types_pb2.Fragment(data=b"a", total_bytes=3)),
                worker_pb2.AttendRequest(call=worker_pb2.AttendCall(call_id=1)),
            ],
            "next fragment",
        ),
        (
            [
                worker_pb2.AttendRequest(
                    fragment=types_pb2.Fragment(data=b"\xff" * 3, total_bytes=3, last=True)
                )
            ],
            "undecodable",
        ),
    ],
)
def test_broken_framing_ends_the_stream(peer: Peer, requests: list, text: str) -> None:
    """Where it is not known which call is meant, the stream itself is refused."""
    raw = [item if isinstance(item, bytes) else item.SerializeToString() for item in requests]
    with pytest.raises(errors.InvalidRequest, match=text):
        list(peer.attend(raw))


def test_message_beyond_the_limit_is_refused_by_its_announcement(peer: Peer) -> None:
    """The first fragment says how much there will be; nothing of it is kept."""
    fragment = types_pb2.Fragment(data=b"a", total_bytes=LIMITS.max_message_bytes + 1)
    request = worker_pb2.AttendRequest(fragment=fragment).SerializeToString()
    with pytest.raises(errors.TooLarge) as caught:
        list(peer.attend([request]))
    assert caught.value.metadata["limit_bytes"] == str(LIMITS.max_message_bytes)


UNARY = [
    method.name
    for method in WORKER.methods
    if not (method.client_streaming or method.server_streaming)
]


def test_undecodable_bytes_are_the_callers_mistake(peer: Peer) -> None:
    """Truncated or random bytes are INVALID_ARGUMENT on every method."""
    for method in (*UNARY, "Read"):
        call = read_raw if method == "Read" else peer_raw
        for raw in (b"\xff", b"\x00", b"\x0a\x05ab"):
            with pytest.raises(errors.InvalidRequest, match="undecodable"):
                call(peer, f"/{WORKER.full_name}/{method}", raw)


def test_text_that_is_no_text_is_the_callers_mistake(peer: Peer) -> None:
    """Invalid UTF-8 in a string, as any other undecodable request."""
    with pytest.raises(errors.InvalidRequest, match="undecodable"):
        peer.call("GetSession", b"\x0a\x02\xff\xfe")


def peer_raw(peer: Peer, path: str, raw: bytes) -> None:
    peer.raw(path, raw)


def read_raw(peer: Peer, path: str, raw: bytes) -> None:
    try:
        list(peer.channel.unary_stream(path)(raw, timeout=10))
    except grpc.RpcError as error:
        raise status.from_rpc_error(error) from error


def test_empty_requests_are_refused(peer: Peer) -> None:
    """Nothing that must be stated has a default: what is missing is named."""
    for method in UNARY:
        if method not in ("PageStats", "ListSessions", "OpenLane"):
            with pytest.raises(errors.InvalidRequest):
                peer.call(method, b"")


def test_other_incarnation_is_told_ours(server: WorkerServer, peer: Peer) -> None:
    """A call meant for an earlier life of the worker changes nothing, and learns of this one."""
    session_id = opened(peer)
    late = types_pb2.PopRequest(
        session_id=session_id, incarnation="gone", epoch=1, keep=[0], expected_lengths=[0]
    )
    with pytest.raises(errors.StaleWorker) as caught:
        peer.call("Pop", late)
    assert caught.value.metadata["incarnation"] == server.incarnation
    call = attend_call(session_id, 0, 1, step=1)
    call.incarnation = "gone"
    with pytest.raises(errors.StaleWorker):
        peer.attend_once(call)
    call.incarnation = server.incarnation
    peer.attend_once(call)


def test_sessions_belong_to_their_tenant(server: WorkerServer, peer: Peer) -> None:
    """To another tenant the session is not there, in the same words as one that never was."""
    session_id = opened(peer)
    with worker_peer(server.address, "other") as other:
        asked = types_pb2.GetSessionRequest(session_id=session_id)
        with pytest.raises(errors.SessionNotFound) as theirs:
            other.call("GetSession", asked)
        with pytest.raises(errors.SessionNotFound) as nobodys:
            other.call("GetSession", types_pb2.GetSessionRequest(session_id=new_id()))
        assert str(theirs.value) == str(nobodys.value)
        with pytest.raises(errors.SessionNotFound):
            other.attend_once(attend_call(session_id, 0, 1, step=1))
        released = other.call("Release", types_pb2.ReleaseRequest(session_ids=[session_id]))
        assert released.released_count == 0


def test_lists_come_in_pages(peer: Peer) -> None:
    """All sessions are listed once, by id, in as many pages as asked for."""
    ids = sorted(opened(peer) for _ in range(5))
    listed, token = [], ""
    while True:
        request = types_pb2.ListSessionsRequest(page_size=2, page_token=token)
        answer = peer.call("ListSessions", request)
        assert len(answer.sessions) <= 2
        listed += [session.session_id for session in answer.sessions]
        token = answer.next_page_token
        if not token:
            break
    assert listed == ids


def test_lease_ends_and_pages_return(server: WorkerServer, peer: Peer) -> None:
    """A session that nobody asks for is freed once its ttl is over; a renewed one lives."""
    dead, alive = opened(peer, ttl_s=5), opened(peer, ttl_s=5)
    peer.attend_once(attend_call(dead, 0, 16, step=1))
    for _ in range(3):
        server._clock.advance(2.0)  # type: ignore[attr-defined]
        request = types_pb2.RenewLeaseRequest(session_ids=[alive])
        assert not peer.call("RenewLease", request).missing_session_ids
    until(lambda: server.worker.stats().num_sessions == 1)
    request = types_pb2.RenewLeaseRequest(session_ids=[alive, dead])
    assert list(peer.call("RenewLease", request).missing_session_ids) == [dead]
    stats = server.worker.stats()
    assert (stats.used_bytes, stats.lease_expirations) == (0, 1)
    assert stats.page_frees["lease_expired"] == 1


def test_stats_metrics_and_facts_agree(server: WorkerServer, peer: Peer) -> None:
    """PageStats, /metrics and what was appended are the same numbers."""
    session_id = opened(peer, num_layers=2)
    for layer in range(2):
        peer.attend_once(attend_call(session_id, 0, 40, step=1, layer=layer))
    pop = types_pb2.PopRequest(session_id=session_id, epoch=1, keep=[20], expected_lengths=[40])
    peer.call("Pop", pop)
    (stats,) = peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    (pool,) = stats.pools
    assert (pool.used_page_count, pool.token_count) == (2, 20)
    assert stats.used_bytes == 2 * 2 * PAGE_BYTES
    assert stats.appended_token_count == 40
    assert stats.popped_token_count == 20
    samples = scrape(str(server.metrics_address))

    def sample(name: str, **more: str) -> float:
        wanted = {"worker": "w0", **more}
        found = [
            value
            for key, value in samples.items()
            if key.partition("{")[0] == name
            and all(f'{label}="{text}"' in key for label, text in wanted.items())
        ]
        assert len(found) == 1, (name, wanted)
        return found[0]

    assert sample("kvservice_pages", state="used") == pool.used_page_count
    assert sample("kvservice_pages", state="free") == pool.free_page_count
    assert sample("kvservice_pages", state="reserved") == pool.reserved_page_count == 0
    assert sample("kvservice_tokens") == pool.token_count
    assert sample("kvservice_used_bytes") == stats.used_bytes
    assert sample("kvservice_arena_bytes", device="cpu") == stats.arena_bytes
    assert sample("kvservice_budget_bytes") == stats.budget_bytes == SETTINGS.budget_bytes
    assert sample("kvservice_appended_tokens_total") == 40
    assert sample("kvservice_popped_tokens_total") == 20
    assert sample("kvservice_appended_bytes_total") == stats.appended_bytes == 40 * 2 * 256
    assert sample("kvservice_page_frees_total", reason="pop") == 1
    assert sample("kvservice_page_allocations_total") == 3
    assert sample("kvservice_sessions", state="active") == 1
    assert samples['kvservice_attention_batch_size_count{worker="w0"}'] == 2


def test_calls_are_counted_by_method_and_code(server: WorkerServer, peer: Peer) -> None:
    """Every call is started and handled once, unknown methods under one name."""
    opened(peer)
    with pytest.raises(errors.SessionNotFound):
        peer.call("GetSession", types_pb2.GetSessionRequest(session_id=new_id()))
    for path in (f"/{WORKER.full_name}/Nothing", "/no.such.Service/Nothing", "/x"):
        with pytest.raises(errors.Unimplemented):
            peer.raw(path, b"")
    samples = scrape(str(server.metrics_address))
    service = f'grpc_service="{WORKER.full_name}"'

    def handled(method: str, code: str) -> float:
        return sum(
            value
            for key, value in samples.items()
            if key.startswith("grpc_server_handled_total")
            and f'grpc_method="{method}"' in key
            and f'grpc_code="{code}"' in key
        )

    assert handled("Allocate", "OK") == 1
    assert handled("GetSession", "NOT_FOUND") == 1
    assert handled("unknown", "UNIMPLEMENTED") == 3
    assert any(service in key for key in samples)
    assert not any("Nothing" in key for key in samples)


def test_streams_cannot_take_the_threads_of_other_calls(peer: Peer) -> None:
    """Beyond the limit a stream is refused at once; unary calls go on; one that ends makes room."""
    session_id = opened(peer)
    first = worker_pb2.AttendRequest(call=attend_call(session_id, 0, 1, step=1))
    queues: list[SimpleQueue] = [SimpleQueue() for _ in range(LIMITS.max_streams)]
    streams = []
    for queue in queues:
        queue.put(first.SerializeToString())
        answers = peer.attend(iter(queue.get, None))
        next(answers)
        streams.append(answers)
    with pytest.raises(errors.Overloaded) as caught:
        peer.attend_once(attend_call(session_id, 1, 1, step=2))
    assert caught.value.retry_delay_s == 1.0
    assert peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    queues[0].put(None)
    assert list(streams[0]) == []
    until(lambda: again(peer, session_id))
    for queue, answers in zip(queues[1:], streams[1:], strict=True):
        queue.put(None)
        assert list(answers) == []


def scraped(server: WorkerServer) -> dict[str, float]:
    return scrape(str(server.metrics_address))


def again(peer: Peer, session_id: str) -> bool:
    try:
        peer.attend_once(attend_call(session_id, 1, 1, step=2))
    except errors.Overloaded:
        return False
    return True


def test_idle_stream_is_closed_and_a_busy_one_is_not(server: WorkerServer, peer: Peer) -> None:
    """After minutes without a call the stream ends; any call before that keeps it."""
    session_id = opened(peer, ttl_s=3600)
    queue: SimpleQueue = SimpleQueue()
    answers = peer.attend(iter(queue.get, None))
    for position in range(3):
        call = attend_call(session_id, position, 1, step=position + 1)
        queue.put(worker_pb2.AttendRequest(call=call).SerializeToString())
        assert not next(answers).result.HasField("error")
        server._clock.advance(LIMITS.idle_stream_s - 10)  # type: ignore[attr-defined]
    assert not streams_ended(server)
    until(lambda: server._clock.advance(LIMITS.idle_stream_s) or streams_ended(server))  # type: ignore[attr-defined,func-returns-value]
    with pytest.raises(errors.Unavailable):
        next(answers)
    queue.put(None)


def streams_ended(server: WorkerServer) -> bool:
    ended = 'grpc_server_handled_total{grpc_code="CANCELLED",grpc_method="Attend"'
    return any(key.startswith(ended) and value for key, value in scraped(server).items())


def test_unexpected_exceptions_do_not_leak(
    server: WorkerServer, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets an id and nothing else; the log has the id and the traceback."""

    def explode(*args: object) -> None:
        raise RuntimeError("secret-token-123")

    session_id = opened(peer)
    server.worker.access.get = explode  # type: ignore[method-assign,assignment]
    server.worker.long_way.attend = explode  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR):
        with pytest.raises(errors.InternalError) as unary:
            peer.call("GetSession", types_pb2.GetSessionRequest(session_id=session_id))
        with pytest.raises(errors.InternalError) as streamed:
            peer.attend_once(attend_call(session_id, 0, 1, step=1))
    for caught in (unary, streamed):
        assert str(caught.value) == f"internal error id={caught.value.metadata['error_id']}"
        assert caught.value.metadata["error_id"] in caplog.text
    assert "secret-token-123" in caplog.text


def test_deadline_is_kept_while_the_work_goes_on(server: WorkerServer, peer: Peer) -> None:
    """A caller with little time hears DEADLINE_EXCEEDED in time, whatever the worker does."""
    going_on = threading.Event()
    session_id = opened(peer)
    get = server.worker.access.get

    def slow(*args: Any, **kwargs: Any) -> object:
        going_on.wait(10)
        return get(*args, **kwargs)

    server.worker.access.get = slow  # type: ignore[method-assign,assignment]
    with pytest.raises(errors.DeadlineExceeded):
        peer.call("GetSession", types_pb2.GetSessionRequest(session_id=session_id), timeout_s=0.3)
    going_on.set()


def test_call_without_a_deadline_gets_one(server: WorkerServer, peer: Peer) -> None:
    """A Write that never ends is closed after the default deadline."""
    queue: SimpleQueue = SimpleQueue()
    method = peer.channel.stream_unary(f"/{WORKER.full_name}/Write")
    future = method.future(iter(queue.get, None))
    started = 'grpc_server_started_total{grpc_method="Write"'
    until(lambda: any(k.startswith(started) and v for k, v in scraped(server).items()))
    until(lambda: server._clock.advance(LIMITS.default_deadline_s) or future.done())  # type: ignore[attr-defined,func-returns-value]
    assert isinstance(future.exception(10), grpc.RpcError)
    queue.put(None)


def test_health_knows_both_names(server: WorkerServer, peer: Peer) -> None:
    """The server as a whole and the service by its name are serving; others are not known."""
    stub = health_pb2_grpc.HealthStub(peer.channel)
    for name in ("", WORKER.full_name):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(
            health_pb2.HealthCheckRequest(service="kvservice.v1.PageManagerService"), timeout=5
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_service(peer: Peer) -> None:
    """Tools that know nothing of the service find it, and its messages."""
    stub = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=WORKER.full_name),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=5)
    names = [service.name for service in listed.list_services_response.service]
    assert WORKER.full_name in names
    assert described.file_descriptor_response.file_descriptor_proto


def test_port_in_use_is_a_clear_error(server: WorkerServer) -> None:
    """Two servers never share a port: the second refuses to start, for gRPC and metrics alike."""
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
        WorkerServer(replace(SETTINGS, port=port)).start()
    metrics_port = int(str(server.metrics_address).rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"metrics on 127.0.0.1:{metrics_port}"):
        WorkerServer(replace(SETTINGS, metrics_port=metrics_port)).start()


def test_garbage_on_the_port_does_no_harm(server: WorkerServer, peer: Peer) -> None:
    """Bytes that are no HTTP/2, and an HTTP/1 request, cost their sender the connection."""
    host, _, port = server.address.rpartition(":")
    for sent in (bytes(range(256)) * 4, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent)
            while connection.recv(4096):
                pass
    assert peer.call("PageStats", types_pb2.PageStatsRequest()).workers


def test_oversized_frame_is_refused(peer: Peer) -> None:
    """A frame beyond the limit never reaches the service."""
    with pytest.raises(errors.Overloaded):
        peer.raw(f"/{WORKER.full_name}/PageStats", b"\x0a" + bytes(LIMITS.max_frame_bytes * 2))


def test_stopping_refuses_new_calls_and_ends_streams() -> None:
    """A stop with an open stream ends within its grace, and leaves nothing behind."""
    server = WorkerServer(SETTINGS)
    server.start()
    with worker_peer(server.address) as peer:
        session_id = opened(peer)
        queue: SimpleQueue = SimpleQueue()
        queue.put(
            worker_pb2.AttendRequest(call=attend_call(session_id, 0, 1, step=1)).SerializeToString()
        )
        answers = peer.attend(iter(queue.get, None))
        next(answers)
        server.stop(grace_s=0.1)
        with pytest.raises(errors.Unavailable):
            next(answers)
        queue.put(None)
        with pytest.raises(errors.Unavailable):
            peer.call("PageStats", types_pb2.PageStatsRequest(), timeout_s=2)


def test_service_can_be_served_by_hand() -> None:
    """`serve` needs nothing but an object with the descriptor's methods."""

    class Nothing:
        def __getattr__(self, name: str) -> object:
            return lambda request, caller: types_pb2.PageStatsResponse()

    server, port = serve(Nothing(), descriptor=WORKER, host="127.0.0.1", port=0)
    assert isinstance(server, GrpcServer)
    with worker_peer(f"127.0.0.1:{port}") as peer:
        assert not peer.call("PageStats", types_pb2.PageStatsRequest()).workers
    server.stop(0)
