"""How many pages and sessions each tenant has on a worker, and how many it may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvservice.core.quota import QuotaOf
from kvservice.core.session import SessionSpec
from kvservice.core.tenancy import Use

_NOTHING: Final = Use()


class TenantUsage:
    """Counts that follow the pools and the session table. The worker's lock is held by the caller.

    A page that several sequences share counts once: only one tenant's sequences can share it.
    Promised pages count as used ones. What a tenant has on other workers counts as it was heard of
    last; `elsewhere` is replaced as a whole.
    """

    def __init__(self, quota_of: QuotaOf) -> None:
        self.quota_of = quota_of
        self.pages: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()
        self.elsewhere: Mapping[str, Use] = {}

    def check_pages(self, tenant: str, change: int, *, is_counted: bool = False) -> None:
        """Raise QuotaExceeded if the tenant may not have so many pages more.

        Args:
            is_counted: They count on another worker already, from where they are moved.
        """
        if change > 0:
            elsewhere = 0 if is_counted else self.elsewhere.get(tenant, _NOTHING).num_pages
            self.quota_of(tenant).check("pages", self.pages[tenant] + elsewhere + change)

    def check_sessions(self, tenant: str, spec: SessionSpec, *, is_counted: bool = False) -> None:
        """Raise QuotaExceeded if the tenant may not open another session, or none like this.

        Args:
            is_counted: It is open on another worker already, and counts there.
        """
        quota = self.quota_of(tenant)
        quota.check("rows", spec.num_rows)
        quota.check("tokens", spec.reserve_tokens or 0)
        elsewhere = 0 if is_counted else self.elsewhere.get(tenant, _NOTHING).num_sessions
        quota.check("sessions", self.sessions[tenant] + elsewhere + 1)

    def limited(self) -> dict[str, int]:
        """Return the pages of each tenant that has sessions, and may not have any number of them,
        or of pages."""
        quotas = {tenant: self.quota_of(tenant) for tenant in self.sessions}
        return {
            tenant: self.pages[tenant]
            for tenant, quota in quotas.items()
            if quota.sessions is not None or quota.pages is not None
        }

    def change_pages(self, tenant: str, change: int) -> None:
        self._change(self.pages, tenant, change)

    def change_sessions(self, tenant: str, change: int) -> None:
        self._change(self.sessions, tenant, change)

    def _change(self, counts: Counter[str], tenant: str, change: int) -> None:
        if change:
            counts[tenant] += change
            if not counts[tenant]:
                del counts[tenant]
