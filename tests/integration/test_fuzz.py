"""Bytes that nobody meant: decoding, the lane's framing, and tensors. Nothing may crash or change.

A short run here; `make fuzz` runs the same for ten minutes.
"""

from __future__ import annotations

import logging
import socket
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import hypothesis
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core.errors import InternalError, InvalidRequest, KVServiceError
from kvservice.core.geometry import DType
from kvservice.metrics import endpoint
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.fragments import Joiner
from kvservice.wire.lane import LanePipe
from kvservice.wire.names import MANAGER, WORKER
from kvservice.wire.tensors import tensor_from_pb
from tests.serving import (
    PAGE_BYTES,
    Peer,
    allocate_request,
    attend_call,
    new_id,
    spec,
    worker_peer,
)

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("leaves_nothing")]

LIMITS = ServerLimits(
    max_frame_bytes=1 << 18, fragment_bytes=1 << 14, max_message_bytes=1 << 20, max_streams=8
)
_STATED = hypothesis.settings.default.max_examples  # of the profile: `fuzz` has more
SHARED = hypothesis.settings(
    suppress_health_check=[*hypothesis.HealthCheck],
    deadline=None,
    max_examples=_STATED if _STATED > 100 else 40,
)


class Target:
    """A worker with a session that must stay as it is."""

    def __init__(self, worker: WorkerServer, peer: Peer) -> None:
        self.worker, self.peer = worker, peer
        self.session_id = new_id()
        peer.call("Allocate", allocate_request(self.session_id, spec(ttl_s=3600.0)))
        peer.attend_once(attend_call(self.session_id, 0, 20, step=1))
        self.expected = self.state()

    def state(self) -> Any:
        [kept] = [
            info
            for _, info in self.worker.worker.list_sessions(None)
            if info.session_id == self.session_id
        ]
        return kept

    def check(self) -> None:
        """Assert that the session stands as it stood, and that it is served."""
        assert self.state() == self.expected
        result = self.peer.attend_once(attend_call(self.session_id, 0, 20, step=1))
        assert result.HasField("out")

    def forget_others(self) -> None:
        ids = [info.session_id for _, info in self.worker.worker.list_sessions(None)]
        others = [one for one in ids if one != self.session_id]
        if others:
            self.peer.call("Release", types_pb2.ReleaseRequest(session_ids=others))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with WorkerServer(WorkerSettings("fuzzed", 64 * PAGE_BYTES, limits=LIMITS)) as worker:
        with worker_peer(worker.address) as peer:
            yield Target(worker, peer)
        worker.worker.check()


# -- messages


def messages(descriptor: Any, session_id: str, depth: int = 3) -> st.SearchStrategy[Any]:
    """Return messages of a type: well-formed on the wire, whatever they say."""
    made = message_factory.GetMessageClass(descriptor)
    if not depth:
        return st.just(made())
    fields = {field.name: values(field, session_id, depth) for field in descriptor.fields}
    oneofs = {one.name: [f.name for f in one.fields] for one in descriptor.oneofs}

    def build(chosen: dict[str, Any]) -> Any:
        message = made()
        for name, value in chosen.items():
            field = descriptor.fields_by_name[name]
            target = getattr(message, name)
            if field.is_repeated:
                target.extend(value)
            elif field.message_type is not None:
                target.CopyFrom(value)
                target.SetInParent()
            else:
                setattr(message, name, value)
        return message

    del oneofs  # the last one set wins
    return st.fixed_dictionaries({}, optional=fields).map(build)


INTEGERS = st.one_of(
    st.integers(-2, 40), st.sampled_from([1 << 20, (1 << 31) - 1, -(1 << 31), 1 << 16])
)
UNSIGNED = st.one_of(st.integers(0, 40), st.sampled_from([1 << 20, (1 << 31) - 1, (1 << 32) - 1]))
LONG = st.one_of(INTEGERS, st.sampled_from([1 << 40, (1 << 63) - 1, -(1 << 63)]))


def values(field: Any, session_id: str, depth: int) -> st.SearchStrategy[Any]:
    kinds = FieldDescriptor
    if field.message_type is not None:
        one = messages(field.message_type, session_id, depth - 1)
    elif field.type == kinds.TYPE_STRING:
        one = st.one_of(st.sampled_from(["", session_id, new_id()]), st.text(max_size=8))
    elif field.type == kinds.TYPE_BYTES:
        one = st.one_of(st.binary(max_size=64), st.integers(0, 64).map(lambda n: bytes(4 * n)))
    elif field.type == kinds.TYPE_BOOL:
        one = st.booleans()
    elif field.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT):
        one = st.floats()
    elif field.type == kinds.TYPE_ENUM:
        one = st.integers(0, 9)
    elif field.type == kinds.TYPE_INT32:
        one = INTEGERS
    elif field.type == kinds.TYPE_UINT32:
        one = UNSIGNED
    else:
        one = LONG
    return st.lists(one, max_size=4) if field.is_repeated else one


# What changes the session by its nature: it is never named there.
CHANGING = {"Pop", "Reset", "Select", "Attach", "Release", "Append", "Attend", "Write"}
UNARY = [m for m in WORKER.methods if not (m.client_streaming or m.server_streaming)]


@SHARED
@given(data=st.data())
def test_requests_that_are_well_formed_get_an_answer(target: Target, data: st.DataObject) -> None:
    """Whatever a request says, there is an answer or an error of ours, never INTERNAL."""
    method = data.draw(st.sampled_from(UNARY))
    named = new_id() if method.name in CHANGING else target.session_id
    request = data.draw(messages(method.input_type, named))
    ask(target, lambda: target.peer.call(method.name, request))
    target.check()
    target.forget_others()


@SHARED
@given(data=st.data())
def test_attends_that_are_well_formed_get_an_answer(target: Target, data: st.DataObject) -> None:
    """On the stream too, with calls of a session that does not exist, or of one made for it."""
    session_id = new_id()
    target.peer.call("Allocate", allocate_request(session_id, spec()))
    call = attend_call(session_id, 0, 2, step=1)
    fields = data.draw(messages(worker_pb2.AttendCall.DESCRIPTOR, session_id))
    for field, value in fields.ListFields():
        if data.draw(st.booleans()):
            call.ClearField(field.name)
            if field.is_repeated:
                getattr(call, field.name).extend(value)
            elif field.message_type is not None:
                getattr(call, field.name).CopyFrom(value)
            else:
                setattr(call, field.name, value)
    ask(target, lambda: target.peer.attend_once(call))
    target.check()
    target.forget_others()


@SHARED
@given(data=st.data(), raw=st.binary(max_size=200))
def test_bytes_that_are_nothing_are_refused(
    target: Target, data: st.DataObject, raw: bytes
) -> None:
    """Every method takes bytes, and says what is wrong with them."""
    method = data.draw(st.sampled_from(UNARY))
    ask(target, lambda: target.peer.call(method.name, raw))
    target.check()
    target.forget_others()


def ask(target: Target, call: Any) -> None:
    try:
        call()
    except InternalError:
        raise  # a bug of ours: no input may lead to it
    except KVServiceError:
        pass


@SHARED
@given(frames=st.lists(st.one_of(st.binary(max_size=60), st.just(None)), max_size=6))
def test_streams_of_anything_end_with_a_reason(target: Target, frames: list) -> None:
    """Frames that are none, pieces that do not fit, calls in between."""
    good = worker_pb2.AttendRequest(call=attend_call(target.session_id, 0, 20, step=1))
    sent = [good.SerializeToString() if one is None else one for one in frames]
    ask(target, lambda: list(target.peer.attend(sent)))
    target.check()


# -- the lane


PIECES = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 1 << 32).map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
    st.binary(max_size=40).map(lambda b: struct.pack("<I", len(b)) + b),
)


@SHARED
@given(pieces=st.lists(PIECES, max_size=6), good_token=st.booleans())
def test_a_lane_takes_any_bytes(target: Target, pieces: list[bytes], good_token: bool) -> None:
    """It answers or hangs up; it never waits for what was only announced once we are gone."""
    answer = target.peer.call("OpenLane", worker_pb2.OpenLaneRequest())
    token = answer.token if good_token else bytes(32)
    host, _, port = answer.addresses[1].rpartition(":")
    exchange((host, int(port)), token + b"".join(pieces))
    target.check()


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes and say that they are all; return what comes back until the peer hangs up."""
    answer = b""
    with socket.create_connection(address, timeout=10) as peer, suppress(ConnectionError):
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        while part := peer.recv(1 << 16):
            answer += part
    return answer


@SHARED
@given(raw=st.binary(max_size=300), cuts=st.lists(st.integers(1, 50), max_size=8))
def test_framing_gives_back_frames_or_refuses(raw: bytes, cuts: list[int]) -> None:
    """However the bytes arrive: what comes out are the frames that went in, then the end."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.settimeout(10)
        sent = b"".join(
            struct.pack("<I", len(piece)) + piece
            for piece in (raw[start : start + 37] for start in range(0, len(raw), 37))
        )
        start = 0
        for cut in [*cuts, len(sent)]:
            theirs.sendall(sent[start : start + cut])
            start += cut
        theirs.shutdown(socket.SHUT_WR)
        pipe = LanePipe(mine, 1 << 10)
        received = b""
        while (one := pipe.receive()) is not None:
            received += bytes(one)
    assert received == raw


@SHARED
@given(
    pieces=st.lists(
        st.tuples(st.binary(max_size=20), st.integers(-5, 100), st.booleans()), max_size=8
    )
)
def test_joining_holds_no_more_than_it_may(pieces: list[tuple[bytes, int, bool]]) -> None:
    """Whatever is announced, at most the limit is kept, and nothing after an error."""
    joiner = Joiner(64)
    for data, total, last in pieces:
        try:
            joined = joiner.add(types_pb2.Fragment(data=data, total_bytes=total, last=last))
        except InvalidRequest:
            assert not joiner.pending
        else:
            assert joined is None or len(joined) == total <= 64


# -- the port for metrics and the status page


METHODS = st.one_of(st.sampled_from([b"GET", b"HEAD", b"POST", b"OPTIONS"]), st.binary(max_size=8))
PATHS = st.one_of(
    st.sampled_from([b"/metrics", b"/metrics?name[]=x", b"/", b"//", b"/%00", b"*"]),
    st.binary(max_size=40),
)
LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"Content-Length: -1",
            b"Content-Length: 9999999999",
            b"Transfer-Encoding: chunked",
            b"Accept-Encoding: gzip",
            b"Accept: application/openmetrics-text; version=\xff",
            b"Expect: 100-continue",
            b"Authorization: Bearer \xff",
            b"Host: ",
        ]
    ),
)
REQUESTS = st.one_of(
    st.binary(max_size=200),
    st.tuples(METHODS, PATHS, st.lists(LINES, max_size=5)).map(
        lambda one: b" ".join(one[:2]) + b" HTTP/1.1\r\n" + b"\r\n".join([*one[2], b"", b""])
    ),
)


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    limits = ServerLimits(max_streams=8, unary_threads=4)
    with ManagerServer(ManagerSettings(limits=limits, metrics_port=0)) as manager:
        assert manager.metrics_address is not None
        yield int(manager.metrics_address.rpartition(":")[2])


@SHARED
@given(request=REQUESTS)
def test_http_takes_any_bytes(http_port: int, request: bytes) -> None:
    """It answers or hangs up, logs no failure of its own, and the next one is served."""
    failures = Failures()
    with failures:
        answer = exchange(("127.0.0.1", http_port), request)
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=10) as other:
            assert other.status == 200
    assert not failures.records
    assert b" 500 " not in answer.partition(b"\r\n")[0]


class Failures(logging.Handler):
    """What is logged of HTTP as an error while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> None:
        endpoint.LOG.addHandler(self)

    def __exit__(self, *_: object) -> None:
        endpoint.LOG.removeHandler(self)


# -- tensors


@SHARED
@given(
    dtype=st.integers(-1, 9),
    shape=st.lists(LONG, max_size=6),
    data=st.binary(max_size=64),
    rank=st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_tensor_is_what_it_says_or_refused(
    dtype: int, shape: list[int], data: bytes, rank: int | None
) -> None:
    """Before anything is allocated: the product of the shape is that of the bytes."""
    tensor = types_pb2.Tensor(shape=shape, data=data)
    tensor.dtype = dtype  # type: ignore[assignment]
    try:
        made = tensor_from_pb(tensor, "x") if rank is None else tensor_from_pb(tensor, "x", rank)
    except InvalidRequest:
        return
    size = 1
    for dim in made.shape:
        assert dim >= 0
        size *= dim
    assert isinstance(made.dtype, DType)
    assert size * made.dtype.itemsize == len(data)


def test_all_services_are_fuzzed() -> None:
    """The manager's messages are those of the worker, but for a few."""
    shared = {method.input_type.full_name for method in WORKER.methods}
    own = {method.input_type.full_name for method in MANAGER.methods} - shared
    assert own == {
        "kvservice.v1.ListWorkersRequest",
        "kvservice.v1.DrainWorkerRequest",
        "kvservice.v1.MoveSessionRequest",
        "kvservice.v1.HeartbeatRequest",
    }
