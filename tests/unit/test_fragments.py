"""Messages in pieces: whatever is cut is joined again, within a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import InvalidRequest, TooLarge
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.fragments import Joiner, frames, split


@given(message=st.binary(min_size=1, max_size=200), limit=st.integers(1, 64))
def test_pieces_join_to_the_message(message: bytes, limit: int) -> None:
    """No piece is larger than the limit, and together they are the message."""
    joiner = Joiner(len(message))
    pieces = list(split(message, limit))
    assert all(len(piece.data) <= limit for piece in pieces)
    *before, last = [joiner.add(piece) for piece in pieces]
    assert before == [None] * len(before)
    assert last == message
    assert not joiner.pending


def piece(data: bytes, total: int, *, last: bool = False) -> types_pb2.Fragment:
    return types_pb2.Fragment(data=data, total_bytes=total, last=last)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(b"", 4)],
        [piece(b"ab", 4, last=True)],
        [piece(b"abcde", 4)],
        [piece(b"ab", 4), piece(b"cd", 5)],
        [piece(b"ab", 4), piece(b"cde", 4, last=True)],
        [piece(b"ab", 0)],
        [piece(b"ab", -4)],
    ],
)
def test_pieces_that_do_not_add_up_are_refused(pieces: list[types_pb2.Fragment]) -> None:
    """The joiner holds nothing after a mistake, and can begin anew."""
    joiner = Joiner(100)
    *good, bad = pieces
    for fragment in good:
        assert joiner.add(fragment) is None
    with pytest.raises(InvalidRequest):
        joiner.add(bad)
    assert not joiner.pending
    assert joiner.add(piece(b"new", 3, last=True)) == b"new"


def test_size_is_refused_as_soon_as_it_is_announced() -> None:
    """The limit holds for what is announced, before the bytes are there, and is in the metadata."""
    with pytest.raises(TooLarge) as caught:
        Joiner(100).add(piece(b"a", 101))
    assert caught.value.metadata == {"limit_bytes": "100"}


@pytest.mark.parametrize("frame", [worker_pb2.AttendRequest, worker_pb2.WriteRequest])
@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 300, 70_000])
def test_frames_are_what_protobuf_would_write(frame: type, size: int) -> None:
    """The hand-written field around a message, or a fragment, is the generated code's."""
    whole = frame().call
    whole.session_id = "s" * size
    data = b"".join(frames(whole, 1 << 20))
    assert data == frame(call=whole).SerializeToString()
    joiner = Joiner(1 << 20)
    joined = None
    for raw in frames(whole, 50):
        request = frame.FromString(raw)
        joined = request.call.SerializeToString()
        if request.WhichOneof("frame") == "fragment":
            joined = joiner.add(request.fragment)
    assert joined == whole.SerializeToString()


@pytest.mark.parametrize(
    "frame",
    [
        worker_pb2.AttendRequest,
        worker_pb2.AttendResponse,
        worker_pb2.WriteRequest,
        worker_pb2.ReadResponse,
    ],
)
def test_every_frame_has_the_same_fields(frame: type) -> None:
    """Field 1 is the whole message, field 2 the fragment: what `frames` relies on."""
    fields = frame.DESCRIPTOR.oneofs_by_name["frame"].fields
    assert [field.number for field in fields] == [1, 2]
    assert fields[1].message_type is types_pb2.Fragment.DESCRIPTOR
