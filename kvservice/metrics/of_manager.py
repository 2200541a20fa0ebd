"""What a manager exports: its picture of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from kvservice.clock import Clock
from kvservice.core.distribution import SECONDS, Histogram
from kvservice.core.liveness import WorkerState
from kvservice.core.membership import Membership
from kvservice.core.recovery import OUTCOMES
from kvservice.metrics.families import Collected, counter_by, gauge, histogram
from kvservice.metrics.process import Metrics


class ManagerMetrics(Metrics):
    """The metrics of a manager process."""

    def watch(self, membership: Callable[[], Membership], clock: Clock) -> None:
        """Report the manager's picture from now on, asked at each scrape."""
        self.registry.register(Collected(lambda: _of_manager(membership(), clock)))


def _of_manager(found: Membership, clock: Clock) -> Iterator[Metric]:
    states = GaugeMetricFamily("kvservice_workers", "Workers, by state.", labels=("state",))
    for state in WorkerState:
        states.add_metric((state.value,), sum(view.state is state for view in found.workers))
    yield states
    yield gauge(
        "kvservice_workers_expected",
        "Workers that there should be, without those that were drained; 0: unknown.",
        {},
        found.expected,
    )
    heard = GaugeMetricFamily(
        "kvservice_worker_heartbeat_timestamp_seconds",
        "When a worker was heard last, in seconds since the epoch.",
        labels=("worker",),
    )
    since_epoch = clock.time() - clock.monotonic()
    for view in found.workers:
        heard.add_metric((view.record.worker_id,), since_epoch + view.heard_at)
    yield heard
    yield counter_by(
        "kvservice_worker_restarts",
        "Times that another incarnation of a worker has registered.",
        {},
        "worker",
        (),
        {view.record.worker_id: view.restarts for view in found.workers},
    )
    yield gauge(
        "kvservice_session_copies_missing",
        "Copies of sessions' extents that should be there by their replicas, and are not.",
        {},
        found.missing_copies,
    )
    recovery = found.recovery
    yield counter_by(
        "kvservice_manager_recoveries",
        "Whether this manager has taken over from an earlier one, and how that ended.",
        {},
        "outcome",
        OUTCOMES,
        {} if recovery is None else {recovery.outcome: 1},
    )
    durations = {outcome: Histogram(SECONDS) for outcome in OUTCOMES}
    if recovery is not None:
        durations[recovery.outcome].observe(recovery.seconds)
    yield histogram(
        "kvservice_manager_recovery_duration_seconds",
        "How long it took a manager that has taken over to know its workers.",
        [({"outcome": outcome}, each.snapshot()) for outcome, each in durations.items()],
        ("outcome",),
    )
