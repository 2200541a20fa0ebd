"""Attend, Write and Read on one worker: tables and arenas, then the kernel."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvservice.clock import Clock
from kvservice.core.errors import InvalidRequest, PositionOutOfRange
from kvservice.core.geometry import HOLE, DType, HostTensor, LayerGeometry
from kvservice.core.recorder import Recorder
from kvservice.core.session import AttendCall, AttendResult, ReadResult, WriteCall
from kvservice_workers.arena import NUMPY_DTYPES, TORCH_DTYPES, Arena
from kvservice_workers.attending import (
    AttendPlan,
    check_ranges,
    padding_after,
    paged_batch,
    plan_attend,
    slots_at,
    token_slots,
)
from kvservice_workers.attention import dispatch
from kvservice_workers.attention.batch import AttentionParams, PagedBatch
from kvservice_workers.counters import Counters
from kvservice_workers.padding import RowPadding
from kvservice_workers.pools import PoolSet
from kvservice_workers.provision import Provision, RowDemand, written_pages
from kvservice_workers.session_state import LayerGroup, Step, WorkerSession, arena_of
from kvservice_workers.steady import SteadyStep, settle

Array = npt.NDArray[np.generic]


class DataPath:
    """The verbs that carry tensors. The session's lock is held by the caller."""

    def __init__(
        self,
        lock: threading.RLock,
        pools: PoolSet,
        counters: Counters,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._lock = lock  # the worker's
        self._pools = pools
        self._counters = counters
        self._clock = clock
        self._recorder = recorder

    def attend(self, session: WorkerSession, call: AttendCall) -> AttendResult:
        """See `PageWorker.attend`."""
        plan = plan_attend(session, call)
        group = session.groups[plan.window]
        with self._lock:
            arena = self._prepare(session, group, call, plan)
            if call.k is not None and call.v is not None:
                self._store(session, group, arena, call, plan)
            batch = self._batch(session, group, plan)
        q = as_torch(call.q).to(arena.device)
        started = self._clock.monotonic()
        partial = dispatch.attend(
            q, arena.k, arena.v, batch, _params(call, session.num_rows, arena.device)
        )
        self._recorder.attention(self._clock.monotonic() - started, session.num_rows)
        self._settle(session, group, arena, call, plan, batch)
        if call.partial:
            return AttendResult(to_host(partial.out), to_host(partial.lse))
        return AttendResult(to_host(partial.out.to(TORCH_DTYPES[plan.geometry.dtype])))

    def attend_steadily(
        self,
        session: WorkerSession,
        steady: SteadyStep,
        layer: int,
        tensors: tuple[bytes, bytes, bytes],
        scale: float,
    ) -> bytes | None:
        """Serve a layer the short way.

        Args:
            steady: What `session.step` held for the layer's group; the call asks as it says.
            tensors: q, k, v.

        Returns:
            The output's bytes; None: it must go the long way, and nothing has changed.
        """
        step = session.step
        window = session.window_of(layer)
        group = session.groups[window]
        fits = (
            step is not None
            and step.steady.get(window) is steady
            and session.epoch == steady.epoch
            and group.version == steady.version
            and layer not in step.appended
            and session.geometries.get(layer) == steady.geometry
            and session.lengths.get(layer) == steady.positions
        )
        arena = group.pool.arenas.get(session.arena_index(layer))
        if step is None or not fits or arena is None:
            return None
        started = self._clock.monotonic()
        addresses = arena.addresses
        held = (arena.k, arena.v)  # should the arena move meanwhile
        try:
            out = steady.call.attend(*addresses, arena.room, *tensors, scale)
        except ValueError:
            return None
        with self._lock:
            if arena.addresses != addresses:
                self._store_again(group, arena, steady, tensors)
            session.lengths[layer] = list(steady.lengths)
            step.appended[layer] = tuple(steady.positions)
            self._counters.appended_bytes += len(tensors[1]) + len(tensors[2])
        del held
        self._recorder.attention(self._clock.monotonic() - started, session.num_rows)
        return out

    def write(self, session: WorkerSession, call: WriteCall) -> tuple[int, ...]:
        """See `PageWorker.write`."""
        session.check_epoch(call.epoch)
        group = session.groups[session.window_of(call.layer)]
        geometry = _write_geometry(call)
        session.check_geometry(call.layer, geometry)
        check_ranges(session, call.padding)
        rows, positions = np.array(call.rows, np.int64), np.array(call.positions, np.int64)
        starts = _write_starts(session, rows, positions)
        lengths = self._lengths_after_write(session, call.layer, starts, rows, positions)
        with self._lock:
            padding = padding_after(session, call.padding, lengths)
            _mark_gaps(session, padding, starts, rows, positions, lengths)
            arena = arena_of(self._pools, session, call.layer, geometry)
            provision = Provision(session)
            old = [
                max(pair) for pair in zip(session.layer_lengths(call.layer), starts, strict=True)
            ]
            provision.add_pages(group, _demands(group, rows, positions, old, lengths))
            provision.execute(self._pools, self._count_pages)
            group.in_use = True
            session.geometries[call.layer] = geometry
            session.padding = padding
            session.starts = starts
            before = sum(session.longest_of_all())
            self._zero_gaps(group, arena, old, rows, positions, lengths)
            self._put(group, arena, rows, positions, call.k, call.v)
            session.lengths[call.layer] = lengths
            if session.step is not None:
                session.step.appended.pop(call.layer, None)
                session.step.batches.clear()  # padding may have changed
                session.step.steady.clear()
            self._count_stored(session, before, call.k, call.v)
        return tuple(lengths)

    def read(self, session: WorkerSession, layer: int, start: int, stop: int) -> ReadResult:
        """See `PageWorker.read`."""
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
        return ReadResult(_host(k, geometry.dtype), _host(v, geometry.dtype), tuple(lengths))

    # -- attend

    def _prepare(
        self, session: WorkerSession, group: LayerGroup, call: AttendCall, plan: AttendPlan
    ) -> Arena:
        """Begin the step if the call does, and provide pages and arena for what it stores.

        Raises:
            OutOfPages: Nothing has changed.
        """
        if plan.new_step and session.spec.states_geometry:
            for layer, geometry in session.geometries.items():
                arena_of(self._pools, session, layer, geometry)
        arena = arena_of(self._pools, session, call.layer, plan.geometry)
        provision = Provision(session)
        padding = session.padding
        if plan.new_step:
            lengths = [max(session.longest(row), length) for row, length in enumerate(plan.lengths)]
            padding = padding_after(session, plan.header.padding, lengths)
            for other in session.groups.values():
                if other.in_use or other is group:
                    _demand(provision, other, plan, padding)
            for evict in plan.header.evict_before:
                windowed = session.groups[evict.window]
                for row, position in enumerate(evict.positions):
                    provision.add_eviction(windowed, row, position // windowed.page_size)
        elif session.step is not None and (
            session.step.positions != plan.positions or not group.in_use
        ):
            _demand(provision, group, plan, padding)
        provision.execute(self._pools, self._count_pages)
        group.in_use = True
        if plan.new_step:
            session.padding = padding
            session.last_step = call.step
            session.step = Step(call.step, plan.header, plan.positions)
        return arena

    def _store(
        self,
        session: WorkerSession,
        group: LayerGroup,
        arena: Arena,
        call: AttendCall,
        plan: AttendPlan,
    ) -> None:
        assert session.step is not None
        assert call.k is not None
        assert call.v is not None
        cache = session.step.slots
        key = (group.window, group.version, plan.positions)
        slots = cache.get(key)
        if slots is None:
            slots = cache[key] = token_slots(group, plan.positions, plan.counts)
        pages, offsets, kept = slots
        k, v = as_numpy(call.k), as_numpy(call.v)
        if kept is not None:
            k, v = k[kept], v[kept]
        with group.pool.lock:
            arena.store(pages, offsets, k, v)
        session.geometries[call.layer] = plan.geometry
        if session.starts is None:
            session.starts = list(plan.positions)
        before = sum(session.longest_of_all())
        session.lengths[call.layer] = list(plan.lengths)
        if call.layer not in session.step.appended:
            self._count_stored(session, before, call.k, call.v)
        session.step.appended[call.layer] = plan.positions

    def _batch(self, session: WorkerSession, group: LayerGroup, plan: AttendPlan) -> PagedBatch:
        cache = {} if session.step is None else session.step.batches
        key = (
            group.window,
            group.version,
            plan.lengths,
            plan.query_counts,
            plan.query_positions,
        )
        batch = cache.get(key)
        if batch is None:
            batch = cache[key] = paged_batch(
                session, group, plan.lengths, plan.query_counts, plan.query_positions
            )
        return batch

    def _settle(
        self,
        session: WorkerSession,
        group: LayerGroup,
        arena: Arena,
        call: AttendCall,
        plan: AttendPlan,
        batch: PagedBatch,
    ) -> None:
        """Let the group's other layers go the short way, if they may."""
        step = session.step
        if step is None or group.window in step.steady:
            return
        slots = step.slots.get((group.window, group.version, plan.positions))
        if slots is None or batch.kv_stops.tolist() != list(plan.lengths):
            return
        steady = settle(
            call,
            arena=arena,
            batch=batch,
            slots=slots,
            counts=plan.counts,
            version=group.version,
        )
        if steady is not None:
            step.steady[group.window] = steady

    def _store_again(
        self,
        group: LayerGroup,
        arena: Arena,
        steady: SteadyStep,
        tensors: tuple[bytes, bytes, bytes],
    ) -> None:
        """Store tokens in an arena that moved while they were stored where it was."""
        pages, offsets, kept = steady.slots
        dtype = steady.geometry.dtype
        k = as_numpy(HostTensor(dtype, tuple(steady.k_shape), tensors[1]))
        v = as_numpy(HostTensor(dtype, tuple(steady.v_shape), tensors[2]))
        if kept is not None:
            k, v = k[kept], v[kept]
        with group.pool.lock:
            arena.store(pages, offsets, k, v)

    # -- write and read

    def _lengths_after_write(
        self,
        session: WorkerSession,
        layer: int,
        starts: Sequence[int],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
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
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
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
                with group.pool.lock:
                    arena.zero_slots(pages, offsets)

    def _put(
        self,
        group: LayerGroup,
        arena: Arena,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
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

    # -- counting; the worker's lock is held

    def _count_pages(self, taken: int, evicted: int) -> None:
        self._counters.page_allocations += taken
        self._counters.page_frees["evict"] += evicted

    def _count_stored(
        self, session: WorkerSession, longest_before: int, k: HostTensor, v: HostTensor
    ) -> None:
        self._counters.appended_tokens += sum(session.longest_of_all()) - longest_before
        self._counters.appended_bytes += k.num_bytes + v.num_bytes


def as_numpy(tensor: HostTensor) -> Array:
    """View a host tensor's bytes as numpy sees them (bfloat16 as uint16). Read-only."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    if not tensor.num_bytes:
        return np.empty(tensor.shape, dtype)
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def as_torch(tensor: HostTensor) -> torch.Tensor:
    """Return a host tensor as a torch tensor, a copy."""
    array = as_numpy(tensor).copy()
    if tensor.dtype is DType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_host(tensor: torch.Tensor) -> HostTensor:
    """Return a tensor's elements as a host tensor."""
    tensor = tensor.detach().cpu().contiguous()
    dtype = _DTYPES[tensor.dtype]
    raw = tensor.view(torch.int16) if dtype is DType.BFLOAT16 else tensor
    return HostTensor(dtype, tuple(tensor.shape), raw.numpy().tobytes())


_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def _host(array: Array, dtype: DType) -> HostTensor:
    return HostTensor(dtype, array.shape, array.tobytes())


def _params(call: AttendCall, num_rows: int, device: torch.device) -> AttentionParams:
    def tensor(host: HostTensor | None) -> torch.Tensor | None:
        return None if host is None else as_torch(host).to(device)

    mask = call.mask
    starts = None
    if mask.dense is not None or call.bias is not None:
        starts = np.array(call.column_starts or (0,) * num_rows, np.int64)
    return AttentionParams(
        scale=call.scale,
        kind=mask.kind,
        window=mask.window,
        chunk=mask.chunk,
        dense=tensor(mask.dense),
        bias=tensor(call.bias),
        column_starts=starts,
        softcap=call.softcap,
        sinks=tensor(call.sinks),
    )


def _demand(
    provision: Provision, group: LayerGroup, plan: AttendPlan, padding: Sequence[RowPadding]
) -> None:
    provision.add_pages(
        group,
        [
            written_pages(group, row, position, position + count, padding[row])
            for row, (position, count) in enumerate(zip(plan.positions, plan.counts, strict=True))
            if count
        ],
    )


def _write_geometry(call: WriteCall) -> LayerGeometry:
    k, v = call.k, call.v
    if len(k.shape) != 3 or len(v.shape) != 3 or k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
        raise InvalidRequest(
            f"k and v must be [tokens, heads, dim] and agree, got {k.shape} and {v.shape}"
        )
    if not len(call.rows) == len(call.positions) == k.shape[0] >= 1:
        raise InvalidRequest(
            f"rows and positions must name each of {k.shape[0]} tokens, at least one, got "
            f"{len(call.rows)} and {len(call.positions)}"
        )
    return LayerGeometry(k.shape[1], k.shape[2], v.shape[2], k.dtype)


def _write_starts(
    session: WorkerSession, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> list[int]:
    """Return where the extent starts, which an open one learns from its first tokens."""
    if rows.min() < 0 or rows.max() >= session.num_rows:
        raise InvalidRequest(f"rows must be below {session.num_rows}")
    if positions.min() < 0:
        raise InvalidRequest("positions must not be negative")
    if session.starts is None:
        if len(np.unique(rows)) < session.num_rows:
            raise InvalidRequest("the first tokens of an extent must name every row")
        return [int(positions[rows == row].min()) for row in range(session.num_rows)]
    below = positions < np.array(session.starts)[rows]
    if below.any():
        row = int(rows[below][0])
        raise PositionOutOfRange(
            f"row {row} begins at {session.starts[row]} here, {int(positions[below][0])} was "
            "written",
            row=row,
            first=session.starts[row],
        )
    return session.starts


def _mark_gaps(
    session: WorkerSession,
    padding: list[RowPadding],
    starts: Sequence[int],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
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
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
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
