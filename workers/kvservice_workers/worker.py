"""A worker without its network: the verbs on sessions, over pools, tables and arenas."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from kvservice.clock import Clock
from kvservice.core.directory import WorkerRecord, WorkerState, WorkerView
from kvservice.core.errors import (
    AlreadyExists,
    InvalidRequest,
    KVServiceError,
    OutOfPages,
    QuotaExceeded,
    SessionMoved,
    StaleEpoch,
)
from kvservice.core.failpoints import NO_FAILPOINTS, Failpoints
from kvservice.core.moving import MovedTo
from kvservice.core.quota import QuotaOf, unlimited
from kvservice.core.said import Said
from kvservice.core.session import (
    MAX_ROWS,
    MAX_TOKENS,
    AttendCall,
    AttendResult,
    EndedSession,
    ReadResult,
    SessionInfo,
    SessionSpec,
    WorkerStats,
    WriteCall,
    check_session_id,
)
from kvservice.core.tenancy import Use
from kvservice_workers.accounts import Discrepancy, Holder, check_accounts, find_discrepancies
from kvservice_workers.admission import Admission
from kvservice_workers.arrival import ArrivalTable
from kvservice_workers.arrivals import Arrivals
from kvservice_workers.arriving_pages import ArrivingPages
from kvservice_workers.counters import FAILURE_REASONS, Counters
from kvservice_workers.data_path import DataPath
from kvservice_workers.departures import Departures
from kvservice_workers.pools import PoolSet
from kvservice_workers.promises import Promises
from kvservice_workers.session_state import GO_ON, WorkerSession
from kvservice_workers.session_table import SessionTable
from kvservice_workers.snapshot import session_info, worker_stats
from kvservice_workers.structure import Structure
from kvservice_workers.token_access import TokenAccess
from kvservice_workers.worker_config import WorkerConfig

__all__ = ["PageWorker", "WorkerConfig"]

Change = str | tuple[str, tuple[int, ...]]
"""A structural change's verb in lower case, and what it was asked for."""

CHANGE_DUE_S: Final = 120.0
"""How long a change that was checked keeps others from copying the session."""


class PageWorker:
    """Sessions of one worker: one step at a time per session, many sessions at once.

    Thread-safe. A session's lock is held for the whole of a call on it; the worker's lock only
    while tables, pools and counters change, never during attention. They are taken in this order.

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
        self._lock = threading.RLock()
        self._sessions = SessionTable(clock)
        self.arriving = ArrivalTable(self._sessions)
        self._pools = PoolSet(
            config.budget_bytes,
            torch.device(config.device),
            quota_of=quota_of,
            zero_freed=config.zero_freed_pages,
        )
        self._counters = Counters()
        self._promises = Promises(self._pools)
        self._structure = Structure(self._pools, self._promises, self._counters)
        self._tokens = TokenAccess(self._lock, self._pools, self._counters)
        self._data = DataPath(
            self._lock, self._sessions, self._pools, self._counters, clock, failpoints
        )
        self.admission = Admission(
            config.max_sessions,
            self._sessions,
            self.arriving,
            self._pools.usage,
            self._counters,
        )
        self.departures = Departures(self._lock, self._sessions, self._structure, clock, failpoints)
        self.arrivals = Arrivals(
            self._lock,
            self._sessions,
            self.arriving,
            self._promises,
            self._structure,
            self.admission,
            clock,
        )
        self.arriving_pages = ArrivingPages(self._lock, self.arriving, self._pools, self._counters)
        self._discrepancies: set[Discrepancy] = set()  # found by the last audit

    # -- sessions come and go

    def allocate(
        self,
        tenant: str,
        session_id: str,
        spec: SessionSpec,
        *,
        extent_starts: Sequence[int] = (),
        epoch: int = 0,
        group: int = 0,
    ) -> SessionInfo:
        """Open a session, or the extent of one.

        Repeat-safe: the same id and request return the session as it stands.

        Args:
            extent_starts: Per row, the first position held here. Empty: 0, or open (the first
                stored tokens decide) where `spec.spread` is above 1.
            epoch: The epoch that the session is at, for an extent; 0 for a new session.
            group: Extents of the same group, on other workers, are copies of this one; 0: none.

        Raises:
            AlreadyExists: The id is in use for another request.
            OutOfPages: The reservation does not fit. Nothing has changed.
            InvalidRequest: It can never fit, or something is out of range.
            TooManySessions, Draining: Nothing has changed.
        """
        check_session_id(session_id)
        if extent_starts and len(extent_starts) != spec.num_rows:
            raise InvalidRequest(f"extent_starts must have {spec.num_rows} entries")
        if any(not 0 <= start <= MAX_TOKENS for start in extent_starts) or epoch < 0:
            raise InvalidRequest("extent_starts and epoch must not be negative")
        key = (tenant, session_id)
        origin = ("allocate", spec, tuple(extent_starts), epoch)
        with self._lock:
            self.arriving.check_id_is_free(key)
            if (existing := self._sessions.find_repeat(key, origin)) is not None:
                self._counters.replays["Allocate"] += 1
                return self._info(existing)
            with self._counting_refusals():
                session = self.admission.admit(key, spec, origin, is_counted=bool(epoch))
            session.epoch, session.group = epoch or 1, group
            if extent_starts:
                session.starts = list(extent_starts)
            elif spec.spread == 1:
                session.begins_at_zero = True
                session.starts = [0] * spec.num_rows
            self._structure.open_groups(session, None)
            try:
                self._promises.promise(session, self._promises.reserved_targets(session))
            except KVServiceError as error:
                self._structure.free(session, "release")
                self._count_failure(error)
                raise
            self._sessions.add(session)
            return self._info(session)

    def fork(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        new_session_id: str,
        *,
        token_count: int | None = None,
        ttl_s: float | None = None,
        clip: bool = False,
    ) -> SessionInfo:
        """Open a session that shares another's pages, or the leading `token_count` of each row.

        Repeat-safe by the new id. Args as in `ForkRequest`.

        Raises:
            SessionNotFound, StaleEpoch, AlreadyExists, TooManySessions, Draining.
            PositionOutOfRange: `token_count` exceeds a row's length (not with `clip`), or the
                child would see what a window has evicted.
            OutOfPages: The parent's reservation needs a page more per row once pages are shared.
            After any of them nothing has changed.
        """
        check_session_id(new_session_id)
        if token_count is not None and token_count < 1:
            raise InvalidRequest(f"token_count must be at least 1, got {token_count}")
        key = (tenant, new_session_id)
        origin = ("fork", session_id, epoch, token_count, ttl_s)
        with self._changing(tenant, session_id) as parent:
            self.arriving.check_id_is_free(key)
            if (existing := self._find_fork(key, origin)) is not None:
                self._counters.replays["Fork"] += 1
                return self._info(existing, with_padding=True)
            parent.check_epoch(epoch)
            keep = self._structure.fork_lengths(parent, token_count, clip=clip)
            spec = replace(
                parent.spec,
                num_rows=parent.num_rows,
                reserve_tokens=None,
                ttl_s=ttl_s or parent.ttl_s,
            )
            child = self.admission.admit(key, spec, origin)
            self._structure.fork(parent, child, keep, token_count)
            self._sessions.add(child)
            return self._info(child, with_padding=True)

    def go_on(self, tenant: str, session_id: str, epoch: int) -> SessionInfo:
        """Begin the next epoch for the session's holder, in the middle of its step.

        It has given up another copy, which is told by being an epoch behind.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._changing(tenant, session_id) as session:
            if not self._is_repeat(session, epoch, GO_ON):
                session.go_on()
                self._sessions.changed(session)
            return self._info(session)

    def attach(self, tenant: str, session_id: str, epoch: int | None = None) -> SessionInfo:
        """Take a session over: the next epoch begins, and older holders are refused.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
            TooLarge: It has too many ranges of padding to be told. Nothing has changed.
        """
        with self._changing(tenant, session_id) as session:
            if epoch is None or not self._is_repeat(session, epoch, "attach"):
                self._info(session, with_padding=True).check_padding_listed()
                session.begin_epoch("attach")
                self._sessions.changed(session)
            return self._info(session, with_padding=True)

    def release(
        self,
        tenant: str,
        session_ids: Iterable[str] | Mapping[str, int],
        unsettled: Collection[str] = (),
    ) -> int:
        """Free sessions; those that do not exist are skipped. Return how many were freed.

        Args:
            session_ids: With the epoch up to which each is to be freed, if that matters; 0: any. A
                later one is somebody else's, and skipped too.
            unsettled: Of which of them the next epoch counts too, unless it came by an Attach:
                their holder does not know whether its last change has arrived.
        """
        epochs = session_ids if isinstance(session_ids, Mapping) else {}
        released = 0
        for session_id in session_ids:
            up_to, is_unsettled = epochs.get(session_id) or math.inf, session_id in unsettled
            with self._lock:
                session = self._sessions.find(tenant, session_id)
                moved = self._sessions.find_moved((tenant, session_id))
                if moved is not None:
                    moved.released = True
                self.arrivals.release((tenant, session_id), up_to, unsettled=is_unsettled)
            if session is None:
                continue
            with session.lock, self._lock:
                is_theirs = session.ends_by_release(up_to, unsettled=is_unsettled)
                if not session.closed and is_theirs:
                    self._remove(session, "release")
                    released += 1
        return released

    def renew(self, tenant: str, session_ids: Sequence[str]) -> list[str]:
        """Renew leases; return the ids of sessions that do not exist."""
        missing = []
        with self._lock:
            for session_id in session_ids:
                session = self._sessions.find(tenant, session_id)
                if session is None:
                    missing.append(session_id)
                    self._sessions.renew_moved((tenant, session_id))
                else:
                    self._sessions.renew(session)
        return missing

    def find_ttl_s(self, tenant: str, session_id: str) -> float | None:
        """Return how long a session's lease runs, in seconds; None if there is no such session."""
        with self._lock:
            session = self._sessions.find(tenant, session_id)
            return None if session is None else session.ttl_s

    def moved_among(self, tenant: str, session_ids: Iterable[str]) -> list[str]:
        """Return those sessions that were moved from here to other workers."""
        with self._lock:
            return [
                session_id
                for session_id in session_ids
                if self._sessions.find_moved((tenant, session_id)) is not None
            ]

    def find_moved(self, tenant: str, session_id: str) -> tuple[MovedTo, float] | None:
        """Return where a session went from here, and its ttl in seconds; None if it did not."""
        with self._lock:
            moved = self._sessions.find_moved((tenant, session_id))
            return None if moved is None else (moved.to, moved.ttl_s)

    def find_copied(self, tenant: str, session_id: str) -> tuple[MovedTo, float, int] | None:
        """Return where a copy of a session was made with which its epoch began, its ttl in seconds,
        and that epoch; None if there was none."""
        with self._lock:
            session = self._sessions.find(tenant, session_id)
            if session is None or session.copied is None or session.copied[1] != session.epoch:
                return None
            return session.copied[0], session.ttl_s, session.epoch

    def expire(self) -> int:
        """Free the sessions whose lease is over; return how many. Costs O(expired).

        A session in the middle of a call is left for the next time.
        """
        count = self.arrivals.expire()
        with self._lock:
            self.departures.sweep()
            for session in self._sessions.expired():
                # The other order of locks, so only if nobody has it.
                if session.lock.acquire(blocking=False):
                    try:
                        self._remove(session, "lease_expired")
                        self._counters.lease_expirations += 1
                        count += 1
                    finally:
                        session.lock.release()
        return count

    def next_deadline(self) -> float | None:
        """Return when `expire` is worth calling next, in the clock's monotonic seconds."""
        with self._lock:
            return self._sessions.next_look()

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
            return not (len(self._sessions) or len(self.arriving))

    def waits_for_takers(self, linger_s: float) -> bool:
        """Whether a session went so lately that somebody may still have to be told where to."""
        with self._lock:
            last = self._sessions.moved_last_at()
            if last is None:
                return False
            now = self._clock.monotonic()
            return now - last < linger_s or self._sessions.is_unconfirmed(now - 10 * linger_s)

    def close(self) -> None:
        """Free everything."""
        self.arrivals.close()
        with self._lock:
            sessions = list(self._sessions.all())
        for session in sessions:
            with session.lock, self._lock:
                if not session.closed:
                    self._remove(session, "release")

    # -- structural changes

    def append(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        token_count: int,
        expected_lengths: Sequence[int],
    ) -> SessionInfo:
        """Promise room for `token_count` tokens of each row beyond `expected_lengths`.

        Raises:
            SessionNotFound, StaleEpoch, Conflict, PositionOutOfRange, InvalidRequest.
            OutOfPages: There is not so much room. Nothing has changed.
        """
        if not 1 <= token_count <= MAX_TOKENS:
            raise InvalidRequest(f"token_count must be at least 1, got {token_count}")
        with self._changing(tenant, session_id) as session:
            session.check_epoch(epoch)
            session.check_lengths(expected_lengths)
            targets = [length + token_count for length in expected_lengths]
            for row, target in enumerate(targets):
                session.check_bound(row, target)
            old = session.targets or [0] * session.num_rows
            targets = [max(pair) for pair in zip(old, targets, strict=True)]
            self._promises.promise(session, targets)
            return self._info(session)

    def go_on_elsewhere(
        self, tenant: str, session_id: str, epoch: int, followed_by: str
    ) -> SessionInfo:
        """Note on which incarnation of another worker a session goes on behind what is held here.

        Should that be gone one day, it can be told that something is missing. A cut to what is
        held here ends it, and each step's header says it again.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._changing(tenant, session_id) as session:
            session.check_epoch(epoch)
            session.go_on_at(followed_by)
            self._promises.lapse(session)
            return self._info(session)

    def pop(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        keep: Sequence[int],
        expected_lengths: Sequence[int],
        *,
        check_only: bool = False,
    ) -> SessionInfo:
        """Cut every layer of row r to at most `keep[r]` tokens and free what becomes empty.

        Raises:
            SessionNotFound, StaleEpoch, InvalidRequest.
            Conflict: `expected_lengths` are not those of the longest layers; not of an extent
                that holds nothing.
            PositionOutOfRange: The next query could see an evicted position. Nothing has changed.
        """
        change = ("pop", tuple(keep))
        with self._changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, change):
                return self._info(session)
            session.check_rows(keep, "keep")
            if min(keep) < 0:
                raise InvalidRequest(f"keep must not be negative, got {list(keep)}")
            session.check_ends(expected_lengths)
            for group in session.groups.values():
                for row, length in enumerate(keep):
                    if length < session.longest(row):
                        session.check_visible_after_cut(group, row, length)
            if not check_only:
                before = sum(session.longest_of_all())
                self._structure.cut(session, keep, "pop")
                self._counters.popped_tokens += max(0, before - sum(session.longest_of_all()))
                self._apply(session, change)
            else:
                self._expect_change(session)
            return self._info(session)

    def reset(
        self, tenant: str, session_id: str, epoch: int, *, check_only: bool = False
    ) -> SessionInfo:
        """Drop all tokens; rows, lease and reservation stay.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        with self._changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, "reset"):
                return self._info(session)
            if not check_only:
                self._structure.cut(session, [0] * session.num_rows, "reset")
                session.lengths.clear()
                session.starts = [0] * session.num_rows if session.begins_at_zero else None
                targets = self._promises.reserved_targets(session)
                self._promises.promise_again(session, targets)
                self._apply(session, "reset")
            else:
                self._expect_change(session)
            return self._info(session)

    def select(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        rows: Sequence[int],
        *,
        check_only: bool = False,
    ) -> SessionInfo:
        """Make new row i continue old row `rows[i]`, by sharing pages.

        Raises:
            SessionNotFound, StaleEpoch.
            InvalidRequest: No rows, too many, or one that does not exist.
            OutOfPages: A reservation does not fit the new rows. Nothing has changed.
        """
        change = ("select", tuple(rows))
        with self._changing(tenant, session_id) as session:
            if self._is_repeat(session, epoch, change):
                return self._info(session)
            if not 1 <= len(rows) <= MAX_ROWS:
                raise InvalidRequest(f"between 1 and {MAX_ROWS} rows, got {len(rows)}")
            if min(rows) < 0 or max(rows) >= session.num_rows:
                raise InvalidRequest(f"rows must be below {session.num_rows}, got {list(rows)}")
            session.quota.check("rows", len(rows))
            if check_only:
                self._promises.hold_room_for_rows(session, rows)
                self._expect_change(session)
            else:
                self._structure.select(session, rows)
                self._apply(session, change)
            return self._info(session)

    # -- data

    def attend(self, tenant: str, call: AttendCall, said: Said | None = None) -> AttendResult:
        """Store new k and v of one layer, attend, return the output; see `worker.proto`.

        Args:
            said: The call as it came. With it, later layers of the step may go the short way.

        Raises:
            Whatever `worker.proto` lists for Attend; see there for what has changed.
        """
        session = self._use(tenant, call.session_id)
        with session.lock:
            session.check_open()
            session.check_thawed(self._clock.monotonic())
            try:
                with self._counting_refusals():
                    result = self._data.attend(session, call, said)
                if session.followed_by and session.targets is not None:
                    with self._lock:
                        self._promises.lapse(session)
                return result
            finally:
                self._renew(session)

    def attend_steadily(self, tenant: str, said: Said) -> bytes | None:
        """Serve a layer the short way, if it asks what the first layer of its step has asked.

        Returns:
            The serialized `AttendResponse`. None: take `attend`, nothing has changed.

        Raises:
            InvalidRequest: No such layer.
        """
        session = self._sessions.peek(tenant, said.session_id)
        if session is None:
            return None
        with session.lock:
            return self._data.attend_steadily(session, said)

    def write(self, tenant: str, call: WriteCall) -> tuple[int, ...]:
        """Store k and v at listed positions; return the layer's lengths. All or nothing.

        Raises:
            Whatever `worker.proto` lists for Write. Nothing has changed.
        """
        session = self._use(tenant, call.session_id)
        with session.lock:
            session.check_open()
            session.check_thawed(self._clock.monotonic())
            try:
                with self._counting_refusals():
                    return self._tokens.write(session, call)
            finally:
                self._renew(session)

    def read(
        self, tenant: str, session_id: str, epoch: int, layer: int, start: int, stop: int
    ) -> ReadResult:
        """Return K and V of positions [start, stop) of every row; zeros for holes.

        Raises:
            SessionNotFound, StaleEpoch, InvalidRequest.
            PositionOutOfRange: Beyond the layer's longest row, or evicted.
        """
        session = self._use(tenant, session_id)
        with session.lock:
            session.check_open()
            with self._counting_refusals():
                session.check_epoch(epoch)
                return self._tokens.read(session, layer, start, stop)

    # -- questions

    def get(
        self, tenant: str, session_id: str, *, ticket: int = 0, renew: bool = True
    ) -> SessionInfo:
        """Return where a session stands.

        Args:
            ticket: By which it was handed over to this worker, in case it does not know yet.
            renew: Whether this is a call on the session, as any of its holder's.

        Raises:
            SessionNotFound, SessionMoved, Moving.
        """
        if ticket:
            self.arrivals.arrive_by(tenant, session_id, ticket)
        with self._lock:
            self.arriving.check_not_arriving((tenant, session_id))
            session = self._sessions.use(tenant, session_id, renew=renew)
        with session.lock, self._lock:
            session.check_open()
            return self._info(session, with_padding=True)

    def list_sessions(self, tenant: str | None) -> list[tuple[str, SessionInfo]]:
        """Return (tenant, session) of one tenant's sessions, or of all (None), oldest first."""
        with self._lock:
            return [
                (session.key[0], self._info(session))
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
            return cursor, [(each.key[0], self._info(each)) for each in changed], ended

    def stats(self) -> WorkerStats:
        """Return the worker's numbers, of one moment."""
        with self._lock:
            return worker_stats(
                self.config,
                self._sessions.all(),
                self._pools,
                self._counters,
                draining=self.admission.draining,
                num_arriving=len(self.arriving),
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
        return [*self._sessions.all(), *self.arriving.all()]

    def _use(self, tenant: str, session_id: str) -> WorkerSession:
        """Find a session whose lease holds, and renew it."""
        with self._lock:
            if len(self.arriving):
                self.arriving.check_not_arriving((tenant, session_id))
            return self._sessions.use(tenant, session_id)

    def _find_fork(self, key: tuple[str, str], origin: Hashable) -> WorkerSession | None:
        """Return the child that the same request has opened before; None if there is none.

        Raises:
            AlreadyExists: Another request has opened it, or it is not here any more.
        """
        try:
            return self._sessions.find_repeat(key, origin)
        except SessionMoved as error:  # which is said of the session that a call is about
            raise AlreadyExists("the fork has been made, and has moved since") from error

    def _renew(self, session: WorkerSession) -> None:
        """Count the lease from the end of a call that may have taken long."""
        with self._lock:
            self._sessions.renew(session)

    def _remove(self, session: WorkerSession, reason: str) -> None:
        self._counters.timings.session_pages.observe(session.num_pages)
        self._structure.free(session, reason)
        self._sessions.remove(session, expired=reason == "lease_expired")

    def _is_repeat(self, session: WorkerSession, epoch: int, change: Change) -> bool:
        """Return whether a structural change has been applied already.

        Raises:
            StaleEpoch: The session is at neither of the two epochs, or came here otherwise.
        """
        if epoch == session.epoch:
            return False
        known = (session.epoch - 1, session.last_change), (session.epoch - 2, session.change_before)
        if (epoch, change) in known:
            verb = change if isinstance(change, str) else change[0]
            self._counters.replays[verb.capitalize()] += 1
            return True
        raise StaleEpoch(
            f"the session is at epoch {session.epoch}, the change starts from {epoch}",
            epoch=session.epoch,
        )

    def _expect_change(self, session: WorkerSession) -> None:
        """Note that a change was checked, which others may have by now."""
        session.change_due_by = self._clock.monotonic() + CHANGE_DUE_S

    def _apply(self, session: WorkerSession, change: Change) -> None:
        session.begin_epoch(change)
        self._sessions.changed(session)

    @contextmanager
    def _changing(self, tenant: str, session_id: str) -> Iterator[WorkerSession]:
        """Hold a session and the worker, for something that is done at one moment."""
        session = self._use(tenant, session_id)
        with session.lock, self._lock, self._counting_refusals():
            session.check_open()
            session.check_thawed(self._clock.monotonic())
            yield session

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        """Count what is refused for lack of room, or because somebody has changed the session."""
        try:
            yield
        except (OutOfPages, QuotaExceeded) as error:
            self._count_failure(error)
            raise
        except StaleEpoch:
            with self._lock:
                self._counters.stale_epochs += 1
            raise

    def _count_failure(self, error: KVServiceError) -> None:
        reason = error.reason.lower()
        if reason in FAILURE_REASONS:
            with self._lock:
                self._counters.allocation_failures[reason] += 1

    def _info(self, session: WorkerSession, *, with_padding: bool = False) -> SessionInfo:
        return session_info(self.config, session, with_padding=with_padding)
