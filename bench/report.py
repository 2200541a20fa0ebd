"""What a measurement prints: a table, and as its last line one JSON object.

A ratio is always the median over pairs that were taken in turn in one run, so that whatever else
the machine does meets both sides.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

from kvservice.clock import now_ns
from kvservice.tables import table

MIN_PAIRS = 9


class Report:
    """Collects ratios and figures of one measurement."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._ratios: dict[str, float] = {}
        self._figures: dict[str, float] = {}
        self._rows: list[tuple[str, str, str, str]] = []

    def ratio(self, name: str, ours: Sequence[float], theirs: Sequence[float], note: str) -> float:
        """Note the median over pairs of ours / theirs, and print nothing yet."""
        assert len(ours) == len(theirs) >= MIN_PAIRS, f"{name}: too few pairs"
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(ours, theirs, strict=True)], n=4
        )
        self._ratios[name] = round(middle, 4)
        self._rows.append((name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", note))
        return middle

    def figure(self, name: str, value: float, note: str, spread: Sequence[float] = ()) -> None:
        """Note a number with a unit in its name; `spread`: the samples that it is the median of."""
        self._figures[name] = round(value, 3)
        quartiles = ""
        if len(spread) > 1:
            low, _, high = statistics.quantiles(spread, n=4)
            quartiles = f"{low:.1f} to {high:.1f}"
        self._rows.append((name, f"{value:.1f}", quartiles, note))

    def print(self) -> None:
        """Print the table and the JSON line."""
        print(table(("name", "median", "middle half", "what is compared"), self._rows))
        print(
            json.dumps({"bench": self._bench, "ratios": self._ratios, "figures": self._figures}),
            flush=True,
        )


def busy(seconds: float) -> None:
    """Compute for a while, as a decoder does between two layers' attention."""
    until = now_ns() + int(seconds * 1e9)
    while now_ns() < until:
        pass


def seconds_of(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    started = now_ns()
    action()
    return (now_ns() - started) / 1e9


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
