"""What a worker knows of one session: its rows and layers, its epoch, the step in progress."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import Final

from kvservice.core.errors import (
    Conflict,
    GeometryMismatch,
    InvalidRequest,
    Moving,
    PositionOutOfRange,
    SessionNotFound,
    StaleEpoch,
)
from kvservice.core.geometry import MAX_LAYERS, LayerGeometry, cdiv
from kvservice.core.moving import MovedTo
from kvservice.core.quota import Quota
from kvservice.core.session import SessionSpec
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding
from kvservice_workers.pools import Pool
from kvservice_workers.step import Refusal, Step

SessionKey = tuple[str, str]  # tenant, session id

GO_ON: Final = ("attach", (1,))
"""The change that begins an epoch without a new holder."""


@dataclass(slots=True)
class Copy:
    """A copy that is being made of a session, for another worker.

    Fields:
        copier: Who makes it.
        used_at: When it was asked for last, in the clock's monotonic seconds.
    """

    number: int
    copier: str
    used_at: float


@dataclass(frozen=True, slots=True)
class Freeze:
    """Nothing changes a session until then, unless its copier takes it over by the ticket."""

    ticket: int
    until: float


class WorkerSession:
    """One session, or the extent of one, on this worker. Its lock is held by whoever uses it.

    Lengths are positions: one past the newest stored token. A layer that has stored nothing is at
    the extent's start.

    Invariants (asserted by `check`):
      1. Every layer's length of a row is at least the row's start.
      2. The groups' invariants, and those of tables and padding.
      3. `promised` of each group is what `promise_of` says, or more (pages may have stopped
         being shared).
    """

    def __init__(
        self,
        key: SessionKey,
        spec: SessionSpec,
        origin: Hashable,
        quota: Quota,
    ) -> None:
        self.key = key
        self.spec = spec
        self.origin = origin  # the request that opened it, to recognise a repeat
        self.quota = quota  # of its tenant, when it was opened
        self.lock = threading.RLock()
        self.closed = False
        self.epoch = 1
        self.last_change: Hashable = None
        self.change_before: Hashable = None  # if the last one was to go on; it may be repeated too
        # The worker that has made a copy, and the epoch at which both have gone on.
        self.copied: tuple[MovedTo, int] | None = None
        # The epoch at which the holder is for certain, where others have begun since with nothing
        # but copies, of which it has not heard yet. 0: there are none.
        self.unheard_from = 0
        # Until when no copy is made: somebody who has checked a change is about to make it.
        self.change_due_by = 0.0
        self.last_step = 0
        self.step: Step | None = None
        self.begins_at_zero = False  # rather than where another worker's extent ends
        self.starts: list[int] | None = None
        self.lengths: dict[int, tuple[int, ...]] = {}  # by layer; layers mostly share one tuple
        self.geometries: dict[int, LayerGeometry] = {}  # by layer, once known
        self.groups: dict[int | None, LayerGroup] = {}  # by window
        self.padding = [RowPadding() for _ in range(spec.num_rows)]
        self.targets: list[int] | None = None  # lengths for which room is promised
        self.followed_by = ""  # the incarnations on which the session goes on; empty: it ends here
        self.group = 0  # of the extent: others of the same group are copies of it
        self.last_write = 0  # number of the newest Write of this epoch
        # The newest that were refused in this epoch for want of room. What is refused stays so: a
        # copy of the call that arrives when there is room must not be carried out, for the holder
        # has been told that nothing was stored.
        self.refused_step: Refusal | None = None
        self.refused_write: Refusal | None = None
        self.replaces: tuple[str, ...] = ()  # lives of workers from which it was moved here
        self.stay = ""  # names its time here, since it was opened or came
        self.copy: Copy | None = None
        self.frozen: Freeze | None = None
        self.moved_to: MovedTo | None = None  # closed, since another worker holds it
        self.ttl_s = spec.ttl_s
        self._places: dict[int, tuple[int | None, int]] = {}
        for layer, stated in enumerate(spec.layers):
            if stated.geometry is not None:
                self.geometries[layer] = same_geometry(stated.geometry)

    @property
    def num_rows(self) -> int:
        return len(self.padding)

    @property
    def tenant(self) -> str:
        return self.key[0]

    # -- reading

    def pools(self) -> list[Pool]:
        """Return the pools of all groups."""
        return [group.pool for group in self.groups.values()]

    @property
    def num_pages(self) -> int:
        """Pages that the rows' tables list; one that several list counts for each."""
        tables = (table for group in self.groups.values() for table in group.tables)
        return sum(table.num_held for table in tables)

    def window_of(self, layer: int) -> int | None:
        """Return a layer's window.

        Raises:
            InvalidRequest: The session does not have this layer.
        """
        layers = self.spec.layers
        limit = len(layers) if self.spec.states_geometry else MAX_LAYERS
        if not 0 <= layer < limit:
            raise InvalidRequest(f"layer must be between 0 and {limit - 1}, got {layer}")
        return layers[layer].window if layer < len(layers) else None

    def arena_index(self, layer: int) -> int:
        """Return which of its pool's arenas is the layer's."""
        if not self.spec.states_geometry:
            return layer
        window = self.spec.layers[layer].window
        return sum(other.window == window for other in self.spec.layers[:layer])

    def place_of(self, layer: int) -> tuple[int | None, int]:
        """Return a layer's window, and which of its pool's arenas is the layer's.

        Raises:
            InvalidRequest: The session does not have this layer.
        """
        place = self._places.get(layer)
        if place is None:
            place = self._places[layer] = (self.window_of(layer), self.arena_index(layer))
        return place

    def start_of(self, row: int) -> int:
        return self.starts[row] if self.starts is not None else 0

    def layer_lengths(self, layer: int) -> Sequence[int]:
        """Return the layer's length of each row."""
        lengths = self.lengths.get(layer)
        if lengths is not None:
            return lengths
        return self.starts if self.starts is not None else [0] * self.num_rows

    def longest(self, row: int) -> int:
        """Return the length of the row's longest layer."""
        return max((lengths[row] for lengths in self.lengths.values()), default=self.start_of(row))

    def longest_of_all(self) -> list[int]:
        different = list({id(lengths): lengths for lengths in self.lengths.values()}.values())
        if len(different) < 2:
            return list(different[0]) if different else list(self.starts or (0,) * self.num_rows)
        return list(map(max, *different))

    def promise_of(self, group: LayerGroup) -> int:
        """Return how many pages are promised to a group now."""
        if self.targets is None:
            return 0
        return sum(
            self.row_promise(
                group,
                row,
                len(table.entries),
                bool(table.entries) and group.pool.pages.is_shared(table.entries[-1]),
            )
            for row, table in enumerate(group.tables)
        )

    def row_promise(self, group: LayerGroup, row: int, num_entries: int, tail_shared: bool) -> int:
        """Return the pages promised to a row with a table of `num_entries` entries.

        One more while the last page is shared, so that copy-on-write cannot fail.
        """
        if self.targets is None:
            return 0
        # A table that begins above the promise, or was evicted empty, needs no pages below.
        gone = max(self.start_of(row), group.evicted[row]) // group.page_size
        reached = max(num_entries, gone)
        pages = cdiv(self.targets[row], group.page_size) - reached
        return max(0, pages) + (1 if tail_shared else 0)

    # -- checks of a caller's picture

    def check_open(self) -> None:
        if self.moved_to is not None:
            raise self.moved_to.error()
        if self.closed:
            raise session_not_found()

    def check_thawed(self, now: float) -> None:
        """Refuse to change what is about to be another worker's.

        Raises:
            Moving: It may be in a moment. Nothing has changed.
        """
        if self.frozen is None:
            return
        if now < self.frozen.until:
            raise moving()
        self.frozen = None  # nobody has taken it over

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(
                f"the session is at epoch {self.epoch}, the call at {epoch}",
                epoch=self.epoch,
            )

    def check_holder(self, epoch: int) -> None:
        """Check that a call is the holder's, who has then heard of all copies."""
        self.check_epoch(epoch)
        self.unheard_from = 0

    def check_rows(self, values: Sequence[int], name: str) -> None:
        if len(values) != self.num_rows:
            raise InvalidRequest(
                f"{name} must have one entry for each of {self.num_rows} rows, got {len(values)}"
            )

    def check_lengths(self, expected: Sequence[int]) -> None:
        self.check_rows(expected, "expected_lengths")
        stored = self.longest_of_all()
        if list(expected) != stored:
            raise Conflict(
                f"expected_lengths are {list(expected)}, stored are {stored}",
                lengths=",".join(map(str, stored)),
            )

    def check_ends(self, expected: Sequence[int]) -> None:
        """As `check_lengths`, for a cut: where nothing is held, rows end on other workers, and who
        cuts them need not know from where this one counts itself."""
        self.check_rows(expected, "expected_lengths")
        is_empty = self.starts is None or self.longest_of_all() == self.starts
        if self.begins_at_zero or not is_empty:
            self.check_lengths(expected)

    def begin_behind(self, lengths: Sequence[int]) -> None:
        """Let an extent that holds nothing begin where the session's rows end, if that is behind
        where it would begin now. One of an empty session is left open: its share of the first
        tokens may be any."""
        if self.begins_at_zero or self.lengths or not any(lengths):
            return
        if self.starts is None or all(map(ge, lengths, self.starts)):
            self.starts = list(lengths)

    def check_bound(self, row: int, length: int) -> None:
        self.quota.check("tokens", length)
        bound = self.spec.max_tokens
        if bound is not None and length > bound:
            raise PositionOutOfRange(
                f"row {row} would have {length} tokens, the session's bound is {bound}",
                row=row,
                length=length,
                max_tokens=bound,
            )

    def check_geometry(self, layer: int, geometry: LayerGeometry) -> None:
        known = self.geometries.get(layer)
        if known is not None and known != geometry:
            raise GeometryMismatch(f"layer {layer} has {known}, got {geometry}", layer=layer)

    def check_visible_after_cut(self, group: LayerGroup, row: int, keep: int) -> None:
        """Refuse a cut after which the next query could see an evicted position."""
        evicted = group.evicted[row]
        if group.window is None or not evicted:
            return
        if min(evicted, keep) > max(0, keep - group.window + 1):
            raise PositionOutOfRange(
                f"row {row} cut to {keep} tokens would see positions below {evicted}, which its "
                f"window of {group.window} has evicted",
                row=row,
                keep=keep,
                evicted=evicted,
            )

    def begin_epoch(self, change: Hashable) -> None:
        """Count a structural change. The step in progress, if any, is over."""
        self.epoch += 1
        self.last_change, self.change_before = change, None
        self.change_due_by, self.unheard_from = 0.0, 0
        self.step = None
        self.last_write = 0
        self.refused_step = self.refused_write = None

    def ends_by_release(self, up_to: float, stay: str, *, unsettled: bool) -> bool:
        """Whether a release up to an epoch is from whoever holds the session now.

        Args:
            stay: The one that is to end, if the release says which one.
            unsettled: It is not known there whether the last change from that epoch was made.
        """
        if stay and stay != self.stay:
            return False  # it was overtaken by what has begun here since
        if self.same_since_epoch:  # nobody has taken it over by that
            return self.same_since_epoch <= up_to
        is_own = unsettled and self.last_change not in (None, "attach")
        return self.epoch - is_own <= up_to

    @property
    def same_since_epoch(self) -> int:
        """The epoch since which nothing has changed but copies; 0: the last change was another."""
        return self.unheard_from or (self.epoch - 1 if self.last_change == GO_ON else 0)

    def go_on(self) -> None:
        """Begin an epoch for the same holder, in the middle of whatever is in progress."""
        self.epoch += 1
        self.change_before, self.last_change = self.last_change, GO_ON
        if self.step is not None:
            self.step.steady.clear()  # that is of the epoch before

    def go_on_with_copy(self) -> None:
        """Begin an epoch with a copy, of which the holder will hear when it comes."""
        self.unheard_from = self.unheard_from or self.epoch
        self.go_on()

    @property
    def is_in_parts(self) -> bool:
        """Whether other workers may have other parts of the session."""
        return bool(self.spec.spread > 1 or self.followed_by or any(self.starts or ()))

    def go_on_at(self, followed_by: str) -> None:
        """Note on which incarnations the session goes on behind what is held here.

        Had this part once come from one of them, then what is there now is another part.
        """
        self.followed_by = followed_by
        if self.replaces:
            followers = followed_by.split(",")
            self.replaces = tuple(one for one in self.replaces if one not in followers)

    def check(self) -> None:
        starts = [self.start_of(row) for row in range(self.num_rows)]
        for lengths in self.lengths.values():
            assert all(map(ge, lengths, starts)), "a layer ends before the extent starts"
        for padding in self.padding:
            padding.check()
        longest = self.longest_of_all()
        for group in self.groups.values():
            group.check()
            assert group.promised >= self.promise_of(group), "promised too little"
            for table, length in zip(group.tables, longest, strict=True):
                pages = cdiv(length, group.page_size)
                assert len(table.entries) <= pages, "pages beyond the row's end"


@lru_cache(maxsize=1024)
def same_geometry(geometry: LayerGeometry) -> LayerGeometry:
    """Return one object for equal geometries, so that comparing them costs nothing."""
    return geometry


def moving(source: str = "") -> Moving:
    """Return what callers are told while it is not known where a session goes on.

    Args:
        source: The incarnation that may still hold it. Empty: this one does.
    """
    text = "the session is being handed over from one worker to another"
    return Moving(text, retry_delay_s=0.01, source=source)


def session_not_found() -> SessionNotFound:
    """Return the one error for sessions that never were, have ended, or are another tenant's."""
    return SessionNotFound("no such session: it was never opened, was released, or has expired")
