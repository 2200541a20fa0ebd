"""Attend on one worker: tables and arenas, then the kernel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt
import torch

from kvservice.clock import Clock
from kvservice.core.errors import CapacityError
from kvservice.core.failpoints import Failpoints
from kvservice.core.geometry import HostTensor
from kvservice.core.session import AttendCall, AttendResult
from kvservice_workers.arena import TORCH_DTYPES, Arena
from kvservice_workers.attending import (
    AttendPlan,
    padding_after,
    paged_batch,
    plan_attend,
    token_slots,
)
from kvservice_workers.attention import dispatch
from kvservice_workers.attention.batch import AttentionParams, PagedBatch
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import as_numpy, as_torch, to_host
from kvservice_workers.padding import RowPadding
from kvservice_workers.pools import PoolSet
from kvservice_workers.provision import Provision, written_pages
from kvservice_workers.session_state import LayerGroup, Refusal, Step, WorkerSession, arena_of
from kvservice_workers.steady import SteadyStep, settle

Array = npt.NDArray[np.generic]


class DataPath:
    """Attend, the long way and the short one. The session's lock is held by the caller."""

    def __init__(
        self,
        lock: threading.RLock,
        pools: PoolSet,
        counters: Counters,
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self._lock = lock  # the worker's
        self._failpoints = failpoints
        self._pools = pools
        self._counters = counters
        self._clock = clock

    def attend(self, session: WorkerSession, call: AttendCall) -> AttendResult:
        """See `PageWorker.attend`."""
        plan = plan_attend(session, call)
        group = session.groups[plan.window]
        with self._lock:
            try:
                arena = self._prepare(session, group, call, plan)
            except CapacityError as error:
                if plan.new_step:
                    session.refused_step = Refusal(call.step, copy(error))
                raise
            self._failpoints.passed("attend.pages_taken")
            if call.k is not None and call.v is not None:
                q = self._store(session, group, arena, call, plan)
            else:
                q = as_torch(call.q).to(arena.device)
            batch = self._batch(session, group, plan, token_major=not arena.on_cpu)
        started = self._clock.monotonic()
        partial = dispatch.attend(
            q, arena.k, arena.v, batch, _params(call, session.num_rows, arena.device)
        )
        self._counters.timings.attention(self._clock.monotonic() - started, session.num_rows)
        self._settle(session, group, arena, call, plan, batch)
        if call.partial:
            return AttendResult(*to_host(partial.out, partial.lse))
        return AttendResult(*to_host(partial.out.to(TORCH_DTYPES[plan.geometry.dtype])))

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
        self._counters.timings.attention(self._clock.monotonic() - started, session.num_rows)
        return out

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
            provision.add_evictions(plan.header.evict_before)
        elif session.step is not None and (
            session.step.positions != plan.positions or not group.in_use
        ):
            _demand(provision, group, plan, padding)
        provision.execute(self._pools, self._counters.count_pages)
        group.in_use = True
        if plan.new_step:
            session.padding = padding
            session.followed_by = plan.header.followed_by
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
    ) -> torch.Tensor:
        """Store the call's tokens; return its queries, on the arena's device."""
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
            q = arena.store_and_bring(pages, offsets, k, v, as_numpy(call.q))
        session.geometries[call.layer] = plan.geometry
        if session.starts is None:
            session.starts = list(plan.positions)
        before = sum(session.longest_of_all())
        session.lengths[call.layer] = list(plan.lengths)
        if call.layer in session.step.appended:
            self._counters.replays["Attend"] += 1
        else:
            grown = sum(session.longest_of_all()) - before
            self._counters.count_stored(grown, call.k.num_bytes + call.v.num_bytes)
        session.step.appended[call.layer] = plan.positions
        return q

    def _batch(
        self, session: WorkerSession, group: LayerGroup, plan: AttendPlan, *, token_major: bool
    ) -> PagedBatch:
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
                session,
                group,
                plan.lengths,
                plan.query_counts,
                plan.query_positions,
                token_major=token_major,
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
