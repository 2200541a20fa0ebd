"""Bare echoes: servers that answer a request of any size with a fixed number of bytes.

    python -m bench.echo socket REPLY_BYTES     a Unix socket: length-prefixed requests
    python -m bench.echo grpc REPLY_BYTES       one bidirectional gRPC stream

Each prints where it listens. They do what a lane or a stream must do at least, and nothing else.
"""

from __future__ import annotations

import queue
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

LENGTH = struct.Struct("<I")


class SocketEcho:
    """The client's side of a bare socket."""

    def __init__(self, path: str, reply_bytes: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reply = memoryview(bytearray(reply_bytes))

    def __call__(self, request: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(request)) + request)
        _receive(self._socket, self._reply)


class GrpcEcho:
    """The client's side of a bare stream."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self._channel.stream_stream("/echo/Echo")(iter(self._requests.get, None))

    def __call__(self, request: bytes) -> None:
        self._requests.put(request)
        next(self._answers)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    received = 0
    while received < len(into):
        count = connection.recv_into(into[received:])
        if not count:
            return False
        received += count
    return True


def _serve_socket(reply: bytes) -> None:
    path = str(Path(tempfile.mkdtemp()) / "echo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print(path, flush=True)
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(16 << 20))
    while _receive(connection, buffer[: LENGTH.size]):
        [size] = LENGTH.unpack_from(buffer)
        _receive(connection, buffer[:size])
        connection.sendall(reply)


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    def service(self, details: Any) -> Any:
        del details

        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            del context
            for _ in requests:
                yield self._reply

        return grpc.stream_stream_rpc_method_handler(answer)


def _serve_grpc(reply: bytes) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Echo(reply),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    kind, reply_bytes = sys.argv[1:]
    {"socket": _serve_socket, "grpc": _serve_grpc}[kind](bytes(int(reply_bytes)))
