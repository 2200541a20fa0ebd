"""Frames on a plain byte pipe: what the lane beside gRPC carries.

A frame is its length, 4 bytes little-endian, and so many bytes: the same `AttendRequest` and
`AttendResponse` that gRPC's stream carries. A connection begins with a token of 32 bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable
from typing import Final

from kvservice.core.errors import TooLarge, Unavailable

TOKEN_BYTES: Final = 32
UNIX_PREFIX: Final = "unix-abstract:"
"""Of an address: what follows is a name in Linux's abstract namespace, as gRPC spells it."""
# What a frame holds beside a fragment's bytes.
HEADROOM: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")
_FIRST_BUFFER_BYTES: Final = 64 << 10


class LanePipe:
    """One connected socket, sending and receiving whole frames. One thread at a time.

    Args:
        connection: A connected stream socket, owned from now on. Its timeout applies to each call.
        max_frame_bytes: A frame that is announced larger is refused before anything is read.
    """

    def __init__(self, connection: socket.socket, max_frame_bytes: int) -> None:
        self.socket = connection
        self._max_bytes = max_frame_bytes + HEADROOM
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # received bytes that nobody has taken yet
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frames: Iterable[bytes]) -> None:
        """Send frames.

        Raises:
            OSError: The connection is broken, or the peer takes too long.
        """
        for frame in frames:
            self.socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> memoryview | None:
        """Return the next frame; None at the end of the stream. Valid until the next call.

        Raises:
            TooLarge: The peer announces more than a frame may have.
            Unavailable: The stream ends within a frame.
            OSError: The connection is broken, or (TimeoutError) nothing comes.
        """
        if not self._fill(_LENGTH.size):
            return None
        [size] = _LENGTH.unpack_from(self._view, self._start)
        if size > self._max_bytes:
            raise TooLarge(
                f"a frame may have {self._max_bytes} bytes, this one has {size}",
                limit_bytes=self._max_bytes,
            )
        if not self._fill(_LENGTH.size + size):
            raise Unavailable("the lane has ended within a frame")
        begin = self._start + _LENGTH.size
        self._start = begin + size
        return self._view[begin : begin + size]

    def receive_token(self) -> bytes | None:
        """Return the bytes that a connection begins with; None if it ends before."""
        if not self._fill(TOKEN_BYTES):
            return None
        token = bytes(self._view[self._start : self._start + TOKEN_BYTES])
        self._start += TOKEN_BYTES
        return token

    def close(self) -> None:
        """End the connection; whoever waits on it, on either side, is woken."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _fill(self, num_bytes: int) -> bool:
        """Have at least `num_bytes` in the buffer; return False if the stream ends before any."""
        if self._start == self._stop:
            self._start = self._stop = 0
        while (rest := self._stop - self._start) < num_bytes:
            if self._stop == len(self._buffer):
                self._make_room(num_bytes)
            received = self.socket.recv_into(self._view[self._stop :])
            if not received and rest:
                raise Unavailable("the lane has ended within a frame")
            if not received:
                return False
            self._stop += received
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Move what is left to the front; if nothing can move, double the buffer.

        So it grows with what has come: an announcement alone takes no memory.
        """
        rest = bytes(self._view[self._start : self._stop])
        if not self._start:
            self._buffer = bytearray(min(max(num_bytes, 2), 2 * len(self._buffer)))
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)
