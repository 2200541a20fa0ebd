"""Shapes: element types, layers, host tensors as they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvservice.core.errors import InvalidRequest

DEFAULT_PAGE_SIZE: Final = 16
MAX_PAGE_SIZE: Final = 1024
MAX_LAYERS: Final = 1024
MAX_DIM: Final = 8192
MAX_KV_HEADS: Final = 1024

HOLE: Final = -1
"""Entry of a page table without a page: padding, evicted, held elsewhere, or never written."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `b` must be positive."""
    return -(-a // b)


class DType(Enum):
    """Element types on the wire and in arenas."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        return self is not DType.BOOL


_ITEMSIZE: Final = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT64: 8,
    DType.BOOL: 1,
}


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A dense tensor in host memory: little-endian, row-major, without gaps.

    `data` holds exactly `prod(shape) * dtype.itemsize` bytes (not checked here; the wire does).
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's keys and values."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: DType

    def __post_init__(self) -> None:
        for name, value, top in (
            ("num_kv_heads", self.num_kv_heads, MAX_KV_HEADS),
            ("k_dim", self.k_dim, MAX_DIM),
            ("v_dim", self.v_dim, MAX_DIM),
        ):
            if not 1 <= value <= top:
                raise InvalidRequest(f"{name} must be between 1 and {top}, got {value}")
        if not self.dtype.is_float:
            raise InvalidRequest(
                f"keys and values must be of a float dtype, got {self.dtype.value}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a session: its window, and its geometry where that is known beforehand."""

    window: int | None = None
    geometry: LayerGeometry | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InvalidRequest(f"a window must be at least 1, got {self.window}")
