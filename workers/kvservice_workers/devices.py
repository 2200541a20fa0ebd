"""What torch knows of devices."""

from __future__ import annotations

import torch


def device_memory_bytes(device: str) -> int:
    """Return how many bytes a GPU has, used or not.

    Args:
        device: As torch names it; `cuda` is the current one.

    Raises:
        RuntimeError: There is no such device.
    """
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
