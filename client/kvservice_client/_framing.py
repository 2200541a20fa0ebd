"""One message as one frame or as many: what streams carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.message import Message

from kvservice.core.errors import Unavailable
from kvservice.wire import fragments

MAX_MESSAGE_BYTES: Final = 1 << 31
"""The largest message put together from fragments: protobuf's own limit."""


def frames(message: Message, request: type[Any]) -> Iterator[bytes]:
    """Yield what to send: the message in field 1 of a request, or its pieces in field 2."""
    data = message.SerializeToString()
    if len(data) <= fragments.FRAGMENT_BYTES:
        yield b"\x0a" + _varint(len(data)) + data  # as `request(call=message)`, a copy less
        return
    for fragment in fragments.split(data):
        yield request(fragment=fragment).SerializeToString()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def join(responses: Iterator[Any], result: type[Any]) -> Any:
    """Return the next whole result of a stream of frames."""
    joiner: fragments.Joiner | None = None
    for response in responses:
        if response.WhichOneof("frame") != "fragment":
            return response.result
        joiner = joiner or fragments.Joiner(MAX_MESSAGE_BYTES)
        whole = joiner.add(response.fragment)
        if whole is not None:
            return result.FromString(bytes(whole))
    raise Unavailable("the server has ended the stream")
