"""What a worker exports: `page_stats`, as one snapshot has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from kvservice.core.caller import ANONYMOUS
from kvservice.core.quota import QuotaOf
from kvservice.core.session import PoolStats, WorkerStats
from kvservice.metrics.families import (
    Collected,
    Labels,
    counter,
    counter_by,
    gauge,
    gauge_by,
    histogram,
)
from kvservice.metrics.process import Metrics

MAX_TENANTS: Final = 50
MAX_POOLS: Final = 64
"""Pools that are exported one by one."""


class WorkerMetrics(Metrics):
    """The metrics of a worker process."""

    def __init__(self, worker_id: str) -> None:
        super().__init__({"worker": worker_id})

    def watch(self, stats: Callable[[], WorkerStats]) -> None:
        """Report a worker's numbers from now on, asked at each scrape."""
        self.registry.register(Collected(lambda: _of_worker(stats())))

    def watch_tenants(
        self,
        pages: Callable[[], Mapping[str, int]],
        named: Callable[[], Iterable[str]],
        quota_of: QuotaOf,
    ) -> None:
        """Report the pages of tenants from now on.

        Args:
            pages: Returns the pages that each tenant's sessions hold.
            named: Returns those with a series of their own; the first `MAX_TENANTS` of them get
                one, all others together are `other`.
        """
        self.registry.register(
            Collected(lambda: _of_tenants(pages(), list(named()), quota_of, self.labels))
        )


_COUNTERS: Final[tuple[tuple[str, str, Callable[[WorkerStats], int]], ...]] = (
    ("page_allocations", "Pages taken into use.", lambda s: s.page_allocations),
    ("appended_tokens", "Tokens stored, per row and session.", lambda s: s.appended_tokens),
    ("popped_tokens", "Tokens dropped from the end.", lambda s: s.popped_tokens),
    ("appended_bytes", "Bytes of keys and values stored.", lambda s: s.appended_bytes),
    ("read_bytes", "Bytes of keys and values read back.", lambda s: s.read_bytes),
    ("lease_expirations", "Sessions whose lease ran out.", lambda s: s.lease_expirations),
    ("moved_bytes", "Bytes of pages copied from other workers.", lambda s: s.moved_bytes),
    ("stale_epoch_rejections", "Calls of an old epoch, refused.", lambda s: s.stale_epochs),
)
_COUNTERS_BY: Final[tuple[tuple[str, str, str, Callable[[WorkerStats], dict[str, int]]], ...]] = (
    ("page_frees", "Pages given back.", "reason", lambda s: s.page_frees),
    (
        "allocation_failures",
        "Calls refused for lack of room.",
        "reason",
        lambda s: s.allocation_failures,
    ),
    (
        "idempotent_replays",
        "Calls that repeated one which had been carried out.",
        "method",
        lambda s: s.replays,
    ),
    (
        "moves",
        "Sessions that were to be taken over from other workers, by how that has ended.",
        "result",
        lambda s: s.moves,
    ),
    (
        "reconcile_discrepancies",
        "Pages whose references and tables were found to disagree; must stay 0.",
        "kind",
        lambda s: s.page_discrepancies,
    ),
)


def _of_worker(stats: WorkerStats) -> Iterator[Metric]:
    worker = {"worker": stats.worker_id}
    device = {**worker, "device": stats.device}
    info = {**worker, "incarnation": stats.incarnation, "device": stats.device}
    yield gauge("kvservice_worker_info", "A worker's identity. Always 1.", info, 1)
    yield gauge("kvservice_budget_bytes", "What arenas may take.", worker, stats.budget_bytes)
    yield gauge("kvservice_used_bytes", "What used pages take.", worker, stats.used_bytes)
    yield gauge("kvservice_arena_bytes", "What arenas take.", device, stats.arena_bytes)
    yield from _of_pools(stats)
    sessions = GaugeMetricFamily("kvservice_sessions", "Sessions.", labels=("worker", "state"))
    active = 0 if stats.draining else stats.num_sessions
    sessions.add_metric((stats.worker_id, "active"), active)
    sessions.add_metric((stats.worker_id, "draining"), stats.num_sessions - active)
    yield sessions
    yield gauge("kvservice_arriving_sessions", "On their way here.", worker, stats.num_arriving)
    yield gauge("kvservice_leases", "Leases that run.", worker, stats.num_sessions)
    for name, text, number in _COUNTERS:
        yield counter(f"kvservice_{name}", text, worker, number(stats))
    for name, text, by, numbers in _COUNTERS_BY:
        yield counter_by(f"kvservice_{name}", text, worker, by, (), numbers(stats))
    yield histogram(
        "kvservice_attention_duration_seconds",
        "Compute of one attention call: one layer of one step.",
        [(device, stats.attention_seconds)],
        device,
    )
    yield histogram(
        "kvservice_attention_batch_size",
        "Rows in one attention call.",
        [(worker, stats.attention_rows)],
        worker,
    )
    yield histogram(
        "kvservice_session_pages",
        "Pages that sessions held when they ended.",
        [(worker, stats.session_pages)],
        worker,
    )
    yield histogram(
        "kvservice_handover_duration_seconds",
        "For how long a session was frozen before it was here.",
        [(worker, stats.handover_seconds)],
        worker,
    )


def _of_tenants(
    pages: Mapping[str, int], named: list[str], quota_of: QuotaOf, labels: Labels
) -> Iterator[Metric]:
    shown = list(dict.fromkeys((ANONYMOUS.tenant, *named)))[:MAX_TENANTS]
    sums = dict.fromkeys((*shown, "other"), 0)
    for tenant, number in pages.items():
        sums[tenant if tenant in sums else "other"] += number
    yield gauge_by(
        "kvservice_tenant_pages",
        "Pages that a tenant's sessions hold; a shared one counts for each of them.",
        labels,
        "tenant",
        sums,
    )
    quotas = {tenant: quota_of(tenant).pages for tenant in shown}
    yield gauge_by(
        "kvservice_tenant_quota_pages",
        "Pages that a tenant may have here, where that is limited.",
        labels,
        "tenant",
        {tenant: limit for tenant, limit in quotas.items() if limit is not None},
    )


def _of_pools(stats: WorkerStats) -> Iterator[Metric]:
    labels = ("worker", "pool")
    pages = GaugeMetricFamily(
        "kvservice_pages", "Pages of a pool; the states sum to all.", labels=(*labels, "state")
    )
    page_bytes = GaugeMetricFamily("kvservice_page_size_bytes", "Bytes of a page.", labels=labels)
    page_tokens = GaugeMetricFamily("kvservice_page_tokens", "Tokens in a page.", labels=labels)
    tokens = GaugeMetricFamily("kvservice_tokens", "Tokens stored in a pool.", labels=labels)
    for name, pool in _exported(stats.pools):
        key = (stats.worker_id, name)
        pages.add_metric((*key, "used"), pool.used_pages)
        pages.add_metric((*key, "reserved"), pool.reserved_pages)
        pages.add_metric((*key, "free"), pool.free_pages)
        page_bytes.add_metric(key, pool.page_bytes)
        page_tokens.add_metric(key, pool.page_size)
        tokens.add_metric(key, pool.num_tokens)
    yield from (pages, page_bytes, page_tokens, tokens)


def _exported(pools: tuple[PoolStats, ...]) -> Iterator[tuple[str, PoolStats]]:
    """Yield the pools with their label: each with a low number its own, the others' sum `other`.

    Sessions that do not state their layers have a pool each, so there may be very many. The page
    of `other` is of mean size, so that pages times size are bytes in total.
    """
    singly = [pool for pool in pools if pool.pool < MAX_POOLS]
    yield from ((str(pool.pool), pool) for pool in singly)
    others = [pool for pool in pools if pool.pool >= MAX_POOLS]
    if others:
        sizes = [pool.used_pages + pool.reserved_pages + pool.free_pages for pool in others]
        num_pages = max(1, sum(sizes))
        yield (
            "other",
            PoolStats(
                pool=MAX_POOLS,
                page_size=sum(p.page_size * n for p, n in zip(others, sizes, strict=True))
                // num_pages,
                page_bytes=sum(p.page_bytes * n for p, n in zip(others, sizes, strict=True))
                // num_pages,
                used_pages=sum(pool.used_pages for pool in others),
                reserved_pages=sum(pool.reserved_pages for pool in others),
                free_pages=sum(pool.free_pages for pool in others),
                num_tokens=sum(pool.num_tokens for pool in others),
            ),
        )
