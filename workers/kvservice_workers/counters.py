"""What has happened on a worker since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FREE_REASONS = ("pop", "reset", "select", "evict", "release", "lease_expired", "move")
FAILURE_REASONS = ("out_of_pages", "quota_exceeded", "too_many_sessions", "draining")


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
