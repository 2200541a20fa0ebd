"""What is exported: exactly these names, types and labels, with every known series at 0."""

from __future__ import annotations

import urllib.request
from dataclasses import replace

import pytest

from kvservice.clock import ManualClock
from kvservice.config import ConfigError
from kvservice.core import errors
from kvservice.core.distribution import POWERS, SECONDS, Distribution, Histogram
from kvservice.core.liveness import WorkerRecord, WorkerState, WorkerView
from kvservice.core.membership import Membership
from kvservice.core.quota import UNLIMITED, Quota
from kvservice.core.recorder import AUTH_REASONS, auth_reason
from kvservice.core.recovery import Recovery
from kvservice.core.session import PoolStats, WorkerStats
from kvservice.metrics import ManagerMetrics, Metrics, MetricsEndpoint, WorkerMetrics
from kvservice.metrics.of_worker import MAX_POOLS, MAX_TENANTS
from kvservice_workers.counters import (
    DISCREPANCIES,
    FAILURE_REASONS,
    FREE_REASONS,
    MOVED,
    REPLAYED,
)

RPC = {
    "grpc_server_started_total": "counter",
    "grpc_server_handled_total": "counter",
    "grpc_server_msg_received_total": "counter",
    "grpc_server_msg_sent_total": "counter",
    "grpc_server_handling_seconds": "histogram",
    "grpc_server_first_message_seconds": "histogram",
    "kvservice_stream_calls_total": "counter",
    "kvservice_stream_call_seconds": "histogram",
    "kvservice_auth_failures_total": "counter",
    "kvservice_queue_depth": "gauge",
    "kvservice_queue_wait_seconds": "histogram",
    "kvservice_build_info": "gauge",
    "kvservice_failpoints_enabled": "gauge",
    "kvservice_config_last_reload_successful": "gauge",
    "kvservice_tls_certificate_expiry_timestamp_seconds": "gauge",
}
WORKER = {
    "kvservice_worker_info": "gauge",
    "kvservice_pages": "gauge",
    "kvservice_page_size_bytes": "gauge",
    "kvservice_page_tokens": "gauge",
    "kvservice_budget_bytes": "gauge",
    "kvservice_used_bytes": "gauge",
    "kvservice_arena_bytes": "gauge",
    "kvservice_tokens": "gauge",
    "kvservice_sessions": "gauge",
    "kvservice_page_allocations_total": "counter",
    "kvservice_page_frees_total": "counter",
    "kvservice_allocation_failures_total": "counter",
    "kvservice_appended_tokens_total": "counter",
    "kvservice_popped_tokens_total": "counter",
    "kvservice_appended_bytes_total": "counter",
    "kvservice_read_bytes_total": "counter",
    "kvservice_lease_expirations_total": "counter",
    "kvservice_attention_duration_seconds": "histogram",
    "kvservice_attention_batch_size": "histogram",
    "kvservice_leases": "gauge",
    "kvservice_stale_epoch_rejections_total": "counter",
    "kvservice_idempotent_replays_total": "counter",
    "kvservice_reconcile_discrepancies_total": "counter",
    "kvservice_session_pages": "histogram",
    "kvservice_arriving_sessions": "gauge",
    "kvservice_moves_total": "counter",
    "kvservice_moved_bytes_total": "counter",
    "kvservice_handover_duration_seconds": "histogram",
    "kvservice_tenant_pages": "gauge",
    "kvservice_tenant_quota_pages": "gauge",
}
MANAGER = {
    "kvservice_workers": "gauge",
    "kvservice_workers_expected": "gauge",
    "kvservice_session_copies_missing": "gauge",
    "kvservice_worker_heartbeat_timestamp_seconds": "gauge",
    "kvservice_worker_restarts_total": "counter",
    "kvservice_manager_recoveries_total": "counter",
    "kvservice_manager_recovery_duration_seconds": "histogram",
}
POOLS = (PoolStats(0, 16, 4096, 3, 2, 1, 40), PoolStats(1, 8, 64, 0, 0, 5, 0))
SECONDS_SEEN = Distribution(SECONDS, (0, 2, *[0] * (len(SECONDS) - 2), 1), 20.5)
STATS = WorkerStats(
    *("w0", "life-1", "host:1", "cpu", 10_000, 9_000, 8_000, 7, POOLS, 6),
    *(dict.fromkeys(FREE_REASONS, 0) | {"pop": 5},),
    *(dict.fromkeys(FAILURE_REASONS, 0) | {"out_of_pages": 4}, 3, 2, 1, 11, 12),
    replays=dict.fromkeys(REPLAYED, 0) | {"Fork": 13},
    stale_epochs=14,
    page_discrepancies=dict.fromkeys(DISCREPANCIES, 0) | {"leaked": 15},
    attention_seconds=SECONDS_SEEN,
    attention_rows=Histogram(POWERS).snapshot(),
    session_pages=Histogram(POWERS).snapshot(),
    moves=dict.fromkeys(MOVED, 0) | {"moved": 16},
    moved_bytes=17,
    handover_seconds=Histogram(SECONDS).snapshot(),
    num_arriving=18,
)


def exposed(metrics: Metrics) -> list[str]:
    endpoint = MetricsEndpoint(metrics.registry, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(answer.read().decode().splitlines())
    finally:
        endpoint.close()


def types(lines: list[str]) -> dict[str, str]:
    words = (line.split() for line in lines if line.startswith("# TYPE"))
    return {name: kind for _, _, name, kind in words}


def samples(lines: list[str]) -> dict[str, float]:
    parts = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in parts}


def ours(kinds: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in kinds.items() if name.startswith(("kvservice", "grpc"))}


@pytest.fixture
def worker() -> WorkerMetrics:
    """Return the metrics of a worker with the stats above."""
    metrics = WorkerMetrics("w0")
    metrics.method("unary", "a.Service", "Do")
    metrics.method("bidi_stream", "a.Service", "Flow")
    metrics.watch(lambda: STATS)
    metrics.watch_tenants(
        lambda: {"a": 1, "b": 2, "c": 4},
        lambda: ("a", "z"),
        lambda tenant: Quota(pages=9) if tenant == "a" else UNLIMITED,
    )
    metrics.watch_files(lambda: True, lambda: {"server": 5000.0})
    return metrics


def manager_metrics(recovery: Recovery | None = None) -> ManagerMetrics:
    clock = ManualClock(5000.0)
    record = WorkerRecord("w0", "life-1", "host:1", "cpu", 100, 50)
    views = [WorkerView(record, WorkerState.ALIVE, 3, heard_at=4990.0, restarts=3)]
    metrics = ManagerMetrics()
    metrics.method("unary", "a.Service", "Do")
    metrics.method("bidi_stream", "a.Service", "Flow")
    metrics.watch(lambda: Membership(views, 2, recovery), clock)
    metrics.watch_files(lambda: True, lambda: {"server": 5000.0})
    return metrics


def test_worker_exports_these_names(worker: WorkerMetrics) -> None:
    """No more, no fewer, each of its type: dashboards and alerts rely on them."""
    lines = exposed(worker)
    assert ours(types(lines)) == {**WORKER, **RPC}
    assert "process_resident_memory_bytes" in types(lines)
    assert not any("_created" in line for line in lines)


def test_manager_exports_these_names() -> None:
    """As the worker."""
    lines = exposed(manager_metrics())
    assert ours(types(lines)) == {**MANAGER, **RPC}
    found = samples(lines)
    assert found['kvservice_workers{state="alive"}'] == 1
    for state in ("suspect", "dead", "draining"):
        assert found[f'kvservice_workers{{state="{state}"}}'] == 0
    assert found["kvservice_workers_expected"] == 2
    assert found['kvservice_worker_heartbeat_timestamp_seconds{worker="w0"}'] == 4990.0
    assert found['kvservice_worker_restarts_total{worker="w0"}'] == 3
    for outcome in ("complete", "partial"):
        assert found[f'kvservice_manager_recoveries_total{{outcome="{outcome}"}}'] == 0


def test_manager_that_has_taken_over_says_so() -> None:
    """Once in its life, with how it went and how long it took."""
    found = samples(exposed(manager_metrics(Recovery("partial", 3.0))))
    assert found['kvservice_manager_recoveries_total{outcome="partial"}'] == 1
    assert found['kvservice_manager_recoveries_total{outcome="complete"}'] == 0
    name = "kvservice_manager_recovery_duration_seconds"
    assert found[f'{name}_sum{{outcome="partial"}}'] == 3.0
    assert found[f'{name}_count{{outcome="complete"}}'] == 0


def test_worker_metrics_are_the_snapshot(worker: WorkerMetrics) -> None:
    """Every number of the stats is exported, under its labels."""
    found = samples(exposed(worker))
    assert found['kvservice_worker_info{device="cpu",incarnation="life-1",worker="w0"}'] == 1
    for pool in POOLS:
        labels = f'pool="{pool.pool}"'
        states = {"used": pool.used_pages, "reserved": pool.reserved_pages, "free": pool.free_pages}
        for state, number in states.items():
            assert found[f'kvservice_pages{{{labels},state="{state}",worker="w0"}}'] == number
        assert found[f'kvservice_page_size_bytes{{{labels},worker="w0"}}'] == pool.page_bytes
        assert found[f'kvservice_page_tokens{{{labels},worker="w0"}}'] == pool.page_size
        assert found[f'kvservice_tokens{{{labels},worker="w0"}}'] == pool.num_tokens
    assert found['kvservice_arena_bytes{device="cpu",worker="w0"}'] == 9_000
    assert found['kvservice_sessions{state="active",worker="w0"}'] == 7
    assert found['kvservice_sessions{state="draining",worker="w0"}'] == 0
    for name, number in (
        ("budget_bytes", 10_000),
        ("used_bytes", 8_000),
        ("page_allocations_total", 6),
        ("appended_tokens_total", 3),
        ("popped_tokens_total", 2),
        ("appended_bytes_total", 1),
        ("read_bytes_total", 11),
        ("lease_expirations_total", 12),
        ("stale_epoch_rejections_total", 14),
        ("leases", 7),
        ("moved_bytes_total", 17),
        ("arriving_sessions", 18),
    ):
        assert found[f'kvservice_{name}{{worker="w0"}}'] == number


def test_known_series_are_there_from_the_start(worker: WorkerMetrics) -> None:
    """A rate of a series that first appears with its first failure would miss that one."""
    found = samples(exposed(worker))
    for reason in FREE_REASONS:
        key = f'kvservice_page_frees_total{{reason="{reason}",worker="w0"}}'
        assert found[key] == (5 if reason == "pop" else 0)
    for reason in FAILURE_REASONS:
        key = f'kvservice_allocation_failures_total{{reason="{reason}",worker="w0"}}'
        assert found[key] == (4 if reason == "out_of_pages" else 0)
    for result in MOVED:
        key = f'kvservice_moves_total{{result="{result}",worker="w0"}}'
        assert found[key] == (16 if result == "moved" else 0)
    assert found['kvservice_attention_batch_size_count{worker="w0"}'] == 0
    labels = 'grpc_method="Do",grpc_service="a.Service",grpc_type="unary"'
    assert found[f"grpc_server_started_total{{{labels}}}"] == 0
    assert found[f'grpc_server_handled_total{{grpc_code="OK",{labels}}}'] == 0


def test_many_pools_are_one_series() -> None:
    """Labels are bounded: sessions that do not state their layers have a pool each."""
    many = tuple(PoolStats(number, 16, 100, 1, 2, 3, 4) for number in range(MAX_POOLS + 50))
    metrics = WorkerMetrics("w0")
    metrics.watch(lambda: replace(STATS, pools=many))
    found = samples(exposed(metrics))
    for state, each in (("used", 1), ("reserved", 2), ("free", 3)):
        values = {
            name: value
            for name, value in found.items()
            if name.startswith("kvservice_pages{") and f'state="{state}"' in name
        }
        assert len(values) == MAX_POOLS + 1
        assert sum(values.values()) == each * len(many)
        assert values[f'kvservice_pages{{pool="other",state="{state}",worker="w0"}}'] == each * 50
    assert found['kvservice_page_size_bytes{pool="other",worker="w0"}'] == 100


def test_tenants_that_are_not_named_are_one_series(worker: WorkerMetrics) -> None:
    """What callers call themselves never becomes a label."""
    found = samples(exposed(worker))
    pages = {name: n for name, n in found.items() if name.startswith("kvservice_tenant_pages")}
    assert pages == {
        f'kvservice_tenant_pages{{tenant="{tenant}",worker="w0"}}': number
        for tenant, number in (("default", 0), ("a", 1), ("z", 0), ("other", 6))
    }
    quotas = {name: n for name, n in found.items() if name.startswith("kvservice_tenant_quota")}
    assert quotas == {'kvservice_tenant_quota_pages{tenant="a",worker="w0"}': 9}


def test_at_most_so_many_tenants_are_named() -> None:
    """An operator who names a thousand gets as many series as there may be."""
    metrics = WorkerMetrics("w0")
    many = [f"t{number}" for number in range(1000)]
    metrics.watch_tenants(lambda: dict.fromkeys(many, 1), lambda: many, lambda _: UNLIMITED)
    found = samples(exposed(metrics))
    pages = [n for name, n in found.items() if name.startswith("kvservice_tenant_pages")]
    assert len(pages) == MAX_TENANTS + 1
    assert sum(pages) == 1000


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.PermissionDenied("no"), "forbidden"),
        (errors.Unauthenticated("who?"), "invalid"),
        (errors.Unauthenticated("who?", cause="expired"), "expired"),
        (errors.Unauthenticated("who?", cause="x" * 99), "invalid"),
        (errors.NotFound("what?"), None),
    ],
)
def test_callers_are_turned_away_for_known_reasons(
    worker: WorkerMetrics, error: errors.KVServiceError, reason: str | None
) -> None:
    """Each refusal is counted under one of the reasons that there are."""
    assert auth_reason(error) == reason
    for known in AUTH_REASONS:
        if known == reason:
            worker.method("unary", "a.Service", "Other").turned_away(known)
        found = samples(exposed(worker))
        assert found[f'kvservice_auth_failures_total{{reason="{known}"}}'] == (known == reason)


def test_distributions_are_cumulative_buckets(worker: WorkerMetrics) -> None:
    """As Prometheus wants them: each bucket holds those below it, and +Inf holds all."""
    found = samples(exposed(worker))

    def bucket(bound: str) -> float:
        name = "kvservice_attention_duration_seconds_bucket"
        return found[f'{name}{{device="cpu",le="{bound}",worker="w0"}}']

    assert [bucket(bound) for bound in ("5e-05", "0.0001", "10.0", "+Inf")] == [0, 2, 2, 3]
    assert found['kvservice_attention_duration_seconds_sum{device="cpu",worker="w0"}'] == 20.5


def test_calls_and_durations_are_counted(worker: WorkerMetrics) -> None:
    """Recorders move their own series."""
    method = worker.method("unary", "a.Service", "Do")
    method.started()
    method.received()
    method.handled("NOT_FOUND", 0.02)
    flow = worker.method("bidi_stream", "a.Service", "Flow2")
    flow.first_sent(0.5)
    flow.answered("OK", 0.25)
    flow.answered("ABORTED", 0.25)
    worker.queue.entered()
    worker.queue.entered()
    worker.queue.left(0.125)
    found = samples(exposed(worker))
    labels = 'grpc_method="Do",grpc_service="a.Service",grpc_type="unary"'
    assert found[f'grpc_server_handled_total{{grpc_code="NOT_FOUND",{labels}}}'] == 1
    assert found[f"grpc_server_msg_received_total{{{labels}}}"] == 1
    assert found[f"grpc_server_msg_sent_total{{{labels}}}"] == 0
    assert found[f"grpc_server_handling_seconds_sum{{{labels}}}"] == 0.02
    call = 'grpc_method="Flow2",grpc_service="a.Service"'
    for code in ("OK", "ABORTED"):
        assert found[f'kvservice_stream_calls_total{{grpc_code="{code}",{call}}}'] == 1
    assert found[f"kvservice_stream_call_seconds_sum{{{call}}}"] == 0.5
    first = f'grpc_server_first_message_seconds_sum{{{call},grpc_type="bidi_stream"}}'
    assert found[first] == 0.5
    assert found['kvservice_queue_depth{worker="w0"}'] == 1
    assert found['kvservice_queue_wait_seconds_sum{worker="w0"}'] == 0.125


def test_draining_worker_has_draining_sessions() -> None:
    """The state is the worker's: all of its sessions are leaving, or none."""
    metrics = WorkerMetrics("w0")
    metrics.watch(lambda: replace(STATS, draining=True))
    found = samples(exposed(metrics))
    assert found['kvservice_sessions{state="active",worker="w0"}'] == 0
    assert found['kvservice_sessions{state="draining",worker="w0"}'] == 7


def test_port_in_use_is_a_clear_error() -> None:
    """The metrics endpoint says which address it could not have."""
    endpoint = MetricsEndpoint(Metrics().registry, "127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{endpoint.port}"):
            MetricsEndpoint(Metrics().registry, "127.0.0.1", endpoint.port)
    finally:
        endpoint.close()
