"""Arrays of torch, numpy and JAX to host memory and back, without importing torch or JAX.

A library whose array we are handed has been imported by the caller, so it is found among the
loaded modules. Inside the client an array is a `HostArray`: a numpy array, bfloat16 as its bits.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType, HostTensor

NUMPY_TYPES: Final[dict[DType, np.dtype[Any]]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),  # numpy has no such type: the bits
    DType.FLOAT64: np.dtype("<f8"),
    DType.BOOL: np.dtype("?"),
}
_BY_NUMPY: Final = {dtype: ours for ours, dtype in NUMPY_TYPES.items() if ours.name != "BFLOAT16"}
_BY_TORCH: Final = {f"torch.{ours.value}": ours for ours in DType}


class Library(Enum):
    """Whose arrays there are."""

    NUMPY = "numpy"
    TORCH = "torch"
    JAX = "jax"


@dataclass(frozen=True, slots=True)
class Kind:
    """Whose array it was, and where, so that the answer can be of the same kind."""

    library: Library = Library.NUMPY
    device: Any = None  # torch.device or jax.Device; None: host memory


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array in host memory. `data` is bfloat16's bits as uint16, else of the dtype itself.

    May alias what it was made from; may be strided in any way.
    """

    data: npt.NDArray[Any]
    dtype: DType
    kind: Kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def to_host(array: Any, name: str) -> HostArray:
    """Return the array in host memory; a view where it is there already.

    Args:
        array: Of torch, numpy or JAX, of any shape, with a float dtype or bool.
        name: What to call it in messages.

    Raises:
        InvalidRequest: Not such an array, or of another dtype.
    """
    if isinstance(array, np.ndarray):
        return _from_numpy(array, name, Kind())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(array, name)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        return _from_numpy(np.asarray(array), name, Kind(Library.JAX, _jax_device(array)))
    raise InvalidRequest(
        f"{name} must be an array of torch, numpy or JAX, got {type(array).__name__}"
    )


def from_host(data: npt.NDArray[Any], dtype: DType, kind: Kind) -> Any:
    """Return an array of the given kind.

    Args:
        data: As in `HostArray`, writable. The result takes it over where it can.

    Raises:
        InvalidRequest: bfloat16 as numpy, and the package ml_dtypes is not installed.
    """
    if kind.library is Library.TORCH:
        return _to_torch(data, dtype, kind.device)
    if dtype is DType.BFLOAT16:
        data = data.view(_bfloat16())
    if kind.library is Library.JAX:
        return sys.modules["jax"].device_put(data, kind.device)
    return data


def to_host_tensor(array: Any, name: str) -> HostTensor:
    """Return the array as it travels: row-major bytes. One copy."""
    host = to_host(array, name)
    return HostTensor(host.dtype, host.shape, host.data.tobytes())


def from_host_tensor(tensor: HostTensor, kind: Kind) -> Any:
    """Return a tensor as an array of the given kind. One copy; the result is writable."""
    data = np.frombuffer(bytearray(tensor.data), NUMPY_TYPES[tensor.dtype])
    return from_host(data.reshape(tensor.shape), tensor.dtype, kind)


def check_dense(tensor: Any, name: str) -> None:
    """Check that a tensor of torch has elements, in rows and columns.

    Raises:
        InvalidRequest: It is on device meta, sparse or nested.
    """
    is_sparse = tensor.layout is not sys.modules["torch"].strided
    if is_sparse or tensor.is_meta or tensor.is_nested:
        raise InvalidRequest(f"{name} must be a dense tensor with data")


def kind_of(array: Any, name: str) -> Kind:
    """Return whose array it is, and where."""
    return to_host(array, name).kind


def to_bool(array: Any, name: str) -> npt.NDArray[np.bool_]:
    """Return a bool array, or nested lists of bools, as numpy's.

    Raises:
        InvalidRequest: Anything else; numbers are not taken for bools.
    """
    data = np.asarray(array) if isinstance(array, (list, tuple)) else to_host(array, name).data
    if data.dtype != np.bool_:
        raise InvalidRequest(f"{name} must be bool, got {data.dtype}")
    return data


def to_int(value: Any) -> int | None:
    """Return an integer as a plain one: Python's, or a scalar of a library. None: no integer.

    A bool is none, nor is an array with dimensions.
    """
    if type(value) is int:
        return value
    if type(value) is bool or not hasattr(value, "__index__") or np.ndim(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def to_ints(values: Any, name: str) -> list[int]:
    """Return integers as a plain list: of a sequence, or a one-dimensional integer array.

    Raises:
        InvalidRequest: Anything else.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, Sequence):
        listed = list(listed)
    if not isinstance(listed, list) or not all(type(value) is int for value in listed):
        raise InvalidRequest(f"{name} must be integers, got {values!r}")
    return listed


def float32_to_bits16(data: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return float32 rounded to bfloat16, to nearest even, as bits. NaN stays NaN."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(data), quiet_nan, rounded).astype(np.uint16)


def bits16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return bfloat16 bits as float32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def cast_float32(data: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    """Return float32 values in another float dtype, bfloat16 as its bits."""
    if dtype is DType.BFLOAT16:
        return float32_to_bits16(data)
    return data.astype(NUMPY_TYPES[dtype], copy=False)


def as_float32(array: HostArray) -> npt.NDArray[np.float32]:
    """Return an array's values as float32; exact from the narrower dtypes."""
    if array.dtype is DType.BFLOAT16:
        return bits16_to_float32(array.data)
    return array.data.astype(np.float32, copy=False)


# -- numpy


def _from_numpy(array: npt.NDArray[Any], name: str, kind: Kind) -> HostArray:
    ours = _BY_NUMPY.get(array.dtype)
    if ours is not None:
        return HostArray(array, ours, kind)
    if array.dtype.name == "bfloat16" and array.dtype.itemsize == 2:  # ml_dtypes'
        return HostArray(array.view(np.uint16), DType.BFLOAT16, kind)
    raise _unknown_dtype(name, array.dtype)


def _bfloat16() -> np.dtype[Any]:
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError:
        raise InvalidRequest(
            "numpy holds bfloat16 only with the package ml_dtypes, which is not installed"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


# -- torch


def _from_torch(tensor: Any, name: str) -> HostArray:
    torch = sys.modules["torch"]
    ours = _BY_TORCH.get(str(tensor.dtype))
    if ours is None:
        raise _unknown_dtype(name, tensor.dtype)
    check_dense(tensor, name)
    kind = Kind(Library.TORCH, None if tensor.device.type == "cpu" else tensor.device)
    plain = tensor.detach()
    if kind.device is not None:
        plain = plain.cpu()
    if ours is DType.BFLOAT16:
        plain = plain.view(torch.int16)
        return HostArray(plain.numpy().view(np.uint16), ours, kind)
    return HostArray(plain.numpy(), ours, kind)


def _to_torch(data: npt.NDArray[Any], dtype: DType, device: Any) -> Any:
    torch: ModuleType = sys.modules["torch"]
    if dtype is DType.BFLOAT16:
        tensor = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(data)
    return tensor if device is None else tensor.to(device)


# -- JAX


def _jax_device(array: Any) -> Any:
    devices = array.devices()
    return next(iter(devices)) if len(devices) == 1 else None


def _unknown_dtype(name: str, dtype: object) -> InvalidRequest:
    known = ", ".join(ours.value for ours in DType)
    return InvalidRequest(f"{name} must be one of {known}, got {dtype}")
