"""The methods of a service as gRPC handlers, made from its descriptor.

Every kind of method does the same things, from the outside in: take a place, count, turn errors
into statuses, bound times, find the caller, read, decode, serve. Where there is no place, a call
is refused as it arrives. No request is read before it is known who makes it, and all of them come
as streams, of which reading one message has a deadline: gRPC would wait for it in a thread, for
ever. Bytes are decoded here and not by gRPC, whose answer to undecodable ones would be INTERNAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.errors import Code, DeadlineExceeded, InvalidRequest, TooLarge
from kvservice.core.recorder import MethodRecorder, RpcRecorder
from kvservice.logs import REQUEST, REQUEST_KEY, Request
from kvservice.server.attends import StreamAnswers
from kvservice.server.guard import Guard
from kvservice.server.rooms import Room, in_room, refusing, streaming_in_room
from kvservice.server.rpc import Method, Rpc
from kvservice.server.streams import NEVER, OpenCall, OpenCalls
from kvservice.server.threads import served_by
from kvservice.server.wholes import decode
from kvservice.wire.fragments import frames
from kvservice.wire.names import snake_case

_FOREVER_S: Final = 1e8  # gRPC says some such number where the caller has stated no deadline
_KINDS: Final = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A method as gRPC is to call it, and what it calls where there is no place."""

    handler: Any
    refusal: Any
    room: Room
    recorder: MethodRecorder


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods of one service; other paths are counted as unknown."""

    def __init__(
        self,
        service: Any,
        descriptor: ServiceDescriptor,
        *,
        limits: ServerLimits,
        calls: OpenCalls,
        recorder: RpcRecorder,
        clock: Clock,
        guard: Guard,
        stream_threads: ThreadPoolExecutor,
        call_threads: ThreadPoolExecutor,
    ) -> None:
        self._stream_threads = stream_threads
        self._call_threads = call_threads
        self._service = service
        self._guard = guard
        self._rules = guard.rules(descriptor)
        self._limits = limits
        self._calls = calls
        self._clock = clock
        self._now = clock.monotonic
        self._unknown = recorder.method("unknown", "unknown", "unknown")
        self._by_path = {
            f"/{descriptor.full_name}/{method.name}": self._entry(method, recorder)
            for method in descriptor.methods
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Find what serves a call that has arrived: gRPC's own thread asks, and must not wait.

        Whoever is given a handler has taken a place, which is given back at the call's end.
        """
        entry = self._by_path.get(details.method)
        if entry is None:
            self._unknown.started()
            self._unknown.handled(Code.UNIMPLEMENTED.name, 0.0)
            return None
        if entry.room.take():
            return entry.handler
        entry.recorder.started()
        entry.recorder.handled(entry.room.refusal.code.name, 0.0)
        return entry.refusal

    def _entry(self, descriptor: MethodDescriptor, recorder: RpcRecorder) -> _Entry:
        streams = (descriptor.client_streaming, descriptor.server_streaming)
        kind = _KINDS[streams]
        method = Method(
            name=descriptor.name,
            serve=getattr(self._service, snake_case(descriptor.name)),
            request=message_factory.GetMessageClass(descriptor.input_type),
            response=message_factory.GetMessageClass(descriptor.output_type),
            whole=_framed(descriptor.input_type),
            recorder=recorder.method(
                kind, descriptor.containing_service.full_name, descriptor.name
            ),
            rule=self._rules[descriptor.name],
        )
        is_call = kind == "unary"
        room = self._calls.calls if is_call else self._calls.streams
        threads = self._call_threads if is_call else self._stream_threads
        behaviour = self._behaviour(method, kind)
        if descriptor.server_streaming:
            handler = grpc.stream_stream_rpc_method_handler(
                served_by(threads, streaming_in_room(room, behaviour))
            )
        else:
            handler = grpc.stream_unary_rpc_method_handler(
                served_by(threads, in_room(room, behaviour))
            )
        return _Entry(handler, refusing(room.refusal), room, method.recorder)

    def _behaviour(self, method: Method, kind: str) -> Callable[..., Any]:
        if kind == "unary":
            return self._unary(method)
        if kind == "client_stream":
            return self._client_stream(method)
        if kind == "server_stream":
            return self._server_stream(method)
        if method.whole is None:
            return self._conversation(method)
        assert method.name == "Attend", f"{method.name}: nobody answers such streams"
        return self._attends(method)

    # One request, one response

    def _unary(self, method: Method) -> Callable[..., bytes]:
        def handle(raws: Iterator[bytes], context: Any) -> bytes:
            rpc = self._begin(method, context)
            try:
                with self._calls.watched(context, timeout_s=self._time_left(context)) as call:
                    rpc.identify()
                    request = self._only(method, raws, call)
                    response = method.serve(request, rpc.admit(request))
                    encoded: bytes = response.SerializeToString()
                    self._check_size(encoded)
                method.recorder.sent()
                rpc.succeed()
                return encoded
            except Exception as error:
                rpc.fail(error)
                return b""

        return handle

    def _client_stream(self, method: Method) -> Callable[..., bytes]:
        def handle(raws: Iterator[bytes], context: Any) -> bytes:
            rpc = self._begin(method, context)
            try:
                with self._calls.watched(context, timeout_s=self._time_left(context)):
                    rpc.identify()
                    calls = list(self._wholes(method, raws))
                    if len(calls) != 1:
                        raise InvalidRequest(f"the stream must carry one call, got {len(calls)}")
                    response = method.serve(calls[0], rpc.admit(calls[0]))
                    encoded: bytes = response.SerializeToString()
                method.recorder.sent()
                rpc.succeed()
                return encoded
            except Exception as error:
                rpc.fail(error)
                return b""

        return handle

    def _server_stream(self, method: Method) -> Callable[..., Iterator[bytes]]:
        def handle(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
            rpc = self._begin(method, context)
            try:
                with self._calls.watched(context, timeout_s=self._time_left(context)) as call:
                    rpc.identify()
                    request = self._only(method, raws, call)
                    result = method.serve(request, rpc.admit(request))
                    for frame in frames(result, self._limits.fragment_bytes):
                        call.ends_at = min(call.ends_at, self._now() + self._limits.answer_s)
                        rpc.sent()
                        yield frame
                rpc.succeed()
            except Exception as error:
                rpc.fail(error)
            finally:
                rpc.end()

        return handle

    # Streams of calls

    def _attends(self, method: Method) -> Callable[..., Iterator[bytes]]:
        """Answer each call in order. A call's error travels in its result; the stream goes on."""

        def handle(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
            rpc = self._begin(method, context)
            idle_s = self._limits.idle_stream_s
            try:
                with self._calls.watched(context, timeout_s=idle_s) as stream:
                    stream.has_ended = rpc.identify()
                    answers = StreamAnswers(
                        rpc=rpc,
                        service=self._service,
                        limits=self._limits,
                        recorder=method.recorder,
                        clock=self._clock,
                    )
                    for raw in self._while_idle(raws, stream, idle_s):
                        method.recorder.received()
                        for frame in answers.answer(raw):
                            # A peer that does not take its answer holds a thread: not for ever.
                            stream.ends_at = self._now() + self._limits.answer_s
                            rpc.sent()
                            yield frame
                    answers.end()
                    if not stream.cancelled:
                        rpc.succeed()
            except Exception as error:
                rpc.fail(error)
            finally:
                rpc.end()

        return handle

    def _conversation(self, method: Method) -> Callable[..., Iterator[bytes]]:
        """Answer message by message; the service is told of the first, and the last at the end."""
        ended = getattr(self._service, f"{snake_case(method.name)}_ended")

        def handle(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
            rpc = self._begin(method, context)
            idle_s = self._limits.idle_stream_s
            request = None
            try:
                with self._calls.watched(context, timeout_s=idle_s) as stream:
                    rpc.identify()
                    for raw in self._while_idle(raws, stream, idle_s):
                        method.recorder.received()
                        first = request is None
                        received = decode(method.request, raw)
                        caller = rpc.admit(received, again=not first)
                        request = received
                        answer = method.serve(request, caller, first=first)
                        rpc.sent()
                        yield answer.SerializeToString()
                    if not stream.cancelled:
                        rpc.succeed()
            except Exception as error:
                rpc.fail(error)
            finally:
                rpc.end()
                if request is not None:
                    ended(request)

        return handle

    def _while_idle(
        self, raws: Iterator[bytes], stream: OpenCall, idle_s: float
    ) -> Iterator[bytes]:
        """Pass messages on; while waiting for one, and only then, the stream's time runs."""
        for raw in raws:
            stream.ends_at = NEVER
            yield raw
            stream.ends_at = self._now() + idle_s

    def _wholes(self, method: Method, raws: Iterator[bytes]) -> Iterator[Any]:
        wholes = method.wholes(self._limits)
        for raw in raws:
            method.recorder.received()
            whole = wholes.add(raw)
            if whole is not None:
                yield whole
        wholes.end()

    def _begin(self, method: Method, context: Any) -> Rpc:
        method.recorder.started()
        metadata = dict(context.invocation_metadata())
        REQUEST.set(Request(metadata.get(REQUEST_KEY)))
        return Rpc(method, context, self._clock, self._guard)

    def _only(self, method: Method, raws: Iterator[bytes], call: OpenCall) -> Any:
        """Read and decode the one message of a request, within the default deadline."""
        ends_at = call.ends_at
        call.ends_at = min(ends_at, self._now() + self._limits.default_deadline_s)
        raw = next(raws, None)
        call.ends_at = ends_at
        if raw is None and call.cancelled:
            raise DeadlineExceeded("the request did not come in time")
        if raw is None:
            raise InvalidRequest("the request is missing")
        method.recorder.received()
        return decode(method.request, raw)

    def _time_left(self, context: Any) -> float:
        """Return the seconds that a call has; those that state none get the default."""
        left: float | None = context.time_remaining()
        if left is None or left > _FOREVER_S:
            return self._limits.default_deadline_s
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the call was begun")
        return NEVER  # gRPC itself ends the call

    def _check_size(self, encoded: bytes) -> None:
        if len(encoded) > self._limits.max_frame_bytes:
            raise TooLarge(
                f"the answer has {len(encoded)} bytes, at most {self._limits.max_frame_bytes} fit",
                limit_bytes=self._limits.max_frame_bytes,
            )


def _framed(descriptor: Any) -> type[Any] | None:
    """Return the type of the message that frames of this type carry; None if it is no frame."""
    if "frame" not in descriptor.oneofs_by_name:
        return None
    found: type[Any] = message_factory.GetMessageClass(descriptor.fields_by_number[1].message_type)
    return found
