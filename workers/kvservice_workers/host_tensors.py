"""Tensors in host memory, as they travel, and what torch and numpy make of their bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.geometry import DType, HostTensor
from kvservice_workers.arena import NUMPY_DTYPES, TORCH_DTYPES
from kvservice_workers.staging import staging_of

Array = npt.NDArray[np.generic]

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def as_numpy(tensor: HostTensor) -> Array:
    """View a host tensor's bytes as numpy sees them (bfloat16 as uint16). Read-only."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    if not tensor.num_bytes:
        return np.empty(tensor.shape, dtype)
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def as_torch(tensor: HostTensor) -> torch.Tensor:
    """Return a host tensor as a torch tensor, a copy."""
    array = as_numpy(tensor).copy()
    if tensor.dtype is DType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_host(*tensors: torch.Tensor) -> list[HostTensor]:
    """Return the elements of tensors of one device as host tensors; one copy from the device."""
    dtypes = [_DTYPES[tensor.dtype] for tensor in tensors]
    if not tensors[0].is_cpu:
        data = staging_of(tensors[0].device).download(tensors)
    else:
        data = [_bytes(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    return [
        HostTensor(dtype, tuple(tensor.shape), raw)
        for tensor, dtype, raw in zip(tensors, dtypes, data, strict=True)
    ]


def _bytes(tensor: torch.Tensor, dtype: DType) -> bytes:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if dtype is DType.BFLOAT16 else tensor).numpy().tobytes()


def from_numpy(array: Array, dtype: DType) -> HostTensor:
    """Return an array's elements as a host tensor."""
    return HostTensor(dtype, array.shape, array.tobytes())
