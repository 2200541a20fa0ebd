"""Metrics out of numbers that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvservice.core.distribution import Distribution

Labels = Mapping[str, str]


class Collected(Collector):
    """A collector out of a function, which is called at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    """Return a gauge with one series."""
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def gauge_by(name: str, text: str, labels: Labels, by: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a series for each value of the label `by`."""
    family = GaugeMetricFamily(name, text, labels=(*labels, by))
    for label, value in values.items():
        family.add_metric((*labels.values(), label), value)
    return family


def counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    """Return a counter with one series. The name without `_total`."""
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def counter_by(
    name: str, text: str, labels: Labels, by: str, known: Iterable[str], counts: Mapping[str, int]
) -> Metric:
    """Return a counter with a series for each known value of the label `by`, those at 0 too."""
    family = CounterMetricFamily(name, text, labels=(*labels, by))
    for value in dict.fromkeys((*known, *counts)):
        family.add_metric((*labels.values(), value), counts.get(value, 0))
    return family


def histogram(
    name: str, text: str, series: Iterable[tuple[Labels, Distribution]], labels: Iterable[str]
) -> Metric:
    """Return a histogram with a series for each distribution. `labels`: the names they all have."""
    names = tuple(labels)
    family = HistogramMetricFamily(name, text, labels=names)
    for values, found in series:
        bounds = (*map(floatToGoString, found.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        family.add_metric([values[label] for label in names], buckets, found.total)
    return family
