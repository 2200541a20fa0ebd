"""Every metric, declared once; the only package that knows Prometheus.

A registry belongs to one process's worker or manager. What tables know is read at scrape time,
from one consistent snapshot; only durations and RPCs are counted as they happen. A series that a
worker exports has the label `worker`; no label takes values from callers.
"""

from kvservice.metrics.endpoint import MetricsEndpoint
from kvservice.metrics.of_manager import ManagerMetrics
from kvservice.metrics.of_worker import WorkerMetrics
from kvservice.metrics.process import Metrics

__all__ = ["ManagerMetrics", "Metrics", "MetricsEndpoint", "WorkerMetrics"]
