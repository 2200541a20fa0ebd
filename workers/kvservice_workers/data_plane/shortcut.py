"""Whether an Attend asks what its step's first layer asked: then one native call answers it.

Protobuf's fields are compared as they are. Whatever is not exactly as before goes the long way,
with all its checks.
"""

from __future__ import annotations

import math
from typing import Final

from kvservice.core.session import MaskKind
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.tensors import dtype_to_pb
from kvservice_workers.steady import SteadyStep

_KINDS: Final = {
    worker_pb2.MASK_KIND_FULL: MaskKind.FULL,
    worker_pb2.MASK_KIND_CAUSAL: MaskKind.CAUSAL,
    worker_pb2.MASK_KIND_CHUNK: MaskKind.CHUNK,
}


def asks_steadily(call: worker_pb2.AttendCall, steady: SteadyStep) -> bool:
    """Return whether a call without a header differs from the step's first in tensors alone."""
    dtype = dtype_to_pb(steady.geometry.dtype)
    q, k, v = call.q, call.k, call.v
    return (
        call.epoch == steady.epoch
        and call.step == steady.number
        and call.positions == steady.positions
        and k.shape == steady.k_shape
        and v.shape == steady.v_shape
        and q.shape == steady.q_shape
        and q.dtype == k.dtype == v.dtype == dtype
        and _masks_agree(call.mask, steady)
        and call.HasField("scale")
        and math.isfinite(call.scale)
        and not call.partial
        and not call.query_counts
        and not call.query_positions
        and not call.column_starts
        and not call.HasField("softcap")
        and not call.HasField("sinks")
        and not call.HasField("bias")
    )


def steady_result(
    call: worker_pb2.AttendCall, steady: SteadyStep, out: bytes
) -> worker_pb2.AttendResult:
    """Return the result that holds an output's bytes."""
    shape = (*steady.q_shape[:2], steady.geometry.v_dim)
    tensor = types_pb2.Tensor(dtype=call.q.dtype, shape=shape, data=out)
    return worker_pb2.AttendResult(call_id=call.call_id, out=tensor)


def _masks_agree(mask: worker_pb2.Mask, steady: SteadyStep) -> bool:
    mine = steady.mask
    window = mask.window if mask.HasField("window") else None
    return (
        _KINDS.get(mask.kind) is mine.kind
        and window == mine.window
        and mask.chunk == (mine.chunk or 0)
        and not mask.HasField("dense")
    )
