"""Which workers are asked first when a session, or another extent of one, needs a place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes new sessions. `free_bytes` are as of its last heartbeat."""

    worker_id: str
    free_bytes: int
    num_sessions: int


def rank(candidates: Iterable[Candidate]) -> list[str]:
    """Return worker ids, best first: most free bytes, then fewest sessions, then by id.

    Sessions decide among workers that are equally empty, which keeps a burst of openings between
    two heartbeats from all going to one of them.
    """
    ordered = sorted(candidates, key=lambda c: (-c.free_bytes, c.num_sessions, c.worker_id))
    return [candidate.worker_id for candidate in ordered]
