"""An Attend that says what the one before has said: put together from pieces, not built.

Between the layers of a step only the call's number, layer, scale and tensors differ. So the rest
is serialized once, and a call is a list of buffers in the order in which protobuf would write
them, with the caller's tensors where they lie; and the bytes before an answer's tensors are known
before it comes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice.core.geometry import DType
from kvservice.v1 import types_pb2, worker_pb2
from kvservice.wire.fragments import FRAGMENT_BYTES, varint
from kvservice.wire.tensors import dtype_to_pb
from kvservice_client._arrays import NUMPY_TYPES

Array = npt.NDArray[Any]

# Tags of fields: number << 3 | wire type.
_CALL, _CALL_ID, _LAYER, _Q, _K, _V = b"\x0a", b"\x08", b"\x30", b"\x42", b"\x4a", b"\x52"
_SCALE, _CAPABILITY, _TRACE_PARENT = b"\x79", b"\xaa\x01", b"\xb2\x01"
_RESULT, _OUT, _LSE, _DATA = b"\x0a", b"\x1a", b"\x22", b"\x1a"
_SESSION_FIELDS: Final = ("session_id", "incarnation", "epoch", "step")
_VARYING: Final = (*_SESSION_FIELDS, "call_id", "layer", "q", "k", "v", "scale", "capability")
_DOUBLE: Final = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class SteadyAnswer:
    """The answer to such a call, in arrays of its own.

    Fields:
        out: [tokens, heads, v_dim]; bfloat16 as its bits.
        lse: f32[tokens, heads], of a partial.
    """

    out: Array
    lse: Array | None


class SteadyCall:
    """One such call, to be filled in again for each layer.

    Fields:
        call_id, layer, scale, capability, trace_parent: As in `AttendCall`.
        stores, asks: Whether it brings keys and values, and whether it brings queries.
        tensors: q, k and v, contiguous; q alone where nothing is stored.
        num_bytes: Of the tensors, and what is said of them.
    """

    __slots__ = (
        *("_answer_bytes", "_answers", "_before", "_begins", "_behind", "_fields", "_heads"),
        *("_last_size", "asks", "call_id", "capability", "incarnation", "layer", "num_bytes"),
        *("scale", "session_id", "step", "stores", "tensors", "trace_parent"),
    )

    def __init__(self, call: worker_pb2.AttendCall, v_dim: int, dtype: DType) -> None:
        """Say what `call` says. It is one without bias, sinks and mask array.

        Args:
            v_dim: Of the answer.
            dtype: Of q, and of an answer that is no partial.
        """
        self.call_id, self.layer, self.scale = call.call_id, call.layer, call.scale
        self.session_id, self.step = call.session_id, call.step
        self.capability, self.trace_parent = call.capability, ""
        self.stores, self.asks = call.HasField("k"), call.q.shape[0] > 0
        self.tensors: Sequence[Any] = ()
        self._last_size = (0, b"")
        self._begins: dict[int, bytes] = {}  # of answers, by the size of the call's id
        self._fields = {name: getattr(call, name) for name in _SESSION_FIELDS}
        self.go_to(call.incarnation)
        rest = worker_pb2.AttendCall()
        rest.CopyFrom(call)
        for name in (*_VARYING, "header", "trace_parent"):
            rest.ClearField(name)
        self._behind = rest.SerializeToString()
        named = ((_Q, call.q), (_K, call.k), (_V, call.v))
        told = [(tag, one) for tag, one in named if tag is _Q or self.stores]
        self._heads = tuple(_head(tag, one.dtype, one.shape, len(one.data)) for tag, one in told)
        self.num_bytes = sum(map(len, self._heads)) + sum(len(one.data) for _, one in told)
        tokens, heads, _ = call.q.shape
        of_out = DType.FLOAT32 if call.partial else dtype
        answers: list[tuple[bytes, DType, tuple[int, ...]]]
        answers = [(_OUT, of_out, (tokens, heads, v_dim))]
        if call.partial:
            answers.append((_LSE, DType.FLOAT32, (tokens, heads)))
        self._answers: list[tuple[bytes, np.dtype[Any], tuple[int, ...], int]] = []
        for tag, of, shape in answers:
            size = int(np.prod(shape)) * of.itemsize
            head = _head(tag, dtype_to_pb(of), shape, size)
            self._answers.append((head, NUMPY_TYPES[of], shape, size))
        self._answer_bytes = sum(len(head) + size for head, _, _, size in self._answers)

    def go_to(self, incarnation: str) -> None:
        """Be a call for an incarnation of a worker."""
        self.incarnation = self._fields["incarnation"] = incarnation
        self._before = worker_pb2.AttendCall(**self._fields).SerializeToString()

    @property
    def fits_a_frame(self) -> bool:
        """Whether calls and answers are so small that neither travels in fragments."""
        return max(self.num_bytes, self._answer_bytes) + (4 << 10) < FRAGMENT_BYTES

    def pieces(self) -> tuple[list[Any], int]:
        """Return the call's `AttendRequest` as it travels, in pieces, and its size in bytes."""
        ids = _CALL_ID + varint(self.call_id) + self._before + _LAYER + varint(self.layer)
        behind = self._behind + _SCALE + _DOUBLE.pack(self.scale)
        if self.capability:
            behind += _CAPABILITY + varint(len(self.capability)) + self.capability
        if self.trace_parent:
            trace = self.trace_parent.encode()
            behind += _TRACE_PARENT + varint(len(trace)) + trace
        size = len(ids) + self.num_bytes + len(behind)
        if size != self._last_size[0]:
            self._last_size = (size, _CALL + varint(size))
        begin, tensors, heads = self._last_size[1], self.tensors, self._heads
        pieces = [begin + ids + heads[0], tensors[0]]
        if self.stores:
            pieces += (heads[1], tensors[1], heads[2], tensors[2])
        pieces.append(behind)
        return pieces, len(begin) + size

    def frame(self) -> bytes:
        """Return the call's `AttendRequest`, in one piece."""
        return b"".join(self.pieces()[0])

    def message(self) -> worker_pb2.AttendCall:
        """Return the call as a message."""
        return worker_pb2.AttendRequest.FromString(self.frame()).call

    def read(self, frame: bytes | memoryview) -> SteadyAnswer | None:
        """Return the answer that a frame holds; None: it is something else, such as an error."""
        call_id = varint(self.call_id)
        begins = self._begins.get(len(call_id))
        if begins is None:
            size = len(_CALL_ID) + len(call_id) + self._answer_bytes
            begins = self._begins[len(call_id)] = _RESULT + varint(size) + _CALL_ID
        begin = begins + call_id
        at = len(begin)
        if len(frame) != at + self._answer_bytes or frame[:at] != begin:
            return None
        arrays = []
        for head, dtype, shape, size in self._answers:
            start = at + len(head)
            if frame[at:start] != head:
                return None
            at = start + size
            arrays.append(np.frombuffer(bytearray(frame[start:at]), dtype).reshape(shape))
        return SteadyAnswer(arrays[0], arrays[1] if len(arrays) > 1 else None)

    def answer_of(self, result: worker_pb2.AttendResult) -> SteadyAnswer | None:
        """Return the same of a message; None: it is not of the expected form."""
        if not self.asks:
            nothing = np.empty(0, np.float32)
            return SteadyAnswer(nothing, nothing)
        return self.read(worker_pb2.AttendResponse(result=result).SerializeToString())


def _head(tag: bytes, dtype: int, shape: Sequence[int], num_bytes: int) -> bytes:
    """Return what comes before a tensor's bytes, its field's tag first."""
    meta = types_pb2.Tensor(dtype=dtype, shape=shape).SerializeToString()  # type: ignore[arg-type]
    data = _DATA + varint(num_bytes)
    return tag + varint(len(meta) + len(data) + num_bytes) + meta + data
