"""Messages that are too large for one frame: cut by bytes, joined again with a bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message

from kvservice.core.errors import InvalidRequest, TooLarge
from kvservice.v1 import types_pb2

FRAGMENT_BYTES: Final = 4 << 20
"""Serialized messages up to this size travel whole; larger ones in pieces of it."""

MAX_FRAME_BYTES: Final = 16 << 20
"""The largest frame that a receiver accepts."""


def split(message: bytes | memoryview, limit: int = FRAGMENT_BYTES) -> Iterator[types_pb2.Fragment]:
    """Yield the pieces of a serialized message, in order.

    Args:
        message: At least one byte.
        limit: Bytes in a piece, at most; at least 1.
    """
    view, total = memoryview(message), len(message)
    assert total, "an empty message needs no fragments"
    for start in range(0, total, limit):
        piece = bytes(view[start : start + limit])
        yield types_pb2.Fragment(data=piece, total_bytes=total, last=start + limit >= total)


def frames(message: Message, limit: int = FRAGMENT_BYTES) -> Iterator[bytes]:
    """Yield the serialized frames that carry a message: one, or its fragments.

    For every message with a oneof `frame`: field 1 is the whole message, field 2 a fragment. The
    field is written here, which saves copying the message into another one.
    """
    data = message.SerializeToString()
    if len(data) <= limit:
        yield b"".join((b"\x0a", varint(len(data)), data))
        return
    for fragment in split(data, limit):
        piece = fragment.SerializeToString()
        yield b"".join((b"\x12", varint(len(piece)), piece))


def varint(value: int) -> bytes:
    """Return a number that is at least 0 as protobuf writes it."""
    if value < 0x80:
        return _SINGLE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_SINGLE: Final = tuple(bytes((value,)) for value in range(0x80))


class Joiner:
    """Puts the pieces of one message after the other together again.

    Invariants:
      1. At most `max_bytes` are held, whatever the sender announces.
      2. After an error nothing is held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._joined = bytearray()  # one buffer: a list of tiny pieces would cost far more
        self._total = 0

    @property
    def pending(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._joined)

    def add(self, fragment: types_pb2.Fragment) -> bytearray | None:
        """Take the next piece; return the whole message if it is the last one.

        Raises:
            TooLarge: The message is larger than `max_bytes`.
            InvalidRequest: The pieces do not add up.
        """
        try:
            return self._add(fragment)
        except InvalidRequest:
            self._forget()
            raise

    def _add(self, fragment: types_pb2.Fragment) -> bytearray | None:
        total, data = fragment.total_bytes, fragment.data
        if total > self._max_bytes:
            raise TooLarge(
                f"a message may have {self._max_bytes} bytes, this one has {total}",
                limit_bytes=self._max_bytes,
            )
        if not data:
            raise InvalidRequest("a fragment must hold at least one byte")
        if self._joined and total != self._total:
            raise InvalidRequest(
                f"total_bytes must stay the same, was {self._total}, is now {total}"
            )
        self._joined += data
        self._total = total
        received = len(self._joined)
        if received > total or (fragment.last and received != total):
            raise InvalidRequest(f"fragments of {received} bytes, announced as {total}")
        if not fragment.last:
            return None
        whole = self._joined
        self._forget()
        return whole

    def _forget(self) -> None:
        self._joined = bytearray()
        self._total = 0
