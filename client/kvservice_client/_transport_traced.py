"""A transport whose Attends have spans, in a process that traces. Others never see this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from kvservice.core.errors import KVServiceError
from kvservice.v1 import worker_pb2
from kvservice.wire.names import WORKER
from kvservice.wire.tracing import Tracer
from kvservice_client._transport import AnyCall, AnyResult, AttendStream, Transport

_ATTEND: Final = f"{WORKER.full_name}/Attend"


class TracedTransport:
    """Gives each Attend of a sampled trace a span; other calls get theirs from the channel."""

    def __init__(self, inner: Transport, tracer: Tracer, address: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._address = address

    def call(self, service: str, method: str, request: Message, *, timeout_s: float) -> Any:
        return self._inner.call(service, method, request, timeout_s=timeout_s)

    def write(self, call: worker_pb2.WriteCall, *, timeout_s: float) -> worker_pb2.WriteResponse:
        return self._inner.write(call, timeout_s=timeout_s)

    def read(self, request: worker_pb2.ReadRequest, *, timeout_s: float) -> worker_pb2.ReadResult:
        return self._inner.read(request, timeout_s=timeout_s)

    def open_stream(self) -> AttendStream:
        return _TracedStream(self._inner.open_stream(), self._tracer, self._address)

    def close(self) -> None:
        self._inner.close()


class _TracedStream:
    def __init__(self, inner: AttendStream, tracer: Tracer, address: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._address = address
        self._span: Any = None

    def attend(self, call: AnyCall, *, timeout_s: float) -> AnyResult:
        self._begin(call)
        return self._ended_by(lambda: self._inner.attend(call, timeout_s=timeout_s))

    def send(self, call: AnyCall, *, timeout_s: float) -> None:
        self._begin(call)
        self._inner.send(call, timeout_s=timeout_s)

    def receive(self) -> AnyResult:
        return self._ended_by(self._inner.receive)

    def close(self) -> None:
        self._end("CANCELLED")
        self._inner.close()

    def _begin(self, call: AnyCall) -> None:
        self._end("CANCELLED")  # one that was given up
        call.trace_parent = ""
        if self._tracer.is_sampled:
            self._span = self._tracer.begin(_ATTEND, self._address)
            self._span.set_attribute("kvservice.layer", call.layer)
            self._span.set_attribute("kvservice.step", call.step)
            call.trace_parent = self._tracer.parent(self._span)

    def _ended_by(self, finish: Callable[[], AnyResult]) -> AnyResult:
        code = "CANCELLED"
        try:
            result = finish()
            code = "OK"
            return result
        except KVServiceError as error:
            code = error.code.name
            raise
        finally:
            self._end(code)

    def _end(self, code: str) -> None:
        if self._span is not None:
            span, self._span = self._span, None
            self._tracer.end(span, code)
