"""One Attend call against its session: every check, and what it is to do. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from kvservice.core.errors import (
    Conflict,
    GeometryMismatch,
    InvalidRequest,
    OutOfOrder,
    PositionOutOfRange,
)
from kvservice.core.geometry import DType, HostTensor, LayerGeometry
from kvservice.core.session import MAX_TOKENS, AttendCall, MaskKind, StepHeader
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import check_ranges
from kvservice_workers.provision import check_evictions
from kvservice_workers.session_state import WorkerSession, same_geometry


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """A checked call: what it stores, and from where its queries look. Per row."""

    new_step: bool
    header: StepHeader
    window: int | None
    geometry: LayerGeometry
    counts: tuple[int, ...]  # tokens to store; all 0 without k and v
    positions: tuple[int, ...]  # of the first of them
    lengths: tuple[int, ...]  # of the layer, afterwards
    query_counts: tuple[int, ...]
    query_positions: tuple[int, ...]


def plan_attend(session: WorkerSession, call: AttendCall) -> AttendPlan:
    """Check an Attend against a session. Changes nothing.

    Raises:
        Whatever `worker.proto` lists for Attend; OUT_OF_PAGES only where the step was refused
        before.
    """
    session.check_holder(call.epoch)
    new_step, header = _step_of(session, call)
    window = session.window_of(call.layer)
    if call.k is not None and call.v is not None:
        geometry = _geometry_of(call.k, call.v)
        session.check_geometry(call.layer, geometry)
        counts = header.counts
        if call.k.shape[0] != sum(counts):
            raise InvalidRequest(
                f"k and v hold {call.k.shape[0]} tokens, the step has {sum(counts)}"
            )
        positions = _append_positions(session, call, new_step)
        lengths = tuple(p + n for p, n in zip(positions, counts, strict=True))
        for row, length in enumerate(lengths):
            session.check_bound(row, length)
    else:
        known = session.geometries.get(call.layer)
        if known is None or call.layer not in session.lengths:
            raise InvalidRequest(f"layer {call.layer} has stored nothing to attend to")
        geometry = known
        counts = (0,) * session.num_rows
        lengths = positions = tuple(session.layer_lengths(call.layer))
    query_counts = call.query_counts or header.counts
    session.check_rows(query_counts, "query_counts")
    query_positions = _query_positions(session, call, positions)
    _check_tensors(call, geometry, query_counts)
    plan = AttendPlan(
        new_step=new_step,
        header=header,
        window=window,
        geometry=geometry,
        counts=counts,
        positions=positions,
        lengths=lengths,
        query_counts=query_counts,
        query_positions=query_positions,
    )
    _check_visible(session, call, plan)
    return plan


def _step_of(session: WorkerSession, call: AttendCall) -> tuple[bool, StepHeader]:
    """Return whether the call begins a step, and the step's header."""
    step = session.step
    if call.step < session.last_step or (call.step == session.last_step and step is None):
        raise Conflict(
            f"step {call.step} is over: the session is at step {session.last_step}",
            step=session.last_step,
        )
    if step is not None and call.step == step.number:
        if call.header is not None and not _says_the_same(call.header, step.header):
            raise Conflict(f"step {call.step} began with another header", step=step.number)
        return False, step.header
    header = call.header
    if header is None:
        raise InvalidRequest("the first message of a step must carry its header")
    _check_not_refused(session, call.step, header)
    session.check_rows(header.counts, "counts")
    if min(header.counts) < 0:
        raise InvalidRequest(f"counts must not be negative, got {header.counts}")
    check_ranges(header.padding, session.num_rows)
    check_evictions(session, header.evict_before)
    return True, header


def _says_the_same(header: StepHeader, other: StepHeader) -> bool:
    """Whether headers are of the same step. What follows may have moved, or lost a copy, since."""
    return replace(header, followed_by=other.followed_by) == other


def _check_not_refused(session: WorkerSession, number: int, header: StepHeader) -> None:
    """Refuse a step again that was refused before, unless its tokens go elsewhere now."""
    refused = session.refused_step
    if refused is None or number > refused.number:
        return
    if number < refused.number:
        raise Conflict(
            f"step {number} is over: step {refused.number} was refused since", step=refused.number
        )
    if any(header.counts):
        raise copy(refused.error)


def _geometry_of(k: HostTensor, v: HostTensor) -> LayerGeometry:
    if len(k.shape) != 3 or len(v.shape) != 3:
        raise InvalidRequest(f"k and v must be [tokens, heads, dim], got {k.shape} and {v.shape}")
    if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
        raise GeometryMismatch(
            f"k and v must agree in tokens, heads and dtype, got {k.shape} {k.dtype.value} and "
            f"{v.shape} {v.dtype.value}"
        )
    return same_geometry(LayerGeometry(k.shape[1], k.shape[2], v.shape[2], k.dtype))


def _append_positions(session: WorkerSession, call: AttendCall, new_step: bool) -> tuple[int, ...]:
    """Return where the call's tokens go, which must be where the layer ends (or ended, if this is
    a repeat of its last append)."""
    session.check_rows(call.positions, "positions")
    if not new_step and session.step is not None and call.layer in session.step.appended:
        expected: Sequence[int] = session.step.appended[call.layer]
    elif session.starts is None:
        if min(call.positions) < 0 or max(call.positions) > MAX_TOKENS:
            raise InvalidRequest(f"positions must be at least 0, got {call.positions}")
        return call.positions
    else:
        expected = session.layer_lengths(call.layer)
    if list(call.positions) != list(expected):
        raise OutOfOrder(
            f"layer {call.layer} appends at {list(call.positions)}, its lengths are "
            f"{list(expected)}",
            lengths=",".join(map(str, expected)),
            layer=call.layer,
        )
    return call.positions


def _query_positions(
    session: WorkerSession, call: AttendCall, positions: tuple[int, ...]
) -> tuple[int, ...]:
    if call.query_positions:
        session.check_rows(call.query_positions, "query_positions")
        for row, position in enumerate(call.query_positions):
            if not 0 <= position <= MAX_TOKENS:
                raise InvalidRequest(f"query_positions of row {row}: {position} is out of range")
        return call.query_positions
    if call.k is None and call.mask.kind is not MaskKind.FULL:
        raise InvalidRequest("query_positions is required without k and v, unless the mask is FULL")
    return positions


def _check_tensors(call: AttendCall, geometry: LayerGeometry, query_counts: Sequence[int]) -> None:
    """Check the shapes and dtypes of q, sinks, bias and a dense mask, and the numbers beside."""
    if min(query_counts) < 0:
        raise InvalidRequest(f"query_counts must not be negative, got {query_counts}")
    q = call.q
    if len(q.shape) != 3 or q.shape[0] != sum(query_counts):
        raise InvalidRequest(
            f"q must be [{sum(query_counts)} tokens, heads, dim], got {list(q.shape)}"
        )
    num_q_heads = q.shape[1]
    if q.dtype is not geometry.dtype or q.shape[2] != geometry.k_dim:
        raise GeometryMismatch(
            f"q must be of dtype {geometry.dtype.value} and dim {geometry.k_dim}, got "
            f"{q.dtype.value} and {q.shape[2]}"
        )
    if num_q_heads < 1 or num_q_heads % geometry.num_kv_heads:
        raise GeometryMismatch(
            f"query heads must be a multiple of {geometry.num_kv_heads} KV heads, got {num_q_heads}"
        )
    if not math.isfinite(call.scale):
        raise InvalidRequest(f"scale must be finite, got {call.scale}")
    if call.softcap is not None and not (math.isfinite(call.softcap) and call.softcap > 0):
        raise InvalidRequest(f"softcap must be finite and above 0, got {call.softcap}")
    if call.sinks is not None:
        if call.partial:
            raise InvalidRequest("sinks do not go with a partial: merge them once, at the end")
        if call.sinks.shape != (num_q_heads,) or call.sinks.dtype is not DType.FLOAT32:
            raise InvalidRequest(f"sinks must be float32 [{num_q_heads}], got {call.sinks.shape}")
    _check_mask(call)
    rows = len(query_counts)
    for name, tensor, may_be_bool in (
        ("a dense mask", call.mask.dense, True),
        ("bias", call.bias, False),
    ):
        if tensor is None:
            continue
        if len(set(query_counts)) > 1:
            raise InvalidRequest(f"{name} needs the same number of queries in every row")
        leading_ok = (
            len(tensor.shape) == 4
            and tensor.shape[0] in (1, rows)
            and tensor.shape[1] in (1, num_q_heads)
            and tensor.shape[2] == query_counts[0]
        )
        if not leading_ok or not (tensor.dtype.is_float or may_be_bool):
            raise InvalidRequest(
                f"{name} must be [{rows} or 1, {num_q_heads} or 1, {query_counts[0]}, columns], "
                f"got {list(tensor.shape)} {tensor.dtype.value}"
            )
    if call.column_starts and len(call.column_starts) != rows:
        raise InvalidRequest(f"column_starts must have {rows} entries")


def _check_mask(call: AttendCall) -> None:
    mask = call.mask
    if mask.window is not None and (mask.kind is not MaskKind.CAUSAL or mask.window < 1):
        raise InvalidRequest(f"a window must be at least 1 and causal, got {mask.window}")
    if (mask.kind is MaskKind.CHUNK) != (mask.chunk is not None):
        raise InvalidRequest("chunk goes with a chunk mask, and only with it")
    if mask.chunk is not None and mask.chunk < 1:
        raise InvalidRequest(f"chunk must be at least 1, got {mask.chunk}")
    if (mask.kind is MaskKind.DENSE) != (mask.dense is not None):
        raise InvalidRequest("a dense tensor goes with a dense mask, and only with it")


def _check_visible(session: WorkerSession, call: AttendCall, plan: AttendPlan) -> None:
    """Refuse a query that would see a position which its window has evicted."""
    if plan.window is None:
        return
    group = session.groups[plan.window]
    for row, evicted in enumerate(_evicted_after(plan, group)):
        if not evicted or not plan.query_counts[row]:
            continue
        lowest = _lowest_visible(session, call, plan, row)
        if max(lowest, session.padding[row].leading) < evicted:
            raise PositionOutOfRange(
                f"row {row}: a query at {plan.query_positions[row]} would see positions below "
                f"{evicted}, which the window of {plan.window} has evicted",
                row=row,
                evicted=evicted,
            )


def _evicted_after(plan: AttendPlan, group: LayerGroup) -> Sequence[int]:
    """Return the evicted positions of each row, with what the step's header asks for."""
    size = group.page_size
    for evict in plan.header.evict_before if plan.new_step else ():
        if evict.window == plan.window:
            return [
                max(old, position // size * size)
                for old, position in zip(group.evicted, evict.positions, strict=True)
            ]
    return group.evicted


def _lowest_visible(session: WorkerSession, call: AttendCall, plan: AttendPlan, row: int) -> int:
    position = plan.query_positions[row]
    mask = call.mask
    if call.bias is not None or mask.kind is MaskKind.DENSE:
        return call.column_starts[row] if call.column_starts else 0
    if mask.kind is MaskKind.CHUNK and mask.chunk is not None:
        origin = session.padding[row].leading
        return origin + (position - origin) // mask.chunk * mask.chunk
    if mask.kind is MaskKind.CAUSAL and mask.window is not None:
        return position - mask.window + 1
    return 0
