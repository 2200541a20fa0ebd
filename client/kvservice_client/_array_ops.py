"""New arrays out of given ones, of torch, numpy or JAX, without importing torch or JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType
from kvservice_client._arrays import NUMPY_TYPES, Kind, Library, from_host, to_host


def read_dtype(dtype: Any) -> tuple[DType, Kind]:
    """Return an element type, and whose array type it is: torch's, JAX's, or else numpy's.

    Args:
        dtype: torch.float32, jax.numpy.float32, numpy.float32, a numpy dtype, a name, a DType.

    Raises:
        InvalidRequest: It is none of those that can be stored.
    """
    name, library = dtype, Library.NUMPY
    if isinstance(dtype, DType):
        name = dtype.value
    elif str(dtype).startswith("torch."):
        name, library = str(dtype).removeprefix("torch."), Library.TORCH
    elif dtype is not None and not isinstance(dtype, str):  # numpy would read None as float64
        if type(dtype).__module__.startswith("jax."):
            library = Library.JAX
            # Where float64 is off, JAX takes float32 for it, and warns.
            dtype = sys.modules["jax"].numpy.empty(0, dtype).dtype
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
    try:
        found = DType(name)
    except ValueError:
        found = DType.BOOL
    if not found.is_float:
        known = ", ".join(one.value for one in DType if one.is_float)
        raise InvalidRequest(f"dtype must be one of {known}, got {dtype!r}")
    return found, Kind(library)


def zeros(shape: Sequence[int], dtype: DType, kind: Kind) -> Any:
    """Return zeros."""
    return from_host(np.zeros(shape, NUMPY_TYPES[dtype]), dtype, kind)


def whose(array: Any, name: str) -> Kind:
    """Return whose array it is, and where, whatever its elements are.

    Raises:
        InvalidRequest: Nobody's that we know.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(array, np.ndarray):
        return Kind()
    if torch is not None and isinstance(array, torch.Tensor):
        return Kind(Library.TORCH, None if array.device.type == "cpu" else array.device)
    if jax is not None and isinstance(array, jax.Array):
        devices = array.devices()
        return Kind(Library.JAX, next(iter(devices)) if len(devices) == 1 else None)
    raise InvalidRequest(
        f"{name} must be an array of torch, numpy or JAX, got {type(array).__name__}"
    )


def as_kind(array: Any, dtype: DType, kind: Kind) -> Any:
    """Return an array's elements in another type, as an array of the kind; itself if it is that.

    Raises:
        InvalidRequest: The kind has no such type: float64 in JAX, where that is off.
    """
    is_wide = kind.library is Library.JAX and dtype is DType.FLOAT64
    if is_wide and not sys.modules["jax"].config.jax_enable_x64:
        raise InvalidRequest("a float64 cache takes JAX arrays only with jax_enable_x64")
    library = whose(array, "array").library
    if library is Library.JAX and kind.library is not library:
        array, library = np.asarray(array), Library.NUMPY
    if library is Library.TORCH:
        torch = sys.modules["torch"]
        device = kind.device if kind.library is library else None
        array = array.to(device=device or "cpu", dtype=getattr(torch, dtype.value))
    else:
        target = zeros((0,), dtype, Kind()).dtype
        array = array if array.dtype == target else array.astype(target)
    if library is kind.library:
        return array
    host = to_host(array, "array")
    return from_host(host.data.copy(), host.dtype, kind)


def replaced(array: Any, start: int, new: Any, kind: Kind) -> Any:
    """Return a copy with positions from `start` on replaced.

    Args:
        array: [rows, heads, positions, dim], of the kind, as is `new`.
    """
    stop = start + new.shape[2]
    if kind.library is Library.JAX:
        return array.at[:, :, start:stop].set(new)
    copied = array.clone() if kind.library is Library.TORCH else array.copy()
    copied[:, :, start:stop] = new
    return copied


def frozen(array: Any) -> Any:
    """Return the array, which nobody can write to if it is numpy's."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


def int32_scalar(value: int, kind: Kind) -> Any:
    """Return an int32 array without dimensions; torch's is in host memory."""
    if kind.library is Library.TORCH:
        torch = sys.modules["torch"]
        return torch.tensor(value, dtype=torch.int32)
    scalar = np.array(value, np.int32)
    if kind.library is Library.JAX:
        return sys.modules["jax"].device_put(scalar, kind.device)
    return frozen(scalar)
