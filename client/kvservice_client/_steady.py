"""The short way through a decoding step: layers that ask what the step's first layer asked.

One new token in each row, arrays of the same kind and shapes, the same mask: then only tensors,
layer and scale differ, and what was said for the first layer serves all. Of several extents each
is asked for its partial, and only the tail stores. Whatever differs takes the long way, with all
its checks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import DType
from kvservice.v1 import worker_pb2
from kvservice_client._arrays import Kind, Library, cast_float32, from_host, to_host
from kvservice_client._ask import Ask
from kvservice_client._extents import Extent
from kvservice_client._merge import Partial, merge
from kvservice_client._mirror import Mirror, Step
from kvservice_client._steady_call import SteadyAnswer, SteadyCall
from kvservice_client._steps import Part, padded_queries

Options = tuple[Any, ...]
"""What a call says besides layer, tensors, place, scale and padding: compared as a whole."""

Asked = Sequence[tuple[Part, worker_pb2.AttendCall]]
Told = Sequence[tuple[Extent, worker_pb2.AttendCall]]

_NO_QUERIES: Final = np.empty(0, np.float32)


@dataclass(slots=True)
class SteadyAsk:
    """What a step's layer must ask for to be served the short way.

    Fields:
        step: The session's step; another object begins with every step and structural change.
        epoch: The session's.
        extents: All of the session's.
        calls: To each extent that is asked, the tail last; then to the twin of the tail, which
            stores the same, and is asked nothing.
        looks: Type, shape and dtype of q, k and v.
        host: Brings one of them to host memory, contiguous.
        padded: Which queries are padding, where several workers answer; None: none is.
    """

    step: Step
    epoch: int
    extents: tuple[Extent, ...]
    calls: list[tuple[Extent, SteadyCall]]
    looks: tuple[Any, ...]
    dtype: DType
    kind: Kind
    default_scale: float
    host: Callable[[Any], npt.NDArray[Any]]
    padded: npt.NDArray[np.bool_] | None

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
            and tuple(mirror.extents) == self.extents
            and mirror.epoch == self.epoch
            and _looks(tensors) == self.looks
        )

    def fill(
        self, first_id: int, layer: int, tensors: tuple[Any, Any, Any], scale: float | None
    ) -> list[tuple[Extent, SteadyCall]]:
        """Return the calls that a layer takes, which fits.

        Args:
            first_id: Of the first of them; the others count on.
        """
        # With one token a row, [rows, heads, 1, dim] and [tokens, heads, dim] are the same bytes.
        host = [self.host(tensor) for tensor in tensors]
        for number, (_, call) in enumerate(self.calls):
            call.call_id = first_id + number
            call.layer = layer
            call.scale = self.default_scale if scale is None else scale
            queries = host[:1] if call.asks else [_NO_QUERIES]
            call.tensors = [*queries, *host[1:]] if call.stores else queries
        return self.calls

    def output(self, answers: Sequence[SteadyAnswer]) -> Any:
        """Return the answers as an array like q, [rows, heads, 1, v_dim]."""
        out = answers[0].out
        if len(self.extents) > 1:
            asked = [one for one, (_, call) in zip(answers, self.calls, strict=True) if call.asks]
            partials = [Partial(one.out, _present(one.lse)) for one in asked]
            merged = merge(partials, out.shape[0]).out
            if self.padded is not None:
                merged[self.padded] = 0.0  # a worker knows only of padding that it holds itself
            out = cast_float32(merged, self.dtype)
        return from_host(out[:, :, None], self.dtype, self.kind)


def settle(
    mirror: Mirror, ask: Ask, tensors: tuple[Any, Any, Any], asked: Asked, told: Told
) -> SteadyAsk | None:
    """Return what serves later layers like the one that was just served; None: nothing does.

    Args:
        asked, told: What extents and their twins were sent.
    """
    step, tokens, queries = mirror.step, ask.tokens, ask.queries
    plain = (
        step is not None
        and tokens is not None
        and not queries.packed
        and set(queries.counts) == {1}
        and tokens.counts == queries.counts
        and ask.query_positions is None
        and queries.kind.device is None
        and queries.kind.library in (Library.TORCH, Library.NUMPY)
        and queries.dtype is not DType.FLOAT64
        and all(_is_plain(mirror, step, part, call) for part, call in asked)
    )
    if not plain or step is None or tokens is None or not tokens.v.size:
        return None
    sent = [(part.extent, call) for part, call in asked]
    sent += [(extent, call) for extent, call in told if call.HasField("k")]
    calls = [(one, SteadyCall(call, tokens.v.shape[2], queries.dtype)) for one, call in sent]
    if not all(call.fits_a_frame for _, call in calls):
        return None
    several = len(mirror.extents) > 1
    return SteadyAsk(
        step=step,
        epoch=mirror.epoch,
        extents=tuple(mirror.extents),
        calls=calls,
        looks=_looks(tensors),
        dtype=queries.dtype,
        kind=queries.kind,
        default_scale=1.0 / math.sqrt(queries.q.shape[2]),
        host=_host_of(queries.kind.library, queries.dtype),
        padded=padded_queries(step, ask, step.positions) if several else None,
    )


def _is_plain(mirror: Mirror, step: Step, part: Part, call: worker_pb2.AttendCall) -> bool:
    """Whether a call stores all of the step's tokens or none, and brings all queries."""
    stored = step.counts if part.extent is mirror.tail else (0,) * len(step.counts)
    return (
        part.counts == stored
        and not any(part.first_query)
        and not call.HasField("bias")
        and not call.HasField("sinks")
        and call.mask.kind != worker_pb2.MASK_KIND_DENSE
    )


def _host_of(library: Library, dtype: DType) -> Callable[[Any], npt.NDArray[Any]]:
    """Return what brings arrays of one kind, in host memory already, to contiguous bytes."""
    if library is not Library.TORCH:
        if dtype is not DType.BFLOAT16:
            return np.ascontiguousarray
        return lambda array: np.ascontiguousarray(to_host(array, "q, k and v").data)
    bits = sys.modules["torch"].int16 if dtype is DType.BFLOAT16 else None

    def of_torch(tensor: Any) -> npt.NDArray[Any]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if bits is not None:
            tensor = tensor.view(bits)
        return np.ascontiguousarray(tensor.numpy())

    return of_torch


def _present(lse: npt.NDArray[Any] | None) -> npt.NDArray[np.float32]:
    assert lse is not None, "a partial has one"
    return lse


def _looks(tensors: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    q, k, v = tensors
    return (
        *(type(q), type(k), type(v)),
        *(q.shape, k.shape, v.shape),
        *(q.dtype, k.dtype, v.dtype),
        *(getattr(q, "device", None), getattr(k, "device", None), getattr(v, "device", None)),
    )
