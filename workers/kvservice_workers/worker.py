"""A worker without its network: the verbs on sessions, over pools, tables and arenas."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kvservice.clock import Clock
from kvservice.core.errors import (
    AlreadyExists,
    Draining,
    InvalidRequest,
    KVServiceError,
    OutOfPages,
    PositionOutOfRange,
    StaleEpoch,
    TooManySessions,
)
from kvservice.core.geometry import LayerGeometry, cdiv
from kvservice.core.lease import LeaseTable
from kvservice.core.recorder import NullRecorder, Recorder
from kvservice.core.session import (
    MAX_ROWS,
    MAX_TOKENS,
    AttendCall,
    AttendResult,
    Extent,
    PoolStats,
    ReadResult,
    SessionInfo,
    SessionSpec,
    WorkerStats,
    WriteCall,
    check_session_id,
)
from kvservice_workers.counters import FAILURE_REASONS, FREE_REASONS, Counters
from kvservice_workers.data_path import DataPath
from kvservice_workers.pools import Pool, PoolSet
from kvservice_workers.session_state import (
    LayerGroup,
    SessionKey,
    WorkerSession,
    session_not_found,
)

# Ended sessions that heartbeats can still report.
MAX_ENDED = 100_000


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told at its start."""

    worker_id: str
    incarnation: str
    budget_bytes: int
    address: str = ""
    device: str = "cpu"
    max_sessions: int = 20_000


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
        self, config: WorkerConfig, *, clock: Clock, recorder: Recorder | None = None
    ) -> None:
        self.config = config
        self._clock = clock
        self._lock = threading.RLock()
        self._sessions: dict[SessionKey, WorkerSession] = {}
        self._leases: LeaseTable[SessionKey] = LeaseTable()
        self._pools = PoolSet(config.budget_bytes, torch.device(config.device))
        self._counters = Counters()
        self._private_keys = itertools.count()
        self._draining = False
        self._serial = 0
        self._changed: dict[SessionKey, int] = {}  # oldest first
        self._ended: deque[tuple[int, SessionKey]] = deque(maxlen=MAX_ENDED)
        self._data = DataPath(
            self._lock, self._pools, self._counters, clock, recorder or NullRecorder()
        )

    # -- sessions come and go

    def allocate(
        self,
        tenant: str,
        session_id: str,
        spec: SessionSpec,
        *,
        extent_starts: Sequence[int] = (),
        epoch: int = 0,
    ) -> SessionInfo:
        """Open a session, or the extent of one.

        Repeat-safe: the same id and request return the session as it stands.

        Args:
            extent_starts: Per row, the first position held here. Empty: 0, or open (the first
                stored tokens decide) where `spec.spread` is above 1.
            epoch: The epoch that the session is at, for an extent; 0 for a new session.

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
            if (existing := self._find_repeat(key, origin)) is not None:
                return self._info(existing)
            self._admit()
            session = WorkerSession(key, spec, origin)
            session.epoch = epoch or 1
            if extent_starts:
                session.starts = list(extent_starts)
            elif spec.spread == 1:
                session.begins_at_zero = True
                session.starts = [0] * spec.num_rows
            self._open_groups(session, None)
            try:
                self._promise(session, self._reserved_targets(session))
            except KVServiceError as error:
                self._close_groups(session)
                self._count_failure(error)
                raise
            return self._add(session)

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
        parent = self._use(tenant, session_id)
        with parent.lock, self._lock:
            parent.check_open()
            if (existing := self._find_repeat(key, origin)) is not None:
                return self._info(existing)
            parent.check_epoch(epoch)
            keep = self._fork_lengths(parent, token_count, clip)
            self._admit()
            spec = _with(parent.spec, ttl_s=ttl_s)
            child = WorkerSession(key, spec, origin)
            child.begins_at_zero = parent.begins_at_zero
            child.starts = None if parent.starts is None else list(parent.starts)
            child.geometries = dict(parent.geometries)
            child.padding = [padding.copy() for padding in parent.padding]
            self._open_groups(child, parent)
            for window, group in parent.groups.items():
                tables = [
                    table.share(cdiv(length, group.page_size))
                    for table, length in zip(group.tables, keep, strict=True)
                ]
                child.groups[window].tables = tables
                child.groups[window].evicted = [
                    min(gone, cdiv(length, group.page_size) * group.page_size)
                    for gone, length in zip(group.evicted, keep, strict=True)
                ]
                child.groups[window].changed()
            child.lengths = {
                layer: [min(length, cut) for length, cut in zip(lengths, keep, strict=True)]
                for layer, lengths in parent.lengths.items()
            }
            for row, padding in enumerate(child.padding):
                padding.cut(keep[row])
            self._settle_starts(child, keep)
            try:
                self._promise(parent, parent.targets)
            except OutOfPages as error:
                self._free(child, "release", uncounted=True)
                self._count_failure(error)
                raise
            return self._add(child)

    def attach(self, tenant: str, session_id: str, epoch: int | None = None) -> SessionInfo:
        """Take a session over: the next epoch begins, and older holders are refused.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        session = self._use(tenant, session_id)
        with session.lock, self._lock:
            session.check_open()
            if epoch is None or not self._is_repeat(session, epoch, "attach"):
                session.begin_epoch("attach")
                self._note_change(session)
            return self._info(session)

    def release(self, tenant: str, session_ids: Sequence[str]) -> int:
        """Free sessions; those that do not exist are skipped. Return how many existed."""
        released = 0
        for session_id in session_ids:
            with self._lock:
                session = self._sessions.get((tenant, session_id))
            if session is None:
                continue
            with session.lock, self._lock:
                if not session.closed:
                    self._remove(session, "release")
                    released += 1
        return released

    def renew(self, tenant: str, session_ids: Sequence[str]) -> list[str]:
        """Renew leases; return the ids of sessions that do not exist."""
        now = self._clock.monotonic()
        missing = []
        with self._lock:
            for session_id in session_ids:
                session = self._find(tenant, session_id)
                if session is None:
                    missing.append(session_id)
                else:
                    self._leases.renew(session.key, now + session.ttl_s)
        return missing

    def expire(self) -> int:
        """Free the sessions whose lease is over; return how many. Costs O(expired).

        A session in the middle of a call is left for the next time.
        """
        count = 0
        with self._lock:
            for key in self._leases.expired(self._clock.monotonic()):
                session = self._sessions[key]
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
            return self._leases.next_look()

    def drain(self) -> None:
        """Open no more sessions."""
        with self._lock:
            self._draining = True

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            sessions = list(self._sessions.values())
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
        session = self._use(tenant, session_id)
        with session.lock, self._lock:
            session.check_open()
            session.check_epoch(epoch)
            session.check_lengths(expected_lengths)
            targets = [length + token_count for length in expected_lengths]
            for row, target in enumerate(targets):
                session.check_bound(row, target)
            old = session.targets or [0] * session.num_rows
            try:
                self._promise(session, [max(pair) for pair in zip(old, targets, strict=True)])
            except OutOfPages as error:
                self._count_failure(error)
                raise
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
            Conflict: `expected_lengths` are not those of the longest layers.
            PositionOutOfRange: The next query could see an evicted position. Nothing has changed.
        """
        session = self._use(tenant, session_id)
        change = ("pop", tuple(keep))
        with session.lock, self._lock:
            session.check_open()
            if self._is_repeat(session, epoch, change):
                return self._info(session)
            session.check_rows(keep, "keep")
            if min(keep) < 0:
                raise InvalidRequest(f"keep must not be negative, got {list(keep)}")
            session.check_lengths(expected_lengths)
            for group in session.groups.values():
                for row, length in enumerate(keep):
                    if length < session.longest(row):
                        session.check_visible_after_cut(group, row, length)
            if not check_only:
                before = sum(session.longest_of_all())
                self._cut(session, keep, "pop")
                self._counters.popped_tokens += max(0, before - sum(session.longest_of_all()))
                self._apply(session, change)
            return self._info(session)

    def reset(
        self, tenant: str, session_id: str, epoch: int, *, check_only: bool = False
    ) -> SessionInfo:
        """Drop all tokens; rows, lease and reservation stay.

        Raises:
            SessionNotFound, StaleEpoch: Nothing has changed.
        """
        session = self._use(tenant, session_id)
        with session.lock, self._lock:
            session.check_open()
            if self._is_repeat(session, epoch, "reset"):
                return self._info(session)
            if not check_only:
                self._cut(session, [0] * session.num_rows, "reset")
                session.lengths.clear()
                session.starts = [0] * session.num_rows if session.begins_at_zero else None
                self._promise_again(session, self._reserved_targets(session))
                self._apply(session, "reset")
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
        session = self._use(tenant, session_id)
        change = ("select", tuple(rows))
        with session.lock, self._lock:
            session.check_open()
            if self._is_repeat(session, epoch, change):
                return self._info(session)
            if not 1 <= len(rows) <= MAX_ROWS:
                raise InvalidRequest(f"between 1 and {MAX_ROWS} rows, got {len(rows)}")
            if min(rows) < 0 or max(rows) >= session.num_rows:
                raise InvalidRequest(f"rows must be below {session.num_rows}, got {list(rows)}")
            if not check_only:
                self._select(session, rows)
                self._apply(session, change)
            return self._info(session)

    # -- data

    def attend(self, tenant: str, call: AttendCall) -> AttendResult:
        """Store new k and v of one layer, attend, return the output; see `worker.proto`.

        Raises:
            Whatever `worker.proto` lists for Attend; see there for what has changed.
        """
        session = self._use(tenant, call.session_id)
        with session.lock:
            session.check_open()
            try:
                return self._data.attend(session, call)
            except OutOfPages as error:
                self._count_failure(error)
                raise
            finally:
                self._renew(session)

    def write(self, tenant: str, call: WriteCall) -> tuple[int, ...]:
        """Store k and v at listed positions; return the layer's lengths. All or nothing.

        Raises:
            Whatever `worker.proto` lists for Write. Nothing has changed.
        """
        session = self._use(tenant, call.session_id)
        with session.lock:
            session.check_open()
            try:
                return self._data.write(session, call)
            except OutOfPages as error:
                self._count_failure(error)
                raise
            finally:
                self._renew(session)

    def read(
        self, tenant: str, session_id: str, epoch: int, layer: int, start: int, stop: int
    ) -> ReadResult:
        """Return K and V of positions [start, stop) of every row; zeros for holes.

        Raises:
            SessionNotFound, StaleEpoch, InvalidRequest.
            PositionOutOfRange: Beyond the layer's longest row, before the extent, or evicted.
        """
        session = self._use(tenant, session_id)
        with session.lock:
            session.check_open()
            session.check_epoch(epoch)
            return self._data.read(session, layer, start, stop)

    # -- questions

    def get(self, tenant: str, session_id: str) -> SessionInfo:
        """Return where a session stands.

        Raises:
            SessionNotFound
        """
        session = self._use(tenant, session_id)
        with session.lock, self._lock:
            session.check_open()
            return self._info(session)

    def list_sessions(self, tenant: str | None) -> list[tuple[str, SessionInfo]]:
        """Return (tenant, session) of one tenant's sessions, or of all (None), oldest first."""
        with self._lock:
            return [
                (key[0], self._info(session))
                for key, session in self._sessions.items()
                if tenant in (None, key[0])
            ]

    def changes_since(
        self, cursor: int
    ) -> tuple[int, list[tuple[str, SessionInfo]], list[tuple[str, str]]]:
        """Return what heartbeats report: a new cursor, changed sessions, and ended ones.

        Opening, ending and structural changes count; appended tokens do not.
        """
        with self._lock:
            changed = []
            for key in reversed(self._changed):
                if self._changed[key] <= cursor:
                    break
                changed.append((key[0], self._info(self._sessions[key])))
            ended = [key for serial, key in self._ended if serial > cursor]
            return self._serial, changed[::-1], ended

    def stats(self) -> WorkerStats:
        """Return the worker's numbers, of one moment."""
        with self._lock:
            counters = self._counters
            tokens: Counter[int] = Counter()
            for session in self._sessions.values():
                for group in session.groups.values():
                    tokens[group.pool.ordinal] += _stored_tokens(session, group)
            return WorkerStats(
                worker_id=self.config.worker_id,
                incarnation=self.config.incarnation,
                address=self.config.address,
                device=self.config.device,
                budget_bytes=self.config.budget_bytes,
                arena_bytes=self._pools.arena_bytes,
                used_bytes=self._pools.used_bytes,
                num_sessions=len(self._sessions),
                pools=tuple(_pool_stats(pool, tokens[pool.ordinal]) for pool in self._pools),
                page_allocations=counters.page_allocations,
                page_frees={name: counters.page_frees[name] for name in FREE_REASONS},
                allocation_failures={
                    name: counters.allocation_failures[name] for name in FAILURE_REASONS
                },
                appended_tokens=counters.appended_tokens,
                popped_tokens=counters.popped_tokens,
                appended_bytes=counters.appended_bytes,
                read_bytes=counters.read_bytes,
                lease_expirations=counters.lease_expirations,
                draining=self._draining,
            )

    def check(self) -> None:
        """Assert all invariants."""
        with self._lock:
            self._pools.check()
            self._leases.check()
            assert len(self._leases) == len(self._sessions)
            held: dict[int, Counter[int]] = {pool.ordinal: Counter() for pool in self._pools}
            promised: Counter[int] = Counter()
            for session in self._sessions.values():
                session.check()
                for group in session.groups.values():
                    promised[group.pool.ordinal] += group.promised
                    for table in group.tables:
                        held[group.pool.ordinal].update(p for p in table.entries if p >= 0)
            used = 0
            for pool in self._pools:
                used += pool.pages.num_used
                assert promised[pool.ordinal] == pool.pages.num_reserved, "promises do not sum"
                for page in range(pool.pages.total):
                    assert pool.pages.refcount(page) == held[pool.ordinal][page], f"page {page}"
            freed = sum(self._counters.page_frees.values())
            assert self._counters.page_allocations - freed == used, "allocations - frees != used"

    # -- the worker's lock is held in all of these

    def _use(self, tenant: str, session_id: str) -> WorkerSession:
        """Find a session whose lease holds, and renew it."""
        with self._lock:
            session = self._find(tenant, session_id)
            if session is None:
                raise session_not_found()
            self._leases.renew(session.key, self._clock.monotonic() + session.ttl_s)
            return session

    def _renew(self, session: WorkerSession) -> None:
        """Count the lease from the end of a call that may have taken long."""
        with self._lock:
            self._leases.renew(session.key, self._clock.monotonic() + session.ttl_s)

    def _find(self, tenant: str, session_id: str) -> WorkerSession | None:
        session = self._sessions.get((tenant, session_id))
        if session is None or self._leases.deadline(session.key) >= self._clock.monotonic():
            return session
        if not session.lock.acquire(blocking=False):  # in the middle of a call
            return session
        session.lock.release()
        return None

    def _find_repeat(self, key: SessionKey, origin: Hashable) -> WorkerSession | None:
        existing = self._sessions.get(key)
        if existing is not None and existing.origin != origin:
            raise AlreadyExists("this session id is in use for another request")
        return existing

    def _admit(self) -> None:
        if self._draining:
            self._counters.allocation_failures["draining"] += 1
            raise Draining("this worker is leaving and opens no sessions", retry_delay_s=1.0)
        if len(self._sessions) >= self.config.max_sessions:
            self._counters.allocation_failures["too_many_sessions"] += 1
            raise TooManySessions(
                f"this worker holds {len(self._sessions)} sessions, the most it may",
                retry_delay_s=1.0,
                limit=self.config.max_sessions,
            )

    def _add(self, session: WorkerSession) -> SessionInfo:
        self._sessions[session.key] = session
        self._leases.grant(session.key, self._clock.monotonic() + session.ttl_s)
        self._note_change(session)
        return self._info(session)

    def _remove(self, session: WorkerSession, reason: str) -> None:
        self._free(session, reason)
        session.closed = True
        del self._sessions[session.key]
        self._leases.revoke(session.key)
        self._changed.pop(session.key, None)
        self._serial += 1
        self._ended.append((self._serial, session.key))

    def _free(self, session: WorkerSession, reason: str, *, uncounted: bool = False) -> None:
        freed = sum(table.cut(0) for group in session.groups.values() for table in group.tables)
        assert not (uncounted and freed), "a session that never was has freed pages"
        self._counters.page_frees[reason] += freed
        self._promise(session, None)
        self._close_groups(session)

    def _open_groups(self, session: WorkerSession, parent: WorkerSession | None) -> None:
        """Give a session its layer groups: a parent's pools, shared ones where it states its
        layers, else private ones."""
        spec = session.spec
        windows = dict.fromkeys(layer.window for layer in spec.layers)
        if not spec.states_geometry:
            windows.setdefault(None)  # for layers that nobody has mentioned
        for window in windows:
            if parent is not None:
                key = parent.groups[window].pool.key
            elif spec.states_geometry:
                key = (spec.page_size, _geometries(spec, window))
            else:
                key = ("private", next(self._private_keys))
            private = not spec.states_geometry
            pool = self._pools.open(key, spec.page_size, private=private)
            session.groups[window] = LayerGroup(window, pool, session.num_rows)

    def _close_groups(self, session: WorkerSession) -> None:
        for group in session.groups.values():
            self._pools.close(group.pool)

    def _reserved_targets(self, session: WorkerSession) -> list[int] | None:
        if session.spec.reserve_tokens is None:
            return None
        return [
            session.start_of(row) + session.spec.reserve_tokens for row in range(session.num_rows)
        ]

    def _promise(self, session: WorkerSession, targets: Sequence[int] | None) -> None:
        """Promise a session room for rows of these lengths, instead of what it was promised.

        Raises:
            OutOfPages, InvalidRequest: There is not, or never, so much. Nothing has changed.
        """
        if targets is None and session.targets is None:
            return
        before = session.targets
        session.targets = None if targets is None else list(targets)
        changes: dict[int, tuple[Pool, int]] = {}
        for group in session.groups.values():
            pool, change = changes.get(id(group.pool), (group.pool, 0))
            change += session.promise_of(group) - group.promised
            changes[id(group.pool)] = (pool, change)
        try:
            self._make_stated_arenas(session)
            for pool, change in changes.values():
                if change > 0:
                    self._check_satisfiable(pool, change)
                    self._pools.make_room(pool, 0, promise_change=change)
        except KVServiceError:
            session.targets = before
            raise
        for group in session.groups.values():
            promise = session.promise_of(group)
            group.pool.pages.take(0, promise_change=promise - group.promised)
            group.promised = promise

    def _promise_again(self, session: WorkerSession, targets: Sequence[int] | None) -> None:
        """Promise room after pages were given up. Where a fork still holds them and there is no
        room for others, the promise lapses: giving up pages never fails."""
        try:
            self._promise(session, targets)
        except KVServiceError:
            self._promise(session, None)

    def _make_stated_arenas(self, session: WorkerSession) -> None:
        """Make all arenas of a session that states its layers, so that its bytes are counted."""
        if session.targets is None or not session.spec.states_geometry:
            return
        for layer, geometry in session.geometries.items():
            self._data.arena_of(session, layer, geometry)

    def _check_satisfiable(self, pool: Pool, num_pages: int) -> None:
        if num_pages * pool.page_bytes > self.config.budget_bytes:
            raise InvalidRequest(
                f"{num_pages} pages of {pool.page_bytes} bytes can never fit into this worker's "
                f"{self.config.budget_bytes} bytes",
                budget_bytes=self.config.budget_bytes,
            )

    def _fork_lengths(
        self, parent: WorkerSession, token_count: int | None, clip: bool
    ) -> list[int]:
        """Return how much of each row a fork shares."""
        longest = parent.longest_of_all()
        if token_count is None:
            return longest
        for row, length in enumerate(longest):
            if length < token_count and not clip:
                raise PositionOutOfRange(
                    f"row {row} has {length} tokens, {token_count} were asked for",
                    row=row,
                    length=length,
                )
            for group in parent.groups.values():
                if token_count < length:
                    parent.check_visible_after_cut(group, row, token_count)
        return [min(length, token_count) for length in longest]

    def _cut(self, session: WorkerSession, keep: Sequence[int], reason: str) -> None:
        for group in session.groups.values():
            for row, table in enumerate(group.tables):
                freed = table.cut(cdiv(keep[row], group.page_size))
                self._counters.page_frees[reason] += freed
                reach = cdiv(keep[row], group.page_size) * group.page_size
                group.evicted[row] = min(group.evicted[row], reach) if keep[row] else 0
            group.changed()
        for lengths in session.lengths.values():
            for row, length in enumerate(lengths):
                lengths[row] = min(length, keep[row])
        for row, padding in enumerate(session.padding):
            padding.cut(keep[row])
        self._settle_starts(session, keep)
        self._promise_again(session, session.targets)

    def _settle_starts(self, session: WorkerSession, keep: Sequence[int]) -> None:
        """Let an extent that was cut below its start begin where the row ends now; if that leaves
        it empty, let its next tokens decide."""
        if session.starts is None:
            return
        below = any(length < start for length, start in zip(keep, session.starts, strict=True))
        if not below:
            return
        session.starts = [min(pair) for pair in zip(keep, session.starts, strict=True)]
        if all(session.longest(row) == session.starts[row] for row in range(session.num_rows)):
            session.starts = None
            session.lengths.clear()

    def _select(self, session: WorkerSession, rows: Sequence[int]) -> None:
        self._make_room_for_rows(session, rows)
        targets = session.targets
        for group in session.groups.values():
            old = group.tables
            group.tables = [old[row].share() for row in rows]
            group.evicted = [group.evicted[row] for row in rows]
            group.changed()
            self._counters.page_frees["select"] += sum(table.cut(0) for table in old)
        session.padding = [session.padding[row].copy() for row in rows]
        if session.starts is not None:
            session.starts = [session.starts[row] for row in rows]
        session.lengths = {
            layer: [lengths[row] for row in rows] for layer, lengths in session.lengths.items()
        }
        if targets is not None:
            session.targets = [targets[row] for row in rows]
            self._promise(session, session.targets)

    def _make_room_for_rows(self, session: WorkerSession, rows: Sequence[int]) -> None:
        """Make sure that a reservation holds for new rows, all of whose pages may be shared.

        Raises:
            OutOfPages: Nothing has changed.
        """
        if session.targets is None:
            return
        for group in session.groups.values():
            entries = [len(table.entries) for table in group.tables]
            most = sum(
                session.row_promise(group, row, entries[row], entries[row] > 0) for row in rows
            )
            if most > group.promised:
                self._pools.make_room(group.pool, 0, promise_change=most - group.promised)

    def _is_repeat(self, session: WorkerSession, epoch: int, change: Hashable) -> bool:
        """Return whether a structural change has been applied already.

        Raises:
            StaleEpoch: The session is at neither of the two epochs, or came here otherwise.
        """
        if epoch == session.epoch:
            return False
        if epoch + 1 == session.epoch and session.last_change == change:
            return True
        raise StaleEpoch(
            f"the session is at epoch {session.epoch}, the change starts from {epoch}",
            epoch=session.epoch,
        )

    def _apply(self, session: WorkerSession, change: Hashable) -> None:
        session.begin_epoch(change)
        self._note_change(session)

    def _note_change(self, session: WorkerSession) -> None:
        self._serial += 1
        self._changed.pop(session.key, None)
        self._changed[session.key] = self._serial

    def _count_failure(self, error: KVServiceError) -> None:
        reason = error.reason.lower()
        if reason in FAILURE_REASONS:
            with self._lock:
                self._counters.allocation_failures[reason] += 1

    def _info(self, session: WorkerSession) -> SessionInfo:
        config = self.config
        return SessionInfo(
            session_id=session.key[1],
            epoch=session.epoch,
            step=session.last_step,
            spec=_with(session.spec, num_rows=session.num_rows),
            extents=(
                Extent(
                    worker_id=config.worker_id,
                    address=config.address,
                    incarnation=config.incarnation,
                    starts=() if session.starts is None else tuple(session.starts),
                    stops=() if session.starts is None else tuple(session.longest_of_all()),
                ),
            ),
            lengths=tuple(
                tuple(session.layer_lengths(layer))
                for layer in range(max(session.lengths, default=-1) + 1)
            ),
        )


def _geometries(spec: SessionSpec, window: int | None) -> tuple[LayerGeometry | None, ...]:
    return tuple(layer.geometry for layer in spec.layers if layer.window == window)


def _with(
    spec: SessionSpec, *, ttl_s: float | None = None, num_rows: int | None = None
) -> SessionSpec:
    """Return the spec with another ttl or number of rows."""
    return SessionSpec(
        num_rows=spec.num_rows if num_rows is None else num_rows,
        layers=spec.layers,
        page_size=spec.page_size,
        max_tokens=spec.max_tokens,
        reserve_tokens=spec.reserve_tokens,
        ttl_s=spec.ttl_s if ttl_s is None else ttl_s,
        replicas=spec.replicas,
        spread=spec.spread,
    )


def _stored_tokens(session: WorkerSession, group: LayerGroup) -> int:
    """Return the tokens that a session stores in a group's pages."""
    size = group.page_size
    total = 0
    for row, table in enumerate(group.tables):
        if not table.num_held:
            continue
        start, stop = session.start_of(row), session.longest(row)
        total += table.num_held * size
        if table.page_at(start // size) >= 0:
            total -= start % size
        if table.page_at((stop - 1) // size) >= 0:
            total -= -stop % size
    return total


def _pool_stats(pool: Pool, num_tokens: int) -> PoolStats:
    return PoolStats(
        pool=pool.ordinal,
        page_size=pool.pages.page_size,
        page_bytes=pool.page_bytes,
        used_pages=pool.pages.num_used,
        reserved_pages=pool.pages.num_reserved,
        free_pages=pool.pages.num_free,
        num_tokens=num_tokens,
    )
