"""The way to one worker with a lane for Attend, and gRPC for everything else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from kvservice.clock import Clock
from kvservice.core.errors import (
    DeadlineExceeded,
    InternalError,
    KVServiceError,
    Unavailable,
    Unimplemented,
)
from kvservice.v1 import worker_pb2
from kvservice.wire import fragments
from kvservice.wire.lane import UNIX_PREFIX, LanePipe
from kvservice.wire.names import WORKER
from kvservice_client._framing import join
from kvservice_client._steady_call import SteadyCall
from kvservice_client._transport import AnyCall, AnyResult, AttendStream, Transport, checked

CONNECT_S: Final = 2.0
# A worker without a lane is asked again after so long.
ASK_AGAIN_S: Final = 30.0
# An answer that takes longer makes the client ask over gRPC whether the worker is there.
SILENCE_S: Final = 1.0
PING_S: Final = 2.0
MAX_IDLE: Final = 8
_NOTHING_TO_SHOW: Final = worker_pb2.OpenLaneRequest()


class LaneTransport:
    """A gRPC transport whose streams take the worker's lane where there is one. Thread-safe.

    Lanes are connected sockets shared by all sessions, one at a time each. Where none can be
    opened, gRPC's streams serve, and the lane is tried again after a while.
    """

    def __init__(self, over_grpc: Transport, *, clock: Clock) -> None:
        self._grpc = over_grpc
        self._clock = clock
        self.monotonic = clock.monotonic
        self._lock = threading.Lock()
        self._idle: deque[LanePipe] = deque()
        self._ask_at = 0.0
        self._closed = False

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        return self._grpc.call(service, method, request, timeout_s=timeout_s)

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> worker_pb2.WriteResponse:
        return self._grpc.write(call, timeout_s=timeout_s)

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> worker_pb2.ReadResult:
        return self._grpc.read(request, timeout_s=timeout_s)

    def open_stream(self) -> AttendStream:
        return _LaneStream(self, self._grpc.open_stream())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                break  # given back and closed by another thread
        self._grpc.close()

    def take(self, call: AnyCall, timeout_s: float) -> LanePipe | None:
        """Return a lane that is connected and idle, or a new one; None where gRPC must serve.

        Raises:
            Unavailable, DeadlineExceeded: The worker does not answer at all.
        """
        while self._idle:
            try:
                pipe = self._idle.pop()
            except IndexError:
                break  # another thread was faster
            if not pipe.has_input:  # closed, or something that nobody asked for
                return pipe
            pipe.close()
        if self._clock.monotonic() < self._ask_at:
            return None
        opened = self._open(_request(call), timeout_s)
        if opened is None:
            self._ask_at = self._clock.monotonic() + ASK_AGAIN_S
        return opened

    def give(self, pipe: LanePipe) -> None:
        """Keep a lane for the next who needs one."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(pipe)
            if not self._closed:
                return
            with contextlib.suppress(ValueError):  # whoever closes may have been faster
                self._idle.remove(pipe)
        pipe.close()

    def check_alive(self, request: worker_pb2.OpenLaneRequest, timeout_s: float) -> None:
        """Ask the worker for a sign of life over gRPC.

        Raises:
            KVServiceError: There is none.
        """
        with contextlib.suppress(Unimplemented):
            self._grpc.call(WORKER.full_name, "OpenLane", request, timeout_s=timeout_s)

    def _open(self, request: worker_pb2.OpenLaneRequest, timeout_s: float) -> LanePipe | None:
        try:
            answer: worker_pb2.OpenLaneResponse = self._grpc.call(
                WORKER.full_name, "OpenLane", request, timeout_s=timeout_s
            )
        except (Unavailable, DeadlineExceeded):
            raise
        except KVServiceError:
            return None
        for address in answer.addresses:
            with contextlib.suppress(OSError):
                connection = _connect(address, min(timeout_s, CONNECT_S))
                connection.sendall(answer.token)
                return LanePipe(connection, fragments.MAX_FRAME_BYTES)
        return None


class _LaneStream:
    """A session's stream: borrows a lane for each call, or uses gRPC's stream."""

    def __init__(self, transport: LaneTransport, over_grpc: AttendStream) -> None:
        self._transport = transport
        self._grpc = over_grpc
        self._pipe: LanePipe | None = None  # while a call is under way on it
        self._call: AnyCall | None = None  # likewise
        self._ends_at = 0.0
        self._timeout_s = 0.0

    def attend(self, call: AnyCall, *, timeout_s: float) -> AnyResult:
        self.send(call, timeout_s=timeout_s)
        return self.receive()

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        assert self._pipe is None, "the last call has not been received"
        pipe = self._transport.take(call, timeout_s)
        if pipe is None:
            self._grpc.send(call, timeout_s=timeout_s)
            return
        self._call, self._timeout_s = call, timeout_s
        self._ends_at = self._transport.monotonic() + timeout_s
        try:
            pipe.set_timeout(min(timeout_s, SILENCE_S))
            if isinstance(call, SteadyCall):
                pipe.send_pieces(*call.pieces(), timeout_s)
            else:
                pipe.send(fragments.frames(call), timeout_s)
        except OSError as error:
            pipe.close()
            raise self._broken(error) from error
        self._pipe = pipe

    def receive(self) -> AnyResult:
        pipe, call = self._pipe, self._call
        if pipe is None or call is None:
            return self._grpc.receive()
        try:
            raw = self._frame(pipe)
            answer = None
            if isinstance(call, SteadyCall) and raw is not None:
                answer = call.read(raw)
            if answer is not None:
                self._pipe = self._call = None
                self._transport.give(pipe)
                return answer
            result = self._joined(pipe, raw)
        except BaseException as error:
            self.close()  # an answer may still come: never to be taken for the next call's
            if isinstance(error, OSError) and not isinstance(error, KVServiceError):
                raise self._broken(error) from error
            if isinstance(error, DecodeError):
                raise InternalError("the worker's answer cannot be decoded") from error
            raise
        self._pipe = self._call = None
        if result.call_id == call.call_id:
            self._transport.give(pipe)
        else:
            pipe.close()
        return checked(result, call.call_id)

    def close(self) -> None:
        pipe, self._pipe, self._call = self._pipe, None, None
        if pipe is not None:
            pipe.close()
        self._grpc.close()

    def _joined(self, pipe: LanePipe, first: memoryview | None) -> worker_pb2.AttendResult:
        """Return the result that begins with a frame."""

        def responses() -> Iterator[worker_pb2.AttendResponse]:
            raw = first
            while raw is not None:
                yield worker_pb2.AttendResponse.FromString(raw)  # type: ignore[arg-type]
                raw = self._frame(pipe)

        result: worker_pb2.AttendResult = join(responses(), worker_pb2.AttendResult)
        return result

    def _frame(self, pipe: LanePipe) -> memoryview | None:
        """Wait for a frame; after each second of silence, ask whether the worker is alive."""
        while True:
            try:
                return pipe.receive()
            except TimeoutError:
                left = self._ends_at - self._transport.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s") from None
                assert self._call is not None
                try:
                    self._transport.check_alive(_request(self._call), min(left, PING_S))
                except DeadlineExceeded as error:
                    if left <= PING_S:
                        raise
                    # It was the question's time that ran out, not the call's.
                    raise Unavailable(f"the worker gives no sign of life: {error}") from error
                left = self._ends_at - self._transport.monotonic()
                pipe.set_timeout(max(0.001, min(left, SILENCE_S)))

    def _broken(self, error: OSError) -> KVServiceError:
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        return Unavailable(f"the lane is broken: {error}")


def _request(call: AnyCall) -> worker_pb2.OpenLaneRequest:
    """Return what asks for a lane, with what the call shows."""
    if not call.capability:
        return _NOTHING_TO_SHOW
    return worker_pb2.OpenLaneRequest(session_id=call.session_id, capability=call.capability)


def _connect(address: str, timeout_s: float) -> socket.socket:
    if address.startswith(UNIX_PREFIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect("\0" + address.removeprefix(UNIX_PREFIX))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
