"""What tenants have on all workers together, as heartbeats tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

LOOK_AGAIN_S: Final = 1.0
"""How old a count of sessions may be: it is a look at all of them."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a tenant has: open sessions, and pages that these use or were promised."""

    num_sessions: int = 0
    num_pages: int = 0


class TenantUse:
    """Sums up what workers say of the tenants whose sessions or pages are limited.

    A session counts once, on however many workers it lies; a page, on each of them. `now` is
    monotonic, in seconds.
    """

    def __init__(self) -> None:
        self._pages: dict[str, dict[str, int]] = {}  # by worker, by tenant
        self._sessions: Counter[str] = Counter()
        self._sessions_on: dict[str, Counter[str]] = {}
        self._counted_at = float("-inf")

    def reported(self, worker_id: str, pages: Mapping[str, int]) -> None:
        """Take a worker's word: the pages there of each tenant that is limited and has some."""
        if pages:
            self._pages[worker_id] = dict(pages)
        else:
            self._pages.pop(worker_id, None)

    def is_due(self, now: float) -> bool:
        """Whether the sessions are to be counted again, before `elsewhere` is asked."""
        return bool(self._pages) and now >= self._counted_at + LOOK_AGAIN_S

    def count(self, holders: Iterable[tuple[str, Collection[str]]], now: float) -> None:
        """Count sessions: for each its tenant, and the workers that hold it and live."""
        limited = {tenant for used in self._pages.values() for tenant in used}
        self._sessions, self._counted_at = Counter(), now
        self._sessions_on = {}
        for tenant, workers in holders:
            if tenant in limited and workers:
                self._sessions[tenant] += 1
                for worker_id in workers:
                    self._sessions_on.setdefault(worker_id, Counter())[tenant] += 1

    def elsewhere(self, worker_id: str, living: Collection[str]) -> dict[str, Use]:
        """Return what each limited tenant has on living workers other than this one."""
        pages: Counter[str] = Counter()
        for other, used in self._pages.items():
            if other != worker_id and other in living:
                pages.update(used)
        here = self._sessions_on.get(worker_id, Counter())
        sessions = {one: count - here[one] for one, count in self._sessions.items()}
        return {
            tenant: Use(sessions.get(tenant, 0), pages[tenant])
            for tenant in sorted(pages.keys() | sessions.keys())
            if pages[tenant] or sessions.get(tenant)
        }
