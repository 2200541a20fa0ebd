"""Distributions: counted like a sorted list would be, and quantiles as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.distribution import EMPTY, SECONDS, Distribution, Histogram

BOUNDS = (1.0, 2.0, 4.0)
values = st.lists(st.floats(0, 10), max_size=50)


def counted(numbers: list[float], bounds: tuple[float, ...] = BOUNDS) -> Distribution:
    histogram = Histogram(bounds)
    for number in numbers:
        histogram.observe(number)
    return histogram.snapshot()


@given(values)
def test_counts_are_those_of_the_values(numbers: list[float]) -> None:
    """Each value is with the first bound that it does not exceed."""
    places = Counter(bisect_left(BOUNDS, number) for number in numbers)
    found = counted(numbers)
    assert found.counts == tuple(places[index] for index in range(len(BOUNDS) + 1))
    assert found.total == pytest.approx(sum(numbers))
    assert found.num_values == len(numbers)


@given(values, values)
def test_what_has_come_since_is_the_difference(first: list[float], second: list[float]) -> None:
    """Taking an earlier moment off leaves what came later, and both together are the whole."""
    earlier, later = counted(first), counted(first + second)
    assert later.since(earlier).counts == counted(second).counts
    assert earlier.plus(counted(second)).counts == later.counts
    assert later.plus(EMPTY) == later == EMPTY.plus(later)


def test_another_life_begins_at_nothing() -> None:
    """Counts that have fallen are of a process that was started since: all of them are new."""
    assert counted([1.5]).since(counted([0.5, 1.5])) == counted([1.5])
    assert counted([1.5]).since(EMPTY) == counted([1.5])


@pytest.mark.parametrize(
    ("numbers", "fraction", "expected"),
    [
        ([0.5] * 10, 0.5, 0.5),  # half of the way from 0 to 1
        ([1.5] * 100, 0.99, 1.99),
        ([0.5, 0.5, 3.0, 3.0], 0.75, 3.0),  # half of the way from 2 to 4
        ([100.0], 0.99, 4.0),  # above all bounds: the last one
        ([], 0.5, None),
    ],
)
def test_quantiles(numbers: list[float], fraction: float, expected: float | None) -> None:
    """Values are taken to be spread evenly between two bounds."""
    found = counted(numbers).quantile(fraction)
    assert found == (None if expected is None else pytest.approx(expected))


def test_no_value_is_lost_between_threads() -> None:
    """Eight threads count, and the sum is right."""
    histogram = Histogram(SECONDS)

    def observe(number: int) -> None:
        for _ in range(2000):
            histogram.observe(number * 0.001)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(observe, range(8)))
    assert histogram.snapshot().num_values == 16_000
