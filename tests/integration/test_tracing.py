"""Spans from client to manager to worker, with the real SDK; and none, at no cost, without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvservice.config import ManagerSettings, ServerLimits, WorkerSettings
from kvservice.core import errors
from kvservice.runtime.manager import ManagerServer
from kvservice.runtime.worker import WorkerServer
from kvservice.wire import tracing
from kvservice.wire.names import MANAGER, WORKER
from kvservice_client import Client, Session, connect
from kvservice_client._transport_traced import TracedTransport
from tests.programs import ROOT
from tests.serving import until

LIMITS = ServerLimits(max_streams=8, unary_threads=4)


@dataclass
class Traced:
    """A service, and what its processes have exported; all of them are this one."""

    client: Client
    exporter: InMemorySpanExporter
    tracer: trace.Tracer

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        assert parent.context is not None
        return [
            span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """Set up the SDK for one test: the global provider can be set once in a process."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


@pytest.fixture(params=[True, False], ids=["lane", "grpc"])
def traced(
    provider: TracerProvider, request: pytest.FixtureRequest, leaves_nothing: None
) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with ExitStack() as running:
        manager = running.enter_context(
            ManagerServer(ManagerSettings(limits=LIMITS, workers_expected=2))
        )
        for name in ("w0", "w1"):
            settings = WorkerSettings(
                name, 64 << 20, manager_address=manager.address, limits=LIMITS
            )
            running.enter_context(WorkerServer(settings))
        until(lambda: len(manager.manager.workers()) == 2)
        client = running.enter_context(connect(manager.address, lane=request.param))
        yield Traced(client, exporter, provider.get_tracer("test"))


def attend(session: Session, layer: int = 0) -> None:
    q, kv = np.ones((1, 4, 3, 16), np.float32), np.ones((1, 2, 3, 16), np.float32)
    session.attend(layer, q, kv, kv)


def test_call_is_one_trace_from_client_to_worker(traced: Traced) -> None:
    """Four spans, each the child of the one before: two of clients, two of servers."""
    with traced.tracer.start_as_current_span("work"):
        session = traced.client.open(num_rows=1)
    [work] = traced.spans("work")
    name = f"{MANAGER.full_name}/Allocate"
    [asked] = [span for span in traced.children(work) if span.name == name]
    [served] = until(lambda: traced.children(asked))
    [forwarded] = traced.children(served)
    [done] = traced.children(forwarded)
    assert [span.kind for span in (asked, served, forwarded, done)] == [
        *(SpanKind.CLIENT, SpanKind.SERVER) * 2
    ]
    assert done.name == forwarded.name == f"{WORKER.full_name}/Allocate"
    assert asked.attributes is not None
    assert asked.attributes["rpc.system.name"] == "grpc"
    assert asked.attributes["rpc.method"] == name
    assert asked.attributes["rpc.response.status_code"] == "OK"
    assert asked.attributes["server.address"] == "127.0.0.1"
    session.release()


def test_calls_on_several_workers_belong_to_their_call(traced: Traced) -> None:
    """The manager asks them at the same time, in other threads."""
    with traced.tracer.start_as_current_span("work"):
        traced.client.page_stats()
    [served] = until(
        lambda: [
            span
            for span in traced.spans(f"{MANAGER.full_name}/PageStats")
            if span.kind is SpanKind.SERVER
        ]
    )
    assert len(traced.children(served)) == 2


def test_layers_have_spans_where_the_trace_is_sampled(traced: Traced) -> None:
    """Streams outlive traces, so each Attend says what it belongs to; with nobody to tell, none."""
    name = f"{WORKER.full_name}/Attend"
    with traced.client.open(num_rows=1) as session:
        attend(session, 0)
        attend(session, 1)
        assert traced.spans(name) == []
        with traced.tracer.start_as_current_span("step"):
            attend(session, 0)
            attend(session, 1)
        attend(session, 0)
        attend(session, 1)
    [step] = traced.spans("step")
    asked = [span for span in traced.children(step) if span.name == name]
    assert len(asked) == 2
    assert [span.attributes and span.attributes["kvservice.layer"] for span in asked] == [0, 1]
    for span in asked:
        [served] = traced.children(span)
        assert served.kind is SpanKind.SERVER
        assert served.attributes is not None
        assert served.attributes["kvservice.worker"] in ("w0", "w1")
    assert len(traced.spans(name)) == 4


def test_errors_are_whose_they_are(traced: Traced) -> None:
    """What a caller does wrong is an error of the client's span, and none of the server's."""
    unknown = "11111111-1111-4111-8111-111111111111"
    with (
        traced.tracer.start_as_current_span("work"),
        suppress(errors.SessionNotFound),
    ):
        traced.client.attach(unknown)
    [work] = traced.spans("work")
    [asked] = [span for span in traced.children(work) if span.name.endswith("/Attach")]
    [served] = until(lambda: traced.children(asked))
    for span in (asked, served):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert asked.status.status_code is StatusCode.ERROR
    assert served.status.status_code is StatusCode.UNSET


def test_spans_hold_no_contents(traced: Traced) -> None:
    """No session id, no token, no tensor: only what is named here."""
    with traced.tracer.start_as_current_span("work"), traced.client.open(num_rows=1) as session:
        attend(session)
        session.read(0)
    allowed = {
        *("rpc.system.name", "rpc.method", "rpc.response.status_code", "error.type"),
        *("server.address", "server.port"),
        *("kvservice.layer", "kvservice.step", "kvservice.worker"),
    }
    for span in traced.exporter.get_finished_spans():
        assert set(span.attributes or ()) <= allowed
        assert not span.events


def test_nothing_is_wrapped_where_nobody_traces(leaves_nothing: None) -> None:
    """Without a provider that was set up there is no tracer, and so no wrapper and no interceptor.

    That is the whole of the cost: each call goes the way it would go if this did not exist.
    """
    assert tracing.find_tracer() is None
    with (
        WorkerServer(WorkerSettings("w0", 64 << 20, limits=LIMITS)) as worker,
        connect(worker.address) as client,
        client.open(num_rows=1) as session,
    ):
        attend(session)
        ways = client._connections._transports.values()
        assert ways
        assert not any(isinstance(way, TracedTransport) for way in ways)


CONSOLE = """
import sys
from kvservice.runtime import telemetry
from kvservice.wire import tracing
telemetry.start("kvservice-test", log_level="info", log_format="json")
tracer = tracing.find_tracer()
with tracer.serving("a.Service/Do", ""):
    pass
from opentelemetry import trace
trace.get_tracer_provider().shutdown()
"""


@pytest.mark.parametrize(
    ("exporter", "code", "says"), [("console", 0, "a.Service/Do"), ("pigeon", 1, "pigeon")]
)
def test_processes_set_it_up_by_their_environment(exporter: str, code: int, says: str) -> None:
    """`OTEL_TRACES_EXPORTER` names where spans go; one that is not installed is said so."""
    done = subprocess.run(
        [sys.executable, "-c", CONSOLE],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "OTEL_TRACES_EXPORTER": exporter},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
