"""What has happened on a worker since its start."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from kvservice.core.distribution import POWERS, SECONDS, Histogram

FREE_REASONS = ("pop", "reset", "select", "evict", "release", "lease_expired", "move")
FAILURE_REASONS = ("out_of_pages", "quota_exceeded", "too_many_sessions", "draining")

REPLAYED = ("Allocate", "Fork", "Pop", "Reset", "Select", "Attach", "Attend", "Write")
MOVED = ("moved", "copied", "refused", "conflict", "unavailable", "lost")
DISCREPANCIES = ("leaked", "double_owned", "missing")


_FOLD_AT = 1024


class Timings:
    """Distributions, which have locks of their own: attention does not hold the worker's.

    Attention calls are put down as they are, and sorted in when somebody looks.
    """

    def __init__(self) -> None:
        self.session_pages = Histogram(POWERS)
        self.handover_seconds = Histogram(SECONDS)
        self._seconds = Histogram(SECONDS)
        self._rows = Histogram(POWERS)
        self._new: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    @property
    def attention_seconds(self) -> Histogram:
        """Seconds of compute of attention calls."""
        self._fold()
        return self._seconds

    @property
    def attention_rows(self) -> Histogram:
        """Rows in the batch of attention calls."""
        self._fold()
        return self._rows

    def attention(self, seconds: float, num_rows: int) -> None:
        """Note one attention call: seconds of compute, and rows in the batch."""
        self._new.append((seconds, num_rows))
        if len(self._new) >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        with self._lock:
            for _ in range(len(self._new)):
                seconds, num_rows = self._new.popleft()
                self._seconds.observe(seconds)
                self._rows.observe(num_rows)


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
    moves: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
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
