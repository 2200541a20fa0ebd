"""Sessions that are on their way here from other workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvservice.clock import Clock
from kvservice.core.errors import AlreadyExists, Conflict, InvalidRequest, KVServiceError
from kvservice.core.geometry import HOLE, LayerGeometry
from kvservice.core.moving import MAX_REPLACED, CopiedPages, GroupState, SessionState
from kvservice_workers.arena import slots_of
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import as_numpy
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding
from kvservice_workers.page_table import PageTable
from kvservice_workers.pools import Pool, PoolSet
from kvservice_workers.promises import Promises
from kvservice_workers.provision import arena_of
from kvservice_workers.session_state import SessionKey, WorkerSession, moving
from kvservice_workers.session_table import SessionTable
from kvservice_workers.step import Refusal, Step
from kvservice_workers.structure import Structure

NEVER = -1  # before any page was written


@dataclass(frozen=True, slots=True)
class Missing:
    """Pages that are still to be fetched, by their numbers at the other worker.

    Fields:
        page_bytes: Of one page, in all layers.
    """

    window: int | None
    layers: tuple[int, ...]
    pages: tuple[int, ...]
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.pages)


@dataclass(slots=True)
class Copied:
    """A page that is here already: its number here, and when what it holds was written there."""

    page: int
    written: int = NEVER


@dataclass(eq=False, slots=True)
class Arrival:
    """One session on its way here. Until it is `complete` it is pages without an order, all in
    one table a group; from then on it is the session, but for the other worker's word.

    Fields:
        session: As it will be.
        source: The incarnation that it comes from.
        copied: By window, then by the page's number there.
        layers: By window, those in which pages are copied.
        ticket: By which it is to be had, once complete.
        left_s, ends_at: How much of its lease is left; when it is over, once complete.
        keeps: The other worker holds it too, from then on.
        here: It has arrived, and is in the worker's table.
        gone: It was given up.
    """

    session: WorkerSession
    source: str
    keeps: bool = False
    copied: dict[int | None, dict[int, Copied]] = field(default_factory=dict)
    layers: dict[int | None, tuple[int, ...]] = field(default_factory=dict)
    complete: bool = False
    ticket: int = 0
    left_s: float = 0.0
    ends_at: float = 0.0
    here: bool = False
    gone: bool = False

    @property
    def key(self) -> SessionKey:
        return self.session.key

    @property
    def tenant(self) -> str:
        return self.session.tenant

    @property
    def groups(self) -> Mapping[int | None, LayerGroup]:
        return self.session.groups

    def check(self) -> None:
        """Assert that the pages are those that were taken for it."""
        if self.complete:
            self.session.check()
        for window, group in self.groups.items():
            listed = {page for table in group.tables for page in table.entries if page != HOLE}
            mine = [one.page for one in self.copied.get(window, {}).values()]
            assert len(set(mine)) == len(mine), "a page here stands for two there"
            assert listed == set(mine), "pages that stand for none"


class Arrivals:
    """Takes sessions over page by page, until the worker that holds one lets go of it.

    What is on its way is no session yet: nobody can use it, it is not reported, and it is dropped
    as a whole. Its pages count as used all the same.
    """

    def __init__(
        self,
        lock: threading.RLock,
        sessions: SessionTable,
        pools: PoolSet,
        promises: Promises,
        structure: Structure,
        counters: Counters,
        clock: Clock,
        admit: Callable[[], None],
    ) -> None:
        """
        Args:
            admit: Raises if the worker opens no more sessions. Called with its lock held.
        """
        self._lock = lock  # the worker's
        self._sessions = sessions
        self._pools = pools
        self._promises = promises
        self._structure = structure
        self._counters = counters
        self._clock = clock
        self._admit = admit
        self._arrivals: dict[SessionKey, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def all(self) -> Collection[Arrival]:
        """Return what is on its way. The worker's lock is held."""
        return self._arrivals.values()

    def check_admitted(self, tenant: str, session_id: str) -> None:
        """Refuse what cannot be taken over.

        Raises:
            AlreadyExists: It is here, or a part of it, be it that its lease is over.
            Conflict: It is on its way here already.
            Draining, TooManySessions.
        """
        with self._lock:
            key = (tenant, session_id)
            if self._sessions.peek(*key) is not None:  # until it is freed, its id is taken
                raise AlreadyExists("this worker holds the session, or a part of it")
            if key in self._arrivals:
                raise Conflict("the session is on its way here already", retry_delay_s=1.0)
            self._admit()

    def begin(
        self,
        tenant: str,
        session_id: str,
        state: SessionState,
        source: str,
        *,
        keeps: bool = False,
    ) -> Arrival:
        """Begin to take a session over from an incarnation of another worker.

        Args:
            keeps: That one will hold it too.

        Raises:
            As `check_admitted`, and QuotaExceeded.
        """
        with self._lock:
            self.check_admitted(tenant, session_id)
            self._pools.usage.check_sessions(tenant, state.spec, is_counted=True)
            session = WorkerSession((tenant, session_id), state.spec, state.origin)
            session.quota = self._pools.usage.quota_of(tenant)
            self._structure.open_groups(session, None)
            arrival = self._arrivals[session.key] = Arrival(session, source, keeps)
            for window, group in session.groups.items():
                group.tables, group.evicted = [PageTable(group.pool.pages)], [0]
                arrival.copied[window] = {}
            self._pools.usage.change_sessions(tenant, 1)
            return arrival

    def sync(self, arrival: Arrival, state: SessionState) -> list[Missing]:
        """Take as many pages as the session has there now; return what they still lack.

        Raises:
            OutOfPages, QuotaExceeded: There is no room for them. Nothing has changed.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._check_waits(arrival)
            session = arrival.session
            by_window = {group.window: group for group in state.groups}
            if by_window.keys() != session.groups.keys():
                raise InvalidRequest("the windows of a session do not change")
            for layer in state.lengths:
                arena_of(self._pools, session, layer, state.geometries[layer])
            wanted = {window: _listed(group) for window, group in by_window.items()}
            self._make_room(arrival, wanted)
            for window, pages in wanted.items():
                self._hold(arrival, session.groups[window], arrival.copied[window], pages)
            return [_missing(arrival, group, state) for group in state.groups]

    def store(
        self, arrival: Arrival, missing: Missing, pages: Sequence[int], copied: CopiedPages
    ) -> None:
        """Store contents of pages as they were fetched.

        Raises:
            InvalidRequest: They are not what was asked for.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._check_waits(arrival)
            session = arrival.session
            group = session.groups[missing.window]
            held = [arrival.copied[missing.window][page].page for page in pages]
            at, offsets = slots_of(held, group.page_size)
            if len(copied.written) != len(held):
                raise InvalidRequest(f"{len(held)} pages were asked for")
            for layer, (k, v) in copied.layers.items():
                arena = group.pool.arenas[session.arena_index(layer)]
                geometry = LayerGeometry(k.shape[1], k.shape[2], v.shape[2], k.dtype)
                if geometry != arena.geometry or k.shape[0] != len(at):
                    raise InvalidRequest(f"pages of {arena.geometry} were asked for")
                with group.pool.lock:
                    arena.store(at, offsets, as_numpy(k), as_numpy(v))
            self._counters.moved_bytes += copied.num_bytes

    def stored(
        self, arrival: Arrival, missing: Missing, pages: Sequence[int], written: Sequence[int]
    ) -> None:
        """Note that all layers of pages are here, as they were written then."""
        with self._lock:
            copied = arrival.copied[missing.window]
            for page, at in zip(pages, written, strict=True):
                if page in copied:
                    copied[page].written = at

    def complete(self, arrival: Arrival, state: SessionState, ticket: int) -> None:
        """Make it the session that was frozen there, for whoever will say that it is ours.

        Args:
            state: As frozen, with no page missing.

        Raises:
            OutOfPages, QuotaExceeded: What is promised to it does not fit. Nothing has changed.
            SessionNotFound: It was given up.
        """
        with self._lock:
            self._check_waits(arrival)
            _become(arrival.session, state, arrival.source)
            for group in state.groups:
                copied = arrival.copied[group.window]
                _set_tables(arrival.session.groups[group.window], group, copied)
            arrival.complete, arrival.ticket, arrival.left_s = True, ticket, state.left_s
            arrival.ends_at = self._clock.monotonic() + state.left_s
            try:
                self._promises.promise(arrival.session, state.targets)
            except KVServiceError:
                self._reopen(arrival)
                raise

    def reopen(self, arrival: Arrival) -> None:
        """Go on copying: the session goes on where it was."""
        with self._lock:
            if arrival.complete and not (arrival.gone or arrival.here):
                self._reopen(arrival)

    def arrive(self, arrival: Arrival) -> bool:
        """Serve a session from now on: it has been handed over. Return False if it has been given
        up meanwhile."""
        with self._lock:
            if not arrival.gone and not arrival.here:
                assert arrival.complete, "it is not known what it is"
                del self._arrivals[arrival.key]
                arrival.here = True
                if arrival.keeps:
                    arrival.session.go_on()
                left_s = max(0.0, arrival.ends_at - self._clock.monotonic())
                self._sessions.add(arrival.session, left_s)
            return arrival.here

    def arrive_by(self, tenant: str, session_id: str, ticket: int) -> None:
        """Take somebody's word, who shows the ticket, that a session has been handed over."""
        with self._lock:
            arrival = self._arrivals.get((tenant, session_id))
            if arrival is not None and arrival.complete and arrival.ticket == ticket:
                self.arrive(arrival)

    def check_not_arriving(self, key: SessionKey) -> None:
        """Raise Moving if it is not known whether a session is here. The worker's lock is held."""
        arrival = self._arrivals.get(key)
        if arrival is not None and arrival.complete:
            raise moving(arrival.source)

    def check_id_is_free(self, key: SessionKey) -> None:
        """Raise Moving if a session by this id is on its way here. The worker's lock is held."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            raise moving(arrival.source)

    def drop(self, arrival: Arrival) -> None:
        """Give up what is on its way, and its pages."""
        with self._lock:
            if not arrival.gone and not arrival.here:
                del self._arrivals[arrival.key]
                arrival.gone = True
                self._structure.free(arrival.session, "move")
                self._pools.usage.change_sessions(arrival.tenant, -1)

    def release(self, key: SessionKey, up_to: float, *, unsettled: bool) -> None:
        """Give up a session that its holder wants no more; see `WorkerSession.ends_by_release`."""
        with self._lock:
            arrival = self._arrivals.get(key)
            if arrival is not None and arrival.session.ends_by_release(up_to, unsettled=unsettled):
                self.drop(arrival)

    def expire(self) -> int:
        """Give up those whose lease is over while nobody knows whose they are; return how many."""
        with self._lock:
            now = self._clock.monotonic()
            over = [one for one in self._arrivals.values() if one.complete and one.ends_at <= now]
            for arrival in over:
                self.drop(arrival)
            return len(over)

    def close(self) -> None:
        """Give up everything."""
        with self._lock:
            for arrival in list(self._arrivals.values()):
                self.drop(arrival)

    # -- inside

    def _check_waits(self, arrival: Arrival) -> None:
        if arrival.gone or arrival.here:
            raise self._sessions.missing(arrival.key)
        assert not arrival.complete, "it goes on copying"

    def _make_room(self, arrival: Arrival, wanted: Mapping[int | None, Collection[int]]) -> None:
        session = arrival.session
        grown = 0
        pools: dict[int, tuple[Pool, int]] = {}
        for window, pages in wanted.items():
            change = len(pages) - len(arrival.copied[window])
            pool, before = pools.get(id(session.groups[window].pool), (None, 0))
            pools[id(session.groups[window].pool)] = session.groups[window].pool, before + change
            grown += change
        self._pools.usage.check_pages(session.tenant, grown, is_counted=True)
        for pool, change in pools.values():
            if change > 0:
                self._pools.make_room(pool, change, keep=session.pools())

    def _hold(
        self,
        arrival: Arrival,
        group: LayerGroup,
        copied: dict[int, Copied],
        wanted: Collection[int],
    ) -> None:
        """Give up the pages that the session has no more, and take one for each that is new."""
        pages = group.pool.pages
        gone = [page for page in copied if page not in wanted]
        freed = pages.release([copied.pop(page).page for page in gone])
        fresh = [page for page in wanted if page not in copied]
        for page, mine in zip(fresh, pages.take(len(fresh)), strict=True):
            copied[page] = Copied(mine)
        self._counters.page_frees["move"] += freed
        self._counters.page_allocations += len(fresh)
        self._pools.usage.change_pages(arrival.tenant, len(fresh) - freed)
        group.tables = [PageTable.holding(pages, [one.page for one in copied.values()])]

    def _reopen(self, arrival: Arrival) -> None:
        """Undo `complete`: pages without an order again."""
        session = arrival.session
        self._promises.promise(session, None)
        for window, group in session.groups.items():
            pages = group.pool.pages
            mine = [one.page for one in arrival.copied[window].values()]
            pages.retain(mine)
            for table in group.tables:
                table.cut(0)
            group.tables, group.evicted = [PageTable.holding(pages, mine)], [0]
        arrival.complete = False


def _listed(group: GroupState) -> dict[int, None]:
    return {page: None for table in group.tables for page in table if page != HOLE}


def _missing(arrival: Arrival, group: GroupState, state: SessionState) -> Missing:
    session, copied = arrival.session, arrival.copied[group.window]
    mine = (layer for layer in state.lengths if session.window_of(layer) == group.window)
    layers = tuple(sorted(mine))
    size = session.groups[group.window].page_size
    if arrival.layers.get(group.window) != layers:
        # One that has come since may have been written before the others were copied.
        arrival.layers[group.window] = layers
        for one in copied.values():
            one.written = NEVER
    return Missing(
        group.window,
        layers,
        tuple(page for page, one in copied.items() if one.written < group.written.get(page, 0)),
        sum(size * state.geometries[layer].token_bytes for layer in layers),
    )


def _set_tables(group: LayerGroup, state: GroupState, copied: Mapping[int, Copied]) -> None:
    """Put pages in the order that they have there. One that several rows list is theirs."""
    pages = group.pool.pages
    listings: Counter[int] = Counter(
        page for table in state.tables for page in table if page != HOLE
    )
    for page, count in listings.items():
        pages.retain([copied[page].page] * (count - 1))
    group.tables = [
        PageTable.holding(pages, [copied[page].page if page != HOLE else HOLE for page in table])
        for table in state.tables
    ]
    group.evicted, group.in_use = list(state.evicted), state.in_use
    group.changed()


def _become(session: WorkerSession, state: SessionState, source: str) -> None:
    """Make a session all that another worker knows of it, but for pages and promises."""
    session.spec, session.origin = state.spec, state.origin
    session.epoch, session.last_change = state.epoch, state.last_change
    session.last_step, session.last_write = state.last_step, state.last_write
    session.begins_at_zero = state.begins_at_zero
    session.starts = None if state.starts is None else list(state.starts)
    session.lengths = dict(state.lengths)
    session.geometries.update(state.geometries)
    session.padding = [RowPadding() for _ in range(state.num_rows)]
    for item in state.padding:
        session.padding[item.row].mark(item.start, item.stop)
    session.followed_by, session.group = state.followed_by, state.group
    session.replaces = (*state.replaces, source)[-MAX_REPLACED:]
    session.refused_step = Refusal(*state.refused_step) if state.refused_step else None
    session.refused_write = Refusal(*state.refused_write) if state.refused_write else None
    session.step = None
    if state.step is not None:
        step = state.step
        session.step = Step(step.number, step.header, step.positions, dict(step.appended))
