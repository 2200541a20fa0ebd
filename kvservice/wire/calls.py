"""The data path: Attend, Write and Read, protobuf to and from the core's plain values.

As `kvservice.wire.convert`, whose module docstring holds here too. A decode calls
`attend_call_from_pb` once per layer and token, so it does nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from kvservice.core import session as core
from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import MAX_LAYERS, DType, HostTensor
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.convert import (
    at_least_one,
    incarnation_from_pb,
    not_negative,
    padding_from_pb,
    padding_to_pb,
    session_id_from_pb,
)
from kvservice.wire.tensors import tensor_from_pb, tensor_to_pb

_KIND_FROM_PB: Final = {
    worker_pb2.MASK_KIND_FULL: core.MaskKind.FULL,
    worker_pb2.MASK_KIND_CAUSAL: core.MaskKind.CAUSAL,
    worker_pb2.MASK_KIND_CHUNK: core.MaskKind.CHUNK,
    worker_pb2.MASK_KIND_DENSE: core.MaskKind.DENSE,
}
_KIND_TO_PB: Final = {kind: number for number, kind in _KIND_FROM_PB.items()}
_FULL: Final = core.Mask(core.MaskKind.FULL)
_CAUSAL: Final = core.Mask(core.MaskKind.CAUSAL)


def layer_from_pb(layer: int) -> int:
    if not 0 <= layer < MAX_LAYERS:
        raise InvalidRequest(f"layer must be 0 to {MAX_LAYERS - 1}, got {layer}")
    return layer


# Attend


def attend_call_from_pb(pb: worker_pb2.AttendCall) -> core.AttendCall:
    if not pb.HasField("q"):
        raise InvalidRequest("q is missing")
    k = v = None
    if pb.HasField("k"):
        if not pb.HasField("v"):
            raise InvalidRequest("k without v")
        k, v = _float_tensor(pb.k, "k", 3), _float_tensor(pb.v, "v", 3)
    elif pb.HasField("v"):
        raise InvalidRequest("v without k")
    if not pb.HasField("scale") or not math.isfinite(pb.scale):
        raise InvalidRequest("scale must be set, and finite")
    softcap = pb.softcap if pb.HasField("softcap") else None
    if softcap is not None and not 0 < softcap < math.inf:
        raise InvalidRequest(f"softcap must be finite and above 0, got {softcap}")
    return core.AttendCall(
        session_id=session_id_from_pb(pb.session_id),
        epoch=at_least_one(pb.epoch, "epoch"),
        step=at_least_one(pb.step, "step"),
        layer=layer_from_pb(pb.layer),
        q=_float_tensor(pb.q, "q", 3),
        scale=pb.scale,
        mask=_mask_from_pb(pb.mask),
        k=k,
        v=v,
        header=header_from_pb(pb.header) if pb.HasField("header") else None,
        positions=not_negative(pb.positions, "positions"),
        query_counts=not_negative(pb.query_counts, "query_counts"),
        query_positions=not_negative(pb.query_positions, "query_positions"),
        softcap=softcap,
        sinks=_sinks_from_pb(pb) if pb.HasField("sinks") else None,
        bias=_float_tensor(pb.bias, "bias", 4) if pb.HasField("bias") else None,
        # May be negative: columns that begin before position 0.
        column_starts=tuple(pb.column_starts),
        partial=pb.partial,
    )


def attend_call_to_pb(
    call: core.AttendCall, *, call_id: int = 0, incarnation: str = ""
) -> worker_pb2.AttendCall:
    return worker_pb2.AttendCall(
        call_id=call_id,
        session_id=call.session_id,
        incarnation=incarnation,
        epoch=call.epoch,
        step=call.step,
        layer=call.layer,
        header=None if call.header is None else header_to_pb(call.header),
        q=tensor_to_pb(call.q),
        k=_find_tensor_pb(call.k),
        v=_find_tensor_pb(call.v),
        positions=call.positions,
        query_counts=call.query_counts,
        query_positions=call.query_positions,
        mask=_mask_to_pb(call.mask),
        scale=call.scale,
        softcap=call.softcap,
        sinks=_find_tensor_pb(call.sinks),
        bias=_find_tensor_pb(call.bias),
        column_starts=call.column_starts,
        partial=call.partial,
    )


def attend_result_to_pb(result: core.AttendResult, call_id: int) -> worker_pb2.AttendResult:
    return worker_pb2.AttendResult(
        call_id=call_id, out=tensor_to_pb(result.out), lse=_find_tensor_pb(result.lse)
    )


def attend_result_from_pb(pb: worker_pb2.AttendResult) -> core.AttendResult:
    """Return the result; `error` is for the caller to look at first."""
    if not pb.HasField("out"):
        raise InvalidRequest("the result holds neither out nor an error")
    lse = _float_tensor(pb.lse, "lse", 2) if pb.HasField("lse") else None
    return core.AttendResult(_float_tensor(pb.out, "out", 3), lse)


def _float_tensor(pb: types_pb2.Tensor, name: str, rank: int) -> HostTensor:
    tensor = tensor_from_pb(pb, name, rank)
    if tensor.dtype is DType.BOOL:
        raise InvalidRequest(f"{name} must be of a float dtype, got bool")
    return tensor


def _find_tensor_pb(tensor: HostTensor | None) -> types_pb2.Tensor | None:
    return None if tensor is None else tensor_to_pb(tensor)


def _sinks_from_pb(pb: worker_pb2.AttendCall) -> HostTensor:
    if pb.partial:
        raise InvalidRequest("sinks cannot be in a partial: they would count once per worker")
    sinks = tensor_from_pb(pb.sinks, "sinks", 1)
    if sinks.dtype is not DType.FLOAT32:
        raise InvalidRequest(f"sinks must be float32, got {sinks.dtype.value}")
    return sinks


def _mask_from_pb(pb: worker_pb2.Mask) -> core.Mask:
    kind = _KIND_FROM_PB.get(pb.kind)
    if kind is None:
        raise InvalidRequest(f"the mask's kind is missing or unknown (number {pb.kind})")
    window = pb.window if pb.HasField("window") else None
    dense = pb.HasField("dense")
    if (window is not None and kind is not core.MaskKind.CAUSAL) or (
        bool(pb.chunk) is not (kind is core.MaskKind.CHUNK)
    ):
        raise InvalidRequest(
            f"window is for CAUSAL alone, chunk goes with CHUNK; got {kind.name}, "
            f"window {window}, chunk {pb.chunk}"
        )
    if dense is not (kind is core.MaskKind.DENSE):
        raise InvalidRequest(f"dense goes with DENSE; got {kind.name}")
    if window is not None:
        return core.Mask(kind, window=at_least_one(window, "window"))
    if kind is core.MaskKind.CAUSAL:
        return _CAUSAL
    if kind is core.MaskKind.CHUNK:
        return core.Mask(kind, chunk=at_least_one(pb.chunk, "chunk"))
    return core.Mask(kind, dense=tensor_from_pb(pb.dense, "dense", 4)) if dense else _FULL


def _mask_to_pb(mask: core.Mask) -> worker_pb2.Mask:
    return worker_pb2.Mask(
        kind=_KIND_TO_PB[mask.kind],
        window=mask.window,
        chunk=mask.chunk,
        dense=_find_tensor_pb(mask.dense),
    )


def header_from_pb(pb: worker_pb2.StepHeader) -> core.StepHeader:
    return core.StepHeader(
        counts=not_negative(pb.counts, "counts"),
        padding=padding_from_pb(pb.padding) if pb.padding else (),
        followed_by=incarnation_from_pb(pb.followed_by),
        evict_before=evictions_from_pb(pb.evict_before) if pb.evict_before else (),
    )


def header_to_pb(header: core.StepHeader) -> worker_pb2.StepHeader:
    return worker_pb2.StepHeader(
        counts=header.counts,
        padding=padding_to_pb(header.padding),
        followed_by=header.followed_by,
        evict_before=evictions_to_pb(header.evict_before),
    )


def evictions_from_pb(groups: Iterable[worker_pb2.EvictBefore]) -> tuple[core.EvictBefore, ...]:
    return tuple(
        core.EvictBefore(
            at_least_one(group.window, "evict_before: window"),
            not_negative(group.positions, "evict_before: positions"),
        )
        for group in groups
    )


def evictions_to_pb(groups: Iterable[core.EvictBefore]) -> list[worker_pb2.EvictBefore]:
    return [
        worker_pb2.EvictBefore(window=group.window, positions=group.positions) for group in groups
    ]


# Write and Read


def write_call_from_pb(pb: worker_pb2.WriteCall) -> core.WriteCall:
    if not (pb.HasField("k") and pb.HasField("v")):
        raise InvalidRequest("k and v must be set")
    k, v = _float_tensor(pb.k, "k", 3), _float_tensor(pb.v, "v", 3)
    rows, positions = not_negative(pb.rows, "rows"), not_negative(pb.positions, "positions")
    if not len(rows) == len(positions) == k.shape[0] == v.shape[0]:
        raise InvalidRequest(
            f"one row and one position for each token: {len(rows)} rows, {len(positions)} "
            f"positions, k of {k.shape[0]} tokens, v of {v.shape[0]}"
        )
    return core.WriteCall(
        session_id=session_id_from_pb(pb.session_id),
        epoch=at_least_one(pb.epoch, "epoch"),
        layer=layer_from_pb(pb.layer),
        k=k,
        v=v,
        rows=rows,
        positions=positions,
        padding=padding_from_pb(pb.padding),
        number=not_negative([pb.number], "number")[0],
        evict_before=evictions_from_pb(pb.evict_before),
        extent_starts=not_negative(pb.extent_starts, "extent_starts"),
    )


def write_call_to_pb(call: core.WriteCall, *, incarnation: str = "") -> worker_pb2.WriteCall:
    return worker_pb2.WriteCall(
        session_id=call.session_id,
        incarnation=incarnation,
        epoch=call.epoch,
        layer=call.layer,
        k=tensor_to_pb(call.k),
        v=tensor_to_pb(call.v),
        rows=call.rows,
        positions=call.positions,
        padding=padding_to_pb(call.padding),
        number=call.number,
        evict_before=evictions_to_pb(call.evict_before),
        extent_starts=call.extent_starts,
    )


def read_result_to_pb(result: core.ReadResult) -> worker_pb2.ReadResult:
    return worker_pb2.ReadResult(
        k=tensor_to_pb(result.k), v=tensor_to_pb(result.v), lengths=result.lengths
    )


def read_result_from_pb(pb: worker_pb2.ReadResult) -> core.ReadResult:
    return core.ReadResult(
        k=_float_tensor(pb.k, "k", 4),
        v=_float_tensor(pb.v, "v", 4),
        lengths=not_negative(pb.lengths, "lengths"),
    )
