"""The short way through a decoding step: layers that ask what the step's first layer asked.

One new token in each row, arrays of the same kind and shapes, the same mask: then only tensors,
layer and scale differ, and one message serves all layers. Whatever differs takes the long way,
with all its checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvservice.core.geometry import DType
from kvservice.v1 import worker_pb2
from kvservice_client._arrays import Kind, Library, from_host, to_host
from kvservice_client._ask import Ask, tensor_data
from kvservice_client._extents import Extent
from kvservice_client._mirror import Mirror, Step

Options = tuple[Any, ...]
"""What a call says besides layer, tensors, place, scale and padding: compared as a whole."""


@dataclass(slots=True)
class SteadyAsk:
    """What a step's layer must ask for to be served the short way.

    Fields:
        step: The session's step; another object begins with every step and structural change.
        looks: Type, shape and dtype of q, k and v.
        call: The message of the last such call, to be filled in again.
    """

    step: Step
    extent: Extent
    looks: tuple[Any, ...]
    call: worker_pb2.AttendCall
    dtype: DType
    kind: Kind
    default_scale: float

    def fits(self, mirror: Mirror, layer: int, tensors: tuple[Any, Any, Any], pos: Any) -> bool:
        """Return whether a call that asks the same may take the short way now.

        Args:
            pos: Where the call says that its tokens go; None: where the layer ends.
        """
        step = self.step
        if pos is not None and (type(pos) is not int or any(one != pos for one in step.positions)):
            return False
        return (
            mirror.step is step
            and layer not in step.appended
            and mirror.lengths.get(layer) == step.positions
            and step.failed_layer is None
            and not mirror.uncertain
            and len(mirror.extents) == 1
            and mirror.extents[0] is self.extent
            and _looks(tensors) == self.looks
        )

    def fill(
        self, call_id: int, layer: int, tensors: tuple[Any, Any, Any], scale: float | None
    ) -> worker_pb2.AttendCall:
        """Return the message of a call that fits."""
        call = self.call
        call.call_id = call_id
        call.layer = layer
        call.scale = self.default_scale if scale is None else scale
        # With one token a row, [rows, heads, 1, dim] and [tokens, heads, dim] are the same bytes.
        call.q.data, call.k.data, call.v.data = (
            to_host(tensor, "q, k and v").data.tobytes() for tensor in tensors
        )
        return call

    def output(self, result: worker_pb2.AttendResult) -> Any:
        """Return the answer as an array like q, [rows, heads, 1, v_dim]."""
        packed = tensor_data(result.out, self.dtype)
        return from_host(packed[:, :, None], self.dtype, self.kind)


def settle(
    mirror: Mirror,
    ask: Ask,
    tensors: tuple[Any, Any, Any],
    call: worker_pb2.AttendCall,
) -> SteadyAsk | None:
    """Return what serves later layers like the one that was just served; None: nothing does."""
    step, tokens, queries = mirror.step, ask.tokens, ask.queries
    plain = (
        step is not None
        and tokens is not None
        and not queries.packed
        and set(queries.counts) == {1}
        and tokens.counts == queries.counts
        and queries.kind.device is None
        and queries.kind.library in (Library.TORCH, Library.NUMPY)
        and queries.dtype is not DType.FLOAT64
        and len(mirror.extents) == 1
        and not call.partial
        and not call.query_positions
        and not call.HasField("bias")
        and call.mask.kind != worker_pb2.MASK_KIND_DENSE
    )
    if not plain or step is None:
        return None
    call.ClearField("header")
    return SteadyAsk(
        step=step,
        extent=mirror.extents[0],
        looks=_looks(tensors),
        call=call,
        dtype=queries.dtype,
        kind=queries.kind,
        default_scale=1.0 / math.sqrt(queries.q.shape[2]),
    )


def _looks(tensors: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    q, k, v = tensors
    return (
        *(type(q), type(k), type(v)),
        *(q.shape, k.shape, v.shape),
        *(q.dtype, k.dtype, v.dtype),
        *(getattr(q, "device", None), getattr(k, "device", None), getattr(v, "device", None)),
    )
