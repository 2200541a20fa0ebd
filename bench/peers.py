"""Peers that do by hand, in HTTP/2, what no library would do; for `bench.callers`."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from contextlib import suppress
from typing import Final, Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
ACK, END_HEADERS = 0x1, 0x4
CANCEL: Final = 8
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW: Final = 4
_NAMES: Final = {RST_STREAM: "told to reset", GOAWAY: "told to go"}


class Peer:
    """One connection, which answers pings and settings as it must. A context manager.

    Args:
        window: Bytes of each answer that it takes. None: as many as is usual.
    """

    def __init__(self, address: str, path: str, *, window: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.came: Counter[str] = Counter()
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._buffer = b""
        self._block = _header_block(path, address)
        settings = b"" if window is None else struct.pack(">HI", _WINDOW, window)
        self._socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def open(self, streams: range) -> None:
        """Begin these streams."""
        self._send(*(_frame(HEADERS, END_HEADERS, one, self._block) for one in streams))

    def ask(self, stream: int, message: bytes) -> None:
        """Send a message on a stream that has begun."""
        self._send(_frame(DATA, 0, stream, b"\x00" + len(message).to_bytes(4, "big") + message))

    def reset(self, streams: range) -> None:
        self._send(*(_frame(RST_STREAM, 0, one, CANCEL.to_bytes(4, "big")) for one in streams))

    def listen(self, seconds: float) -> bool:
        """Read what has come, or comes within so long; return False at the connection's end."""
        self._socket.settimeout(seconds or 1e-6)
        with suppress(TimeoutError, BlockingIOError):
            received = self._socket.recv(1 << 16)
            if not received:
                return False
            self._buffer += received
            self._answer()
        return True

    def _answer(self) -> None:
        while len(self._buffer) >= 9:
            size, kind, flags = int.from_bytes(self._buffer[:3], "big"), *self._buffer[3:5]
            if len(self._buffer) < 9 + size:
                return
            payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._send(_frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind in _NAMES:
                self.came[_NAMES[kind]] += 1

    def _send(self, *frames: bytes) -> None:
        self._socket.settimeout(10)
        self._socket.sendall(b"".join(frames))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _header_block(path: str, authority: str) -> bytes:
    """Return a call's headers: literals, nothing indexed, nothing compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def _text(text: str) -> bytes:
    assert len(text) < 127, "a longer text needs a longer length"
    return bytes([len(text)]) + text.encode()
