"""Write and Read on one worker: keys and values by position, without attention."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import CapacityError, Conflict, InvalidRequest, PositionOutOfRange
from kvservice.core.geometry import HOLE, HostTensor, LayerGeometry
from kvservice.core.session import ReadResult, WriteCall
from kvservice_workers.arena import NUMPY_DTYPES, Arena
from kvservice_workers.batching import slots_at
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import Array, as_numpy, from_numpy
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding, check_ranges, padding_after
from kvservice_workers.pools import PoolSet
from kvservice_workers.provision import Provision, RowDemand, arena_of, check_evictions
from kvservice_workers.session_access import SessionAccess
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.step import Refusal

Ints = npt.NDArray[np.int64]


class TokenAccess:
    """Write and Read. Thread-safe."""

    def __init__(
        self, lock: threading.RLock, access: SessionAccess, pools: PoolSet, counters: Counters
    ) -> None:
        self._lock = lock  # the worker's
        self._access = access
        self._pools = pools
        self._counters = counters

    def write(self, tenant: str, call: WriteCall) -> tuple[int, ...]:
        """Store k and v at listed positions; return the layer's lengths. All or nothing.

        Raises:
            Whatever `worker.proto` lists for Write. Nothing has changed.
        """
        with self._access.storing(tenant, call.session_id) as session:
            session.check_holder(call.epoch)
            _check_number(session, call.number)
            if _is_carried_out(session, call.number):
                with self._lock:
                    self._counters.replays["Write"] += 1
                return tuple(session.layer_lengths(call.layer))
            try:
                return self._write(session, call)
            except CapacityError as error:
                if call.number:
                    session.refused_write = Refusal(call.number, copy(error))
                raise

    def read(
        self, tenant: str, session_id: str, epoch: int, layer: int, start: int, stop: int
    ) -> ReadResult:
        """Return K and V of positions [start, stop) of every row; zeros for holes.

        Raises:
            SessionNotFound, StaleEpoch, InvalidRequest.
            PositionOutOfRange: Beyond the layer's longest row, or evicted.
        """
        with self._access.reading(tenant, session_id) as session:
            session.check_epoch(epoch)
            return self._read(session, layer, start, stop)

    # -- inside

    def _write(self, session: WorkerSession, call: WriteCall) -> tuple[int, ...]:
        group = session.groups[session.window_of(call.layer)]
        geometry = _write_geometry(call)
        session.check_geometry(call.layer, geometry)
        check_ranges(call.padding, session.num_rows)
        check_evictions(session, call.evict_before)
        if not call.rows:
            return self._evict(session, call)
        rows, positions = np.array(call.rows, np.int64), np.array(call.positions, np.int64)
        starts = _write_starts(session, call.extent_starts, rows, positions)
        lengths = self._lengths_after_write(session, call.layer, starts, rows, positions)
        with self._lock:
            padding = padding_after(session.padding, call.padding, lengths)
            _mark_gaps(session, padding, starts, rows, positions, lengths)
            arena = arena_of(self._pools, session, call.layer, geometry)
            provision = Provision(session)
            provision.add_evictions(call.evict_before)
            _check_not_evicted(provision, group, rows, positions)
            old = [
                max(pair) for pair in zip(session.layer_lengths(call.layer), starts, strict=True)
            ]
            provision.add_pages(group, _demands(group, rows, positions, old, lengths))
            provision.execute(self._pools, self._counters.count_pages)
            group.in_use = True
            session.geometries[call.layer] = geometry
            session.padding = padding
            session.starts = starts
            session.last_write = max(session.last_write, call.number)
            before = session.longest_of_all()
            self._zero_gaps(group, arena, old, rows, positions, lengths)
            self._put(group, arena, rows, positions, call.k, call.v)
            session.lengths[call.layer] = tuple(lengths)
            if session.step is not None:
                session.step.appended.pop(call.layer, None)
                session.step.batches.clear()  # padding may have changed
                session.step.steady.clear()
            grown = sum(map(max, before, lengths)) - sum(before)
            self._counters.count_stored(grown, call.k.num_bytes + call.v.num_bytes)
        return tuple(lengths)

    def _evict(self, session: WorkerSession, call: WriteCall) -> tuple[int, ...]:
        """Carry out a write without tokens: it only frees pages."""
        with self._lock:
            provision = Provision(session)
            provision.add_evictions(call.evict_before)
            provision.execute(self._pools, self._counters.count_pages)
        return tuple(session.layer_lengths(call.layer))

    def _read(self, session: WorkerSession, layer: int, start: int, stop: int) -> ReadResult:
        group = session.groups[session.window_of(layer)]
        geometry = session.geometries.get(layer)
        if geometry is None or layer not in session.lengths:
            raise InvalidRequest(f"layer {layer} has stored nothing to read")
        lengths = session.layer_lengths(layer)
        if not 0 <= start < stop:
            raise InvalidRequest(f"a range of positions must not be empty, got [{start}, {stop})")
        if stop > max(lengths):
            raise PositionOutOfRange(
                f"positions up to {stop} were asked for, the longest row has {max(lengths)}",
                length=max(lengths),
            )
        for row, evicted in enumerate(group.evicted):
            # What lies before the extent was never here: a hole, as rows may start unevenly.
            if session.start_of(row) < evicted and start < min(evicted, lengths[row]):
                raise PositionOutOfRange(
                    f"row {row} has evicted positions below {evicted}, {start} was asked for",
                    row=row,
                    first=evicted,
                )
        k, v = self._gather(session, group, geometry, layer, start, stop)
        with self._lock:
            self._counters.read_bytes += k.nbytes + v.nbytes
        return ReadResult(
            from_numpy(k, geometry.dtype), from_numpy(v, geometry.dtype), tuple(lengths)
        )

    def _lengths_after_write(
        self,
        session: WorkerSession,
        layer: int,
        starts: Sequence[int],
        rows: Ints,
        positions: Ints,
    ) -> list[int]:
        lengths = [max(pair) for pair in zip(session.layer_lengths(layer), starts, strict=True)]
        for row in np.unique(rows):
            highest = int(positions[rows == row].max())
            session.check_bound(int(row), highest + 1)
            lengths[row] = max(lengths[row], highest + 1)
        return lengths

    def _zero_gaps(
        self,
        group: LayerGroup,
        arena: Arena,
        old: Sequence[int],
        rows: Ints,
        positions: Ints,
        lengths: Sequence[int],
    ) -> None:
        """Zero what the layer's length has jumped over, so that nothing older shows there."""
        for row, (before, after) in enumerate(zip(old, lengths, strict=True)):
            if after == before:
                continue
            gap = np.setdiff1d(np.arange(before, after), positions[rows == row])
            if len(gap):
                pages, offsets, _ = slots_at(
                    group.table_array(), group.page_size, np.full(len(gap), row), gap
                )
                group.wrote_slots(pages)
                with group.pool.lock:
                    arena.zero_slots(pages, offsets)

    def _put(
        self,
        group: LayerGroup,
        arena: Arena,
        rows: Ints,
        positions: Ints,
        k: HostTensor,
        v: HostTensor,
    ) -> None:
        """Write tokens to their slots; of equal positions the last wins."""
        order = np.arange(len(rows))[::-1]
        _, newest = np.unique(np.stack([rows, positions])[:, order], axis=1, return_index=True)
        chosen = np.sort(order[newest])
        pages, offsets, kept = slots_at(
            group.table_array(), group.page_size, rows[chosen], positions[chosen]
        )
        assert kept is None, "every written page is there"
        group.wrote_slots(pages)
        with group.pool.lock:
            arena.store(pages, offsets, as_numpy(k)[chosen], as_numpy(v)[chosen])

    def _gather(
        self,
        session: WorkerSession,
        group: LayerGroup,
        geometry: LayerGeometry,
        layer: int,
        start: int,
        stop: int,
    ) -> tuple[Array, Array]:
        lengths, heads = session.layer_lengths(layer), geometry.num_kv_heads
        dtype = NUMPY_DTYPES[geometry.dtype]
        shape = (session.num_rows, heads, stop - start)
        k = np.zeros((*shape, geometry.k_dim), dtype)
        v = np.zeros((*shape, geometry.v_dim), dtype)
        for row, length in enumerate(lengths):
            first = max(start, session.start_of(row), group.evicted[row])
            where = np.arange(first, min(stop, length), dtype=np.int64)
            pages, offsets, kept = slots_at(
                group.table_array(), group.page_size, np.full(len(where), row), where
            )
            arena = group.pool.arenas.get(session.arena_index(layer))
            if arena is None or not len(pages):  # nothing but padding was ever stored
                continue
            at = (where if kept is None else where[kept]) - start
            row_k, row_v = arena.load(pages, offsets)
            k[row][:, at] = row_k.swapaxes(0, 1)
            v[row][:, at] = row_v.swapaxes(0, 1)
        return k, v


def _check_number(session: WorkerSession, number: int) -> None:
    """Refuse a write that arrives behind a later one, and again one that was refused before."""
    refused = session.refused_write
    if refused is not None and number == refused.number:
        raise copy(refused.error)
    latest = max(session.last_write, 0 if refused is None else refused.number)
    if 0 < number < latest:
        raise Conflict(
            f"write {number} arrives behind write {latest} of this epoch",
            number=latest,
        )


def _is_carried_out(session: WorkerSession, number: int) -> bool:
    """Whether this write is the newest of the epoch. A copy that comes late finds steps that have
    begun since, and is not to make their calls ones that cannot be repeated."""
    return bool(number) and number == session.last_write


def _write_geometry(call: WriteCall) -> LayerGeometry:
    k, v = call.k, call.v
    if len(k.shape) != 3 or len(v.shape) != 3 or k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
        raise InvalidRequest(
            f"k and v must be [tokens, heads, dim] and agree, got {k.shape} and {v.shape}"
        )
    least = 0 if call.evict_before else 1
    if not len(call.rows) == len(call.positions) == k.shape[0] >= least:
        raise InvalidRequest(
            f"rows and positions must name each of {k.shape[0]} tokens, at least {least}, got "
            f"{len(call.rows)} and {len(call.positions)}"
        )
    return LayerGeometry(k.shape[1], k.shape[2], v.shape[2], k.dtype)


def _write_starts(
    session: WorkerSession, extent_starts: Sequence[int], rows: Ints, positions: Ints
) -> list[int]:
    """Return where the extent starts: an open one is told, or learns it from its first tokens."""
    if rows.min() < 0 or rows.max() >= session.num_rows:
        raise InvalidRequest(f"rows must be below {session.num_rows}")
    if positions.min() < 0:
        raise InvalidRequest("positions must not be negative")
    starts = session.starts
    if starts is None and extent_starts:
        session.check_rows(extent_starts, "extent_starts")
        starts = list(extent_starts)
    if starts is None:
        if len(np.unique(rows)) < session.num_rows:
            raise InvalidRequest("the first tokens of an extent must name every row")
        return [int(positions[rows == row].min()) for row in range(session.num_rows)]
    below = positions < np.array(starts)[rows]
    if below.any():
        row = int(rows[below][0])
        raise PositionOutOfRange(
            f"row {row} begins at {starts[row]} here, {int(positions[below][0])} was written",
            row=row,
            first=starts[row],
        )
    return starts


def _check_not_evicted(
    provision: Provision, group: LayerGroup, rows: Ints, positions: Ints
) -> None:
    """Refuse to write what is evicted, or is about to be."""
    for row, evicted in enumerate(provision.evicted_after(group)):
        gone = (rows == row) & (positions < evicted)
        if gone.any():
            raise PositionOutOfRange(
                f"row {row} has evicted positions below {evicted}, {int(positions[gone][0])} was "
                "written",
                row=row,
                first=evicted,
            )


def _mark_gaps(
    session: WorkerSession,
    padding: list[RowPadding],
    starts: Sequence[int],
    rows: Ints,
    positions: Ints,
    lengths: Sequence[int],
) -> None:
    """Make padding of positions that no layer has reached and this write leaves out."""
    for row, after in enumerate(lengths):
        before = max(session.longest(row), starts[row])
        written = np.unique(positions[(rows == row) & (positions >= before)])
        if after <= before or len(written) == after - before:
            continue
        mine = session.padding[row].copy() if padding[row] is session.padding[row] else padding[row]
        previous = before
        for position in [*written.tolist(), after]:
            if position > previous:
                mine.mark(previous, position)
            previous = position + 1
        padding[row] = mine


def _demands(
    group: LayerGroup,
    rows: Ints,
    positions: Ints,
    old: Sequence[int],
    lengths: Sequence[int],
) -> list[RowDemand]:
    """Return the pages that a write touches: those of its tokens, and those that are there where
    the layer's length jumps over a gap, which is zeroed."""
    size = group.page_size
    demands = []
    for row, (before, after) in enumerate(zip(old, lengths, strict=True)):
        indices = set((positions[rows == row] // size).tolist())
        reached = range(before // size, -(-after // size)) if after > before else ()
        indices.update(i for i in reached if group.tables[row].page_at(i) != HOLE)
        demands.append(RowDemand(row, sorted(indices)))
    return demands
