"""The long way through Attend: everything is checked, pages are provided, then the kernel runs."""

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
from kvservice.core.geometry import DType, HostTensor
from kvservice.core.said import Said
from kvservice.core.session import AttendCall, AttendResult
from kvservice_workers.arena import TORCH_DTYPES, Arena
from kvservice_workers.attend_plan import AttendPlan, plan_attend
from kvservice_workers.attention import dispatch
from kvservice_workers.attention.batch import AttentionParams, PagedBatch
from kvservice_workers.batching import paged_batch, token_slots
from kvservice_workers.counters import Counters
from kvservice_workers.host_tensors import as_numpy, as_torch, to_host
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding, padding_after
from kvservice_workers.pools import PoolSet
from kvservice_workers.promises import Promises
from kvservice_workers.provision import Provision, arena_of, written_pages
from kvservice_workers.session_access import SessionAccess
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.steady import settle
from kvservice_workers.step import Refusal, Step

Array = npt.NDArray[np.generic]


class LongWay:
    """Attend: any call. It leaves behind what lets a step's other layers go the short way.

    Thread-safe. The worker's lock is not held during attention.
    """

    def __init__(
        self,
        lock: threading.RLock,
        access: SessionAccess,
        pools: PoolSet,
        promises: Promises,
        counters: Counters,
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self._lock = lock  # the worker's
        self._access = access
        self._pools = pools
        self._promises = promises
        self._counters, self._timings = counters, counters.timings
        self._clock = clock
        self._failpoints = failpoints

    def attend(self, tenant: str, call: AttendCall, said: Said | None = None) -> AttendResult:
        """Store new k and v of one layer, attend, return the output; see `worker.proto`.

        Args:
            said: The call as it came. With it, later layers of the step may go the short way.

        Raises:
            Whatever `worker.proto` lists for Attend; see there for what has changed.
        """
        with self._access.storing(tenant, call.session_id) as session:
            result = self._attend(session, call, said)
            if session.followed_by and session.targets is not None:
                with self._lock:
                    self._promises.lapse(session)
            return result

    # -- inside

    def _attend(self, session: WorkerSession, call: AttendCall, said: Said | None) -> AttendResult:
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
        if not any(plan.query_counts):
            if said is not None:
                self._settle(session, group, arena, call, said, plan, batch)
            return _no_output(call, plan)
        started = self._clock.monotonic()
        partial = dispatch.attend(
            q, arena.k, arena.v, batch, _params(call, session.num_rows, arena.device)
        )
        self._timings.attention(self._clock.monotonic() - started, session.num_rows)
        if said is not None:
            self._settle(session, group, arena, call, said, plan, batch)
        if call.partial:
            return AttendResult(*to_host(partial.out, partial.lse))
        return AttendResult(*to_host(partial.out.to(TORCH_DTYPES[plan.geometry.dtype])))

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
            padding = padding_after(session.padding, plan.header.padding, lengths)
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
            session.go_on_at(plan.header.followed_by)
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
        group.wrote_slots(pages)
        with group.pool.lock:
            q = arena.store_and_bring(pages, offsets, k, v, as_numpy(call.q))
        session.geometries[call.layer] = plan.geometry
        if session.starts is None:
            session.starts = list(plan.positions)
        before = session.longest_of_all()
        session.lengths[call.layer] = plan.lengths
        if call.layer in session.step.appended:
            self._counters.replays["Attend"] += 1
        else:
            grown = sum(map(max, before, plan.lengths)) - sum(before)
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
        said: Said,
        plan: AttendPlan,
        batch: PagedBatch,
    ) -> None:
        """Let the group's other layers go the short way, if they may."""
        step, stores = session.step, call.k is not None
        if step is None or (group.window, stores) in step.steady:
            return
        slots = step.slots.get((group.window, group.version, plan.positions)) if stores else None
        if (stores and slots is None) or batch.kv_stops.tolist() != list(plan.lengths):
            return
        steady = settle(
            call,
            said,
            arena=arena,
            geometry=plan.geometry,
            batch=batch,
            slots=slots,
            lengths=plan.lengths,
            counts=plan.counts,
            query_counts=plan.query_counts,
            version=group.version,
        )
        if steady is not None:
            step.steady[group.window, stores] = steady


def _no_output(call: AttendCall, plan: AttendPlan) -> AttendResult:
    """Return what a call without queries is answered: it only stores, as copies do."""
    heads, dtype = call.q.shape[1], plan.geometry.dtype
    out = HostTensor(DType.FLOAT32 if call.partial else dtype, (0, heads, plan.geometry.v_dim), b"")
    return AttendResult(out, HostTensor(DType.FLOAT32, (0, heads), b"") if call.partial else None)


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
