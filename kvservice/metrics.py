"""Every metric, declared once; the only file that knows Prometheus.

A registry belongs to one process's worker or manager. What tables know is read at scrape time,
from one consistent snapshot; only durations and RPCs are counted as they happen.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Final
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice import __version__
from kvservice.clock import Clock
from kvservice.config import ConfigError
from kvservice.core.directory import WorkerState, WorkerView
from kvservice.core.recorder import MethodRecorder
from kvservice.core.session import WorkerStats

# One more series for each counter, which nobody reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

FREE_REASONS: Final = ("pop", "reset", "select", "evict", "release", "lease_expired", "move")
FAILURE_REASONS: Final = ("out_of_pages", "quota_exceeded", "too_many_sessions", "draining")
DURATION_BUCKETS: Final = (
    *(0.00005, 0.0001, 0.0003, 0.0006, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0),
)
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """A registry with what every server has: build, process, RPCs. An `RpcRecorder`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        prometheus_client.GCCollector(registry=self.registry)
        self.registry.register(_Collected(_build_info))
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self._started = self._counter("grpc_server_started", "Calls begun.", labels)
        self._handled = self._counter(
            "grpc_server_handled", "Calls ended, by status code.", (*labels, "grpc_code")
        )
        self._received = self._counter("grpc_server_msg_received", "Messages received.", labels)
        self._sent = self._counter("grpc_server_msg_sent", "Messages sent.", labels)
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "How long calls took; streams, as long as they lived.",
            labels,
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        """Return the recorder of an RPC method, with all its series at 0."""
        labels = (kind, service, method)
        self._handled.labels(*labels, "OK")
        return _MethodMetrics(
            self._started.labels(*labels),
            self._received.labels(*labels),
            self._sent.labels(*labels),
            self._seconds.labels(*labels),
            lambda code: self._handled.labels(*labels, code),
        )

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, tuple(labels), registry=self.registry)


class WorkerMetrics(Metrics):
    """The metrics of a worker process. A `Recorder` for the worker."""

    def __init__(self, worker_id: str, device: str) -> None:
        super().__init__()
        self._attention_seconds = Histogram(
            "kvservice_attention_duration_seconds",
            "Compute of one attention call.",
            ("worker", "device"),
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        ).labels(worker_id, device)
        self._batch_size = Histogram(
            "kvservice_attention_batch_size",
            "Rows in one attention call.",
            ("worker",),
            buckets=BATCH_BUCKETS,
            registry=self.registry,
        ).labels(worker_id)

    def attention(self, seconds: float, num_rows: int) -> None:
        self._attention_seconds.observe(seconds)
        self._batch_size.observe(num_rows)

    def watch(self, stats: Callable[[], WorkerStats]) -> None:
        """Report a worker's numbers from now on, asked at each scrape."""
        self.registry.register(_Collected(lambda: _of_worker(stats())))


class ManagerMetrics(Metrics):
    """The metrics of a manager process."""

    def watch(
        self, workers: Callable[[], list[WorkerView]], workers_expected: int, clock: Clock
    ) -> None:
        """Report the manager's picture from now on, asked at each scrape."""
        self.registry.register(_Collected(lambda: _of_manager(workers(), workers_expected, clock)))


class MetricsEndpoint:
    """Serves a registry over HTTP, at `/metrics`, between its making and `close`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """
        Args:
            port: 0: any free one.

        Raises:
            ConfigError: The port is taken, or the host is not this machine's.
        """
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}; choose another "
                "port, or 0 for any free one"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MethodMetrics:
    def __init__(
        self,
        started: Counter,
        received: Counter,
        sent: Counter,
        seconds: Histogram,
        handled: Callable[[str], Counter],
    ) -> None:
        self.started = started.inc
        self.received = received.inc
        self.sent = sent.inc
        self._seconds = seconds
        self._handled = handled

    def handled(self, code: str, seconds: float) -> None:
        self._handled(code).inc()
        self._seconds.observe(seconds)


class _Collected(Collector):
    """A collector out of a function."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _build_info() -> Iterator[Metric]:
    labels = {
        "version": __version__,
        "revision": "",
        "python": platform.python_version(),
        "torch": _version_of("torch"),
    }
    yield _gauge("kvservice_build_info", "What runs here. Always 1.", labels, 1)


def _of_worker(stats: WorkerStats) -> Iterator[Metric]:
    worker = {"worker": stats.worker_id}
    device = {**worker, "device": stats.device}
    info = {**worker, "incarnation": stats.incarnation, "device": stats.device}
    yield _gauge("kvservice_worker_info", "A worker's identity. Always 1.", info, 1)
    yield _gauge("kvservice_budget_bytes", "What arenas may take.", worker, stats.budget_bytes)
    yield _gauge("kvservice_used_bytes", "What used pages take.", worker, stats.used_bytes)
    yield _gauge("kvservice_arena_bytes", "What arenas take.", device, stats.arena_bytes)
    yield from _of_pools(stats)
    sessions = GaugeMetricFamily("kvservice_sessions", "Sessions.", labels=("worker", "state"))
    active = 0 if stats.draining else stats.num_sessions
    sessions.add_metric((stats.worker_id, "active"), active)
    sessions.add_metric((stats.worker_id, "draining"), stats.num_sessions - active)
    yield sessions
    for name, text, value in (
        ("page_allocations", "Pages taken into use.", stats.page_allocations),
        ("appended_tokens", "Tokens stored, per row and session.", stats.appended_tokens),
        ("popped_tokens", "Tokens dropped from the end.", stats.popped_tokens),
        ("appended_bytes", "Bytes of keys and values stored.", stats.appended_bytes),
        ("read_bytes", "Bytes of keys and values read back.", stats.read_bytes),
        ("lease_expirations", "Sessions whose lease ran out.", stats.lease_expirations),
    ):
        yield _counter(f"kvservice_{name}", text, worker, value)
    yield _by_reason(
        "kvservice_page_frees", "Pages given back.", stats.worker_id, FREE_REASONS, stats.page_frees
    )
    yield _by_reason(
        "kvservice_allocation_failures",
        "Calls refused for lack of room.",
        stats.worker_id,
        FAILURE_REASONS,
        stats.allocation_failures,
    )


def _of_pools(stats: WorkerStats) -> Iterator[Metric]:
    labels = ("worker", "pool")
    pages = GaugeMetricFamily(
        "kvservice_pages", "Pages of a pool; the states sum to all.", labels=(*labels, "state")
    )
    page_bytes = GaugeMetricFamily("kvservice_page_size_bytes", "Bytes of a page.", labels=labels)
    page_tokens = GaugeMetricFamily("kvservice_page_tokens", "Tokens in a page.", labels=labels)
    tokens = GaugeMetricFamily("kvservice_tokens", "Tokens stored in a pool.", labels=labels)
    for pool in stats.pools:
        key = (stats.worker_id, str(pool.pool))
        pages.add_metric((*key, "used"), pool.used_pages)
        pages.add_metric((*key, "reserved"), pool.reserved_pages)
        pages.add_metric((*key, "free"), pool.free_pages)
        page_bytes.add_metric(key, pool.page_bytes)
        page_tokens.add_metric(key, pool.page_size)
        tokens.add_metric(key, pool.num_tokens)
    yield from (pages, page_bytes, page_tokens, tokens)


def _of_manager(workers: list[WorkerView], workers_expected: int, clock: Clock) -> Iterator[Metric]:
    states = GaugeMetricFamily("kvservice_workers", "Workers, by state.", labels=("state",))
    for state in WorkerState:
        states.add_metric((state.value,), sum(view.state is state for view in workers))
    yield states
    yield _gauge(
        "kvservice_workers_expected",
        "Workers that there should be; 0: unknown.",
        {},
        workers_expected,
    )
    heard = GaugeMetricFamily(
        "kvservice_worker_heartbeat_timestamp_seconds",
        "When a worker was heard last, in seconds since the epoch.",
        labels=("worker",),
    )
    since_epoch = clock.time() - clock.monotonic()
    for view in workers:
        heard.add_metric((view.record.worker_id,), since_epoch + view.heard_at)
    yield heard


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _by_reason(
    name: str, text: str, worker_id: str, reasons: Iterable[str], counts: dict[str, int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=("worker", "reason"))
    for reason in dict.fromkeys((*reasons, *counts)):
        family.add_metric((worker_id, reason), counts.get(reason, 0))
    return family


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
