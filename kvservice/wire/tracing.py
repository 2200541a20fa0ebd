"""Spans from client to manager to worker, where OpenTelemetry's SDK is installed and set up.

Where it is not, `find_tracer` returns None, nothing is wrapped, and no call does anything for it.
What travels is W3C's `traceparent`: in the metadata of RPCs and, since streams outlive traces, in
each Attend whose trace is sampled. Spans say who, what and how it ended; never what is in a tensor
or a credential.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from typing import Any, Final

import grpc

from kvservice.core.errors import KVServiceError
from kvservice.logs import TRACE_ID

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # an optional extra
    HAS_API = False
else:
    HAS_API = True

TRACE_PARENT: Final = "traceparent"
NOTHING_MORE: Final[Mapping[str, int | str]] = {}

_OURS: Final = "/kvservice.v1."
# Of these a server is at fault; for a client, everything but OK is an error.
_FAULTS: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)


class Tracer:
    """Makes the spans of this process."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @property
    def is_sampled(self) -> bool:
        """Whether the current span, if there is one, is of a trace that is kept."""
        return bool(trace.get_current_span().get_span_context().trace_flags.sampled)

    def parent(self, span: Any | None = None) -> str:
        """Return the `traceparent` of a span, or of the current one; empty if there is none."""
        carrier: dict[str, str] = {}
        context = None if span is None else trace.set_span_in_context(span)
        self._propagator.inject(carrier, context)
        return carrier.get(TRACE_PARENT, "")

    def begin(self, method: str, address: str) -> Any:
        """Begin a client's span, to be ended by `end`. `method`: pkg.Service/Method."""
        host, _, port = address.rpartition(":")
        attributes = {**_of_method(method), "server.address": host}
        if port.isdigit():
            attributes["server.port"] = int(port)
        kind = trace.SpanKind.CLIENT
        return self._tracer.start_span(method, kind=kind, attributes=attributes)

    def end(self, span: Any, code: str, *, is_server: bool = False) -> None:
        """End a span with a status code by its name."""
        span.set_attribute("rpc.response.status_code", code)
        if code in _FAULTS or (code != "OK" and not is_server):
            span.set_attribute("error.type", code)
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    @contextmanager
    def serving(
        self, method: str, parent: str, attributes: Mapping[str, int | str] = NOTHING_MORE
    ) -> Iterator[Any]:
        """Have a server's span be the current one. An error of the tree ends it with its code."""
        context = self._propagator.extract({TRACE_PARENT: parent})
        span = self._tracer.start_span(
            method,
            context,
            kind=trace.SpanKind.SERVER,
            attributes={**_of_method(method), **attributes},
        )
        code = "OK"
        TRACE_ID.set(trace.format_trace_id(span.get_span_context().trace_id))
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        except KVServiceError as error:
            code = error.code.name
            raise
        except BaseException:
            code = "INTERNAL"
            raise
        finally:
            self.end(span, _ended_with(span, code), is_server=True)

    def channel(self, channel: grpc.Channel, address: str) -> grpc.Channel:
        """Return a channel whose calls of our services have spans. Streams of calls have none."""
        return grpc.intercept_channel(channel, _ClientSpans(self, address))

    def interceptors(self) -> tuple[grpc.ServerInterceptor, ...]:
        """Return what gives a server's calls spans. Streams of calls have none."""
        return (_ServerSpans(self),)


def find_tracer() -> Tracer | None:
    """Return the tracer of this process; None: OpenTelemetry is not installed, or not set up."""
    if not HAS_API:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracer(provider.get_tracer("kvservice", metadata.version("opentelemetry-api")))


def set_up(exporter: str, service_name: str) -> None:
    """Set OpenTelemetry up in a process of ours, unless somebody has.

    Sampling, resource and the exporter's address are the SDK's own settings (`OTEL_...`).

    Args:
        exporter: A name as in `OTEL_TRACES_EXPORTER`: `otlp`, `console`.

    Raises:
        ImportError: The SDK, or the package with that exporter, is not installed.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if find_tracer() is not None:
        return
    found = metadata.entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not found:
        raise ImportError(f"no package has the exporter {exporter}", name=exporter)
    make = next(iter(found)).load()
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(make()))
    trace.set_tracer_provider(provider)


def _of_method(method: str) -> dict[str, Any]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


def _ended_with(span: Any, code: str) -> str:
    """Return the code that a handler has set, where it has not raised."""
    noted = getattr(span, "attributes", None) or {}
    return str(noted.get("rpc.response.status_code", code))


_Details = namedtuple(
    "_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
)


class _ClientDetails(_Details, grpc.ClientCallDetails):  # type: ignore[misc]
    pass


class _ClientSpans(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
):
    def __init__(self, tracer: Tracer, address: str) -> None:
        self._tracer = tracer
        self._address = address

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return self._call(continuation, details, request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return self._call(continuation, details, requests)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return self._call(continuation, details, request)

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        if not details.method.startswith(_OURS):
            return continuation(details, request)
        span = self._tracer.begin(details.method[1:], self._address)
        carried = [*(details.metadata or ()), (TRACE_PARENT, self._tracer.parent(span))]
        made = _ClientDetails(
            details.method,
            details.timeout,
            carried,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        try:
            call = continuation(made, request)
        except BaseException:
            self._tracer.end(span, "CANCELLED")
            raise

        def end() -> None:
            self._tracer.end(span, call.code().name)

        if call.done() if hasattr(call, "done") else not call.add_callback(end):
            end()
        return call


class _ServerSpans(grpc.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        parents: Mapping[str, Any] = dict(details.invocation_metadata)
        parent = parents.get(TRACE_PARENT, "")
        method = details.method[1:]
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._whole(handler.unary_unary, method, parent)
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._whole(handler.stream_unary, method, parent)
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method, parent)
            )
        return handler

    def _whole(self, inner: Callable[..., Any], method: str, parent: str) -> Callable[..., Any]:
        @wraps(inner)  # and is run by its threads
        def serve(request: Any, context: Any) -> Any:
            with self._tracer.serving(method, parent) as span:
                answer = inner(request, context)
                _note(span, context)
                return answer

        return serve

    def _stream(self, inner: Callable[..., Any], method: str, parent: str) -> Callable[..., Any]:
        @wraps(inner)
        def serve(request: Any, context: Any) -> Iterator[Any]:
            with self._tracer.serving(method, parent) as span:
                yield from inner(request, context)
                _note(span, context)

        return serve


def _note(span: Any, context: Any) -> None:
    code = context.code()
    span.set_attribute("rpc.response.status_code", "OK" if code is None else code.name)
