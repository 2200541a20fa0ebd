"""Messages of a stream, which frames carry whole or in fragments."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from kvservice.core.errors import InvalidRequest
from kvservice.wire.fragments import Joiner


class Wholes:
    """Puts the messages of one stream together.

    Args:
        frame: The frames' type, which has a oneof `frame`.
        whole: The type of the message that they carry.
    """

    def __init__(self, frame: type[Any], whole: type[Any], max_message_bytes: int) -> None:
        self._frame = frame
        self._whole = whole
        self._joiner = Joiner(max_message_bytes)

    @property
    def pending(self) -> bool:
        """Whether a message has begun and is not complete."""
        return self._joiner.pending

    def add(self, raw: bytes | memoryview) -> Any | None:
        """Take the next frame; return the message that it completes, if it does.

        Raises:
            InvalidRequest, TooLarge: Nothing sensible can follow.
        """
        frame = decode(self._frame, raw)
        kind = frame.WhichOneof("frame")
        if kind == "fragment":
            joined = self._joiner.add(frame.fragment)
            return None if joined is None else decode(self._whole, bytes(joined))
        if kind == "call" and not self._joiner.pending:
            return frame.call
        raise InvalidRequest("expected a call or the next fragment of one")

    def end(self) -> None:
        """The stream has ended.

        Raises:
            InvalidRequest: Within a message.
        """
        if self._joiner.pending:
            raise InvalidRequest("the stream ended within a message")


def decode(message: type[Any], raw: bytes | bytearray | memoryview) -> Any:
    """Return a message.

    Raises:
        InvalidRequest: The bytes are none.
    """
    try:
        return message.FromString(raw)
    except DecodeError:
        raise InvalidRequest(f"not a {message.DESCRIPTOR.full_name}: undecodable") from None
