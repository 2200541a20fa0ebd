"""Whether the books are right: what pools and counters say, and what tables and sessions hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import HOLE
from kvservice_workers.counters import Counters
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.pools import PoolSet

Array = npt.NDArray[np.int64]

Discrepancy = tuple[str, int, int]  # kind, pool, page


class Holder(Protocol):
    """Whoever holds pages: a session, or what is to be one."""

    @property
    def tenant(self) -> str: ...

    @property
    def groups(self) -> Mapping[int | None, LayerGroup]: ...

    def check(self) -> None: ...


def find_discrepancies(sessions: Collection[Holder], pools: PoolSet) -> set[Discrepancy]:
    """Return the pages whose references are not the tables that list them; there should be none.

    leaked: used, and listed by fewer tables than it has references. double_owned: listed by more.
    missing: listed, but not used. Costs about half a microsecond a page.
    """
    tables: dict[int, list[Array]] = {pool.ordinal: [] for pool in pools}
    for session in sessions:
        for group in session.groups.values():
            tables[group.pool.ordinal] += [np.array(t.entries, np.int64) for t in group.tables]
    found: set[Discrepancy] = set()
    for pool in pools:
        counted = np.array(pool.pages.refcounts(), np.int64)
        entries = np.concatenate([np.zeros(0, np.int64), *tables[pool.ordinal]])
        listed = np.bincount(entries[entries != HOLE], minlength=len(counted))
        for page in np.flatnonzero(counted != listed).tolist():
            kind = "leaked" if listed[page] < counted[page] else "double_owned"
            if not counted[page]:
                kind = "missing"
            found.add((kind, pool.ordinal, page))
    return found


def check_accounts(sessions: Collection[Holder], pools: PoolSet, counters: Counters) -> None:
    """Assert that references, promises and counters sum to what sessions hold."""
    held = {pool.ordinal: [0] * pool.pages.total for pool in pools}
    promised = dict.fromkeys(held, 0)
    opened: dict[str, int] = {}  # by tenant
    pages: dict[str, int] = {}
    listed: dict[tuple[str, int], set[int]] = {}  # a page belongs to the tenant that lists it
    for session in sessions:
        session.check()
        opened[session.tenant] = opened.get(session.tenant, 0) + 1
        for group in session.groups.values():
            ordinal = group.pool.ordinal
            promised[ordinal] += group.promised
            pages[session.tenant] = pages.get(session.tenant, 0) + group.promised
            counts, mine = held[ordinal], listed.setdefault((session.tenant, ordinal), set())
            for table in group.tables:
                mine.update(table.entries)
                for page in table.entries:
                    if page != HOLE:
                        counts[page] += 1
    used = 0
    for pool in pools:
        used += pool.pages.num_used
        assert promised[pool.ordinal] == pool.pages.num_reserved, "promises do not sum"
        assert held[pool.ordinal] == pool.pages.refcounts(), "a page's references do not sum"
    for (tenant, _), mine in listed.items():
        pages[tenant] = pages.get(tenant, 0) + len(mine - {HOLE})
    kept = {tenant: count for tenant, count in pages.items() if count}
    assert kept == dict(pools.usage.pages), "tenants' pages do not sum"
    assert opened == dict(pools.usage.sessions), "tenants' sessions do not sum"
    freed = sum(counters.page_frees.values())
    assert counters.page_allocations - freed == used, "allocations - frees != used"
