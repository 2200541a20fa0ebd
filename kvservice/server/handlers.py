"""The methods of a service as gRPC handlers, made from its descriptor.

Every kind of method does the same things, from the outside in: count, turn errors into statuses,
bound streams and times, find the caller, decode, serve. Bytes are decoded here and not by gRPC,
whose answer to undecodable ones would be INTERNAL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kvservice.clock import Clock
from kvservice.config import ServerLimits
from kvservice.core.access import Rule
from kvservice.core.caller import Caller
from kvservice.core.errors import (
    Code,
    DeadlineExceeded,
    InvalidRequest,
    KVServiceError,
    TooLarge,
)
from kvservice.core.recorder import MethodRecorder, RpcRecorder, auth_reason
from kvservice.logs import REQUEST, REQUEST_KEY, Request
from kvservice.server.attends import whole_or_pieces
from kvservice.server.faults import explained
from kvservice.server.guard import Attend, Credential, Guard
from kvservice.server.streams import NEVER, OpenCall, OpenCalls
from kvservice.server.wholes import Wholes, decode
from kvservice.wire import status
from kvservice.wire.fragments import frames
from kvservice.wire.names import snake_case

LOG = logging.getLogger(__name__)

OURS: Final = {Code.INTERNAL, Code.DATA_LOSS}
_FOREVER_S: Final = 1e8  # gRPC says some such number where the caller has stated no deadline
_KINDS: Final = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


@dataclass(frozen=True, slots=True)
class Method:
    """One method: how to decode, serve and count it.

    Fields:
        name: As in the path.
        whole: For framed requests, the type of the message that the frames carry.
        rule: Who may call it.
        read: Looks at a frame that may be served without being decoded. None: there are none.
    """

    name: str
    serve: Callable[..., Any]
    request: type[Any]
    response: type[Any]
    whole: type[Any] | None
    recorder: MethodRecorder
    rule: Rule
    read: Callable[[bytes], Any] | None

    def wholes(self, limits: ServerLimits) -> Wholes:
        """Return what puts the requests of a stream together."""
        assert self.whole is not None, f"the requests of {self.name} are not framed"
        return Wholes(self.request, self.whole, limits.max_message_bytes)


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
    ) -> None:
        self._service = service
        self._guard = guard
        self._rules = guard.rules(descriptor)
        self._limits = limits
        self._calls = calls
        self._clock = clock
        self._unknown = recorder.method("unknown", "unknown", "unknown")
        self._by_path = {
            f"/{descriptor.full_name}/{method.name}": self._handler(method, recorder)
            for method in descriptor.methods
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._by_path.get(details.method)
        if handler is None:
            self._unknown.started()
            self._unknown.handled(Code.UNIMPLEMENTED.name, 0.0)
        return handler

    def _handler(self, descriptor: MethodDescriptor, recorder: RpcRecorder) -> Any:
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
            read=getattr(self._service, f"read_{snake_case(descriptor.name)}", None),
        )
        if kind == "unary":
            return grpc.unary_unary_rpc_method_handler(self._unary(method))
        if kind == "client_stream":
            return grpc.stream_unary_rpc_method_handler(self._client_stream(method))
        if kind == "server_stream":
            return grpc.unary_stream_rpc_method_handler(self._server_stream(method))
        if method.whole is None:
            return grpc.stream_stream_rpc_method_handler(self._conversation(method))
        result = _framed(descriptor.output_type)
        assert result is not None, f"{descriptor.name}: requests are framed, responses are not"
        return grpc.stream_stream_rpc_method_handler(self._calls_on_stream(method, result))

    # One request, one response

    def _unary(self, method: Method) -> Callable[..., bytes]:
        def handle(raw: bytes, context: Any) -> bytes:
            rpc = self._begin(method, context)
            try:
                with self._calls.call(context, timeout_s=self._time_left(context)):
                    method.recorder.received()
                    rpc.identify()
                    request = decode(method.request, raw)
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
                with self._calls.stream(context, timeout_s=self._time_left(context)):
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
        def handle(raw: bytes, context: Any) -> Iterator[bytes]:
            rpc = self._begin(method, context)
            try:
                with self._calls.stream(context, timeout_s=self._time_left(context)):
                    method.recorder.received()
                    rpc.identify()
                    request = decode(method.request, raw)
                    result = method.serve(request, rpc.admit(request))
                    for frame in frames(result, self._limits.fragment_bytes):
                        rpc.sent()
                        yield frame
                rpc.succeed()
            except Exception as error:
                rpc.fail(error)
            finally:
                rpc.end()

        return handle

    # Streams of calls

    def _calls_on_stream(
        self, method: Method, result_type: type[Any]
    ) -> Callable[..., Iterator[bytes]]:
        """Answer each call in order. A call's error travels in its result; the stream goes on."""

        limit = self._limits.fragment_bytes

        def failed(call: Any, rpc: _Rpc, error: Exception, began: float) -> Iterable[bytes]:
            told = rpc.mapped(error)
            method.recorder.answered(told.code.name, self._clock.monotonic() - began)
            return frames(result_type(call_id=call.call_id, error=status.to_status(told)), limit)

        def answer(raw: bytes, wholes: Wholes, rpc: _Rpc) -> Iterable[bytes]:
            began = self._clock.monotonic()
            said = None if method.read is None or wholes.pending else method.read(raw)
            if said is not None and not said.begins:
                try:
                    frame = self._service.attend_steadily(said, rpc.admit_streamed(said))
                except Exception as error:
                    return failed(said, rpc, error, began)
                if frame is not None:
                    method.recorder.answered("OK", self._clock.monotonic() - began)
                    return whole_or_pieces(frame, limit)
            call = wholes.add(raw)
            if call is None:
                return ()
            try:
                more = () if method.read is None else (said,)
                result = method.serve(call, rpc.admit(call), *more)
            except Exception as error:
                return failed(call, rpc, error, began)
            method.recorder.answered("OK", self._clock.monotonic() - began)
            return frames(result, limit)

        def handle(raws: Iterator[bytes], context: Any) -> Iterator[bytes]:
            rpc = self._begin(method, context)
            idle_s = self._limits.idle_stream_s
            try:
                with self._calls.stream(context, timeout_s=idle_s) as stream:
                    stream.has_ended = rpc.identify()
                    wholes = method.wholes(self._limits)
                    for raw in self._while_idle(raws, stream, idle_s):
                        method.recorder.received()
                        for frame in answer(raw, wholes, rpc):
                            # A peer that does not take its answer holds a thread: not for ever.
                            stream.ends_at = self._clock.monotonic() + self._limits.answer_s
                            rpc.sent()
                            yield frame
                    wholes.end()
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
                with self._calls.stream(context, timeout_s=idle_s) as stream:
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
            stream.ends_at = self._clock.monotonic() + idle_s

    def _wholes(self, method: Method, raws: Iterator[bytes]) -> Iterator[Any]:
        wholes = method.wholes(self._limits)
        for raw in raws:
            method.recorder.received()
            whole = wholes.add(raw)
            if whole is not None:
                yield whole
        wholes.end()

    def _begin(self, method: Method, context: Any) -> _Rpc:
        method.recorder.started()
        metadata = dict(context.invocation_metadata())
        REQUEST.set(Request(metadata.get(REQUEST_KEY)))
        return _Rpc(method, context, self._clock, self._guard)

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


class _Rpc:
    """One call on its way: who calls, how it ends, and that it is counted and logged once."""

    __slots__ = (
        *("_clock", "_context", "_counted", "_credential", "_ended"),
        *("_guard", "_method", "_sent", "_started"),
    )

    def __init__(self, method: Method, context: Any, clock: Clock, guard: Guard) -> None:
        self._method = method
        self._guard = guard
        self._context = context
        self._clock = clock
        self._started = clock.monotonic()
        self._credential: Credential | None = None
        self._counted: str | None = None
        self._ended = False
        self._sent = False

    def sent(self) -> None:
        """A message of a stream goes out."""
        if not self._sent:
            self._sent = True
            self._method.recorder.first_sent(self._clock.monotonic() - self._started)
        self._method.recorder.sent()

    def identify(self) -> Callable[[], bool]:
        """Find out who calls; return what says whether that has ended meanwhile.

        Raises:
            Unauthenticated, PermissionDenied, InvalidRequest: Before anything is decoded.
        """
        credential = self._credential = self._guard.identify(self._context)
        return partial(self._guard.has_ended, credential)

    def admit(self, request: Any, *, again: bool = False) -> Caller:
        """Return who makes a request. The first one counts as the tenant's call in progress.

        Args:
            again: Of a conversation that has been admitted: only its first message needs a
                credential that still holds.
        """
        assert self._credential is not None, "identified before"
        if again and self._credential.caller is not None:
            return self._credential.caller
        caller = self._guard.admit(self._credential, self._method.rule, request)
        if self._counted is None:
            self._guard.calls.begin(caller.tenant)
            self._counted = caller.tenant
        return caller

    def admit_streamed(self, call: Attend) -> Caller:
        """As `admit`, of an Attend that has not been decoded."""
        assert self._credential is not None, "identified before"
        caller = self._guard.admit_streamed(self._credential, self._method.rule, call)
        if self._counted is None:
            self._guard.calls.begin(caller.tenant)
            self._counted = caller.tenant
        return caller

    def mapped(self, error: Exception) -> KVServiceError:
        """Return what the client is told; what nobody expected is explained in the log alone."""
        if isinstance(error, KVServiceError):
            if reason := auth_reason(error):
                self._method.recorder.turned_away(reason)
            level = logging.ERROR if error.code in OURS else logging.INFO
            self._log(level, error.reason, error.message)
            return error
        return explained(error, self._method.name)

    def fail(self, error: Exception) -> None:
        if isinstance(error, grpc.RpcError):  # the client has gone, or its deadline has passed
            self.end()
            return
        ours = self.mapped(error)
        answer = status.to_trailer_status(ours)
        self._context.set_code(status.to_code(ours))
        self._context.set_details(answer.message)
        self._context.set_trailing_metadata(((status.DETAILS_KEY, answer.SerializeToString()),))
        self._end(ours.code.name)

    def succeed(self) -> None:
        self._end("OK" if self._context.is_active() else self._cut_off())

    def end(self) -> None:
        """The call is over, however it was; no effect if that has been said already."""
        self._end(self._cut_off())

    def _cut_off(self) -> str:
        left = self._context.time_remaining()
        return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"

    def _end(self, code: str) -> None:
        if not self._ended:
            self._ended = True
            if self._counted is not None:
                self._guard.calls.end(self._counted)
            seconds = self._clock.monotonic() - self._started
            self._method.recorder.handled(code, seconds)
            self._log(logging.DEBUG, code, f"{seconds:.6f} s", duration_s=round(seconds, 6))

    def _log(self, level: int, outcome: str, text: str, **more: object) -> None:
        if LOG.isEnabledFor(level):
            fields = {"rpc_method": self._method.name, "rpc_outcome": outcome, **more}
            LOG.log(level, "%s %s: %s", self._method.name, outcome, text, extra=fields)


def _framed(descriptor: Any) -> type[Any] | None:
    """Return the type of the message that frames of this type carry; None if it is no frame."""
    if "frame" not in descriptor.oneofs_by_name:
        return None
    found: type[Any] = message_factory.GetMessageClass(descriptor.fields_by_number[1].message_type)
    return found
