"""The tensors of one layer's pages, and moving bytes in and out of them by slot.

An arena has room for `capacity` pages. On the CPU it lies in address space that is reserved in
advance and touched as needed, so growing moves nothing; on other devices it is a tensor that is
copied when it grows.

Layout: CPU [num_pages, num_kv_heads, page_size, dim] (one contiguous tile per page and head, what
the decode kernel streams); other devices [num_pages, page_size, num_kv_heads, dim] (what their
kernels want).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvservice.core.geometry import DType, LayerGeometry
from kvservice_workers.page_table import PageCopy
from kvservice_workers.staging import staging_of

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
    DType.BOOL: torch.bool,
}
# How numpy sees the same bytes; it has no bfloat16.
NUMPY_DTYPES: dict[DType, npt.DTypeLike] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
    DType.FLOAT64: np.float64,
    DType.BOOL: np.bool_,
}

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]


def slots_of(pages: Sequence[int], page_size: int) -> tuple[Indices, Indices]:
    """Return all slots of whole pages, in order: page and offset of each."""
    offsets = np.tile(np.arange(page_size, dtype=np.int64), len(pages))
    return np.repeat(np.array(pages, np.int64), page_size), offsets


def page_bytes(geometry: LayerGeometry, page_size: int) -> int:
    """Return the bytes of one page of one layer, K and V."""
    return page_size * geometry.token_bytes


def is_token_major(device: torch.device) -> bool:
    """Return whether pages on a device are [page_size, num_kv_heads, dim]."""
    return device.type != "cpu"


class Place(NamedTuple):
    """Where an arena's tensors are, while it does not move: another object each time it does.

    Fields:
        k_address, v_address: Of page 0.
        room: Pages that the tensors have.
        held: The tensors.
    """

    k_address: int
    v_address: int
    room: int
    held: tuple[torch.Tensor, torch.Tensor]


class Arena:
    """K and V of one layer, for the pages of one pool.

    Values of a page that nobody has written are unspecified, except that they are zeros in a page
    that has never been used. Not thread-safe: the pool's lock is held by whoever grows or writes.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        page_size: int,
        *,
        device: torch.device,
        capacity: int,
        reserve: int,
    ) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.device = device
        self.on_cpu = not is_token_major(device)
        self.page_bytes = page_bytes(geometry, page_size)
        self.capacity = 0
        self._reserved = 0
        self._place(max(capacity, reserve) if self.on_cpu else capacity)
        self.capacity = capacity

    @property
    def k(self) -> torch.Tensor:
        """Keys of all pages, in this device's layout."""
        return self._k

    @property
    def v(self) -> torch.Tensor:
        """Values of all pages, in this device's layout."""
        return self._v

    @property
    def room(self) -> int:
        """Pages that the tensors have, those beyond `capacity` included."""
        return self._reserved

    def move_bytes(self, capacity: int) -> int:
        """Return the bytes that growing to `capacity` takes in passing, for a copy."""
        return self.capacity * self.page_bytes if capacity > self._reserved else 0

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` pages. Their contents stay; the tensors may be new ones."""
        assert capacity >= self.capacity, "arenas do not shrink"
        if capacity > self._reserved:
            old_k, old_v, kept = self._k, self._v, self.capacity
            self._place(4 * capacity if self.on_cpu else capacity)
            self._k[:kept] = old_k[:kept]
            self._v[:kept] = old_v[:kept]
        self.capacity = capacity

    def store(self, pages: Indices, offsets: Indices, k: Array, v: Array) -> None:
        """Write token i to offset `offsets[i]` of page `pages[i]`; of equal slots the last wins.

        Args:
            pages, offsets: i64[num_tokens].
            k, v: [num_tokens, num_kv_heads, dim], with the arena's numpy dtype.
        """
        if self.on_cpu:
            self._k_host[pages, :, offsets] = k
            self._v_host[pages, :, offsets] = v
        else:
            self._store_staged(pages, offsets, k, v)

    def store_and_bring(
        self, pages: Indices, offsets: Indices, k: Array, v: Array, q: Array
    ) -> torch.Tensor:
        """Write tokens as `store` does, and return q as a tensor on the arena's device; one copy.

        Args:
            q: [num_queries, num_q_heads, k_dim], with the arena's numpy dtype.
        """
        if self.on_cpu:
            self.store(pages, offsets, k, v)
            return _as_torch(q.copy(), self.geometry.dtype)
        [there] = self._store_staged(pages, offsets, k, v, q)
        return there

    def _store_staged(
        self, pages: Indices, offsets: Indices, k: Array, v: Array, *beside: Array
    ) -> list[torch.Tensor]:
        dtype = TORCH_DTYPES[self.geometry.dtype]
        at_pages, at_offsets, k_there, v_there, *others = staging_of(self.device).upload(
            [pages, offsets, k, v, *beside],
            [torch.int64, torch.int64, dtype, dtype, *(dtype for _ in beside)],
        )
        # Of equal slots the last must win, which torch does not promise.
        slots = pages * self.page_size + offsets
        if len(np.unique(slots)) < len(slots):
            _, last = np.unique(slots[::-1], return_index=True)
            kept = torch.from_numpy(len(slots) - 1 - last).to(self.device)
            at_pages, at_offsets = at_pages[kept], at_offsets[kept]
            k_there, v_there = k_there[kept], v_there[kept]
        self._k[at_pages, at_offsets] = k_there
        self._v[at_pages, at_offsets] = v_there
        return others

    def load(self, pages: Indices, offsets: Indices) -> tuple[Array, Array]:
        """Return K and V of slots, [num_tokens, num_kv_heads, dim], fresh, in numpy's dtype."""
        if self.on_cpu:
            return self._k_host[pages, :, offsets], self._v_host[pages, :, offsets]
        at = (torch.from_numpy(pages).to(self.device), torch.from_numpy(offsets).to(self.device))
        return self._to_host(self._k[at]), self._to_host(self._v[at])

    def zero_slots(self, pages: Indices, offsets: Indices) -> None:
        """Write zeros to slots."""
        if self.on_cpu:
            self._k_host[pages, :, offsets] = 0
            self._v_host[pages, :, offsets] = 0
        else:
            at = (
                torch.from_numpy(pages).to(self.device),
                torch.from_numpy(offsets).to(self.device),
            )
            self._k[at] = 0
            self._v[at] = 0

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Write zeros to whole pages."""
        for page in pages:
            self._k[page] = 0
            self._v[page] = 0

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages. No destination is a source of the same call."""
        for copy in copies:
            self._k[copy.dst] = self._k[copy.src]
            self._v[copy.dst] = self._v[copy.src]

    def _place(self, num_pages: int) -> None:
        """Get tensors for `num_pages` pages, zero-filled."""
        geometry, size = self.geometry, self.page_size
        heads = geometry.num_kv_heads
        dims = (geometry.k_dim, geometry.v_dim)
        if self.on_cpu:
            k_host, v_host = (
                _reserve((num_pages, heads, size, dim), geometry.dtype) for dim in dims
            )
            self._k_host, self._v_host = k_host, v_host
            self._k, self._v = (_as_torch(host, geometry.dtype) for host in (k_host, v_host))
        else:
            dtype = TORCH_DTYPES[geometry.dtype]
            self._k, self._v = (
                torch.zeros((num_pages, size, heads, dim), dtype=dtype, device=self.device)
                for dim in dims
            )
        self._reserved = num_pages
        self.place = Place(self._k.data_ptr(), self._v.data_ptr(), num_pages, (self._k, self._v))

    def _to_host(self, tensor: torch.Tensor) -> Array:
        tensor = tensor.cpu().contiguous()
        if self.geometry.dtype is DType.BFLOAT16:
            return tensor.view(torch.int16).numpy().view(np.uint16)
        array: Array = tensor.numpy()
        return array


def _reserve(shape: tuple[int, ...], dtype: DType) -> Array:
    """Map zero-filled memory that takes room only once it is touched."""
    numpy_dtype = np.dtype(NUMPY_DTYPES[dtype])
    num_bytes = max(1, int(np.prod(shape, dtype=object))) * numpy_dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    region = mmap.mmap(-1, num_bytes, flags=flags)
    # The array keeps the mapping alive; it is unmapped when the last view goes.
    return np.frombuffer(region, numpy_dtype, count=num_bytes // numpy_dtype.itemsize)[
        : int(np.prod(shape, dtype=object))
    ].reshape(shape)


def _as_torch(array: Array, dtype: DType) -> torch.Tensor:
    """View a numpy array as a tensor of the element type that its bytes stand for."""
    if dtype is DType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
