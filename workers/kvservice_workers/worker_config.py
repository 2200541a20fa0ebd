"""What a worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's name and life, where it is reached, and what it may take.

    Fields:
        budget_bytes: Of all arenas together.
        address: Where other workers and callers reach it.
        device: Where the arenas are, as torch names it.
        zero_freed_pages: Overwrite pages as soon as nothing holds them any more.
    """

    worker_id: str
    incarnation: str
    budget_bytes: int
    address: str = ""
    device: str = "cpu"
    max_sessions: int = 20_000
    zero_freed_pages: bool = False
