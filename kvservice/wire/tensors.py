"""Tensors on the wire: protobuf to and from `HostTensor`, and `HostTensor` to and from numpy."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType, HostTensor
from kvservice.v1 import types_pb2

MAX_RANK: Final = 8
MAX_SIDE: Final = (1 << 31) - 1
MAX_EMPTY_ELEMENTS: Final = 1 << 24
"""What the other dimensions of a tensor without elements may amount to: nobody who makes room by
them is led into making room for a lie."""

_FROM_PB: Final = {
    types_pb2.D_TYPE_FLOAT32: DType.FLOAT32,
    types_pb2.D_TYPE_FLOAT16: DType.FLOAT16,
    types_pb2.D_TYPE_BFLOAT16: DType.BFLOAT16,
    types_pb2.D_TYPE_FLOAT64: DType.FLOAT64,
    types_pb2.D_TYPE_BOOL: DType.BOOL,
}
_TO_PB: Final = {dtype: number for number, dtype in _FROM_PB.items()}
_ITEMSIZE: Final = {number: dtype.itemsize for number, dtype in _FROM_PB.items()}

_NUMPY: Final[dict[DType, np.dtype[Any]]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),  # numpy has no such type: the bits
    DType.FLOAT64: np.dtype("<f8"),
    DType.BOOL: np.dtype("?"),
}
_FROM_NUMPY: Final = {dtype: ours for ours, dtype in _NUMPY.items() if ours is not DType.BFLOAT16}


def dtype_from_pb(number: int, name: str) -> DType:
    """Return the element type of a field called `name`.

    Raises:
        InvalidRequest: It is missing, or one that this version does not know.
    """
    dtype = _FROM_PB.get(number)  # type: ignore[call-overload]
    if dtype is None:
        raise InvalidRequest(f"{name}: the dtype is missing or unknown (number {number})")
    return dtype  # type: ignore[no-any-return]


def dtype_to_pb(dtype: DType) -> types_pb2.DType:
    return _TO_PB[dtype]


def tensor_from_pb(pb: types_pb2.Tensor, name: str, rank: int | None = None) -> HostTensor:
    """Check a tensor and take it over; the bytes are not copied again.

    Args:
        name: What to call it in messages.
        rank: Number of dimensions it must have. None: 1 to 8.

    Raises:
        InvalidRequest: Unknown dtype, bad shape, or another number of bytes than the shape says.
    """
    number = pb.dtype
    dtype = dtype_from_pb(number, name)
    shape = tuple(pb.shape[:])  # the slice is a list, made in one go
    if len(shape) != rank and (rank is not None or not 1 <= len(shape) <= MAX_RANK):
        wanted = f"{rank}" if rank is not None else f"1 to {MAX_RANK}"
        raise InvalidRequest(f"{name} must have {wanted} dimensions, got {len(shape)}")
    if min(shape) < 0 or max(shape) > MAX_SIDE:
        raise InvalidRequest(f"{name}: dimensions must be 0 to {MAX_SIDE}, got {list(shape)}")
    data = pb.data
    num_bytes = math.prod(shape) * _ITEMSIZE[number]  # Python's integers do not overflow
    if num_bytes != len(data):
        raise InvalidRequest(
            f"{name}: {dtype.value}{list(shape)} takes {num_bytes} bytes, got {len(data)}"
        )
    if not num_bytes and math.prod(side or 1 for side in shape) > MAX_EMPTY_ELEMENTS:
        raise InvalidRequest(f"{name}: too large a shape for no elements: {list(shape)}")
    if dtype is DType.BOOL and data.translate(None, b"\0\1"):
        raise InvalidRequest(f"{name}: bools must be bytes 0 or 1")
    return HostTensor(dtype, shape, data)


def tensor_to_pb(tensor: HostTensor) -> types_pb2.Tensor:
    """Return the message; copies the bytes."""
    return types_pb2.Tensor(dtype=_TO_PB[tensor.dtype], shape=tensor.shape, data=bytes(tensor.data))


def to_numpy(tensor: HostTensor) -> npt.NDArray[Any]:
    """Return a view, read-only if the bytes are; bfloat16 as uint16, its bits."""
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype]).reshape(tensor.shape)


def from_numpy(array: npt.NDArray[Any], dtype: DType | None = None) -> HostTensor:
    """Return the tensor; aliases the array if that is row-major and little-endian.

    Args:
        dtype: Needed for bfloat16, which numpy holds as uint16. None: the array's own.

    Raises:
        InvalidRequest: An element type that does not travel, or not the stated one.
    """
    found = DType.BFLOAT16 if dtype is DType.BFLOAT16 else _FROM_NUMPY.get(_little(array.dtype))
    if found is None or (dtype or found) is not found:
        raise InvalidRequest(f"cannot send {array.dtype} as {dtype.value if dtype else 'a tensor'}")
    if _little(array.dtype) != _NUMPY[found]:
        raise InvalidRequest(f"{found.value} travels as {_NUMPY[found]}, got {array.dtype}")
    plain = np.ascontiguousarray(array, _NUMPY[found])
    return HostTensor(found, array.shape, plain.reshape(-1).view(np.uint8).data)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
