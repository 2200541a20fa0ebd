"""The lane beside gRPC: the same answers and errors, let in once, and gone with its worker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.clock import ManualClock
from kvservice.config import ServerLimits, WorkerSettings
from kvservice.core.caller import ANONYMOUS
from kvservice.core.errors import DeadlineExceeded, OutOfOrder, Overloaded, PagesLost
from kvservice.core.recorder import NullRpcRecorder
from kvservice.runtime.worker import WorkerServer
from kvservice.server.lane import MAX_STRANGERS, MAX_TOKENS, TOKEN_LIFE_S, LaneServer
from kvservice.v1 import worker_pb2
from kvservice.wire.lane import LanePipe
from kvservice_client import Client, ClientConfig, connect
from kvservice_client._transport_lane import LaneTransport
from kvservice_client.testing import eventually

RNG = np.random.default_rng(5)
SHAPE = (2, 4, 3, 8)


def settings(**changes: object) -> WorkerSettings:
    return WorkerSettings(worker_id="w", budget_bytes=1 << 26, **changes)  # type: ignore[arg-type]


@pytest.fixture
def worker() -> Iterator[WorkerServer]:
    with WorkerServer(settings()) as server:
        yield server


@pytest.fixture
def client(worker: WorkerServer) -> Iterator[Client]:
    with connect(worker.address) as client:
        yield client


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def lane_of(client: Client, address: str) -> LaneTransport:
    transport = client._connections.to(address)
    assert isinstance(transport, LaneTransport)
    return transport


def test_lane_and_grpc_give_the_same_bits(worker: WorkerServer, client: Client) -> None:
    """A prompt, a step, and an error in between, over both."""
    q, k, v = numbers(*SHAPE), numbers(2, 2, 3, 8), numbers(2, 2, 3, 8)
    with connect(worker.address, lane=False) as over_grpc:
        outs = []
        for each in (client, over_grpc):
            session = each.open(num_rows=2)
            first = session.attend(0, q, k, v)
            with pytest.raises(OutOfOrder):
                session.attend(0, q, k, v, pos=7)
            outs.append((first, session.attend(0, q[:, :, :1], k[:, :, :1], v[:, :, :1])))
            session.release()
    for by_lane, by_grpc in zip(*outs, strict=True):
        np.testing.assert_array_equal(by_lane, by_grpc)
    assert lane_of(client, worker.address)._idle, "the lane was not used"


def test_calls_larger_than_a_frame_travel_in_pieces(client: Client) -> None:
    """40 MB up and 20 MB down, by lane."""
    q, k = numbers(1, 8, 10_000, 64), numbers(1, 8, 10_000, 64)
    session = client.open(num_rows=1)
    out = session.attend(0, q, k, k, mask="causal", window=1)
    np.testing.assert_allclose(out, k, rtol=1e-6)  # each query sees its own value alone
    session.release()


def test_a_worker_without_a_lane_is_served_by_grpc() -> None:
    """The lane is off by a setting; nothing above can tell."""
    with WorkerServer(settings(lane_port=None)) as server, connect(server.address) as client:
        session = client.open(num_rows=1)
        session.attend(0, numbers(1, 2, 1, 8), numbers(1, 2, 1, 8), numbers(1, 2, 1, 8))
        assert not lane_of(client, server.address)._idle
        session.release()


def test_tcp_serves_where_the_unix_socket_cannot_be_reached(worker: WorkerServer) -> None:
    """Another machine does not have the name: the next address is taken."""
    assert worker._lane is not None
    worker._lane.addresses = ("unix-abstract:nobody-has-this", worker._lane.addresses[1])
    with connect(worker.address) as client:
        session = client.open(num_rows=1)
        session.attend(0, numbers(1, 2, 1, 8), numbers(1, 2, 1, 8), numbers(1, 2, 1, 8))
        [pipe] = lane_of(client, worker.address)._idle
        assert pipe.socket.family == socket.AF_INET
        session.release()


def test_a_broken_lane_is_opened_again_and_the_call_repeated(
    worker: WorkerServer, client: Client
) -> None:
    """The connection goes between two calls, and before an answer: nobody notices."""
    session = client.open(num_rows=1)
    k = numbers(1, 2, 4, 8)
    for i in range(4):
        session.attend(0, k[:, :, i : i + 1], k[:, :, i : i + 1], k[:, :, i : i + 1])
        for connection in list(worker._lane._open):  # type: ignore[union-attr]
            connection.pipe.close()
    assert session.lengths(0) == (4,)
    np.testing.assert_array_equal(session.read(0)[0], k)
    session.release()


def test_a_question_without_an_answer_is_not_the_end_of_the_call(
    worker: WorkerServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the time to ask for a sign of life runs out before the call's, the call is repeated."""
    session, k = client.open(num_rows=1), numbers(1, 2, 2, 8)
    session.attend(0, k[:, :, :1], k[:, :, :1], k[:, :, :1])
    going_on, asked = threading.Event(), threading.Event()
    attend = worker.worker.long_way.attend

    def hang(*args: object, **kwargs: object) -> object:
        going_on.wait(20)
        return attend(*args, **kwargs)  # type: ignore[arg-type]

    def no_answer(*args: object) -> None:
        asked.set()
        going_on.set()
        raise DeadlineExceeded("Stream removed")

    monkeypatch.setattr(worker.worker.long_way, "attend", hang)
    monkeypatch.setattr(LaneTransport, "check_alive", no_answer)
    session.attend(0, k[:, :, 1:], k[:, :, 1:], k[:, :, 1:])
    assert asked.is_set()
    np.testing.assert_array_equal(session.read(0)[0], k)
    session.release()


def test_a_dead_worker_is_pages_lost_by_lane_too() -> None:
    """Nothing hangs: the detection time, and then the typed error."""
    server = WorkerServer(settings())
    server.start()
    config = ClientConfig(detection_s=0.5)
    with connect(server.address, config=config) as client:
        session = client.open(num_rows=1)
        k = numbers(1, 2, 1, 8)
        session.attend(0, k, k, k)
        server.stop(grace_s=0)
        with pytest.raises(PagesLost) as error:
            session.attend(0, k, k, k)
        assert error.value.metadata["from_position"] == "0"


class Echo:
    """Answers with the caller's tenant."""

    def read_attend(self, frame: object) -> None:
        """Have everything decoded."""

    def attend_steadily(self, said: object, caller: object) -> None:
        raise AssertionError("nothing was read")

    def attend(
        self, call: worker_pb2.AttendCall, caller: object, said: object = None
    ) -> worker_pb2.AttendResult:
        if call.layer == 13:
            raise RuntimeError("secret-token-123")
        return worker_pb2.AttendResult(call_id=call.call_id)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lane(clock: ManualClock) -> Iterator[LaneServer]:
    server = LaneServer(
        "127.0.0.1",
        0,
        advertised=None,
        limits=ServerLimits(max_frame_bytes=1 << 20, fragment_bytes=1 << 19),
        clock=clock,
        recorder=NullRpcRecorder(),
    )
    server.start(Echo())
    yield server
    server.stop()


def dial(lane: LaneServer, token: bytes) -> LanePipe:
    host, _, port = lane.addresses[1].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(token)
    return LanePipe(connection, 1 << 20)


def ask(pipe: LanePipe, **fields: int) -> worker_pb2.AttendResponse:
    call = worker_pb2.AttendCall(**fields)  # type: ignore[arg-type]
    pipe.send([worker_pb2.AttendRequest(call=call).SerializeToString()])
    raw = pipe.receive()
    assert raw is not None
    return worker_pb2.AttendResponse.FromString(bytes(raw))


def refused(pipe: LanePipe) -> bool:
    try:
        return pipe.receive() is None
    except ConnectionError:
        return True
    finally:
        pipe.close()


def test_a_token_lets_in_once_and_not_for_long(lane: LaneServer, clock: ManualClock) -> None:
    """Used twice, invented, too late: the connection is closed without a word."""
    _, token = lane.admit(ANONYMOUS)
    pipe = dial(lane, token)
    assert ask(pipe, call_id=5).result.call_id == 5
    assert refused(dial(lane, token))
    assert refused(dial(lane, bytes(32)))
    _, late = lane.admit(ANONYMOUS)
    clock.advance(TOKEN_LIFE_S + 1)
    assert refused(dial(lane, late))
    assert ask(pipe, call_id=6).result.call_id == 6, "others go on"
    pipe.close()


def test_strangers_keep_nobody_out(lane: LaneServer, clock: ManualClock) -> None:
    """Connections that say nothing, or say it byte by byte, give way to whoever has a token."""
    first = dial(lane, b"")
    eventually(lambda: len(lane._open) == 1)
    clock.advance(0.1)
    strangers = [dial(lane, b"") for _ in range(MAX_STRANGERS + 2)]
    pipe = dial(lane, lane.admit(ANONYMOUS)[1])
    assert ask(pipe, call_id=5).result.call_id == 5
    first.set_timeout(TOKEN_LIFE_S / 2)  # at once, not when its own time is over
    assert refused(first), "who has waited longest gives way"
    clock.advance(TOKEN_LIFE_S / 2)
    strangers[-1].socket.sendall(b"x")

    def alone() -> bool:
        clock.advance(TOKEN_LIFE_S / 4)
        return len(lane._open) == 1

    eventually(alone)
    for stranger in strangers:
        assert refused(stranger)
    assert ask(pipe, call_id=6).result.call_id == 6
    pipe.close()


def test_unused_tokens_are_bounded_and_forgotten(lane: LaneServer, clock: ManualClock) -> None:
    """Asking for ever takes no memory."""
    for _ in range(MAX_TOKENS):
        lane.admit(ANONYMOUS)
    with pytest.raises(Overloaded):
        lane.admit(ANONYMOUS)
    clock.advance(TOKEN_LIFE_S + 1)
    lane.admit(ANONYMOUS)
    assert len(lane._admissions) == 1


def test_an_unexpected_exception_says_nothing_but_an_id(lane: LaneServer) -> None:
    """The text stays in the log, and the lane goes on."""
    pipe = dial(lane, lane.admit(ANONYMOUS)[1])
    error = ask(pipe, call_id=1, layer=13).result.error
    assert "secret" not in str(error)
    assert error.message.startswith("internal error id=")
    assert ask(pipe, call_id=2).result.call_id == 2
    pipe.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",  # a frame of 4 GiB
        b"\x05\x00\x00\x00\xff\xff\xff\xff\xff",  # undecodable
        b"\x00\x00\x00\x00",  # neither a call nor a fragment
    ],
)
def test_what_is_no_frame_closes_the_lane(lane: LaneServer, sent: bytes) -> None:
    """Nothing sensible can follow; others are still served."""
    pipe = dial(lane, lane.admit(ANONYMOUS)[1])
    pipe.socket.sendall(sent)
    assert refused(pipe)
    other = dial(lane, lane.admit(ANONYMOUS)[1])
    assert ask(other, call_id=3).result.call_id == 3
    other.close()
    eventually(lambda: not lane._open, timeout_s=5)


@pytest.fixture
def pipes() -> Iterator[tuple[LanePipe, LanePipe]]:
    """Both ends of a connection."""
    ends = [LanePipe(one, 1 << 24) for one in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_a_frame_may_lie_in_pieces_of_any_kind(pipes: tuple[LanePipe, LanePipe]) -> None:
    """Bytes and arrays, small and far larger than what a socket takes at once."""
    here, there = pipes
    for size in (3, 1 << 22):
        array = numbers(size)
        pieces = (b"head", array, b"tail")
        whole = b"head" + array.tobytes() + b"tail"
        sender = threading.Thread(target=here.send_pieces, args=(pieces, len(whole)))
        sender.start()
        received = there.receive()
        assert received is not None
        assert bytes(received) == whole
        sender.join()
        assert not there.has_input


def test_waiting_ends_when_it_should(pipes: tuple[LanePipe, LanePipe]) -> None:
    """For a frame, for the rest of one, and for room; and then everything goes on as before."""
    here, there = pipes
    for end in pipes:
        end.set_timeout(0.05)
    with pytest.raises(TimeoutError):
        there.receive()
    here.socket.sendall(b"\x05\0\0\0ab")
    with pytest.raises(TimeoutError):
        there.receive()
    here.socket.sendall(b"cde")
    received = there.receive()
    assert received is not None
    assert bytes(received) == b"abcde"
    with pytest.raises(TimeoutError):
        here.send((bytes(1 << 23),))


def test_it_is_seen_whether_something_has_come(pipes: tuple[LanePipe, LanePipe]) -> None:
    """A frame that nobody asked for, one behind another, and the end."""
    here, there = pipes
    assert not there.has_input
    here.send((b"a", b"b"))
    assert there.has_input
    assert there.receive() is not None
    assert there.has_input, "the second one, in the buffer already"
    assert there.receive() is not None
    assert not there.has_input
    here.close()
    assert there.has_input
