"""How values are distributed: counts between bounds, and what can be told from them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SECONDS: Final = (
    *(0.00005, 0.0001, 0.0003, 0.0006, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Bounds for durations: fine where a layer's attention is, coarse where timeouts are."""

POWERS: Final = tuple(float(2**power) for power in range(11))
"""Bounds for counts: 1 to 1024."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts of one moment.

    Fields:
        bounds: Rising. A value belongs to the first bound that it does not exceed.
        counts: One for each bound, and at last that of the values above all bounds.
        total: The sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def since(self, earlier: Distribution) -> Distribution:
        """Return what has come since an earlier moment; all, if that was another life's."""
        counts = [new - old for new, old in zip(self.counts, earlier.counts, strict=False)]
        if self.bounds != earlier.bounds or min(counts) < 0:
            return self
        return Distribution(self.bounds, tuple(counts), self.total - earlier.total)

    def plus(self, other: Distribution) -> Distribution:
        """Return both together. One without bounds is empty and adds nothing."""
        if not other.bounds or not self.bounds:
            return self if self.bounds else other
        assert self.bounds == other.bounds, "distributions over other bounds"
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total)

    def quantile(self, fraction: float) -> float | None:
        """Return the value below which a fraction of all values is, None if there are none.

        Between two bounds values are taken to be spread evenly, and above the last bound to be
        that bound: as Prometheus' `histogram_quantile` does.
        """
        rank = fraction * self.num_values
        if not self.num_values:
            return None
        below, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below, lower = below + count, bound
        return self.bounds[-1]


EMPTY: Final = Distribution()


_FOLD_AT: Final = 1024


class Histogram:
    """Counts values as they come. Thread-safe, and cheap: it is on the path of every token.

    Values are put down as they are, which takes no lock, and sorted in when somebody looks.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()
        self._new: deque[float] = deque()

    def observe(self, value: float) -> None:
        self._new.append(value)
        if len(self._new) >= _FOLD_AT:
            with self._lock:
                self._fold()

    def snapshot(self) -> Distribution:
        """Return the counts of this moment."""
        with self._lock:
            self._fold()
            return Distribution(self._bounds, tuple(self._counts), self._total)

    def _fold(self) -> None:
        """Sort in what has come. The lock is held: nobody else takes any away."""
        new = self._new
        for _ in range(len(new)):
            value = new.popleft()
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value
