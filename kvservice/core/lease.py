"""Deadlines of leases, in an order that makes expiry cost what has expired."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeaseTable(Generic[K]):
    """Who holds a lease until when. Seconds of one monotonic clock, passed in as arguments.

    Renewing moves a deadline without touching the order; an entry that comes up too early is put
    back at its new place. So a renewal is O(1), and each lease is looked at once per ttl at most.

    Invariants (asserted by `check`):
      1. Every lease has exactly one live entry in the heap, at or before its deadline.
    """

    def __init__(self) -> None:
        self._deadlines: dict[K, float] = {}
        self._serials: dict[K, int] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, holder: object) -> bool:
        return holder in self._deadlines

    def grant(self, holder: K, deadline: float) -> None:
        """Begin a lease. The holder must not have one."""
        assert holder not in self._deadlines, "this holder has a lease"
        self._next_serial += 1
        self._deadlines[holder] = deadline
        self._serials[holder] = self._next_serial
        heapq.heappush(self._heap, (deadline, self._next_serial, holder))

    def renew(self, holder: K, deadline: float) -> None:
        """Move a deadline. Never backwards: an earlier one changes nothing."""
        if deadline > self._deadlines[holder]:
            self._deadlines[holder] = deadline

    def revoke(self, holder: K) -> None:
        """End a lease before its time."""
        del self._deadlines[holder]
        del self._serials[holder]
        if len(self._heap) > 2 * len(self._deadlines) + 64:  # mostly ended ones: drop them
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def deadline(self, holder: K) -> float:
        return self._deadlines[holder]

    def next_look(self) -> float | None:
        """Return when `expired` is worth calling next; None while there are no leases."""
        self._skip_ended()
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[K]:
        """Return the holders whose deadline has passed, oldest first. Their leases go on until
        they are revoked; one that is not is returned again."""
        over: list[tuple[float, int, K]] = []
        while True:
            self._skip_ended()
            if not self._heap or self._heap[0][0] > now:
                break
            _, serial, holder = heapq.heappop(self._heap)
            deadline = self._deadlines[holder]
            if deadline > now:
                heapq.heappush(self._heap, (deadline, serial, holder))
            else:
                over.append((deadline, serial, holder))
        for entry in over:
            heapq.heappush(self._heap, entry)
        return [holder for _, _, holder in sorted(over, key=lambda entry: entry[:2])]

    def check(self) -> None:
        live = [entry for entry in self._heap if self._serials.get(entry[2]) == entry[1]]
        assert len(live) == len(self._deadlines) == len({holder for _, _, holder in live})
        assert all(at <= self._deadlines[holder] for at, _, holder in live)

    def _skip_ended(self) -> None:
        while self._heap and self._serials.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
