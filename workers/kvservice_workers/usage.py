"""How many pages and sessions each tenant has on a worker, and how many it may have."""

from __future__ import annotations

from collections import Counter

from kvservice.core.quota import QuotaOf
from kvservice.core.session import SessionSpec


class TenantUsage:
    """Counts that follow the pools and the session table. The worker's lock is held by the caller.

    A page that several sequences share counts once: only one tenant's sequences can share it.
    Promised pages count as used ones.
    """

    def __init__(self, quota_of: QuotaOf) -> None:
        self.quota_of = quota_of
        self.pages: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()

    def check_pages(self, tenant: str, change: int) -> None:
        """Raise QuotaExceeded if the tenant may not have so many pages more."""
        if change > 0:
            self.quota_of(tenant).check("pages", self.pages[tenant] + change)

    def check_sessions(self, tenant: str, spec: SessionSpec) -> None:
        """Raise QuotaExceeded if the tenant may not open another session, or none like this."""
        quota = self.quota_of(tenant)
        quota.check("rows", spec.num_rows)
        quota.check("tokens", spec.reserve_tokens or 0)
        quota.check("sessions", self.sessions[tenant] + 1)

    def change_pages(self, tenant: str, change: int) -> None:
        self._change(self.pages, tenant, change)

    def change_sessions(self, tenant: str, change: int) -> None:
        self._change(self.sessions, tenant, change)

    def _change(self, counts: Counter[str], tenant: str, change: int) -> None:
        if change:
            counts[tenant] += change
            if not counts[tenant]:
                del counts[tenant]
