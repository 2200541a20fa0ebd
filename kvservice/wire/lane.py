"""Frames on a plain byte pipe: what the lane beside gRPC carries.

A frame is its length, 4 bytes little-endian, and so many bytes: the same `AttendRequest` and
`AttendResponse` that gRPC's stream carries. A connection begins with a token of 32 bytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from kvservice.core.errors import TooLarge, Unavailable

TOKEN_BYTES: Final = 32
UNIX_PREFIX: Final = "unix-abstract:"
"""Of an address: what follows is a name in Linux's abstract namespace, as gRPC spells it."""
# What a frame holds beside a fragment's bytes.
HEADROOM: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")
_TIMEVAL: Final = struct.Struct("@ll")
_FIRST_BUFFER_BYTES: Final = 64 << 10

Buffer = bytes | bytearray | memoryview


class LanePipe:
    """One connected socket, sending and receiving whole frames. One thread at a time.

    Args:
        connection: A connected stream socket, owned from now on. It waits for ever, until
            `set_timeout` says for how long.
        max_frame_bytes: A frame that is announced larger is refused before anything is read.
    """

    def __init__(self, connection: socket.socket, max_frame_bytes: int) -> None:
        self.socket = connection
        connection.settimeout(None)  # the kernel keeps the time: no poll before each call
        self._timeout_s: float | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._max_bytes = max_frame_bytes + HEADROOM
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # received bytes that nobody has taken yet
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, seconds: float) -> None:
        """Let a call wait for so long, at most; above 0. Costs nothing if it was so before."""
        if seconds != self._timeout_s:
            self._timeout_s = seconds
            whole, micros = divmod(max(1, round(seconds * 1e6)), 1_000_000)
            value = _TIMEVAL.pack(whole, micros)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    @property
    def has_input(self) -> bool:
        """Whether there is something to receive already, the end of the stream included."""
        return self._start != self._stop or bool(self._poll.poll(0))

    def send(self, frames: Iterable[bytes], timeout_s: float | None = None) -> None:
        """Send frames.

        Args:
            timeout_s: How long a frame may take for which the peer has no room. None: as long as
                any call.

        Raises:
            OSError: The connection is broken, or (TimeoutError) the peer takes too long.
        """
        for frame in frames:
            self.send_pieces((frame,), len(frame), timeout_s)

    def send_pieces(
        self, pieces: Sequence[Buffer], num_bytes: int, timeout_s: float | None = None
    ) -> None:
        """Send one frame that lies in pieces, of so many bytes together; as `send`."""
        head = _LENGTH.pack(num_bytes)
        try:
            sent = self.socket.sendmsg((head, *pieces), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < _LENGTH.size + num_bytes:  # no room: wait for it, and keep the time
            self.socket.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            try:
                self.socket.sendall(memoryview(b"".join((head, *pieces)))[sent:])
            finally:
                self.socket.settimeout(None)

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
        # Mostly all of it has come at once.
        if self._stop - self._start < _LENGTH.size + size and not self._fill(_LENGTH.size + size):
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
            try:
                received = self.socket.recv_into(self._view[self._stop :])
            except BlockingIOError:
                raise TimeoutError("the peer takes too long") from None
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
