"""Bytes on their way to a device and back: everything that goes one way together is one copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT: Final = 16
"""Bytes; at least that of the largest element."""

Array = npt.NDArray[Any]


class Staging:
    """Host memory that a device copies from and to; page-locked where the device is a GPU.

    A buffer for each thread and direction, which grows as needed. All copies are ordered with the
    device's other work, and a download waits for it, after which both buffers are free again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers = threading.local()

    def upload(self, arrays: Sequence[Array], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return arrays as tensors on the device, by one copy.

        Args:
            arrays: C-contiguous, of any shapes.
            dtypes: What each array's bytes are; of the same size as its elements.
        """
        offsets, total = _layout([array.nbytes for array in arrays])
        self.settle()
        buffer = self._buffer("up", total)
        host = buffer.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).ravel()
            )
        there = buffer[:total].to(self._device, non_blocking=True)
        if there.data_ptr() == buffer.data_ptr():
            there = there.clone()  # the device is the host: the buffer is used again
        self._buffers.busy = self._pinned
        return [
            there[offset : offset + array.nbytes].view(dtype).reshape(array.shape)
            for array, offset, dtype in zip(arrays, offsets, dtypes, strict=True)
        ]

    def download(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """Return the bytes of tensors, row-major, by one copy; waits for the device."""
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        joined = raw[0] if len(raw) == 1 else torch.cat(raw)
        buffer = self._buffer("down", joined.numel())[: joined.numel()]
        buffer.copy_(joined, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()
        self._buffers.busy = False
        host, stop, result = buffer.numpy(), 0, []
        for one in raw:
            start, stop = stop, stop + one.numel()
            result.append(host[start:stop].tobytes())
        return result

    def settle(self) -> None:
        """Wait until the last upload has been copied: its buffer may be filled again."""
        if getattr(self._buffers, "busy", False):
            torch.cuda.current_stream(self._device).synchronize()
            self._buffers.busy = False

    def _buffer(self, way: str, num_bytes: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._buffers, way, None)
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, 64 << 10, 0 if buffer is None else 2 * buffer.numel())
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            setattr(self._buffers, way, buffer)
        return buffer


@cache
def staging_of(device: torch.device) -> Staging:
    """Return the process's staging memory for a device."""
    return Staging(device)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each of some byte strings begins, aligned, and where the last ends."""
    offsets, stop = [], 0
    for size in sizes:
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        stop = start + size
    return offsets, stop
