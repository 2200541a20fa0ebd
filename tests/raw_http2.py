"""HTTP/2 by hand, for what no gRPC library would send."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
CANCEL: Final = 8
ENHANCE_YOUR_CALM: Final = 11


class RawConnection:
    """One TCP connection that sends frames as it is told. A context manager."""

    def __init__(self, address: str, *, timeout_s: float = 15.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._buffer = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def begin(self) -> None:
        """Send what every connection begins with."""
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield type, flags, stream and payload of what comes, until the peer closes."""
        while True:
            head = self._take(9)
            if head is None:
                return
            size = int.from_bytes(head[:3], "big")
            payload = self._take(size)
            if payload is None:
                return
            yield head[3], head[4], int.from_bytes(head[5:9], "big"), payload

    def is_closed(self) -> bool:
        """Wait for the peer to close, reading over what it says."""
        try:
            for _ in self.frames():
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def _take(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            received = self.socket.recv(1 << 16)
            if not received:
                return None
            self._buffer += received
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(path: str, authority: str, **more: str) -> bytes:
    """Return the header block of a gRPC call: literals, nothing indexed, nothing compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    block = b""
    for name, value in fields.items():
        for text in (name, value):
            assert len(text) < 127, "a longer text needs a longer length"
        block += b"\x00" + bytes([len(name)]) + name.encode()
        block += bytes([len(value)]) + value.encode()
    return block


def goaway_code(payload: bytes) -> int:
    return int.from_bytes(payload[4:8], "big")
