"""A worker without its network: the parts that serve its RPCs, and what is asked of all of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import torch

from kvservice.clock import Clock
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.liveness import WorkerRecord, WorkerState, WorkerView
from kvservice.core.quota import QuotaOf, unlimited
from kvservice.core.session import EndedSession, SessionInfo, WorkerStats
from kvservice.core.tenancy import Use
from kvservice_workers.accounts import Discrepancy, Holder, check_accounts, find_discrepancies
from kvservice_workers.admission import Admission
from kvservice_workers.arrival import ArrivalTable
from kvservice_workers.arrivals import Arrivals
from kvservice_workers.arriving_pages import ArrivingPages
from kvservice_workers.changes import Changes
from kvservice_workers.counters import Counters
from kvservice_workers.departures import Departures
from kvservice_workers.leases import Leases
from kvservice_workers.long_way import LongWay
from kvservice_workers.opening import Opening
from kvservice_workers.pools import PoolSet
from kvservice_workers.promises import Promises
from kvservice_workers.session_access import SessionAccess
from kvservice_workers.session_table import SessionTable
from kvservice_workers.short_way import ShortWay
from kvservice_workers.snapshot import worker_stats
from kvservice_workers.structure import Structure
from kvservice_workers.token_access import TokenAccess
from kvservice_workers.worker_config import WorkerConfig

__all__ = ["PageWorker", "WorkerConfig"]


class PageWorker:
    """Sessions of one worker: one step at a time per session, many sessions at once.

    Thread-safe. A session's lock is held for the whole of a call on it; the worker's lock only
    while tables, pools and counters change, never during attention. They are taken in this order.

    Each RPC is a method of one of its parts, which share pools, tables and that lock:
      `opening`                   Allocate, Fork
      `changes`                   Append, Pop, Reset, Select, Attach
      `leases`                    RenewLease, Release, and expiry
      `access`                    GetSession; how all other calls get at their sessions
      `short_way`, `long_way`     Attend: what can be served by one native call, and the rest
      `tokens`                    Write, Read
      `departures`                FollowSession, CopyState, CopyPages, HandOver
      `arrivals`                  PullSession: the sessions, and with them
      `arriving_pages`            their pages
      `admission`                 whether the worker opens another session

    Invariants (asserted by `check`):
      1. Those of pools, tables, padding and leases.
      2. Every used page's reference count is the number of tables that list it.
      3. The promises of all groups sum to their pool's.
      4. Pages taken - pages freed = pages used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        clock: Clock,
        quota_of: QuotaOf = unlimited,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        """
        Args:
            quota_of: What each tenant may have here.
        """
        self.config = config
        self._clock = clock
        self._lock = lock = threading.RLock()
        self._counters = counters = Counters()
        self._sessions = sessions = SessionTable(clock)
        self._pools = pools = PoolSet(
            config.budget_bytes,
            torch.device(config.device),
            quota_of=quota_of,
            zero_freed=config.zero_freed_pages,
        )
        promises = Promises(pools)
        structure = Structure(pools, promises, counters)
        self._arriving = ArrivalTable(sessions)
        self.admission = Admission(
            config.incarnation,
            config.max_sessions,
            sessions,
            self._arriving,
            pools.usage,
            counters,
        )
        self.access = SessionAccess(config, lock, sessions, self._arriving, counters, clock)
        self.opening = Opening(lock, self.access, sessions, self.admission, structure)
        self.changes = Changes(self.access, sessions, promises, structure, counters, clock)
        self.long_way = LongWay(lock, self.access, pools, promises, counters, clock, failpoints)
        self.short_way = ShortWay(lock, sessions, counters, clock)
        self.tokens = TokenAccess(lock, self.access, pools, counters)
        self.departures = Departures(config, lock, sessions, structure, clock, failpoints)
        self.arrivals = Arrivals(
            lock, sessions, self._arriving, promises, structure, self.admission, clock
        )
        self.arriving_pages = ArrivingPages(lock, self._arriving, pools, counters)
        self.leases = Leases(lock, sessions, self.arrivals, self.departures, structure, counters)
        self._discrepancies: set[Discrepancy] = set()  # found by the last audit

    # -- its life

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, or have a part here."""
        return len(self._sessions)

    def drain(self) -> None:
        """Open no more sessions."""
        with self._lock:
            self.admission.draining = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here, and nothing on its way here or from here."""
        with self._lock:
            return not (len(self._sessions) or len(self._arriving))

    def close(self) -> None:
        """Free everything."""
        self.arrivals.close()
        self.leases.close()

    # -- questions

    def list_sessions(self, tenant: str | None) -> list[tuple[str, SessionInfo]]:
        """Return (tenant, session) of one tenant's sessions, or of all (None), oldest first."""
        with self._lock:
            return [
                (session.key[0], self.access.info(session))
                for session in self._sessions.all()
                if tenant in (None, session.key[0])
            ]

    def changes_since(
        self, cursor: int
    ) -> tuple[int, list[tuple[str, SessionInfo]], list[EndedSession]]:
        """Return what heartbeats report: a new cursor, changed sessions, and ended ones.

        Opening, ending and structural changes count; appended tokens do not.
        """
        with self._lock:
            cursor, changed, ended = self._sessions.changes_since(cursor)
            return cursor, [(each.key[0], self.access.info(each)) for each in changed], ended

    def stats(self) -> WorkerStats:
        """Return the worker's numbers, of one moment."""
        with self._lock:
            return worker_stats(
                self.config,
                self._sessions.all(),
                self._pools,
                self._counters,
                draining=self.admission.draining,
                num_arriving=len(self._arriving),
            )

    def view(self, metrics_address: str = "") -> WorkerView:
        """Return what heartbeats say of the worker itself. Unlike `stats`, it costs O(pools)."""
        config = self.config
        with self._lock:
            promised = sum(pool.pages.num_reserved * pool.page_bytes for pool in self._pools)
            record = WorkerRecord(
                config.worker_id,
                config.incarnation,
                config.address,
                config.device,
                config.budget_bytes,
                free_bytes=max(0, config.budget_bytes - self._pools.used_bytes - promised),
                draining=self.admission.draining,
                metrics_address=metrics_address,
            )
            state = WorkerState.DRAINING if self.admission.draining else WorkerState.ALIVE
            return WorkerView(record, state, self.num_sessions, self._clock.monotonic())

    def count_move(self, outcome: str) -> None:
        """Count a session that was to be taken over from another worker: see `MOVED`."""
        with self._lock:
            self._counters.moves[outcome] += 1

    def note_handover(self, seconds: float) -> None:
        """Note for how long a session was frozen before it was here."""
        self._counters.timings.handover_seconds.observe(seconds)

    def tenant_pages(self) -> dict[str, int]:
        """Return how many pages each tenant's sessions hold; a shared one counts for each."""
        with self._lock:
            found: Counter[str] = Counter()
            for session in self._sessions.all():
                found[session.key[0]] += session.num_pages
            return dict(found)

    def limited_tenants(self) -> dict[str, int]:
        """Return the pages of each tenant that has sessions here, and a limit of these or those."""
        with self._lock:
            return self._pools.usage.limited()

    def used_elsewhere(self, use: Mapping[str, Use]) -> None:
        """Take what limited tenants have on all other workers: their quotas are for all of them.

        Who has more than it may keeps it, and gets no more.
        """
        with self._lock:
            self._pools.usage.elsewhere = dict(use)

    def audit(self) -> int:
        """Compare all pages' references with all tables; return how many disagree newly.

        None should. It holds the worker's lock for about half a microsecond a page.
        """
        with self._lock:
            found = find_discrepancies(self._holders(), self._pools)
            new = found - self._discrepancies
            self._discrepancies = found
            for kind, _, _ in new:
                self._counters.page_discrepancies[kind] += 1
        return len(new)

    def check(self) -> None:
        """Assert all invariants."""
        with self._lock:
            self._pools.check()
            self._sessions.check()
            check_accounts(self._holders(), self._pools, self._counters)

    # -- inside

    def _holders(self) -> list[Holder]:
        """Return all that holds pages. The worker's lock is held."""
        return [*self._sessions.all(), *self._arriving.all()]
