"""What every server exports: its build, its process, its calls."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric

from kvservice import __version__, config
from kvservice.core.distribution import SECONDS, Distribution, Histogram
from kvservice.core.recorder import AUTH_REASONS, MethodRecorder, QueueRecorder
from kvservice.metrics.families import Collected, Labels, gauge, gauge_by, histogram

# One more series for each counter, which nobody reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

_METHOD = ("grpc_type", "grpc_service", "grpc_method")
_CALL = ("grpc_service", "grpc_method")


class Metrics:
    """A registry with what every server has: build, process, RPCs. An `RpcRecorder`."""

    def __init__(self, labels: Labels | None = None) -> None:
        """
        Args:
            labels: Of the series that are this process's own: of a worker, its name.
        """
        self.registry = CollectorRegistry()
        self.labels = dict(labels or {})
        self._methods: list[_MethodMetrics] = []
        self.queue: QueueRecorder = _QueueMetrics(self.registry, self.labels)
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        prometheus_client.GCCollector(registry=self.registry)
        self.registry.register(Collected(_of_build))
        self.registry.register(Collected(self._calls))
        self._started = self._counter("grpc_server_started", "Calls begun.", _METHOD)
        self._handled = self._counter(
            "grpc_server_handled", "Calls ended, by status code.", (*_METHOD, "grpc_code")
        )
        self._turned_away = self._counter(
            "kvservice_auth_failures", "Callers who were not let in, or not to this.", ("reason",)
        )
        for reason in AUTH_REASONS:
            self._turned_away.labels(reason)

    def method(self, kind: str, service: str, method: str) -> MethodRecorder:
        """Return the recorder of an RPC method, with all its series at 0."""
        made = _MethodMetrics(
            (kind, service, method),
            started=self._started,
            handled=self._handled,
            turned_away=self._turned_away,
        )
        self._methods.append(made)
        return made

    def watch_files(
        self, up_to_date: Callable[[], bool], certificate_ends: Callable[[], Mapping[str, float]]
    ) -> None:
        """Report on secret and other files from now on.

        Args:
            up_to_date: Whether what holds is what the files say now.
            certificate_ends: Returns when certificates expire, by role, in seconds since the epoch.
        """
        self.registry.register(Collected(lambda: _of_files(up_to_date(), certificate_ends())))

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, tuple(labels), registry=self.registry)

    def _calls(self) -> Iterator[Metric]:
        """Yield what methods count by themselves, as of one moment each."""
        counted = [(method, method.count()) for method in self._methods]
        for name, text, which in (
            ("grpc_server_msg_received", "Messages received.", "received"),
            ("grpc_server_msg_sent", "Messages sent.", "sent"),
        ):
            family = CounterMetricFamily(name, text, labels=_METHOD)
            for method, counts in counted:
                family.add_metric(tuple(method.labels.values()), getattr(counts, which))
            yield family
        family = CounterMetricFamily(
            "kvservice_stream_calls",
            "Calls that streams have carried, by the status code of each.",
            labels=(*_CALL, "grpc_code"),
        )
        for method, counts in counted:
            for code, number in counts.answered.items():
                family.add_metric((*(method.labels[name] for name in _CALL), code), number)
        yield family
        yield histogram(
            "grpc_server_handling_seconds",
            "How long calls took; streams, as long as they lived.",
            [(method.labels, method.seconds.snapshot()) for method, _ in counted],
            _METHOD,
        )
        yield histogram(
            "grpc_server_first_message_seconds",
            "How long after a stream's beginning its first message went out.",
            [(method.labels, method.first.snapshot()) for method, _ in counted if method.streams],
            _METHOD,
        )
        yield histogram(
            "kvservice_stream_call_seconds",
            "How long the calls that streams carry took, from the whole call to its answer.",
            [(method.labels, counts.seconds) for method, counts in counted if method.carries],
            _CALL,
        )


class _Counts(NamedTuple):
    """Messages of a method, and the calls that its streams have carried."""

    received: int
    sent: int
    answered: dict[str, int]
    seconds: Distribution


class _MethodMetrics:
    """A `MethodRecorder`."""

    def __init__(
        self,
        names: tuple[str, str, str],
        *,
        started: Counter,
        handled: Counter,
        turned_away: Counter,
    ) -> None:
        self.labels = dict(zip(_METHOD, names, strict=True))
        self.streams = names[0] in ("server_stream", "bidi_stream")
        self.carries = names[0] == "bidi_stream"
        self.seconds, self.first, self._calls = (Histogram(SECONDS) for _ in range(3))
        self.first_sent = self.first.observe
        self.started = started.labels(*names).inc
        handled.labels(*names, "OK")
        self._handled, self._names = handled, names
        self._refusals = turned_away
        self._lock = threading.Lock()
        self._received = self._sent = 0
        self._answered = {"OK": 0} if self.carries else {}
        # What went well is put down here, which takes no lock, and counted when somebody looks.
        self._carried = Histogram(SECONDS)
        self.carried = self._carried.observe

    def received(self) -> None:
        with self._lock:
            self._received += 1

    def sent(self) -> None:
        with self._lock:
            self._sent += 1

    def answered(self, code: str, seconds: float) -> None:
        with self._lock:
            self._answered[code] = self._answered.get(code, 0) + 1
        self._calls.observe(seconds)

    def count(self) -> _Counts:
        """Return the numbers of this moment."""
        carried = self._carried.snapshot()
        number = carried.num_values
        with self._lock:
            answered = dict(self._answered)
            received, sent = self._received + number, self._sent + number
        if self.carries:
            answered["OK"] += number
        return _Counts(received, sent, answered, self._calls.snapshot().plus(carried))

    def turned_away(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def handled(self, code: str, seconds: float) -> None:
        self._handled.labels(*self._names, code).inc()
        self.seconds.observe(seconds)


class _QueueMetrics:
    """A `QueueRecorder`."""

    def __init__(self, registry: CollectorRegistry, labels: Labels) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._depth = 0
        self._waits = Histogram(SECONDS)
        registry.register(Collected(self._collect))

    def entered(self) -> None:
        with self._lock:
            self._depth += 1

    def left(self, seconds: float) -> None:
        with self._lock:
            self._depth -= 1
        self._waits.observe(seconds)

    def _collect(self) -> Iterator[Metric]:
        yield gauge(
            "kvservice_queue_depth", "Calls waiting for a thread.", self._labels, self._depth
        )
        yield histogram(
            "kvservice_queue_wait_seconds",
            "How long calls waited for a thread.",
            [(self._labels, self._waits.snapshot())],
            self._labels,
        )


def _of_build() -> Iterator[Metric]:
    labels = {
        "version": __version__,
        "revision": config.revision(),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
    }
    yield gauge("kvservice_build_info", "What runs here. Always 1.", labels, 1)
    yield gauge(
        "kvservice_failpoints_enabled",
        "Settings of the environment that inject faults; must be 0 in production.",
        {},
        len(config.failpoints()),
    )


def _of_files(up_to_date: bool, certificate_ends: Mapping[str, float]) -> Iterator[Metric]:
    yield gauge(
        "kvservice_config_last_reload_successful",
        "Whether what holds is what tokens, keys, quotas and certificates say in their files now.",
        {},
        up_to_date,
    )
    yield gauge_by(
        "kvservice_tls_certificate_expiry_timestamp_seconds",
        "When a certificate in use expires, in seconds since the epoch.",
        {},
        "role",
        certificate_ends,
    )


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
