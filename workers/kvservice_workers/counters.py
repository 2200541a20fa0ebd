"""What has happened on a worker since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvservice.core.distribution import POWERS, SECONDS, Histogram

FREE_REASONS = ("pop", "reset", "select", "evict", "release", "lease_expired", "move")
FAILURE_REASONS = ("out_of_pages", "quota_exceeded", "too_many_sessions", "draining")

REPLAYED = ("Allocate", "Fork", "Pop", "Reset", "Select", "Attach", "Attend")
DISCREPANCIES = ("leaked", "double_owned", "missing")


class Timings:
    """Distributions, which have locks of their own: attention does not hold the worker's."""

    def __init__(self) -> None:
        self.attention_seconds = Histogram(SECONDS)
        self.attention_rows = Histogram(POWERS)
        self.session_pages = Histogram(POWERS)

    def attention(self, seconds: float, num_rows: int) -> None:
        """Note one attention call: seconds of compute, and rows in the batch."""
        self.attention_seconds.observe(seconds)
        self.attention_rows.observe(num_rows)


@dataclass(slots=True)
class Counters:
    """Only ever rising. Guarded by the worker's lock."""

    page_allocations: int = 0
    page_frees: Counter[str] = field(default_factory=Counter)
    allocation_failures: Counter[str] = field(default_factory=Counter)
    appended_tokens: int = 0
    popped_tokens: int = 0
    appended_bytes: int = 0
    read_bytes: int = 0
    lease_expirations: int = 0
    stale_epochs: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    page_discrepancies: Counter[str] = field(default_factory=Counter)
    timings: Timings = field(default_factory=Timings)

    def count_pages(self, taken: int, evicted: int) -> None:
        """Note pages that were taken, and pages that an eviction has freed."""
        self.page_allocations += taken
        self.page_frees["evict"] += evicted

    def count_stored(self, num_tokens: int, num_bytes: int) -> None:
        """Note tokens by which rows have grown, and bytes of k and v that were stored."""
        self.appended_tokens += num_tokens
        self.appended_bytes += num_bytes
